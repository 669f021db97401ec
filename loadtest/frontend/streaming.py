"""Rounds of streams against one server process, and what they cost it."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loadtest.frontend.cost import Cost
from loadtest.frontend.machine import Round, Sockets, next_round

END = "[DONE]"
EVENTS_WITHOUT_TOKENS = 1
"""The end mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is streamed.

    Args:
        num_streams: At once.
        num_tokens: Of each stream.
        stream_interval: As the server's option; None for its clock.
        step_ms: Between two steps of the device; 0 for none.
        endpoint: `completions` or `chat`.
    """

    num_streams: int
    num_tokens: int
    stream_interval: int | None = None
    step_ms: float = 0.0
    endpoint: str = "completions"

    @property
    def options(self) -> list[str]:
        """The server's."""
        options = ["--streams", str(self.num_streams), "--tokens", str(self.num_tokens)]
        if self.stream_interval is not None:
            options += ["--stream-interval", str(self.stream_interval)]
        return [*options, "--step-ms", str(self.step_ms)]

    @property
    def request(self) -> bytes:
        """The request of every stream, with a place for a number of its own."""
        fields: dict[str, Any] = {"max_tokens": self.num_tokens, "ignore_eos": True, "stream": True}
        if self.endpoint == "chat":
            path = "/v1/chat/completions"
            fields["messages"] = [{"role": "user", "content": "count @@@@@@@@"}]
        else:
            path = "/v1/completions"
            fields["prompt"] = "count @@@@@@@@"
        return post(path, fields)


def post(path: str, fields: Any) -> bytes:
    """Return a request as it is sent."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: what the server said of it, and what the reader saw."""

    figures: dict[str, Any]
    seen: Round

    @property
    def cost(self) -> Cost:
        """What the span in which every stream decoded cost."""
        return Cost(**self.figures["cost"])


@contextmanager
def server(module: str, options: Sequence[str]) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Run a server's process for the duration of the block; gives it and its port.

    Raises:
        ConnectionError: It did not start.
    """
    command = [sys.executable, "-m", module, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ConnectionError("the server did not start")
            yield process, int(line)
        finally:
            process.communicate()


def measure(
    sockets: Sockets,
    setting: Setting,
    *,
    model: str,
    num_rounds: int,
    probes: bool = False,
    module: str = "loadtest.frontend.server",
) -> list[Measured]:
    """Return so many rounds, after one that fills the caches.

    Raises:
        ConnectionError: The server did not start, a stream broke off, or ended before all had begun.
    """
    options = ["--model", model, *setting.options, *(["--probes"] if probes else [])]
    measured = []
    with (
        server(module, options) as (process, port),
        sockets.reading(port, setting.num_streams, num_rounds + 1, setting.request, END) as reader,
    ):
        assert process.stdout is not None
        for turn in range(num_rounds + 1):
            seen = next_round(reader)
            figures = json.loads(process.stdout.readline())
            if "cost" not in figures:
                raise ConnectionError(
                    f"of {setting.num_streams} streams some ended before all had begun: give each more tokens"
                )
            if turn:
                measured.append(Measured(figures, seen))
    return measured


def bytes_per_event(measured: Sequence[Measured]) -> float:
    """Return the mean length of an event on the wire, heads of answers included."""
    return sum(each.seen.num_bytes for each in measured) / sum(each.seen.num_events for each in measured)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of some rounds, and the least and the greatest."""
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
