"""Where Gemma 3 270M is, for tests that need a real model with a sliding window; fetched when first asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FILE = _ROOT / "models" / "gemma-3-270m-q4_k_m.gguf"


def gemma_model_path() -> Path:
    """Return the model's file, or skip the test if there is none and it cannot be fetched."""
    if not _FILE.is_file():
        script = _ROOT / "scripts" / "fetch_model.py"
        done = subprocess.run(
            [sys.executable, str(script), str(_FILE)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"{_FILE.name} cannot be fetched: {done.stderr.strip()[-300:]}")
    return _FILE
