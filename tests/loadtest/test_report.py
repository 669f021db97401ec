import json
import math
from pathlib import Path

import pytest

from loadtest.report import Distribution, by_kind, latencies_ms, plot, summarize, to_table
from tests.loadtest.records import record


def test_percentiles_interpolate_linearly() -> None:
    values = Distribution.of([10.0, 20.0, 30.0, 40.0, 50.0])
    assert (values.count, values.mean, values.median, values.max) == (5, 30.0, 30.0, 50.0)
    assert values.p90 == pytest.approx(46.0)
    assert values.p95 == pytest.approx(48.0)
    assert values.p99 == pytest.approx(49.6)
    assert values.p999 == pytest.approx(49.96)


def test_no_values_are_no_numbers() -> None:
    assert math.isnan(Distribution.of([]).median)


def test_time_per_output_token_leaves_out_the_first_token() -> None:
    values = latencies_ms([record(started_s=5.0, ttft_s=0.1, e2el_s=1.1, tokens=11)])
    assert values["ttft"] == [pytest.approx(100)]
    assert values["e2el"] == [pytest.approx(1100)]
    assert values["tpot"] == [pytest.approx(100)]
    assert values["itl"] == [pytest.approx(100)] * 10


def test_an_output_of_one_token_has_no_time_per_output_token() -> None:
    single = record(ttft_s=0.1, e2el_s=0.1, tokens=2)
    single.num_output_tokens = 1
    assert latencies_ms([single])["tpot"] == []


def test_failures_count_for_nothing_but_themselves() -> None:
    records = [record(), record(error="boom"), record(error="boom"), record(error="other")]
    report = summarize(records, duration_s=2.0)
    assert (report.num_requests, report.num_completed) == (4, 1)
    assert report.failures == {"boom": 2, "other": 1}
    assert report.output_throughput == pytest.approx(5.5)
    assert report.total_throughput == pytest.approx(15.5)
    assert report.request_throughput == pytest.approx(0.5)
    assert report.latencies["ttft"].count == 1


def test_messages_that_differ_in_numbers_alone_are_told_as_one() -> None:
    records = [record(error=f"token {number} is above 319") for number in (320, 321, 321, 4000)]
    records += [record(error="boom")] * 2
    report = summarize(records, duration_s=1.0)
    assert by_kind(report.failures) == [("token 321 is above 319", 4, 3), ("boom", 2, 1)]
    table = to_table(report)
    assert "4 x token 321 is above 319 (and the like: 3 messages)" in table
    assert "2 x boom\n" in table
    assert "nan" not in table


def test_answers_of_another_length_are_counted_where_the_server_counts() -> None:
    uncounted = record(asked=12)
    uncounted.has_usage = False
    report = summarize([record(), record(asked=12), record(asked=10), uncounted], duration_s=1.0)
    assert report.num_wrong_length == 2
    assert not report.is_sound
    assert "wrong length  2 answers" in to_table(report)
    assert summarize([record(), record()], duration_s=1.0).is_sound
    assert not summarize([record(), record(error="boom")], duration_s=1.0).is_sound


def test_the_share_of_cached_prompt_tokens_is_given_where_the_server_tells() -> None:
    silent = summarize([record()], duration_s=1.0)
    assert (silent.num_cached_tokens, silent.prefix_cache_hit_rate) == (None, None)
    assert "does not tell" in to_table(silent)
    # A server may leave the figure out where it is 0.
    report = summarize([record(cached=16), record(), record(cached=0, error="boom")], duration_s=1.0)
    assert (report.num_cached_tokens, report.prefix_cache_hit_rate) == (16, 0.4)
    assert "16 prompt tokens were in it (40.0%)" in to_table(report)
    assert report.to_json()["prefix_cache_hit_rate"] == 0.4
    assert summarize([record(cached=0)], duration_s=1.0).prefix_cache_hit_rate == 0.0


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    records = [
        record(ttft_s=0.1, e2el_s=1.1),
        record(ttft_s=0.6, e2el_s=1.1),
        record(ttft_s=0.1, e2el_s=3.1),
        record(error="boom"),
    ]
    assert summarize(records, duration_s=2.0, limits_ms={"ttft": 500, "tpot": 150}).goodput == 0.5
    assert summarize(records, duration_s=2.0, limits_ms={"ttft": 500}).goodput == 1.0
    assert summarize(records, duration_s=2.0, limits_ms={"e2el": 10_000}).goodput == 1.5
    assert summarize(records, duration_s=2.0).goodput is None


def test_a_failed_request_keeps_no_limit_and_counts_in_the_share() -> None:
    records = [record(ttft_s=0.1), record(ttft_s=0.6), record(error="boom"), record(ttft_s=0.2)]
    report = summarize(records, duration_s=2.0, limits_ms={"ttft": 500})
    assert (report.num_good, report.good_share, report.goodput) == (2, 0.5, 1.0)
    assert "2 of 4 requests kept every limit (50.0%)" in to_table(report)
    assert summarize(records, duration_s=2.0).good_share is None


def test_the_speed_of_a_user_is_the_inverse_of_the_median_time_per_token() -> None:
    records = [record(e2el_s=0.1 + 10 * tpot_s) for tpot_s in (0.02, 0.04, 0.5)]
    assert summarize(records, duration_s=9.0).user_throughput == pytest.approx(25)
    single = record(ttft_s=0.1, e2el_s=0.1, tokens=2)
    single.num_output_tokens = 1
    assert summarize([single], duration_s=1.0).user_throughput is None


def test_a_run_in_which_everything_failed_still_makes_a_report() -> None:
    report = summarize([record(error="boom")], duration_s=1.0, limits_ms={"ttft": 1})
    assert report.goodput == 0
    assert "1 x boom" in to_table(report)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["latencies"]["ttft"]["median"] is None


@pytest.mark.slow
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    plot({"one": [record(), record(e2el_s=2.0)], "empty": []}, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
