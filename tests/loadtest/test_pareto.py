import random
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest import pareto
from loadtest.results import points
from tests.loadtest.records import paced, record, row


def test_the_front_holds_what_nothing_beats() -> None:
    values = [(1, 9), (2, 8), (3, 8), (4, 1), (2, 9), (1, 1)]
    assert [values[index] for index in pareto.front(values)] == [(2, 9), (3, 8), (4, 1)]
    assert pareto.front([]) == []
    assert sorted(pareto.front([(1, 1), (1, 1)])) == [0, 1]


def test_the_front_is_what_a_comparison_of_all_pairs_leaves() -> None:
    source = random.Random(5)
    for _ in range(200):
        values = [(source.randrange(6), source.randrange(6)) for _ in range(source.randrange(12))]
        beaten = {
            one
            for one in values
            for other in values
            if other != one and other[0] >= one[0] and other[1] >= one[1]
        }
        assert sorted(pareto.front(values)) == [
            index for index, value in enumerate(values) if value not in beaten
        ]


def test_a_point_is_the_median_over_its_repeats_with_its_range() -> None:
    rows = [paced(tpot_ms, repeat=number + 1, concurrency=4) for number, tpot_ms in enumerate((20, 10, 40))]
    (trade,) = pareto.trades(points(rows))
    assert trade.label == "4"
    assert (trade.user.median, trade.user.lowest, trade.user.highest) == pytest.approx((50, 25, 100))
    # 4 requests of 11 tokens in 0.1 s + 10 x TPOT.
    throughputs = (44 / 0.3, 44 / 0.5, 44 / 0.2)
    assert (trade.total.median, trade.total.lowest, trade.total.highest) == pytest.approx(throughputs)


def test_points_stand_in_the_order_of_their_speed_and_failed_ones_are_left_out() -> None:
    rows = [
        paced(40, concurrency=8, num_requests=4),
        paced(10, concurrency=1, num_requests=1),
        paced(45, concurrency=9, num_requests=1),
        row([record(error="boom")], concurrency=16),
        paced(20, rate=2.5, num_requests=2),
    ]
    found = pareto.trades(points(rows))
    assert [trade.label for trade in found] == ["9", "8", "2.5/s", "1"]
    assert [trade.label for trade in pareto.on_front(found)] == ["8", "2.5/s", "1"]


def test_the_table_has_a_row_for_every_point_or_says_why_not() -> None:
    rows = [
        paced(10, concurrency=1, num_requests=1),
        paced(45, concurrency=2, num_requests=1),
        paced(0, concurrency=4),
        row([record(error="boom")], concurrency=8),
        row([record(tokens=2, e2el_s=0.1)], concurrency=16),
        row([replace(record(), num_output_tokens=1)], concurrency=32),
    ]
    _, _, *table = pareto.to_text(points(rows)).split("\n")
    assert [line.split()[0] for line in table] == ["1", "2", "4", "8", "16", "32"]
    assert [line.split()[-1] for line in table[:2]] == ["yes", "no"]
    assert ["one read" in line for line in table] == [False, False, True, False, True, False]
    assert "no request was answered" in table[3]
    assert "no answer of two tokens" in table[5]


def test_what_a_sweep_has_shown_is_said_in_a_sentence_each() -> None:
    limits = {"tpot": 30.0}
    rows = [
        paced(tpot_ms, num_requests=users, concurrency=users, limits_ms=limits)
        for users, tpot_ms in ((1, 10), (2, 20), (4, 40), (8, 20))
    ]
    assert pareto.conclusions(points(rows)) == [
        "most output tokens/s: 293.3, at 8 requests at once",
        "99% of requests keep the limits (TPOT 30 ms) up to 2 requests at once",
    ]
    assert "at none of these loads" in pareto.conclusions(points(rows[2:3]))[1]
    assert pareto.conclusions(points([paced(10, rate=2.5)])) == [
        "most output tokens/s: 220.0, at 2.5 requests/s"
    ]
    assert pareto.conclusions(points([row([record(error="boom")], concurrency=8)])) == []


def test_a_line_joins_loads_that_differ_only_in_how_many_come_when() -> None:
    rows = [
        paced(10, concurrency=1, num_requests=5),
        paced(20, concurrency=2, num_requests=10),
        paced(30, rate=3.0),
        paced(10, concurrency=1, input_len=7),
        paced(20, concurrency=2, input_len=7),
        paced(20, workload="text"),
    ]
    found = pareto.lines({"one": rows})
    assert {name: [trade.label for trade in line] for name, line in found.items()} == {
        "one: random 128+128": ["3/s", "2", "1"],
        "one: random 7+128": ["2", "1"],
    }
    assert list(pareto.lines({"a": rows[:2], "b": rows[:2]})) == ["a", "b"]
    assert list(pareto.lines({"": rows[:2]})) == ["random 128+128"]


@pytest.mark.slow
def test_the_picture_is_drawn_in_both_formats(tmp_path: Path) -> None:
    rows = [paced(10, concurrency=1), paced(30, concurrency=4, num_requests=9)]
    pareto.draw({"one": rows, "two": rows[:1]}, tmp_path / "pareto.png")
    pareto.draw({"one": rows}, tmp_path / "pareto.svg")
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "pareto.svg").read_text()
