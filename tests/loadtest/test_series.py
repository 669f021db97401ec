import pytest

from loadtest import series
from loadtest.report import latencies_ms
from tests.loadtest.records import record


def test_percentile_curves_say_which_percentiles_they_are_of() -> None:
    curves = series.percentiles_of(latencies_ms([record(ttft_s=0.1 * number) for number in range(1, 12)]))
    at, ttft = curves["at"], curves["ttft"]
    assert at is not None
    assert ttft is not None
    values = dict(zip(at, ttft, strict=True))
    assert (values[0], values[50], values[90], values[100]) == (100, 600, 1000, 1100)
    assert values[95] == pytest.approx(1050)
    assert series.percentiles_of({"ttft": []})["ttft"] is None


def test_tokens_are_counted_when_their_event_came() -> None:
    # Events at 0.5, 1.5 and 2.5 s; then one that fails after 3 s and one that began at 2 s.
    whole = record(ttft_s=0.5, e2el_s=2.5, tokens=3)
    broken = record(ttft_s=1.0, e2el_s=3.0, tokens=2, error="boom")
    late = record(started_s=2.0, ttft_s=0.25, e2el_s=0.75, tokens=2)
    found = series.over_time([whole, broken, late])
    interval_s = found["interval_s"]
    assert interval_s == 0.1
    tokens = {
        round(number * interval_s, 1): count for number, count in enumerate(found["output_tokens"]) if count
    }
    # Of 3.0, the right end belongs to the interval that begins there.
    assert tokens == {0.5: 1, 1.0: 1, 1.5: 1, 2.2: 1, 2.5: 1, 2.7: 1, 3.0: 1}
    assert sum(found["started"]) == 3
    assert (sum(found["completed"]), sum(found["failed"])) == (2, 1)
    assert found["running"][:3] == [2, 2, 2]
    assert found["running"][22] == 3
    assert sum(found["running"]) * interval_s == pytest.approx(2.5 + 3.0 + 0.75)


def test_tokens_of_an_answer_are_spread_over_its_events() -> None:
    merged = record(ttft_s=0.5, e2el_s=2.5, tokens=3)
    merged.num_output_tokens = 12
    assert sum(series.over_time([merged])["output_tokens"]) == 12


def test_a_long_run_has_few_intervals() -> None:
    found = series.over_time([record(), record(started_s=5000.0)])
    assert len(found["output_tokens"]) <= series.MOST_INTERVALS + 1
    assert sum(found["completed"]) == 2
    assert series.over_time([])["output_tokens"] == []


def test_goodput_moves_with_its_limits() -> None:
    records = [record(ttft_s=0.1), record(ttft_s=0.2), record(ttft_s=0.4), record(error="boom")]
    found = series.goodput(records, {"ttft": 200}, duration_s=2.0)
    assert found is not None
    values = dict(zip(found["scales"], found["goodput"], strict=True))
    assert (values[0.35], values[0.5], values[1.0], values[2.0], values[10.0]) == (0, 0.5, 1.0, 1.5, 1.5)
    assert series.goodput(records, {}, duration_s=2.0) is None


def test_turns_are_told_apart_where_there_are_several() -> None:
    records = [
        record(ttft_s=0.4, cached=0),
        record(ttft_s=0.6, cached=0),
        record(ttft_s=0.1, cached=15, turn=1),
        record(error="boom", turn=1),
    ]
    first, second = series.turns(records) or []
    assert (first["turn"], first["num_requests"], first["prefix_cache_hit_rate"]) == (1, 2, 0.0)
    assert first["ttft_median"] == pytest.approx(500)
    assert (second["num_requests"], second["num_completed"]) == (2, 1)
    assert second["prefix_cache_hit_rate"] == 0.75
    assert second["ttft_median"] == pytest.approx(100)
    assert series.turns(records[:2]) is None
