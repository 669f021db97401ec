import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.frontend import Cost
from tests.architecture.sources import ROOT
from tests.fakes.demo_model import demo_model_path


def test_cost_is_given_per_token() -> None:
    assert Cost(num_tokens=1000, user_s=0.002, kernel_s=0.004, wall_s=0.01).figures == pytest.approx(
        (2.0, 4.0, 6.0, 100_000.0)
    )


@pytest.mark.slow
def test_the_benchmark_measures_every_round_of_a_real_server(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "loadtest.frontend",
        "--model",
        str(demo_model_path()),
        "--json",
        str(figures),
    ]
    command += ["--streams", "4", "--tokens", "40", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "socket.send loop" in done.stdout
    measured = json.loads(figures.read_text())
    assert measured["event_bytes"] > 50
    for rounds in (measured["server"], measured["socket.send loop"]):
        assert len(rounds) == 2
        assert all(tokens_per_s > 0 for *_, tokens_per_s in rounds)
