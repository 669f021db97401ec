"""What a streamed token costs: `python -m loadtest.frontend`, run in the repository's root.

One process, pinned to one core, runs the real HTTP application, engine, scheduler and detokenizer over a
device side that answers every step at once; this process, on another core, reads as cheaply as Python
can. Reported: the server's CPU time per token, user and kernel apart, from the first step in which every
stream decodes until the first stream ends, and tokens per second over the same span. Beside it, taken the
same way, a loop that does nothing but `socket.send` one chunk of the same size to each stream in turn:
what the kernel charges here for a write.
"""

import argparse
import asyncio
import gc
import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from asyncserve.checkpoint import open_checkpoint
from asyncserve.http.app import build_app, make_runner
from asyncserve.loop.engine import Engine
from asyncserve.loop.tokenizer import load_tokenizer
from asyncserve.observer import NullObserver, RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import StepOutput, StepPlan
from tests.fakes.executor import FakeExecutor, fake_info

DEMO_MODEL = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")
PROMPT_LEN = 16
BLOCK_LEN = 16
EVENT = b"data: "
END = b"data: [DONE]"
READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU and wall time of a span, and how many tokens (or chunks) it handled."""

    num_tokens: int
    user_s: float
    kernel_s: float
    wall_s: float

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """User, kernel and total CPU µs per token, and tokens per second."""
        user_us, kernel_us = (1e6 * seconds / self.num_tokens for seconds in (self.user_s, self.kernel_s))
        return user_us, kernel_us, user_us + kernel_us, self.num_tokens / self.wall_s


class Stopwatch:
    """CPU and wall time of this process since it was made."""

    def __init__(self) -> None:
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._started_s = time.perf_counter()

    def cost(self, num_tokens: int) -> Cost:
        """Return what the time since then cost."""
        now = resource.getrusage(resource.RUSAGE_SELF)
        return Cost(
            num_tokens,
            now.ru_utime - self._usage.ru_utime,
            now.ru_stime - self._usage.ru_stime,
            time.perf_counter() - self._started_s,
        )


class SpanObserver(NullObserver):
    """Prints the cost of each round: from the first step with every stream until the first end."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._stopwatch: Stopwatch | None = None
        self._num_tokens = 0
        self._num_finished = 0

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Count the step's tokens once every stream decodes."""
        if self._stopwatch is not None:
            self._num_tokens += len(output.token_ids)
        elif self._num_finished == 0 and plan.num_tokens == len(plan.sequences) == self._num_streams:
            self._stopwatch = Stopwatch()

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """End the span at the first end, and the round at the last."""
        if self._stopwatch is not None:
            cost = self._stopwatch.cost(self._num_tokens)
            print(json.dumps([cost.num_tokens, cost.user_s, cost.kernel_s, cost.wall_s]), flush=True)
            self._stopwatch, self._num_tokens = None, 0
        self._num_finished = (self._num_finished + 1) % self._num_streams


async def serve(model: str, num_streams: int, num_tokens: int) -> None:
    """Serve until stdin closes; prints the port, then one line per round."""
    tokenizer = load_tokenizer(open_checkpoint(model), chat_template=None)
    blocks_each = (PROMPT_LEN + num_tokens) // BLOCK_LEN + 8
    info = fake_info(
        num_slots=num_streams,
        num_blocks=num_streams * blocks_each + 1,
        block_len=BLOCK_LEN,
        max_model_len=BLOCK_LEN * blocks_each,
        vocab_size=tokenizer.vocab_size,
        max_num_batched_tokens=max(8192, num_streams),
    )
    engine = Engine(
        executor=FakeExecutor(info, check_plans=False),
        tokenizer=tokenizer,
        observer=SpanObserver(num_streams),
        max_num_queued_requests=2 * num_streams,
    )
    app = build_app(engine, model_names=["fake"], metrics_renderer=bytes, access_log=False)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=num_streams).start()
    await engine.start()
    gc.collect()
    gc.freeze()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await engine.stop()
    await runner.cleanup()


class _Stream:
    """One socket that is read to its end: a mark in the data, or a number of bytes."""

    __slots__ = ("num_bytes", "receive", "tail")

    def __init__(self, stream: socket.socket) -> None:
        self.receive = stream.recv
        self.num_bytes = 0
        self.tail = b""


def read_streams(sockets: Sequence[socket.socket], *, num_bytes: int | None = None) -> None:
    """Read until every stream has ended: with `[DONE]`, or after `num_bytes` each."""
    poll = select.epoll()
    streams = {}
    for connection in sockets:
        connection.setblocking(False)
        poll.register(connection.fileno(), select.EPOLLIN)
        streams[connection.fileno()] = _Stream(connection)
    num_open = len(streams)
    while num_open:
        for number, _ in poll.poll():
            stream = streams[number]
            data = stream.receive(READ_BYTES)
            if not data:
                raise ConnectionError("the server closed a stream")
            if num_bytes is None:
                # An end split over two reads is found in the tail kept from the first.
                has_ended = END in stream.tail + data
                stream.tail = data[-len(END) :]
            else:
                stream.num_bytes += len(data)
                has_ended = stream.num_bytes >= num_bytes
            if has_ended:
                poll.unregister(number)
                num_open -= 1
    poll.close()


def pin(core: int) -> None:
    """Keep this process on one core, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[core % len(cores)]})


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Run the server's process for the duration of the block; gives it and its port."""
    command = [sys.executable, "-m", "loadtest.frontend", "--serve", "--model", arguments.model]
    command += ["--streams", str(arguments.streams), "--tokens", str(arguments.tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ConnectionError("the server did not start")
            yield process, int(line)
        finally:
            process.communicate()


def measure_server(arguments: argparse.Namespace) -> tuple[list[Cost], float]:
    """Run the rounds; return their costs and the mean bytes of one event on the wire."""
    costs = []
    event_bytes = 0.0
    with server(arguments) as (process, port):
        assert process.stdout is not None
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(arguments.streams)]
        for turn in range(arguments.rounds + 1):
            for number, stream in enumerate(sockets):
                stream.setblocking(True)
                stream.sendall(_request(arguments, number, turn))
            read_streams(sockets)
            cost = Cost(*json.loads(process.stdout.readline()))
            if turn:  # the first round fills the caches
                costs.append(cost)
        event_bytes = _event_bytes(arguments, port)
        for stream in sockets:
            stream.close()
    return costs, event_bytes


def measure_send(num_streams: int, chunk_bytes: int, num_chunks: int) -> Cost:
    """Send `num_chunks` chunks to every stream from a process of its own; return what it cost."""
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        ends = [socket.create_connection(listener.getsockname()) for _ in range(num_streams)]
        accepted = [listener.accept()[0] for _ in range(num_streams)]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        pin(0)
        chunk = b"x" * chunk_bytes
        sends = []
        for stream in accepted:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sends.append(stream.send)
        stopwatch = Stopwatch()
        for _ in range(num_chunks):
            for send in sends:
                send(chunk)
        cost = stopwatch.cost(num_chunks * num_streams)
        os.write(writing, json.dumps([cost.num_tokens, cost.user_s, cost.kernel_s, cost.wall_s]).encode())
        os._exit(0)
    for stream in accepted:
        stream.close()
    read_streams(ends, num_bytes=chunk_bytes * num_chunks)
    os.waitpid(child, 0)
    cost = Cost(*json.loads(os.read(reading, 1000)))
    for stream in ends:
        stream.close()
    os.close(reading)
    os.close(writing)
    return cost


def _request(arguments: argparse.Namespace, number: int, turn: int) -> bytes:
    fields: dict[str, Any] = {"max_tokens": arguments.tokens, "ignore_eos": True, "stream": True}
    if arguments.endpoint == "chat":
        path = "/v1/chat/completions"
        fields["messages"] = [{"role": "user", "content": f"{turn} {number}"}]
    else:
        path = "/v1/completions"
        fields["prompt"] = [100 + number, 100 + turn] + [50] * (PROMPT_LEN - 2)
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _event_bytes(arguments: argparse.Namespace, port: int) -> float:
    """Return the mean bytes of an event on the wire, chunk framing included."""
    with socket.create_connection(("127.0.0.1", port)) as stream:
        stream.sendall(_request(arguments, 0, 0))
        received = b""
        while END not in received:
            received += stream.recv(READ_BYTES)
    body = received.partition(b"\r\n\r\n")[2]
    return len(body) / body.count(EVENT)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.frontend", description=__doc__)
    parser.add_argument("--streams", type=int, default=256, help="Streams at once. Default: 256.")
    parser.add_argument("--tokens", type=int, default=400, help="Tokens of each stream. Default: 400.")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds that count. Default: 5.")
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="Where the tokenizer comes from.")
    parser.add_argument("--json", type=Path, default=None, help="Write the figures to this file.")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        pin(0)
        uvloop.run(serve(arguments.model, arguments.streams, arguments.tokens))
        return 0
    if not Path(arguments.model).exists():
        print(f"{arguments.model} is missing: run `make model`", file=sys.stderr)
        return 2
    pin(1)
    costs, event_bytes = measure_server(arguments)
    floor = [
        measure_send(arguments.streams, round(event_bytes), arguments.tokens) for _ in range(arguments.rounds)
    ]
    print(f"{arguments.streams} streams x {arguments.tokens} tokens, {arguments.endpoint}, ", end="")
    print(f"{event_bytes:.0f} bytes an event; median of {arguments.rounds} rounds (lowest - highest)\n")
    print(f"{'CPU µs per token':28}{'user':>22}{'kernel':>22}{'all':>22}{'tokens/s':>28}")
    rows = {"server": costs, "socket.send loop": floor}
    for name, measured in rows.items():
        columns = zip(*(cost.figures for cost in measured), strict=True)
        cells = [_cell(column, width) for column, width in zip(columns, (22, 22, 22, 28), strict=True)]
        print(f"{name:28}" + "".join(cells))
    if arguments.json is not None:
        figures = {name: [cost.figures for cost in measured] for name, measured in rows.items()}
        arguments.json.write_text(json.dumps({"event_bytes": event_bytes, **figures}, indent=1) + "\n")
    return 0


def _cell(values: Sequence[float], width: int) -> str:
    digits = 0 if max(values) > 1000 else 2
    text = f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"
    return text.rjust(width)


if __name__ == "__main__":
    sys.exit(main())
