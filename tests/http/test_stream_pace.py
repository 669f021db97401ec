"""Streams that nobody reads for a while, and streams that have nothing to say for a while, in every API."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from asyncserve.http import sse
from asyncserve.request import FinishReason
from tests.fakes.observer import RecordingObserver
from tests.fakes.tokenizer import FakeTokenizer
from tests.http.live import MODEL, Live, live_server, spell, until
from tests.http.test_connection import http_request

HI = [{"role": "user", "content": "hi"}]
COMMON = {"model": MODEL, "stream": True}
NUM_TOKENS = 3_500
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMMON, "prompt": "hi", "max_tokens": NUM_TOKENS},
    "/v1/chat/completions": {**COMMON, "messages": HI, "max_tokens": NUM_TOKENS},
    "/v1/responses": {**COMMON, "input": "hi", "max_output_tokens": NUM_TOKENS},
    "/v1/messages": {**COMMON, "messages": HI, "max_tokens": NUM_TOKENS},
}
KEEP_ALIVES = dict.fromkeys(BODIES, b": keep-alive\n\n") | {
    "/v1/messages": b'event: ping\ndata: {"type":"ping"}\n\n'
}
each_api = pytest.mark.parametrize("path", BODIES)
LARGE_DEVICE = {"max_model_len": 4_000, "num_blocks": 3_000, "num_slots": 2}
ANSWER = "".join(chr(97 + number % 26) for number in range(NUM_TOKENS))


@asynccontextmanager
async def unread(live: Live, path: str, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A client that has sent its request and does not read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (live.host, live.port))
        await loop.sock_sendall(client, http_request(path, body, headers="Connection: close\r\n"))
        yield client


async def read_all(client: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), bytearray()
    while data := await loop.sock_recv(client, 1 << 20):
        received += data
    return bytes(received)


def texts(stream: bytes, path: str) -> dict[int, str]:
    """Return the text of each choice of a whole response."""
    _, _, chunks = stream.partition(b"\r\n\r\n")
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body += chunks[: int(size, 16)]
        chunks = chunks[int(size, 16) + 2 :]
    found: dict[int, str] = {}
    for event in body.decode().split("\n\n"):
        data = event.partition("data: ")[2]
        if not data.startswith("{"):
            continue
        shown = json.loads(data)
        for choice in shown.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
        if shown.get("type") == "response.output_text.delta":
            found[0] = found.get(0, "") + shown["delta"]
        if shown.get("type") == "content_block_delta":
            found[0] = found.get(0, "") + shown["delta"]["text"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("path", "n"), [*((path, 1) for path in BODIES), ("/v1/chat/completions", 2)])
async def test_a_client_that_does_not_read_holds_no_slot_and_misses_nothing_when_it_reads_again(
    path: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncserve.http.connection.SEND_BUFFER_BYTES", 16 * 1024)
    observer = RecordingObserver()
    async with live_server(
        next_token=spell(ANSWER), info=LARGE_DEVICE, check_plans=False, engine_options={"observer": observer}
    ) as live:
        body = BODIES[path] | ({"n": n} if n > 1 else {})
        async with unread(live, path, body) as client:
            await until(lambda: live.engine.statistics().num_paused == n)
            await until(lambda: live.num_sequences == 0)
            statistics = live.engine.statistics()
            assert statistics.num_blocks_used == 0
            assert statistics.num_blocks_cached > 100, "they are kept as long as nobody needs them"
            assert (await live.complete(n=2, max_tokens=3)).status == 200, "others have its slots"
            assert observer.reasons[FinishReason.LENGTH] == 2
            found = texts(await read_all(client), path)
        assert found == dict.fromkeys(range(n), ANSWER)
        await live.until_running(0)
        statistics = live.engine.statistics()
        assert statistics.num_paused == 0
        assert statistics.num_pauses >= n


# ---- nothing to say ------------------------------------------------------------------------------------


def short(path: str) -> dict[str, Any]:
    """A request for few tokens."""
    return {name: 9 if value == NUM_TOKENS else value for name, value in BODIES[path].items()}


@each_api
async def test_a_stream_without_news_is_kept_alive_while_its_prompt_is_computed(path: str) -> None:
    async with live_server(next_token=spell("xyz"), keep_alive_s=0.02) as live:
        live.executor.hold()
        async with live.session.post(live.url + path, json=short(path)) as response:
            begun = b""
            while begun.count(KEEP_ALIVES[path]) < 4:
                begun += await response.content.readany()
            live.executor.resume()
            rest = await response.content.read()
    whole = begun + rest
    assert response.status == 200
    if path == "/v1/responses":
        assert begun.startswith(b"event: response.created\n")
        assert b"event: response.in_progress\n" in begun
        assert rest.count(b"response.created") == 0
    elif path == "/v1/messages":
        assert begun.startswith(b"event: message_start\n")
        assert whole.count(b"message_start\n") == 1
    else:
        assert begun.replace(KEEP_ALIVES[path], b"") == b"", "the first event comes with the first token"
        assert whole.endswith(b"data: [DONE]\n\n")


class SlowTokenizer(FakeTokenizer):
    """Encodes texts that are not short when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.error: Exception | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        if len(text) > 1024:
            asyncio.run_coroutine_threadsafe(self.may_go_on.wait(), self.loop).result()
            if self.error is not None:
                raise self.error
        return super().encode(text, add_special_tokens=add_special_tokens)


def long_body(path: str) -> dict[str, Any]:
    long = "x" * 1500
    given = {"prompt": long, "input": long, "messages": [{"role": "user", "content": long}]}
    return {name: given.get(name, value) for name, value in short(path).items()}


@each_api
async def test_a_stream_whose_prompt_takes_long_to_encode_gets_its_headers_and_is_kept_alive(
    path: str,
) -> None:
    tokenizer = SlowTokenizer()
    async with (
        live_server(
            next_token=spell("xyz"), tokenizer=tokenizer, info=LARGE_DEVICE, keep_alive_s=0.02
        ) as live,
        live.session.post(live.url + path, json=long_body(path)) as response,
    ):
        begun = await response.content.readexactly(2 * len(KEEP_ALIVES[path]))
        tokenizer.may_go_on.set()
        rest = await response.content.read()
    assert begun == 2 * KEEP_ALIVES[path]
    first = rest.replace(KEEP_ALIVES[path], b"")
    if path == "/v1/messages":
        assert first.startswith(b"event: message_start\n")
        assert b'"input_tokens":15' in first, "the prompt's length was waited for"
    elif path == "/v1/responses":
        assert first.startswith(b"event: response.created\n")
    else:
        assert first.startswith(b"data: {")


@each_api
@pytest.mark.parametrize("is_kept_alive", [False, True])
async def test_what_is_wrong_with_a_prompt_has_its_status_unless_the_stream_had_to_be_kept_alive(
    path: str, is_kept_alive: bool
) -> None:
    tokenizer = SlowTokenizer()
    async with live_server(
        tokenizer=tokenizer,
        info={"max_model_len": 1200, "num_blocks": 400},
        keep_alive_s=0.02 if is_kept_alive else 60.0,
    ) as live:
        if not is_kept_alive:
            tokenizer.may_go_on.set()
        async with live.session.post(live.url + path, json=long_body(path)) as response:
            if is_kept_alive:
                await response.content.readexactly(len(KEEP_ALIVES[path]))
                tokenizer.may_go_on.set()
            rest = await response.content.read()
    assert response.status == (200 if is_kept_alive else 400)
    assert b"error" in rest
    assert b"1200" in rest
    if is_kept_alive:
        assert not rest.endswith(b"[DONE]\n\n")


async def test_nothing_is_sent_where_streams_are_not_to_be_kept_alive() -> None:
    async with live_server(next_token=spell("xyz"), keep_alive_s=0.0) as live:
        answer = await live.call("/v1/completions", short("/v1/completions"))
    assert b"keep-alive" not in answer.body


async def test_a_background_response_is_kept_alive_for_who_follows_it() -> None:
    async with live_server(next_token=spell("xyz"), keep_alive_s=0.01) as live:
        live.executor.hold()
        body = {**short("/v1/responses"), "background": True}
        async with live.session.post(live.url + "/v1/responses", json=body) as response:
            begun = b""
            while begun.count(sse.KEEP_ALIVE) < 3:
                begun += await response.content.readany()
            live.executor.resume()
            rest = await response.content.read()
    assert b"event: response.completed\n" in rest


# ---- what real clients make of it ----------------------------------------------------------------------


async def _ask_openai(live: Live) -> str:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**short("/v1/chat/completions"))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def _ask_openai_responses(live: Live) -> str:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.responses.create(**short("/v1/responses"))
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


async def _ask_anthropic(live: Live) -> str:
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        stream = await client.messages.create(**short("/v1/messages"))
        return "".join([event.delta.text async for event in stream if event.type == "content_block_delta"])


@pytest.mark.slow
@pytest.mark.parametrize("ask", [_ask_openai, _ask_openai_responses, _ask_anthropic])
async def test_clients_take_what_keeps_a_stream_alive_for_nothing(
    ask: Callable[[Live], Coroutine[Any, Any, str]],
) -> None:
    async with live_server(next_token=spell("xyz"), keep_alive_s=0.02) as live:
        live.executor.hold()
        asking = asyncio.create_task(ask(live))
        await live.until_step_waits()
        await asyncio.sleep(0.2)  # so that several are sent before the first token, and between two
        live.executor.complete()
        await asyncio.sleep(0.1)
        live.executor.resume()
        assert await asking == "xyz"
