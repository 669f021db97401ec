import json
from pathlib import Path
from typing import Any

from loadtest.gpu.parts import Outcome, Part
from loadtest.gpu.results import TABLES, Results, combined, markdown, number, spread
from loadtest.model_shapes import known_shapes

ABOUT = {"date": "2026-01-01", "commit": "abc", "label": "", "command": "python", "versions": {"torch": "2"}}
MACHINE = {
    "kind": "machine",
    "gpu": "a GPU",
    "driver": "1",
    "power_limit": "700 W",
    "cuda": "13",
    "num_cores": 16,
    "copy_gbps": 4000.0,
    "product_tflops": 800.0,
}
STEPS = {
    "num_steps": 100,
    "interval_ms": 0.91,
    "interval_p99_ms": 1.2,
    "device_ms": 0.85,
    "launch_ms": 0.2,
    "idle_share": 0.015,
}
DECODE = {
    "kind": "decode",
    "batch": 8,
    "context_len": 1152.0,
    "tpot_ms": 1.0,
    "all_ms": [1.1, 1.0],
    "floor_bytes": 2e9,
    "steps": STEPS,
}


def measured(file: Path | None, rows: list[dict[str, Any]], *, status: str = "done") -> Results:
    results = Results(ABOUT, file)
    results.begin(Part(name="machine", kind="machine", limit_s=1))
    results.add(MACHINE)
    results.end(Outcome(status="done", error=None, took_s=1.0))
    (shape,) = known_shapes(["qwen3-0.6b"])
    results.begin(Part(name="offline-qwen3-0.6b", kind="offline", limit_s=1, shape=shape))
    for row in rows:
        results.add(row)
    results.end(Outcome(status=status, error=None if status == "done" else "Error: why\nmore", took_s=2.0))
    return results


def test_a_decode_row_stands_beside_its_aim_the_other_server_and_the_byte_floor() -> None:
    text = markdown([measured(None, [DECODE]).content])
    (row,) = (line for line in text.splitlines() if line.startswith("| qwen3-0.6b |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:8] == ["qwen3-0.6b", "8", "1,152", "1.000", "1.000 - 1.100", "1.00", "2.56", "50.0 %"]
    assert cells[-1] == "1.5 %"


def test_both_files_hold_everything_after_every_row(tmp_path: Path) -> None:
    file = tmp_path / "new" / "run.json"
    results = Results(ABOUT, file)
    results.begin(Part(name="machine", kind="machine", limit_s=1))
    assert json.loads(file.read_text())["parts"][0]["status"] == "running"
    line = results.add(MACHINE)
    assert line.startswith("machine: GPU a GPU | driver 1")
    assert json.loads(file.read_text())["parts"][0]["rows"] == [MACHINE]
    assert "| a GPU |" in file.with_suffix(".md").read_text()
    assert sorted(path.name for path in file.parent.iterdir()) == ["run.json", "run.md"]


def test_without_a_copy_bandwidth_there_is_no_share() -> None:
    results = Results(ABOUT, None)
    results.begin(Part(name="steps", kind="steps", limit_s=1))
    assert "share" not in results.add({**DECODE, "kind": "decode"})


def test_a_part_that_failed_is_told_in_one_line() -> None:
    text = markdown([measured(None, [], status="failed").content])
    assert "| offline-qwen3-0.6b | failed: Error: why | 2.0 |" in text


def test_of_several_runs_the_last_that_did_a_part_counts() -> None:
    first = measured(None, [DECODE]).content
    second = measured(None, [{**DECODE, "tpot_ms": 0.5}]).content
    failed = measured(None, [], status="failed").content
    names = [[part["name"] for part in run["parts"]] for run in combined([first, second, failed])]
    both = ["machine", "offline-qwen3-0.6b"]
    assert names == [["machine"], both, both]
    text = markdown(combined([first, second]))
    assert "| 0.500 |" in text
    assert "| 1.000 | 1.000 - 1.100 |" not in text


def test_figures_are_written_with_few_digits_and_none_as_a_dash() -> None:
    assert [number(12345.6), number(0.12345, 3), number(None)] == ["12,346", "0.123", "-"]
    assert spread([3.0, 1.0], 2) == "1.00 - 3.00"
    assert spread([]) == "-"


def test_every_table_has_as_many_titles_as_cells() -> None:
    for heading, cells in TABLES.values():
        assert heading
        assert all(title and write for title, write in cells)
