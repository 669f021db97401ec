"""Requests nobody would write, to a whole server over the fake device: `python -m loadtest.fuzz`.

Three quarters of the cases are bodies drawn from the server's own `/openapi.json`, sound and damaged, for
every operation, streamed and not, some of whose clients leave early; the rest are bytes on a socket. They
come in small batches at once. Every answer must be well-formed HTTP, of a status and content type that the
document lists, its JSON and its events as the document says, and no answer a 5xx. After each batch nothing
may be left in the engine: no sequence, no block, no message in a channel, no task. What is wrong is shown
as the smallest batch that hypothesis can find. Runs from the repository's root, needs what tests need.
"""

import argparse
import asyncio
import gc
import json
import logging
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import orjson
from hypothesis import strategies as st

from asyncserve.http.generation import CollectingSink
from asyncserve.http.sse import EventStream
from loadtest.answers import EVENTS, JSON, Answers
from loadtest.fuzz_bodies import TEXTS, Bodies, damaged
from loadtest.fuzz_bytes import RawCase, raw_cases
from loadtest.http_reader import MalformedHTTP, read_responses
from tests.http.live import MODEL
from tests.http.live_thread import LiveThread, live_thread

BATCH_LEN = 12
"""Cases of a batch, which are sent at once."""
RAW_BATCH_LEN = 24
"""The same of bytes on sockets, many of which wait for each other's silence."""
SILENCE_S = 0.25
"""A connection that gives nothing for so long, and was sent no whole request last, is closed."""
ANSWER_S = 240.0
"""An answer that takes longer is a failure. Grammars are compiled one after the other, each within its own
time limit, by a process whose start takes as long as the machine is slow: only what hangs takes longer."""
SETTLE_S = 120.0
"""How long it may take until nothing of a batch is left; grammars that nobody waits for are made first."""
TURNS_TO_END = 10
"""Of the loop, in which the tasks of a closed connection have ended."""
MAX_LAST_SINKS = 8
"""A coroutine of the engine that waits for work still holds the last piece of work it had."""
SERVER: Mapping[str, Any] = {
    "info": {"max_model_len": 512, "num_blocks": 512, "max_num_batched_tokens": 64},
    "body_timeout_s": 0.1,
    "access_log": False,
    "check_plans": True,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an operation.

    Args:
        leaves: The client closes its connection without waiting for the answer.
    """

    method: str
    path: str
    target: str
    body: bytes | None
    is_sound: bool
    leaves: bool = False

    @property
    def data(self) -> bytes:
        """What is sent."""
        head = f"{self.method} {self.target} HTTP/1.1\r\nHost: x\r\n"
        if self.body is None:
            return f"{head}\r\n".encode()
        return f"{head}Content-Type: {JSON}\r\nContent-Length: {len(self.body)}\r\n\r\n".encode() + self.body


class Fuzz:
    """Batches of cases against one server.

    Args:
        server: Running.
        seed: Of everything drawn.
        settle_s: How long tasks may stay after a batch.
    """

    def __init__(self, server: LiveThread, *, seed: int, settle_s: float = SETTLE_S) -> None:
        self._server = server
        self._settle_s = settle_s
        self._seed = seed
        self._document = orjson.loads(server.run(self._read_document()))
        self.answers = Answers(self._document)
        self._bodies = Bodies(self._document, (MODEL, "alias/of-it"))
        self._num_tasks = sys.maxsize
        self._num_tasks = server.run(self._rest())
        self._sinks_before = _sinks()
        self.num_cases = 0

    def bodies(self, num_cases: int) -> None:
        """Send calls of every operation until there were so many."""
        self._run(self.cases(), BATCH_LEN, num_cases, self._call, shrinks=True)

    def raw(self, num_cases: int) -> None:
        """Send bytes until there were so many connections."""
        # Connections that wait for more take their time: what fails is shown as it was found.
        self._run(raw_cases(), RAW_BATCH_LEN, num_cases, self._send_raw, shrinks=False)

    def cases(self) -> st.SearchStrategy[Case]:
        """Return calls of any operation, those with a body above all."""
        with_body: list[st.SearchStrategy[Case]] = []
        without: list[st.SearchStrategy[Case]] = []
        for path, methods in self._document["paths"].items():
            for method, operation in methods.items():
                has_body = "requestBody" in operation
                (with_body if has_body else without).append(self._calls(method.upper(), path, operation))

        @st.composite
        def cases(draw: st.DrawFn) -> Case:
            is_body = draw(st.integers(0, 9)) < 9
            calls: st.SearchStrategy[Case] = draw(st.sampled_from(with_body if is_body else without))
            return draw(calls)

        return cases()

    def check_sinks(self) -> None:
        """Raise AssertionError if sinks of ended calls are still there."""
        left = _sinks() - self._sinks_before
        assert left.total() <= MAX_LAST_SINKS, f"still there: {dict(left)}"

    async def _read_document(self) -> bytes:
        """Return it when the connection it came by is gone: one that is kept has a task, until it ends."""
        live = self._server.live
        document = (await live.call("/openapi.json", headers={"Connection": "close"})).body
        assert live.runner.server is not None
        num_turns = 0
        while num_turns < TURNS_TO_END:
            await asyncio.sleep(0.001)
            num_turns = 0 if live.runner.server.connections else num_turns + 1
        return document

    def _calls(self, method: str, path: str, operation: Mapping[str, Any]) -> st.SearchStrategy[Case]:
        content = operation.get("requestBody", {}).get("content", {}).get(JSON)
        bodies = st.none() if content is None else self._bodies.of(content["schema"])
        names = [each["name"] for each in operation.get("parameters", ()) if each.get("in") == "path"]
        has_events = EVENTS in operation["responses"].get("200", {}).get("content", {})

        @st.composite
        def calls(draw: st.DrawFn) -> Case:
            target = path
            for name in names:
                value = draw(st.sampled_from((MODEL, "alias/of-it", "resp_1")) | TEXTS.filter(bool))
                target = target.replace(f"{{{name}}}", urllib.parse.quote(value, safe=""))
            body = draw(bodies)
            if body is None:
                return Case(method, path, target, None, True)
            if has_events and draw(st.booleans()):
                body["stream"] = True
            is_sound = draw(st.integers(0, 9)) < 6
            data = json.dumps(body).encode() if is_sound else draw(damaged(body))
            return Case(method, path, target, data, is_sound, draw(st.integers(0, 9)) == 0)

        return calls()

    def _run(
        self,
        strategy: st.SearchStrategy[Any],
        batch_len: int,
        num_cases: int,
        send: Any,
        *,
        shrinks: bool,
    ) -> None:
        goal = self.num_cases + num_cases
        batches = st.lists(strategy, min_size=batch_len, max_size=batch_len)

        @hypothesis.seed(self._seed)
        @hypothesis.settings(
            max_examples=-(-num_cases // batch_len),
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrinks else [])],
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        @hypothesis.given(batches)
        def run(batch: Sequence[Any]) -> None:
            self.num_cases += len(batch)
            self._server.run(self._batch([send(each) for each in batch]), timeout_s=2 * (ANSWER_S + SETTLE_S))

        run()
        assert self.num_cases >= goal, f"{self.num_cases} cases were drawn, not {goal}"

    async def _batch(self, sending: Sequence[Any]) -> None:
        results = await asyncio.gather(*sending, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        num_tasks = await self._rest()
        if errors:
            raise errors[0]
        assert num_tasks <= self._num_tasks, f"{num_tasks} tasks, {self._num_tasks} before"

    async def _rest(self) -> int:
        """Wait until nothing is left in the engine; return how many tasks there are."""
        engine = self._server.live.engine
        begin_s = time.monotonic()
        while True:
            assert engine.failure is None, f"the engine died of {engine.failure!r}"
            statistics = engine.statistics()
            left = {
                "running": statistics.num_running,
                "waiting": statistics.num_waiting,
                "blocks": statistics.num_blocks_used,
                "steps": statistics.num_unapplied_steps,
                "in channels": sum(channel.depth for channel in statistics.channels),
            }
            num_tasks = len(asyncio.all_tasks())
            waited_s = time.monotonic() - begin_s
            if not any(left.values()) and (num_tasks <= self._num_tasks or waited_s > self._settle_s):
                engine.check()
                return num_tasks
            assert waited_s <= SETTLE_S, f"left after a batch: {left}"
            await asyncio.sleep(0.001)

    async def _call(self, case: Case) -> None:
        reader, writer = await self._connect()
        try:
            writer.write(case.data)
            if case.leaves:
                await asyncio.sleep(0)
                return
            async with asyncio.timeout(ANSWER_S):
                data = await _read_one(reader)
            [response] = read_responses(data)
            self.answers.check(case.method, case.path, response, sent=f"{case.target} {case.body!r:.2000}")
        finally:
            writer.close()

    async def _send_raw(self, case: RawCase) -> None:
        reader, writer = await self._connect()
        received = bytearray()
        try:
            for piece in case.pieces:
                if not writer.transport.is_closing():
                    writer.write(piece)
                await asyncio.sleep(0)
            if case.ends and not writer.transport.is_closing():
                writer.write_eof()
            while True:
                async with asyncio.timeout(SILENCE_S):
                    data = await reader.read(1 << 20)
                if not data:
                    break
                received += data
        except (TimeoutError, ConnectionError):
            pass  # it waits for more, or was thrown out: what came until then counts
        finally:
            writer.close()
        try:
            for response in read_responses(bytes(received)):
                self.answers.check_any(response)
        except (MalformedHTTP, AssertionError) as error:
            raise AssertionError(f"{error}: after {case}") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        live = self._server.live
        return await asyncio.open_connection(live.host, live.port, limit=1 << 26)


def _sinks() -> Counter[str]:
    """Return how many sinks of calls there are, those of other servers in this process included."""
    gc.collect()
    kinds = (CollectingSink, EventStream)
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


async def _read_one(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes of one response, as far as its head says how many they are."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        body = bytearray()
        while not body.endswith(b"\r\n0\r\n\r\n") and body != b"0\r\n\r\n":
            data = await reader.read(1 << 20)
            if not data:
                break
            body += data
        return head + bytes(body)
    _, found, rest = lower.partition(b"content-length: ")
    if not found:
        return head
    return head + await reader.readexactly(int(rest.partition(b"\r\n")[0]))


def fuzz(*, num_bodies: int, num_raw: int, seed: int) -> Fuzz:
    """Start a server, send it so many cases and look at what it leaves behind.

    Raises:
        AssertionError: Something was not as it should be.
    """
    with live_thread(**SERVER) as server:
        fuzzing = Fuzz(server, seed=seed)
        if num_bodies:
            fuzzing.bodies(num_bodies)
        if num_raw:
            fuzzing.raw(num_raw)
        fuzzing.check_sinks()
        answer = server.run(server.live.complete(max_tokens=3))
        assert answer.status == 200, f"at the end a plain request gets {answer.status}"
    return fuzzing


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fuzz", description="Fuzz a server.")
    parser.add_argument("--cases", type=int, default=20_000, help="How many. Default: 20000.")
    parser.add_argument("--raw-share", type=float, default=0.25, help="Share of bytes on a socket.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # each unknown field and each refusal would have its line
    num_raw = int(arguments.cases * arguments.raw_share)
    started_s = time.monotonic()
    try:
        done = fuzz(num_bodies=arguments.cases - num_raw, num_raw=num_raw, seed=arguments.seed)
    except AssertionError as error:
        print(f"WRONG  {error}")
        return 1
    for name, count in sorted(done.answers.counts.items()):
        print(f"{name:48}{count:8}")
    print(f"{done.num_cases} cases in {time.monotonic() - started_s:.0f} s; nothing left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
