import pytest

from loadtest.load import Load
from loadtest.search import Found, SearchPlan, greatest


@pytest.mark.parametrize("limit", [0.07, 0.9, 1.0, 1.001, 7.3, 63.0])
def test_the_greatest_rate_is_found_to_the_precision_asked_for(limit: float) -> None:
    tried: list[float] = []

    def is_kept(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = greatest(is_kept, first=1.0, last=1000.0, precision=0.05)
    assert found.rate is not None
    assert found.too_great is not None
    assert found.rate <= limit < found.too_great <= 1.05 * found.rate
    assert found.rate in tried
    assert found.too_great in tried
    assert len(tried) == len(set(tried)) < 16


def test_a_server_that_keeps_every_rate_ends_the_search_at_the_last() -> None:
    tried: list[float] = []
    found = greatest(lambda rate: tried.append(rate) is None, first=3.0, last=10.0, precision=0.05)
    assert found == Found(10.0, None)
    assert tried == [3.0, 6.0, 10.0]
    assert greatest(lambda rate: True, first=30.0, last=10.0, precision=0.05) == Found(10.0, None)


def test_a_server_that_keeps_none_is_said_to() -> None:
    tried: list[float] = []
    found = greatest(lambda rate: tried.append(rate) is not None, first=1.0, last=10.0, precision=0.05)
    assert found.rate is None
    assert tried == [1.0, 0.5, 0.25, 0.125, 0.0625]


def test_a_search_ends_whatever_precision_is_asked_for() -> None:
    found = greatest(lambda rate: rate <= 7.3, first=1.0, last=1000.0, precision=0.0)
    assert found.rate == pytest.approx(7.3, rel=0.002)


def test_each_rate_is_tried_long_enough() -> None:
    load = Load(seed=1, num_requests=20)
    assert SearchPlan(seconds=10).at(load, 3.05).num_requests == 31
    assert SearchPlan(seconds=10).at(load, 1.0).num_requests == 20
    assert SearchPlan(seconds=10).at(load, 3.05).rate == 3.05


def test_a_rate_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="rate is 0"):
        SearchPlan().at(Load(seed=1), 0.0)
