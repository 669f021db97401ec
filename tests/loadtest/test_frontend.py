import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncserve.checkpoint import open_checkpoint
from asyncserve.loop.tokenizer import load_tokenizer
from asyncserve.step import ScheduledSequence, StepPlan
from loadtest.frontend.cost import Cost
from loadtest.frontend.device import TEXT, ReplayDevice
from loadtest.frontend.machine import Sockets
from loadtest.frontend.probes import CallbackTimes
from loadtest.frontend.results import Results, Row
from loadtest.frontend.scheduling import measure_scheduling
from tests.architecture.sources import ROOT
from tests.fakes.demo_model import demo_model_path
from tests.fakes.executor import fake_info
from tests.fakes.tokenizer import FakeTokenizer

COST = Cost(num_tokens=1000, user_s=0.002, kernel_s=0.004, wall_s=0.01)


def test_cost_is_given_per_token() -> None:
    figures = (COST.user_us, COST.kernel_us, COST.all_us, COST.tokens_per_s)
    assert figures == pytest.approx((2.0, 4.0, 6.0, 100_000.0))


async def test_replayed_streams_get_consecutive_tokens_of_the_text() -> None:
    tokenizer = FakeTokenizer()
    text = list(tokenizer.encode(TEXT, add_special_tokens=False))
    device = ReplayDevice(fake_info(num_slots=2), tokenizer)
    got = []
    for step_id in range(3):
        rows = tuple(ScheduledSequence(slot, 10 + step_id, 1, True) for slot in range(2))
        got.append(list((await device.submit(StepPlan(step_id=step_id, sequences=rows))).token_ids))
    assert got == [text[0:2], text[1:3], text[2:4]]


async def test_a_chunk_that_does_not_end_its_prompt_gets_no_token() -> None:
    device = ReplayDevice(fake_info(num_slots=3), FakeTokenizer())
    rows = (
        ScheduledSequence(0, 9, 1, True),
        ScheduledSequence(1, 0, 4, True),
        ScheduledSequence(2, 0, 4, False),
    )
    output = await device.submit(StepPlan(step_id=0, sequences=rows))
    assert len(output.token_ids) == 2


def test_longest_call_of_each_kind_is_kept() -> None:
    times = CallbackTimes()
    for name, cpu_s in (("a", 1.0), ("b", 3.0), ("a", 2.0), ("a", 0.5)):
        times.note(name, cpu_s)
    assert times.longest == {"a": 2.0, "b": 3.0}
    with pytest.raises(ZeroDivisionError):
        times.timed(lambda: 1 / 0, "c")()
    assert times.num_calls == 5


def test_scheduling_is_measured_with_every_request_decoding() -> None:
    plan_us, apply_us = measure_scheduling(2)
    assert plan_us > 0
    assert apply_us > 0


def test_sending_and_reading_ends_at_the_last_byte(tmp_path: Path) -> None:
    cost = Sockets(tmp_path).send(3, 100, 50)
    assert cost.num_tokens == 150
    assert cost.wall_s > 0


def test_tables_hold_what_was_measured_against_the_bare_send_of_as_many_streams() -> None:
    results = Results(
        streaming=[Row("a write for each token", 64, [COST, COST]), Row("alone", 1, [COST])],
        floors=[Row("C send()", 64, [Cost(1000, 0.0, 0.004, 0.01)])],
        scheduling={256: (90.0, 38.0)},
        whole=[Row("whole server", 256, [COST])],
    )
    text = results.as_markdown()
    assert "| 64 | a write for each token | 2.00 (2.00 - 2.00) | 4.00 (4.00 - 4.00) |" in text
    assert "| 1.50 |" in text
    assert "| 256 | 90 | 38 | 0.50 |" in text
    assert "vLLM 209, llama.cpp 663" in text
    assert json.loads(json.dumps(results.as_object()))["streaming"][0]["all_us"]["median"] == 6.0


def test_the_text_has_characters_of_several_tokens() -> None:
    tokenizer = load_tokenizer(open_checkpoint(str(demo_model_path())), chat_template=None)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = [token_id for token_id in token_ids if b"\xef\xbf\xbd" in _shown(tokenizer.token_bytes(token_id))]
    assert 0.02 < len(parts) / len(token_ids) < 0.15


def _shown(data: bytes) -> bytes:
    return data.decode(errors="replace").encode()


@pytest.mark.slow
def test_the_benchmark_measures_a_real_server_and_writes_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest.frontend", "--model", str(demo_model_path())]
    command += ["--streams", "4", "--tokens", "40", "--rounds", "1", "--output", str(tmp_path / "figures")]
    command += ["--parts", "streaming", "scheduling"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures.md").read_text() in done.stdout
    measured = json.loads((tmp_path / "figures.json").read_text())
    assert [row["name"] for row in measured["streaming"]] == ["a write for each token", "4 ms clock"]
    for row in [*measured["streaming"], *measured["c_send"]]:
        assert row["num_streams"] == 4
        assert row["tokens_per_s"]["median"] > 0
    assert measured["streaming"][0]["bytes_per_event"] > 50


@pytest.mark.slow
def test_streams_that_end_before_all_have_begun_are_no_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest.frontend", "--model", str(demo_model_path())]
    command += ["--streams", "128", "--tokens", "2", "--rounds", "1", "--parts", "streaming"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "before all had begun" in done.stderr
