import json
from pathlib import Path

import jsonschema
import pytest

from loadtest import results
from loadtest.report import latencies_ms
from tests.loadtest.records import paced, record, row

CLIENT = {
    "num_processes": 1,
    "cpu_share": 0.5,
    "lag_p99_ms": 1.0,
    "lag_max_ms": 2.0,
    "num_reconnects": 0,
    "ceiling": None,
    "warnings": [],
}
VERSION_1 = {
    "date": "2029-01-01T00:00:00+00:00",
    "label": "abc",
    "model": "m",
    "scenario": "cpu",
    "name": "random 128+128, concurrency 8 #2",
    "load": {
        "workload": "random",
        "endpoint": "completions",
        "num_requests": 40,
        "input_len": 128,
        "output_len": 128,
        "concurrency": 8,
        "rate": None,
        "seed": 5,
        "repeat": 3,
    },
    "repeat": 2,
    "num_requests": 40,
    "num_completed": 40,
    "failures": {},
    "duration_s": 2.0,
    "num_prompt_tokens": 10,
    "num_output_tokens": 20,
    "num_cached_tokens": None,
    "prefix_cache_hit_rate": None,
    "num_wrong_length": 0,
    "num_without_usage": 0,
    "request_throughput": 20.0,
    "output_throughput": 10.0,
    "total_throughput": 15.0,
    "goodput": None,
    "latencies": {
        name: {"count": 3, "mean": 20.0, "median": 20.0, "p90": 30.0, "p99": 40.0, "max": 50.0}
        for name in ("ttft", "tpot", "itl", "e2el")
    },
}
"""What the program wrote before its files had a version."""


def check(found: dict[str, object]) -> None:
    jsonschema.validate(found, json.loads(results.SCHEMA_FILE.read_text()))


def test_a_row_is_what_the_schema_says() -> None:
    limits = {"ttft": 500.0}
    check(row([record(cached=3), record(error="boom", turn=1)], client=CLIENT, limits_ms=limits))
    check(row([record(error="boom")]))


def test_lines_and_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [paced(10, repeat=1), paced(20, repeat=2)]
    lines, document = tmp_path / "new" / "lines.jsonl", tmp_path / "document.json"
    for one in rows:
        results.append(lines, one)
    values = {"values_ms": latencies_ms([record()])}
    document.write_text(
        json.dumps({"schema_version": 2, "date": "d", "runs": [one | values for one in rows], "repeats": []})
    )
    assert results.read(lines) == rows
    assert [{**one, "values_ms": None} for one in results.read(document)] == [
        {**one, "values_ms": None} for one in rows
    ]


def test_files_of_version_1_are_read_as_rows_of_today(tmp_path: Path) -> None:
    lines, document = tmp_path / "lines.jsonl", tmp_path / "document.json"
    lines.write_text(json.dumps(VERSION_1) + "\n" + json.dumps(VERSION_1) + "\n")
    about = {name: VERSION_1[name] for name in ("date", "label", "model", "scenario")}
    run = {name: value for name, value in VERSION_1.items() if name not in about}
    values = {"values_ms": {"ttft": [1.0, 3.0], "tpot": [], "itl": [2.0], "e2el": [2.0]}}
    document.write_text(json.dumps({**about, "runs": [run | values], "repeats": []}))
    first, _ = results.read(lines)
    check(first)
    assert first["point"] == "random 128+128, concurrency 8"
    assert first["user_throughput"] == 50.0
    (detailed,) = results.read(document)
    check(detailed)
    assert detailed["percentiles"]["ttft"][0] == 1.0
    assert detailed["percentiles"]["tpot"] is None


def test_a_load_of_version_1_is_the_same_load_today() -> None:
    today = paced(10, num_requests=40, concurrency=8)
    (point,) = results.points(
        [
            {**VERSION_1, "command": "run", "point": "p"},
            {**today, "load": {**today["load"], "num_requests": 40}},
        ]
    )
    assert len(point.rows) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"parts": []}', "is no results file"),
        ("[1, 2]", "is no results file"),
        ("not JSON", "is no results file"),
        ('{"schema_version": 3}', "version 3; this reads up to 2"),
    ],
)
def test_other_files_and_versions_to_come_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        results.read(path)


def test_repeats_of_a_load_are_one_point_and_commands_are_told_apart() -> None:
    rows = [
        paced(10, repeat=1, concurrency=1),
        paced(30, repeat=2, concurrency=1, seed=9),
        paced(20, concurrency=2),
        paced(20, concurrency=1, command="sweep"),
    ]
    found = results.points(rows)
    assert [len(point.rows) for point in found] == [2, 1, 1]
    assert found[0].values("tpot_median") == pytest.approx([10, 30])
    assert found[0].values("output_throughput") == pytest.approx([44 / 0.2, 44 / 0.4])
    assert found[0].values("goodput") == []
