"""The server as a process of its own: started on given cores, waited for, read out, stopped.

Takes a command line, gives a `ServerProcess`: its address, the times of its start, its figures from
`/metrics`. All it logs goes to a file, where its address is found, and whose last lines are told when it
does not start. Blocking: whoever measures does nothing else meanwhile. Tests start theirs by it, too.
"""

import contextlib
import json
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtest.cores import on_cores
from loadtest.metrics_page import totals

POLL_S = 0.02
STOP_LIMIT_S = 30.0
_READY = re.compile(r"ready on (\S+) after")
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANDOM = random.SystemRandom()
"""Not the seeded one: processes that run at the same time must not choose the same."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks the server itself, whatever proxy the environment names."""


class ServerFailed(Exception):
    """The server ended, or did not do in time what was waited for."""


class ServerProcess:
    """A server, started on the given cores or any.

    Args:
        command: Its command line; see `command`.
        log: File for its output.
        cores: To run on; None for any.
        environment: Instead of this process's.
        url: Base URL, if it is known beforehand; else the log tells it once requests are answered.

    Attributes:
        process: Its process.
        log: As given.
        started_s: When it was started, `time.perf_counter`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        cores: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        url: str = "",
    ) -> None:
        self.log = log
        self._url = url
        with log.open("wb") as output, on_cores(cores):
            self.started_s = time.perf_counter()
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    @property
    def url(self) -> str:
        """Base URL; "" as long as it is not known."""
        if not self._url and (found := _READY.search(self.log.read_text(errors="replace"))):
            self._url = found[1]
        return self._url

    def wait_ready(self, limit_s: float) -> None:
        """Wait until its log says where it answers requests.

        Raises:
            ServerFailed: It ended, or took too long.
        """
        while not self.url:
            self._check("its address", limit_s)

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET; status 0 if there is no answer."""
        if not self.url:
            return 0, b""
        return self._ask(urllib.request.Request(self.url + path))

    def complete(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Send one request and wait for its whole answer.

        Raises:
            ServerFailed: It is no answer.
        """
        fields = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        body = json.dumps(fields).encode()
        status, answer = self._ask(urllib.request.Request(f"{self.url}/v1/completions", body, headers))
        if status != 200:
            raise ServerFailed(f"HTTP {status}: {answer[:300].decode(errors='replace')}")

    def wait_for_status(self, path: str, limit_s: float) -> float:
        """Wait until a path answers with 200; return the seconds since the server was started.

        Raises:
            ServerFailed: It ended, or took too long.
        """
        while self.get(path)[0] != 200:
            self._check(path, limit_s)
        return time.perf_counter() - self.started_s

    def wait_until_warm(self, limit_s: float) -> float:
        """Wait until no CUDA graph is left to be captured; return the seconds since the start.

        Raises:
            ServerFailed: It ended, or took too long.
        """
        while self.metrics()["asyncserve:graphs_pending"]:
            self._check("the last graph", limit_s)
        return time.perf_counter() - self.started_s

    def metrics(self) -> Mapping[str, float]:
        """Return every sample of /metrics by name, labels added up; 0 for what is not there.

        Raises:
            ServerFailed: There is no such page.
        """
        status, page = self.get("/metrics")
        if status != 200:
            raise ServerFailed(f"/metrics: HTTP {status}:\n{self.last_lines(30)}")
        return totals(page.decode())

    def last_lines(self, count: int) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def stop(self) -> None:
        """Ask it to end, and end it if it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _check(self, waited_for: str, limit_s: float) -> None:
        if self.process.poll() is not None:
            raise ServerFailed(
                f"the server ended with status {self.process.returncode}:\n{self.last_lines(30)}"
            )
        if time.perf_counter() - self.started_s > limit_s:
            raise ServerFailed(f"{waited_for} did not come in {limit_s:g} s:\n{self.last_lines(30)}")
        time.sleep(POLL_S)

    def _ask(self, request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with _OPENER.open(request, timeout=60) as answer:
                return int(answer.status), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:  # nobody listens yet
            return 0, b""


def command(
    model: str, options: Mapping[str, Any], *, port: int, module: Sequence[str] = ("asyncserve",)
) -> list[str]:
    """Return the command line of a server; options by their field names, `module` with what comes first."""
    parts = [sys.executable, "-m", *module, model, "--host=127.0.0.1", f"--port={port}"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            parts += [f"--{flag}", *map(str, value)]
        else:
            parts.append(f"--{flag}={value}")
    return parts


def free_port() -> int:
    """Return a port that nobody listens on, and that the kernel gives to nobody who asks for any."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    try:
        first_given = int(_GIVEN_PORTS.read_text().split()[0])
    except OSError:  # no Linux
        return port
    for _ in range(100):
        chosen = _RANDOM.randint(first_given // 2, first_given)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", chosen)):
            return chosen
    return port


@contextmanager
def running(
    model: str,
    options: Mapping[str, Any],
    *,
    cores: Sequence[int] | None,
    log: Path,
    module: Sequence[str] = ("asyncserve",),
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[ServerProcess]:
    """Run a server for the duration of the block, on the given cores, or any; its log goes to a file.

    Without a port it gets a free one.
    """
    server = ServerProcess(
        command(model, options, port=port or 0, module=module),
        log=log,
        cores=cores,
        environment=environment,
        url=f"http://127.0.0.1:{port}" if port else "",
    )
    try:
        yield server
    finally:
        server.stop()
