"""A real server in a process of its own: started, waited for, measured and stopped by the tests."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from loadtest import server_process
from loadtest.metrics_page import samples

START_LIMIT_S = 120.0
COMMAND = (sys.executable, "-m", "asyncserve", "--device", "cpu")
TINY = ("--num-threads", "1")
"""For tiny models: a second thread gains nothing, and on a busy machine each of their steps waits for it."""


class ServerProcess:
    """`python -m asyncserve` with its log, listening on a free port, on the CPU wherever it runs."""

    def __init__(self, model: Path | str, *options: str, environ: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._server = server_process.ServerProcess(
            [*COMMAND, str(model), "--host", "127.0.0.1", "--port", "0", *options],
            log=Path(self._folder.name) / "log",
            environment={**os.environ, "TOKENIZERS_PARALLELISM": "false", **(environ or {})},
        )

    @property
    def pid(self) -> int:
        return self._server.process.pid

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def log(self) -> str:
        return self._server.log.read_text(errors="replace")

    def wait_ready(self) -> "ServerProcess":
        self._server.wait_ready(START_LIMIT_S)
        return self

    def signal(self, number: int) -> None:
        self._server.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self._server.process.wait(timeout_s)

    def stop(self) -> None:
        self._server.stop()
        self._folder.cleanup()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels, whatever their others."""
        values = [
            sample.value
            for sample in samples(self.get("/metrics").text)
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"no metric {name} with {labels}"
        return sum(values)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing runs, waits or holds a block."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = {
                name: self.metric(f"asyncserve:{name}")
                for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            }
            if not any(state.values()):
                return
            assert time.monotonic() < deadline, f"not idle after {timeout_s} s: {state}"
            time.sleep(0.05)


@contextlib.contextmanager
def running_server(
    model: Path | str, *options: str, environ: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    server = ServerProcess(model, *options, environ=environ)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def sse_events(lines: Sequence[str]) -> list[str]:
    """Return the data of each event of a finished stream."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
