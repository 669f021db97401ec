"""A script that uses `LLM` and ends, as scripts do, without closing it."""

import subprocess
import sys

import pytest

from tests.fakes.demo_model import demo_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = """
import sys
from asyncserve import LLM, SamplingParams, StructuredOutput, StructureKind
llm = LLM(sys.argv[1], device="cpu", num_gpu_blocks_override=64)
shape = StructuredOutput(kind=StructureKind.REGEX, source="[a-c]{3}")
(completion,) = llm.generate(["x"], SamplingParams(max_tokens=8, structured=shape), progress=False)
print(completion.outputs[0].text)
"""


def test_a_script_ends_well_although_a_step_still_runs() -> None:
    """An answer that ends before `max_tokens` leaves one step on the device, which was inside torch then."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(demo_model_path())],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.strip()) == 3
    assert "Traceback" not in done.stderr
