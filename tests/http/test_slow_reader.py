import pytest

from asyncserve.http.slow_reader import (
    MAX_STALLS,
    MAX_TOKENS,
    PAUSE_AFTER_S,
    PAUSE_TOKENS,
    SlowReader,
    Verdict,
)

STALL_S = 60.0


def reader() -> SlowReader:
    return SlowReader(100_000, 0.0, stall_timeout_s=STALL_S)


@pytest.mark.parametrize(
    ("now_s", "num_waiting", "verdict"),
    [
        (PAUSE_AFTER_S / 2, 1, Verdict.WAIT),
        (PAUSE_AFTER_S, 0, Verdict.PAUSE),
        (0.0, PAUSE_TOKENS - 1, Verdict.WAIT),
        (0.0, PAUSE_TOKENS, Verdict.PAUSE),
        (0.0, MAX_TOKENS + 1, Verdict.GIVE_UP),
        (STALL_S - 1.0, 10, Verdict.PAUSE),
        (STALL_S, 0, Verdict.GIVE_UP),
    ],
)
def test_a_client_that_reads_nothing_is_paused_and_then_given_up(
    now_s: float, num_waiting: int, verdict: Verdict
) -> None:
    assert reader().verdict(100_000, num_waiting, now_s) is verdict


def test_progress_puts_off_both() -> None:
    slow = reader()
    assert slow.verdict(99_000, 0, 50.0) is Verdict.WAIT
    assert slow.verdict(99_500, 0, 50.0 + PAUSE_AFTER_S) is Verdict.PAUSE, "more unsent is no progress"
    assert slow.verdict(98_000, 0, 100.0) is Verdict.WAIT
    assert slow.verdict(98_000, 0, 100.0 + STALL_S) is Verdict.GIVE_UP


def test_one_that_reads_a_byte_now_and_then_is_given_up_in_the_end() -> None:
    slow = reader()
    last_s = MAX_STALLS * STALL_S
    for now_s in range(30, int(last_s), 30):
        assert slow.verdict(100_000 - now_s, 0, float(now_s)) is Verdict.WAIT
    assert slow.verdict(1000, 0, last_s) is Verdict.GIVE_UP
