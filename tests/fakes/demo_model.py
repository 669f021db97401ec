"""Where the demo model is, for tests that need a real one."""

from pathlib import Path

_FILE = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model_path() -> Path:
    """Return the demo model's file; its absence is an error, because tests must not pass without it."""
    if not _FILE.is_file():
        raise FileNotFoundError(f"{_FILE} is missing; run `make model`")
    return _FILE
