"""Mistreat a running server and check what it leaves behind: `python -m loadtest.chaos --url URL`.

Keeps N streams going for S seconds, of which many disconnect at a random point, and mixes in clients of
non-streaming requests that leave, and malformed requests of many kinds. `/health` is timed throughout on a
connection of its own, and none of its answers may take longer than a limit. At the end every request must
have had its answer, `/metrics` must show no running or waiting sequence and no block in use, requests must
still be answered as before, and, given the server's process id, its idle CPU share is measured. Exit status 1
if anything is not as it should be.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import uvloop

from loadtest.client import Answer, Client, Connection, ConnectionLost, Record, error_message
from loadtest.metrics_page import totals
from loadtest.workload import Sample, random_tokens, text

HEALTH_INTERVAL_S = 0.05
SETTLE_S = 60.0
"""How long the server may take to notice that everybody has left."""

GAUGES_AT_REST = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "share of KV blocks in use": "kv_cache_usage_perc",
    "unapplied steps": "unapplied_steps",
}
"""What must be 0 when nobody is served → its metric, without prefix."""

BAD_BODIES: Sequence[tuple[str, bytes]] = (
    ("truncated JSON", b'{"prompt": "abc", "max_tok'),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}'),
    ("not an object", b"[1, 2]"),
    ("empty body", b""),
    ("no prompt", b"{}"),
    ("prompt without tokens", b'{"prompt": []}'),
    ("wrong type of prompt", b'{"prompt": 3}'),
    ("wrong type of max_tokens", b'{"prompt": "a", "max_tokens": "many"}'),
    ("max_tokens 0", b'{"prompt": "a", "max_tokens": 0}'),
    ("max_tokens negative", b'{"prompt": "a", "max_tokens": -1}'),
    ("temperature negative", b'{"prompt": "a", "temperature": -1}'),
    ("temperature NaN", b'{"prompt": "a", "temperature": NaN}'),
    ("top_p 0", b'{"prompt": "a", "top_p": 0}'),
    ("token id outside the vocabulary", b'{"prompt": [999999999]}'),
    ("logit_bias outside the vocabulary", b'{"prompt": "a", "logit_bias": {"999999999": 1}}'),
    ("stop token outside the vocabulary", b'{"prompt": "a", "stop_token_ids": [999999999]}'),
    ("prompt longer than any context", json.dumps({"prompt": [20] * 300_000}).encode()),
    ("body of 5 MB", b'{"prompt": "' + b"a" * 5_000_000 + b'"}'),
    ("unknown model", b'{"prompt": "a", "model": "no-such-model"}'),
)
"""Requests to /v1/completions that must be refused with a 4xx in OpenAI's shape."""


@dataclass(slots=True)
class Tally:
    """What happened: how every request ended, what /health took, what was wrong."""

    num_sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    health_ms: list[float] = field(default_factory=list)
    complaints: Counter[str] = field(default_factory=Counter)


class Chaos:
    """The mistreatment of one server.

    Args:
        client: For the server; its endpoint is ignored.
        num_streams: How many clients at once.
        input_len: Mean prompt length.
        output_len: Mean output length.
        disconnects: Share of the streaming and plain requests whose client leaves before the end.
        malformed: Share of all requests that are malformed.
        vocab_size: Token ids of prompts are below it.
        seed: Of everything drawn.
    """

    def __init__(
        self,
        client: Client,
        *,
        num_streams: int,
        input_len: int,
        output_len: int,
        disconnects: float,
        malformed: float,
        vocab_size: int,
        seed: int,
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._num_streams = num_streams
        self._disconnects = disconnects
        self._malformed = malformed
        self._random = random.Random(seed)
        lengths = {"input_len": input_len, "output_len": output_len, "seed": seed}
        self._samples = random_tokens(512, range_ratio=0.8, vocab_size=vocab_size, **lengths)
        self._samples += text(512, range_ratio=0.8, **lengths)

    async def run(self, duration_s: float) -> None:
        """Mistreat the server for so long, then wait until every answer that is due has come."""
        stop_s = time.perf_counter() + duration_s
        ended = asyncio.Event()
        watching = asyncio.create_task(self._watch_health(ended))
        await asyncio.gather(*(self._client_life(stop_s) for _ in range(self._num_streams)))
        ended.set()
        await watching

    async def _client_life(self, stop_s: float) -> None:
        while time.perf_counter() < stop_s:
            draw = self._random.random()
            self.tally.num_sent += 1
            try:
                async with asyncio.timeout(self._client.timeout_s):
                    if draw < self._malformed:
                        await self._send_malformed()
                    elif draw < self._malformed + 0.15:
                        await self._send_plain()
                    else:
                        await self._send_stream()
            except TimeoutError:
                self.tally.outcomes["unanswered"] += 1
                self._complain(f"a request had no answer within {self._client.timeout_s:g} s")
            except ConnectionLost as error:
                self.tally.outcomes["connection lost"] += 1
                self._complain(f"a request lost its connection: {error}")

    async def _send_malformed(self) -> None:
        name, body = self._random.choice(BAD_BODIES)
        answer = await self._client.ask("POST", "/v1/completions", body)
        if not 400 <= answer.status < 500:
            self._complain(f"{name}: HTTP {answer.status}")
        elif b'"error":{"message":' not in answer.body.replace(b" ", b""):
            self._complain(f"{name}: the body is not OpenAI's error")
        self.tally.outcomes["malformed, refused"] += 1

    async def _send_plain(self) -> None:
        body = self._client.body(self._sample(), stream=False)
        leaves = self._leaves()
        answer = await self._client.on_connection(
            lambda connection: self._exchange_plain(connection, body, leaves=leaves)
        )
        if answer is None:
            self.tally.outcomes["plain, left"] += 1
            return
        self._count_answer(
            "plain", answer.status, None if answer.status == 200 else error_message(answer.body)
        )

    async def _exchange_plain(self, connection: Connection, body: bytes, *, leaves: bool) -> Answer | None:
        """Return the answer, or None if the client left before it came."""
        request = self._client.head("POST", "/v1/completions", body)
        exchange = asyncio.ensure_future(connection.exchange(request))
        try:
            if leaves:
                await asyncio.wait({exchange}, timeout=self._random.uniform(0, 0.5))
                if not exchange.done():
                    return None
            return await exchange
        finally:
            if not exchange.done():
                connection.close()
                await asyncio.gather(exchange, return_exceptions=True)

    async def _send_stream(self) -> None:
        sample = self._sample()
        record = Record(num_asked_tokens=sample.max_tokens)
        if self._leaves():
            await self._leave_stream(await self._client.connect(), sample, record)
            return
        body = self._client.body(sample)
        await self._client.on_connection(lambda connection: self._client.stream(connection, body, record))
        if record.error is None and record.num_output_tokens != sample.max_tokens:
            record.error = f"{record.num_output_tokens} of {sample.max_tokens} tokens came"
        self._count_answer("stream", record.status, record.error)

    async def _leave_stream(self, connection: Connection, sample: Sample, record: Record) -> None:
        streaming = asyncio.ensure_future(self._client.stream(connection, self._client.body(sample), record))
        leave_after = self._random.choice(
            (0.0, 0.001, self._random.uniform(0, 0.2), self._random.uniform(0, 3))
        )
        await asyncio.wait({streaming}, timeout=leave_after)
        finished = streaming.done()
        connection.close()
        await asyncio.gather(streaming, return_exceptions=True)
        self.tally.outcomes["stream, complete" if finished else "stream, left"] += 1

    async def _watch_health(self, ended: asyncio.Event) -> None:
        """Ask until `ended` is set, and wait for the last answer: a long one must not be missed."""
        request = self._client.head("GET", "/health")
        connection = None
        while not ended.is_set():
            started_s = time.perf_counter()
            try:
                if connection is None or not connection.is_open:
                    connection = await self._client.open()
                async with asyncio.timeout(self._client.timeout_s):
                    answer = await connection.exchange(request)
                if answer.status != 200:
                    self._complain(f"/health: HTTP {answer.status}")
            except (ConnectionLost, TimeoutError) as error:
                self._complain(f"/health: {str(error) or 'no answer'}")
                if connection is not None:
                    connection.close()
            self.tally.health_ms.append(1e3 * (time.perf_counter() - started_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), HEALTH_INTERVAL_S)
        if connection is not None:
            connection.close()

    def _count_answer(self, kind: str, status: int, error: str | None) -> None:
        if status == 429:
            self.tally.outcomes[f"{kind}, told to come later"] += 1
            return
        self.tally.outcomes[f"{kind}, complete" if error is None else f"{kind}, failed"] += 1
        if error is not None:
            self._complain(f"{kind}: HTTP {status}: {error}")

    def _sample(self) -> Sample:
        return self._random.choice(self._samples)

    def _leaves(self) -> bool:
        return self._random.random() < self._disconnects

    def _complain(self, message: str) -> None:
        self.tally.complaints[message] += 1


async def gauges(client: Client) -> dict[str, float]:
    """Return what /metrics says of `GAUGES_AT_REST`."""
    found = totals((await client.ask("GET", "/metrics")).body.decode())
    for name, metric in GAUGES_AT_REST.items():
        if f"asyncserve:{metric}" not in found:
            raise ValueError(f"/metrics does not show {name}")
    return {name: found[f"asyncserve:{metric}"] for name, metric in GAUGES_AT_REST.items()}


async def _reference(client: Client) -> str:
    """Return what a fixed greedy request gives: it must be the same before and after."""
    body = client.body(Sample("The sea was calm and", 8), stream=False)
    answer = await client.ask("POST", "/v1/completions", body)
    if answer.status != 200:
        raise ValueError(f"a plain request gets HTTP {answer.status}: {error_message(answer.body)}")
    return str(answer.json()["choices"][0]["text"])


async def mistreat(arguments: argparse.Namespace) -> int:
    """Run the whole test and print what came of it."""
    client = Client(
        arguments.url, model=arguments.model, api_key=arguments.api_key, timeout_s=arguments.timeout
    )
    client.model = client.model or (await client.served_model())[0]
    expected = await _reference(client)
    chaos = Chaos(
        client,
        num_streams=arguments.streams,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        disconnects=arguments.disconnects,
        malformed=arguments.malformed,
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
    )
    await chaos.run(arguments.seconds)
    tally = chaos.tally
    deadline_s = time.perf_counter() + SETTLE_S
    at_rest = await gauges(client)
    while any(at_rest.values()) and time.perf_counter() < deadline_s:  # another process: nothing to wait on
        await asyncio.sleep(0.2)
        at_rest = await gauges(client)
    if tally.num_sent != tally.outcomes.total():
        tally.complaints[f"{tally.num_sent} requests were sent, {tally.outcomes.total()} ended"] += 1
    for name, value in at_rest.items():
        if value:
            tally.complaints[f"at rest, {name} is {value:g}"] += 1
    if await _reference(client) != expected:
        tally.complaints["the same greedy request gives another text than before"] += 1
    client.close()
    idle_share = await measured_idle_share(arguments.pid, arguments.idle_seconds) if arguments.pid else None
    if idle_share is not None and idle_share > arguments.max_idle_percent:
        tally.complaints[f"idle, the server takes {idle_share:.1f} % of a core"] += 1
    _print(tally, at_rest, idle_share)
    if client.num_reconnects:
        print(f"reconnected: {client.num_reconnects} x, a kept connection being closed")
    late = late_health(tally.health_ms, arguments.max_health_ms)
    if late is not None:
        tally.complaints[late] += 1
    for message, count in tally.complaints.most_common():
        print(f"WRONG  {count} x {message}")
    if not tally.complaints:
        print("nothing is wrong and nothing is left behind")
    if arguments.json is not None:
        found = {**dataclasses.asdict(tally), "at_rest": at_rest, "idle_percent": idle_share}
        found |= {"outcomes": dict(tally.outcomes), "complaints": dict(tally.complaints)}
        arguments.json.write_text(json.dumps(found) + "\n")
    return 1 if tally.complaints else 0


def late_health(times_ms: Sequence[float], limit_ms: float) -> str | None:
    """Return what is wrong with the times of /health, None if even the longest is within the limit."""
    if not times_ms:
        return "/health was never answered"
    num_late = sum(took_ms > limit_ms for took_ms in times_ms)
    if not num_late:
        return None
    told = f"in {num_late} of {len(times_ms)} requests, {max(times_ms):.1f} ms at most"
    return f"/health took over {limit_ms:g} ms {told}"


async def measured_idle_share(pid: int, seconds: float) -> float:
    """Return the percentage of one core that a process takes over so many seconds."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    return float(100 * (after.user + after.system - before.user - before.system) / seconds)


def _print(tally: Tally, at_rest: dict[str, float], idle_share: float | None) -> None:
    print(f"{'requests sent':28}{tally.num_sent:8}")
    for name, count in sorted(tally.outcomes.items()):
        print(f"{name:28}{count:8}")
    if tally.health_ms:
        median, p99, largest = np.percentile(tally.health_ms, [50, 99, 100])
        asked = len(tally.health_ms)
        print(f"/health, ms: median {median:.2f}, p99 {p99:.2f}, max {largest:.2f} ({asked} asked)")
    print("at rest: " + ", ".join(f"{name} {value:g}" for name, value in at_rest.items()))
    if idle_share is not None:
        print(f"idle: {idle_share:.2f} % of a core")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.chaos", description="Mistreat a running server."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Base URL of the server.")
    parser.add_argument("--model", default="", help="Model to ask for. Default: the server's first.")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--streams", type=int, default=64, help="Clients at once. Default: 64.")
    parser.add_argument("--seconds", type=float, default=60.0, help="How long. Default: 60.")
    parser.add_argument("--input-len", type=int, default=32, help="Mean tokens or words of a prompt.")
    parser.add_argument("--output-len", type=int, default=32, help="Mean tokens of an output.")
    parser.add_argument("--disconnects", type=float, default=0.4, help="Share of clients that leave early.")
    parser.add_argument("--malformed", type=float, default=0.15, help="Share of requests that are malformed.")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="Token ids of prompts are below it.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="Most seconds for one answer.")
    parser.add_argument(
        "--pid", type=int, default=None, help="The server's process, to measure it when idle."
    )
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--max-idle-percent", type=float, default=2.0)
    parser.add_argument("--max-health-ms", type=float, default=50.0, help="Most for any answer of /health.")
    parser.add_argument("--json", type=Path, default=None, help="Write what happened to this file.")
    arguments = parser.parse_args(argv)
    try:
        return uvloop.run(mistreat(arguments))
    except (ConnectionLost, ValueError, psutil.Error) as error:
        print(f"loadtest.chaos: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
