from itertools import pairwise

import pytest

from asyncserve.loop.queue_bounds import Load
from asyncserve.loop.start_rate import LEAST_S, MOST_S, WINDOW_S, StartRate

ONE = Load(1, 0)


def steady(per_second: int, *, seconds: int = 10, num_tokens: int = 0) -> StartRate:
    """A queue from which so many were started in each second until now, 100.0."""
    rate = StartRate()
    for number in range(seconds * per_second):
        rate.note(Load(1, num_tokens), 100.0 - seconds + number / per_second)
    return rate


@pytest.mark.parametrize(("per_second", "excess", "expected"), [(2, 10, 5.0), (10, 100, 10.0), (1, 30, 30.0)])
def test_a_client_waits_as_long_as_what_is_before_it_takes(
    per_second: int, excess: int, expected: float
) -> None:
    wait_s = steady(per_second).retry_after_s(Load(excess, 0), ONE, 100.0)
    assert wait_s == pytest.approx(expected, rel=0.15)


def test_tokens_are_waited_for_at_the_rate_of_tokens() -> None:
    rate = steady(10, num_tokens=100)
    assert rate.retry_after_s(Load(0, 5000), Load(1, 100), 100.0) == pytest.approx(5.0, rel=0.15)


def test_clients_refused_one_after_the_other_are_told_to_come_one_after_the_other() -> None:
    rate = steady(2)
    waits = [rate.retry_after_s(Load(10, 0), Load(4, 0), 100.0) for _ in range(5)]
    gaps = [later - earlier for earlier, later in pairwise(waits)]
    assert gaps == pytest.approx([2.0] * 4, rel=0.15)
    for number in range(30):
        rate.note(ONE, 100.0 + number / 2)
    later = rate.retry_after_s(Load(10, 0), ONE, 115.0)
    assert later == pytest.approx(waits[0], rel=0.15), "when they have come, the way is free again"


def test_it_is_never_less_than_a_second_nor_more_than_a_minute() -> None:
    fast, slow = steady(1000, seconds=1), steady(1, seconds=1)
    assert fast.retry_after_s(ONE, ONE, 100.0) == LEAST_S
    assert slow.retry_after_s(Load(10_000, 0), ONE, 100.0) == MOST_S
    for _ in range(1000):
        slow.retry_after_s(Load(10_000, 0), Load(100, 0), 100.0)
    assert slow.retry_after_s(ONE, ONE, 100.0 + 2 * MOST_S) <= MOST_S


def test_a_queue_that_stands_still_is_waited_for_as_long_as_it_has_stood() -> None:
    rate = steady(5)
    assert rate.retry_after_s(ONE, ONE, 100.0 + WINDOW_S + 15.0) == pytest.approx(25.2, rel=0.05)
    assert rate.retry_after_s(ONE, ONE, 100.0 + 500.0) == MOST_S
    assert StartRate().retry_after_s(ONE, ONE, 100.0) == LEAST_S


def test_only_the_last_seconds_count() -> None:
    rate = steady(1000, seconds=1)
    for number in range(20):
        rate.note(ONE, 110.0 + number / 2)
    assert rate.retry_after_s(Load(20, 0), ONE, 120.0) == pytest.approx(10.0, rel=0.15)
