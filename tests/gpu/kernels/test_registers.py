import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_REGISTERS = 230
"""Of 255, for one token: what takes 243 by one version of the compiler has 2.9 KB on its stack by another."""

MOST_STACK_BYTES = 64


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_way_that_is_chosen_fits_the_registers() -> None:
    """One that did not made a step of llama-3.1-8b take 57 ms instead of 4."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu.kernels.registers"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    usage = json.loads(found.stdout.splitlines()[-1])
    assert len(usage) > 40
    assert {name: used for name, used in usage.items() if used[1] > MOST_STACK_BYTES} == {}
    for_one = {name: used for name, used in usage.items() if name.startswith("1 x ")}
    assert {name: used for name, used in for_one.items() if used[0] > MOST_REGISTERS} == {}
