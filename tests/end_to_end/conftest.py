"""One real server per test session for the tests that only ask it things."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.server_process import ServerProcess, running_server
from tests.fakes.demo_model import demo_model_path


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """The demo model in float32: greedy answers do not hang on rounding."""
    with running_server(demo_model_path(), "--dtype", "float32", "--served-model-name", "smollm2") as server:
        yield server
