from typing import Any

import pytest

from loadtest.load import Load
from loadtest.sweep import SweepPlan

LOAD = Load(seed=1, num_requests=16, warmup=3)


def point(output_tps: float, *, answered: float = 1.0, failed: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "load": {"rate": 1.0},
            "num_requests": 100,
            "num_completed": 100 - failed,
            "output_throughput": output_tps,
            "request_throughput": answered,
        }
    ]


def test_points_double_from_the_first_to_the_last() -> None:
    assert SweepPlan(first=1, last=9).values() == [1, 2, 4, 8]
    assert SweepPlan(first=3, last=3).values() == [3]
    assert SweepPlan(points=(8, 1)).values() == [1, 8]


def test_what_leads_nowhere_is_refused() -> None:
    for plan in (SweepPlan(first=0), SweepPlan(first=8, last=4)):
        with pytest.raises(ValueError, match="it must rise, from above 0"):
            plan.values()
    with pytest.raises(ValueError, match="concurrency is 0"):
        SweepPlan().at(LOAD, 0)
    with pytest.raises(ValueError, match="rate is 0"):
        SweepPlan(over="rate").at(LOAD, 0)


def test_requests_and_warm_up_grow_with_the_concurrency() -> None:
    at = SweepPlan(requests_per_user=5).at(LOAD, 8)
    assert (at.concurrency, at.num_requests, at.warmup) == (8, 40, 8)
    assert SweepPlan(requests_per_user=5).at(LOAD, 2).num_requests == 16
    assert SweepPlan(has_warmup=True).at(LOAD, 8).warmup == 3


def test_a_run_at_a_rate_lasts_long_enough() -> None:
    at = SweepPlan(over="rate", seconds=10).at(LOAD, 2.5)
    assert (at.rate, at.num_requests, at.concurrency) == (2.5, 25, None)
    assert SweepPlan(over="rate", seconds=10).at(LOAD, 0.5).num_requests == 16


def test_a_sweep_ends_when_two_points_bring_nothing() -> None:
    plan = SweepPlan(gain=0.05)
    points = [point(100), point(180), point(185)]
    assert plan.is_saturated(points) == ""  # one point alone may be noise
    assert plan.is_saturated([*points, point(190)]) == ""  # 190 is over 5 % more than 180
    assert "two points brought less than 5% over 180.0" in plan.is_saturated([*points, point(188)])
    assert plan.is_saturated([point(100), point(50)]) == ""


def test_the_median_of_repeats_decides() -> None:
    noisy = point(100) + point(500) + point(101)
    assert SweepPlan().is_saturated([point(100), noisy, point(102)])


def test_a_sweep_ends_when_requests_fail() -> None:
    assert SweepPlan().is_saturated([point(100, failed=6)]) == "6 requests failed"
    assert SweepPlan().is_saturated([point(100, failed=5)]) == ""


def test_a_sweep_over_rates_ends_when_the_server_falls_behind() -> None:
    plan = SweepPlan(over="rate")
    assert plan.is_saturated([point(10, answered=0.9)]) == ""
    assert "0.89 of 1 requests/s" in plan.is_saturated([point(10, answered=0.89)])
