import sys
import time
from pathlib import Path

import pytest

from loadtest.server_process import ServerFailed, ServerProcess, command


def test_options_are_spelled_as_the_command_line_takes_them() -> None:
    options = {"enforce_eager": True, "enable_prefix_caching": False, "sizes": (1, 2), "max_model_len": 64}
    words = command("model", options, port=81)[3:]
    assert words == [
        "model",
        "--host=127.0.0.1",
        "--port=81",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--sizes",
        "1",
        "2",
        "--max-model-len=64",
    ]


def started(script: str, log: Path) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", script], log=log)


def test_the_address_is_what_the_log_says_and_nobody_is_asked_before(tmp_path: Path) -> None:
    server = started("input()", tmp_path / "silent")
    assert (server.url, server.get("/live")) == ("", (0, b""))
    server.stop()
    script = "print('12:00 ready on http://127.0.0.1:7 after 1 s', flush=True); import time; time.sleep(600)"
    server = started(script, tmp_path / "log")
    server.wait_ready(60)
    assert server.url == "http://127.0.0.1:7"
    assert server.started_s <= time.perf_counter()
    server.stop()
    assert server.process.returncode != 0


def test_a_server_that_ends_before_it_is_ready_is_told_with_its_last_words(tmp_path: Path) -> None:
    server = started("print('no such model'); raise SystemExit(2)", tmp_path / "log")
    with pytest.raises(ServerFailed, match="ended with status 2:\nno such model"):
        server.wait_ready(60)
    server.stop()
