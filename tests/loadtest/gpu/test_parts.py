import json
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from loadtest.gpu import __main__ as program
from loadtest.gpu.parts import PROGRAMS, Part, all_parts, run
from loadtest.model_shapes import known_shapes
from tests.loadtest.gpu.extents import tiny_shape

CHILD = """
import json, os, subprocess, sys, time
name, rows_to = sys.argv[-3], int(sys.argv[-1])
with os.fdopen(rows_to, "w", buffering=1) as rows:
    rows.write(json.dumps({"kind": name, "pid": os.getpid()}) + "\\n")
    if name == "hangs":
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        rows.write(json.dumps({"kind": "grandchild", "pid": grandchild.pid}) + "\\n")
        time.sleep(600)
    if name == "raises":
        rows.write(json.dumps({"error": "ValueError: no"}) + "\\n")
        sys.exit(1)
    if name == "dies":
        os.abort()
"""


def part(name: str, *, limit_s: float = 30) -> Part:
    return Part(name=name, kind=name, limit_s=limit_s)


def wait_for_end(pid: int) -> None:
    """Return when a process of somebody else's has ended; fail if it does not."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([process], [], [], 60)
    finally:
        os.close(process)
    assert ended, f"process {pid} goes on"


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("works", "done", None),
        ("raises", "failed", "ValueError: no"),
        ("dies", "failed", f"the process ended with status {-signal.SIGABRT}"),
    ],
)
def test_a_part_gives_its_rows_and_how_it_ended(name: str, status: str, error: str | None) -> None:
    rows: list[dict[str, object]] = []
    outcome = run(part(name), [sys.executable, "-c", CHILD], rows.append)
    assert (outcome.status, outcome.error) == (status, error)
    assert [row["kind"] for row in rows] == [name]


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_it_started_and_keeps_its_rows() -> None:
    rows: list[dict[str, object]] = []
    outcome = run(part("hangs", limit_s=3), [sys.executable, "-c", CHILD], rows.append)
    assert outcome.status == "ended after 3 s"
    pids = [int(str(row["pid"])) for row in rows]
    assert len(pids) == 2
    for pid in pids:
        wait_for_end(pid)


def test_parts_are_chosen_by_a_piece_of_their_name_and_the_machine_always() -> None:
    shapes = known_shapes()
    names = [each.name for each in all_parts(shapes)]
    assert names[0] == "machine"
    assert {"offline-qwen3-0.6b", "online-llama-3.1-8b", "clients", *PROGRAMS} < {*names}
    chosen = [each.name for each in all_parts(shapes, ["online-qwen", "kernels"])]
    assert chosen == ["machine", "online-qwen3-0.6b", "kernels"]
    skipped = [each.name for each in all_parts(shapes, ["qwen"], ["machine", "online"])]
    assert skipped == ["machine", "offline-qwen3-0.6b", "start-qwen3-0.6b"]
    with pytest.raises(ValueError, match="no part 'nothing'"):
        all_parts(shapes, ["nothing"])


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="here the machine part would not fail")
def test_a_run_goes_on_when_a_part_fails_and_writes_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = tiny_shape(tmp_path / "tiny")
    out = tmp_path / "out.json"
    argv = ["--only", "start", "--shape", str(shape.folder), "--out", str(out), "--commit", "abc"]
    argv += ["--option", "device=cpu", "dtype=float32", "max_model_len=64", "kv_cache_memory_bytes=4194304"]
    assert program.main(argv) == 1
    written = json.loads(out.read_text())
    machine, start = written["parts"]
    assert (machine["name"], machine["status"], machine["rows"]) == ("machine", "failed", [])
    assert (start["name"], start["status"], start["error"]) == ("start-tiny", "done", None)
    assert start["rows"][0]["mode"] == "eager"
    assert written["commit"] == "abc"
    assert str(out) not in written["command"]
    assert "max_model_len=64" in written["command"]
    assert "| tiny | eager |" in out.with_suffix(".md").read_text()
    assert "start: mode eager | listening" in capsys.readouterr().out


def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--only", "nothing"]) == 2
    assert program.main(["--option", "device"]) == 2
    assert "'device' is no NAME=VALUE" in capsys.readouterr().err
