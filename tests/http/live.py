"""A live server on a loopback port: the real application and engine over a fake device."""

import asyncio
import io
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from asyncserve.http.app import build_app, make_runner
from asyncserve.http.connection import ConnectionBound, HeaderLimits
from asyncserve.loop.engine import Engine
from asyncserve.metrics.exposition import new_registry, render
from tests.fakes.executor import FakeExecutor, NextToken, fake_info
from tests.fakes.tokenizer import EOS_ID, FakeTokenizer

MODEL = "fake-model"


def spell(text: str | bytes, *, then: int = EOS_ID) -> NextToken:
    """Return a device that answers every prompt with `text`, byte by byte, and then one more token."""
    data = text.encode() if isinstance(text, str) else text

    def next_token(token_ids: Sequence[int], prompt_len: int) -> int:
        position = len(token_ids) - prompt_len
        return data[position] if position < len(data) else then

    return next_token


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something holds; the test's time limit is the bound."""
    while not condition():  # noqa: ASYNC110 - any part of the server may bring it about
        await asyncio.sleep(0)


@dataclass(slots=True)
class Answer:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose envelope is checked here."""
        assert self.headers["Content-Type"].startswith("application/json"), self.headers
        envelope = self.json
        assert list(envelope) == ["error"], envelope
        error: dict[str, Any] = envelope["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str), error
        assert error["message"], error
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, parsed; the last is the text `[DONE]` if the stream is complete."""
        assert self.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "the stream breaks off within an event"
        events: list[Any] = []
        for part in parts:
            assert part.startswith("data: "), part
            data = part.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
        return events


@dataclass(slots=True)
class Live:
    """A running server and a client for it."""

    url: str
    host: str
    port: int
    session: aiohttp.ClientSession
    engine: Any
    executor: FakeExecutor
    runner: web.AppRunner
    headers: dict[str, str] = field(default_factory=dict)

    async def call(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        data: bytes | io.BytesIO | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request, POST if it has a body, and read the answer to its end."""
        payload = json.dumps(body).encode() if body is not None else data
        async with self.session.request(
            method or ("GET" if payload is None else "POST"),
            self.url + path,
            data=payload,
            headers={**self.headers, **(headers or {})},
        ) as response:
            return Answer(response.status, response.headers, await response.read())

    async def complete(self, **fields: Any) -> Answer:
        return await self.call("/v1/completions", {"model": MODEL, "prompt": "ab", **fields})

    async def chat(self, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": "hi"}]
        return await self.call("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    async def until_running(self, num_sequences: int) -> None:
        """Wait until so many sequences are in the engine."""
        await until(lambda: self.num_sequences == num_sequences)

    async def until_step_waits(self) -> None:
        """Wait until the held device has been given a step."""
        await until(lambda: bool(self.executor.pending_step_ids))

    @property
    def num_sequences(self) -> int:
        statistics = self.engine.statistics()
        return int(statistics.num_running + statistics.num_waiting)

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send bytes."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(data)
        return reader, writer


@asynccontextmanager
async def live_server(
    *,
    next_token: NextToken | None = None,
    engine: Any = None,
    tokenizer: FakeTokenizer | None = None,
    is_started: bool = True,
    check_plans: bool = True,
    executor_class: type[FakeExecutor] = FakeExecutor,
    info: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    limits: HeaderLimits | None = None,
    bound: ConnectionBound | None = None,
    keepalive_timeout_s: float = 75.0,
    tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    **app_options: Any,
) -> AsyncIterator[Live]:
    """Serve for the duration of the block.

    Args:
        next_token: The device's answers; `fake_token` if not given.
        engine: Instead of a real one.
        is_started: Whether the engine is started.
        check_plans: Whether the device checks what it is asked, which takes longer with each token.
        executor_class: Of the device.
        info: Of the fake device, where it is not the default.
        engine_options: Of `Engine`.
        limits: Of headers.
        bound: Of the number of connections.
        keepalive_timeout_s: How long a connection without a request stays open.
        tls: To listen with.
        client_tls: Of the client.
        app_options: Of `build_app`.
    """
    executor = executor_class(fake_info(**(info or {})), next_token=next_token, check_plans=check_plans)
    if engine is None:
        engine = Engine(executor=executor, tokenizer=tokenizer or FakeTokenizer(), **(engine_options or {}))
        if is_started:
            await engine.start()
    app_options = {
        "model_names": (MODEL, "alias/of-it"),
        "metrics_renderer": partial(render, new_registry()),
        **app_options,
    }
    runner = make_runner(
        build_app(engine, **app_options),
        shutdown_timeout_s=0.2,
        limits=limits,
        bound=bound,
        keepalive_timeout_s=keepalive_timeout_s,
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    scheme = "http" if tls is None else "https"
    host, port = runner.addresses[0]
    try:
        connector = aiohttp.TCPConnector(ssl=True if client_tls is None else client_tls)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Live(f"{scheme}://{host}:{port}", host, port, session, engine, executor, runner)
    finally:
        if isinstance(engine, Engine):
            await engine.stop()
        await runner.cleanup()
