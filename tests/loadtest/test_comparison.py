import json
import re

import pytest

from loadtest.comparison import METRICS, chance, compare, to_json, to_text
from tests.loadtest.records import paced, record, row


def repeats(*tpots_ms: float, **options: object) -> list[dict[str, object]]:
    return [paced(tpot_ms, repeat=number + 1, **options) for number, tpot_ms in enumerate(tpots_ms)]  # type: ignore[arg-type]


def test_ratios_are_of_medians_and_their_bounds_of_the_repeats() -> None:
    found = compare(repeats(20, 22, 24), repeats(30, 33, 27))
    tpot = next(one for one in found.loads[0].differences if one.metric == "tpot_median")
    assert (tpot.before, tpot.after) == pytest.approx((22, 30))
    assert (tpot.ratio, tpot.least, tpot.greatest) == pytest.approx((30 / 22, 27 / 24, 33 / 20))
    assert (tpot.differs, tpot.verdict) == (True, "worse")
    assert tpot.worse_by == pytest.approx(30 / 22 - 1)
    user = next(one for one in found.loads[0].differences if one.metric == "user_throughput")
    assert user.worse_by == pytest.approx(1 - 22 / 30)
    assert user.verdict == "worse"


def test_ranges_that_touch_are_the_same() -> None:
    found = compare(repeats(20, 22, 24), repeats(24, 33, 27))
    verdicts = {one.metric: one.verdict for one in found.loads[0].differences}
    assert verdicts["tpot_median"] == "same"
    # Never slower, whatever the limit: 27 over 22 is within noise.
    assert not found.slower(0.01)


def test_faster_is_better_and_never_slower() -> None:
    found = compare(repeats(30, 33), repeats(20, 22))
    assert {one.verdict for one in found.loads[0].differences if one.metric.startswith("tpot")} == {"better"}
    assert not found.slower(0.0)


def test_slower_is_what_is_worse_by_more_than_the_limit_and_beyond_noise() -> None:
    found = compare(repeats(20, 20.2), repeats(21.9, 22))
    assert {one.metric for _, one in found.slower(0.05)} >= {"tpot_median", "tpot_p99", "user_throughput"}
    assert "ttft_median" not in {one.metric for _, one in found.slower(0.05)}
    assert not found.slower(0.10)
    assert {one.metric for _, one in found.slower(0.05, ["tpot_p99"])} == {"tpot_p99"}


def test_of_single_runs_nothing_is_said_to_differ_but_a_limit_is_a_limit() -> None:
    found = compare(repeats(20), repeats(30))
    assert {one.verdict for one in found.loads[0].differences} == {"one run"}
    assert found.slower(0.05)
    assert not found.slower(0.60)


def test_a_throughput_that_vanished_is_worse_by_all_of_it() -> None:
    limits = {"ttft": 150.0}
    good = [row([record()], limits_ms=limits, repeat=number) for number in (1, 2)]
    bad = [row([record(ttft_s=0.2)], limits_ms=limits, repeat=number) for number in (1, 2)]
    found = compare(good, bad)
    goodput = next(one for one in found.loads[0].differences if one.metric == "goodput")
    assert (goodput.ratio, goodput.verdict, goodput.worse_by) == (0, "worse", 1)
    assert "goodput" in {one.metric for _, one in found.slower(0.05)}


def test_loads_are_matched_by_what_they_are_and_not_by_seed_or_name() -> None:
    before = repeats(20, 21, concurrency=4, seed=1) + repeats(20, concurrency=8)
    after = repeats(20, 21, concurrency=4, seed=2) + repeats(20, concurrency=16)
    found = compare(before, after)
    assert [load.before.rows[0]["load"]["concurrency"] for load in found.loads] == [4]
    assert [name.rpartition(" ")[2] for name in (*found.only_before, *found.only_after)] == ["8", "16"]
    with pytest.raises(ValueError, match="no load in common"):
        compare(repeats(20, concurrency=8), repeats(20, concurrency=16))


def test_failures_and_other_tokens_are_remarked_upon() -> None:
    before = [row([record()] * 4)]
    after = [row([record(), record(), record(), record(error="boom")])]
    (load,) = compare(before, after).loads
    assert load.fails_more
    assert any("0.00% and 25.00%" in remark for remark in load.remarks)
    assert any("output tokens differ: 44 and 33" in remark for remark in load.remarks)
    assert not compare(after, after).loads[0].fails_more


def test_chance_is_what_counting_gives() -> None:
    assert chance(3, 3) == pytest.approx(0.1)
    assert chance(5, 5) == pytest.approx(2 / 252)


def test_text_and_json_say_the_same() -> None:
    before, after = repeats(20, 22), repeats(30, 33)
    for one in after:
        one["commit"] = "fedcba987654"
    found = compare(before, after)
    text = to_text(found, ("old", "new"))
    assert "commit: 0123456789ab  →  fedcba987654" in text
    assert re.search(r"TPOT median, ms +21\.00 +31\.50 +1\.500  \(1\.364 - 1\.650\) +worse\n", text)
    plain = json.loads(json.dumps(to_json(found), allow_nan=False))
    metrics = plain["loads"][0]["metrics"]
    assert metrics["tpot_median"]["verdict"] == "worse"
    assert metrics.keys() <= METRICS.keys()
    assert f"{sum(one['verdict'] != 'same' for one in metrics.values())} of {len(metrics)}" in text
