"""On the wire: keep-alive, pipelining, old clients, bytes that are no HTTP, clients that leave."""

import asyncio
import io
import json
import socket
import time
from typing import Any

import pytest

from asyncserve.request import FinishReason
from tests.fakes.observer import RecordingObserver
from tests.http.live import MODEL, Live, live_server, spell, until


def http_request(
    path: str, body: Any = None, *, version: str = "1.1", headers: str = "", method: str = "POST"
) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


STREAM = {"model": MODEL, "prompt": "ab", "stream": True}
WHOLE = {"model": MODEL, "prompt": "ab"}


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    return int(status.split()[1]), headers


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int(await reader.readline(), 16)
        chunk = await reader.readexactly(size + 2)
        assert chunk.endswith(b"\r\n")
        if size == 0:
            return body
        body += chunk[:-2]


async def test_connection_is_kept_and_pipelined_requests_are_answered_in_order_after_a_stream() -> None:
    async with live_server(next_token=spell("xy")) as live:
        reader, writer = await live.raw(
            http_request("/v1/completions", STREAM) + http_request("/v1/completions", WHOLE)
        )
        status, headers = await read_head(reader)
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        assert (await read_chunked(reader)).endswith(b"data: [DONE]\n\n")
        status, headers = await read_head(reader)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert body["choices"][0]["text"] == "xy"
        writer.write(http_request("/v1/completions", STREAM))
        await read_head(reader)
        assert (await read_chunked(reader)).endswith(b"data: [DONE]\n\n")
        writer.close()


@pytest.mark.parametrize("wish", ["", "Connection: keep-alive\r\n"])
async def test_http_1_0_gets_bare_events_and_a_closed_connection(wish: str) -> None:
    async with live_server(next_token=spell("xy")) as live:
        reader, writer = await live.raw(http_request("/v1/completions", STREAM, version="1.0", headers=wish))
        status, headers = await read_head(reader)
        async with asyncio.timeout(10):
            body = await reader.read()
        writer.close()
    assert status == 200
    assert "transfer-encoding" not in headers
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert len(body.split(b"\n\n")) == 5


async def test_connection_close_is_honoured() -> None:
    async with live_server(next_token=spell("xy")) as live:
        reader, writer = await live.raw(
            http_request("/v1/completions", STREAM, headers="Connection: close\r\n")
        )
        await read_head(reader)
        await read_chunked(reader)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\r\n\r\n",
        b"hello there\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_http_get_a_400_in_the_usual_shape(data: bytes) -> None:
    async with live_server(next_token=spell("x")) as live:
        reader, writer = await live.raw(data)
        status, headers = await read_head(reader)
        error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
        assert await reader.read() == b"", "the connection must be closed"
        writer.close()
        assert (await live.complete()).status == 200
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


async def test_body_that_cannot_be_unpacked_is_a_400() -> None:
    async with live_server(next_token=spell("x")) as live:
        zipped = await live.call(
            "/v1/completions", data=io.BytesIO(b"abc"), headers={"Content-Encoding": "gzip"}
        )
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await live.raw(head.encode() + b"zz\r\nabc\r\n0\r\n\r\n")
        status, _ = await read_head(reader)
        writer.close()
        assert (await live.complete()).status == 200
    assert (zipped.status, status) == (400, 400)
    assert zipped.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_body_that_is_not_what_its_encoding_says_is_a_400_and_no_bug(
    encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_server(next_token=spell("x")) as live:
        reader, writer = await live.raw(
            http_request("/v1/completions", WHOLE, headers=f"Content-Encoding: {encoding}\r\n")
        )
        status, headers = await read_head(reader)
        error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
        assert await reader.read() == b""
        writer.close()
    assert status == 400
    assert error["message"] == f"the request body is not valid {encoding}, as its header says"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("encoding", ["br", "zstd", "x-strange"])
async def test_body_in_an_encoding_that_is_not_taken_is_a_415_that_names_those_that_are(
    path: str, encoding: str
) -> None:
    async with live_server() as live:
        reader, writer = await live.raw(
            http_request(path, WHOLE, headers=f"Content-Encoding: {encoding}\r\n")
        )
        status, headers = await read_head(reader)
        error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
        writer.close()
    assert status == 415
    assert "gzip, deflate" in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_encoding")


async def test_body_that_stands_still_is_a_408_and_one_that_comes_slowly_is_taken() -> None:
    data = http_request("/v1/completions", WHOLE)
    async with live_server(next_token=spell("x"), body_timeout_s=0.0) as live:
        reader, writer = await live.raw(data[:-5])
        async with asyncio.timeout(10):
            status, headers = await read_head(reader)
        error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
        writer.close()
    assert (status, headers["connection"]) == (408, "close")
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_timeout")
    assert f"after {len(json.dumps(WHOLE)) - 5} bytes" in error["message"]
    async with live_server(next_token=spell("x")) as live:
        reader, writer = await live.raw(data[:-5])
        await asyncio.sleep(0)
        writer.write(data[-5:])
        status, _ = await read_head(reader)
        writer.close()
    assert status == 200


async def test_impossible_expectation_is_refused_in_the_usual_shape() -> None:
    async with live_server() as live:
        answer = await live.call("/v1/completions", WHOLE, headers={"Expect": "miracles"})
    assert answer.status == 417
    assert answer.error["type"] == "invalid_request_error"


async def test_unknown_path_and_wrong_method_are_refused_in_the_usual_shape() -> None:
    async with live_server() as live:
        missing = await live.call("/v1/nowhere", {})
        wrong = await live.call("/v1/completions")
        assert missing.status == 404
        assert "/v1/nowhere" in missing.error["message"]
        assert wrong.status == 405
        assert wrong.headers["Allow"] == "POST"
        assert wrong.error["code"] == "method_not_allowed"
        assert all("X-Request-Id" in answer.headers for answer in (missing, wrong))


async def until_empty(live: Live) -> None:
    await until(lambda: not live.num_sequences and not live.engine.statistics().num_blocks_used)


@pytest.mark.parametrize("body", [STREAM, WHOLE, {**STREAM, "prompt": ["a", "b"], "n": 2}])
@pytest.mark.parametrize("resets", [False, True])
async def test_client_that_leaves_before_its_first_token_ends_its_sequences(
    body: dict[str, Any], resets: bool
) -> None:
    observer = RecordingObserver()
    num_sequences = 4 if "n" in body else 1
    async with live_server(next_token=spell("x" * 200), engine_options={"observer": observer}) as live:
        live.executor.hold()
        _, writer = await live.raw(http_request("/v1/completions", {**body, "max_tokens": 100}))
        await live.until_running(num_sequences)
        if resets:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.close()
        await until(lambda: observer.reasons[FinishReason.ABORT] == num_sequences)
        live.executor.resume()
        await until_empty(live)
        assert live.executor.num_completed_steps <= 2, "it was aborted before the device went on"
        assert (await live.complete(max_tokens=3)).status == 200


async def test_client_that_leaves_amid_its_stream_ends_its_sequence() -> None:
    observer = RecordingObserver()
    async with live_server(next_token=spell("x" * 200), engine_options={"observer": observer}) as live:
        live.executor.hold()
        reader, writer = await live.raw(http_request("/v1/completions", {**STREAM, "max_tokens": 100}))
        await live.until_running(1)
        await live.until_step_waits()
        live.executor.complete()
        await read_head(reader)
        await reader.readuntil(b"\n\n")
        writer.close()
        await until(lambda: observer.reasons[FinishReason.ABORT] == 1)
        live.executor.resume()
        await until_empty(live)
        assert live.executor.num_completed_steps <= 4


@pytest.mark.slow
async def test_client_that_never_reads_is_given_up_while_others_are_served() -> None:
    observer = RecordingObserver()
    later_s = [0.0]
    async with live_server(
        next_token=spell("x" * 20_000),
        info={"max_model_len": 20_000, "num_blocks": 6_000},
        check_plans=False,
        engine_options={"observer": observer},
        clock=lambda: time.monotonic() + later_s[0],
    ) as live:
        body = {**STREAM, "max_tokens": 15_000, "logprobs": 20}
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (live.host, live.port))
            await loop.sock_sendall(client, http_request("/v1/completions", body))
            await live.until_running(1)
            assert live.runner.server is not None
            [connection] = live.runner.server.connections
            transport = connection.transport
            assert transport is not None
            await until(lambda: transport.get_write_buffer_size() > 64 * 1024)
            assert (await live.complete(max_tokens=2)).status == 200
            await until(lambda: live.engine.statistics().num_paused == 1)
            await until_empty(live)
            assert observer.reasons[FinishReason.ABORT] == 0, "it rests, and may go on"
            unsent = transport.get_write_buffer_size()
            assert unsent < 128 * 1024, "what the client does not take must not pile up as bytes"
            later_s[0] = 61.0
            await until(lambda: observer.reasons[FinishReason.ABORT] == 1)
            assert live.engine.statistics().num_paused == 0
            await until(lambda: connection.transport is None)


async def test_accepted_sockets_have_a_bounded_send_buffer() -> None:
    async with live_server() as live:
        await live.call("/live")
        assert live.runner.server is not None
        assert live.runner.server.connections
        for connection in live.runner.server.connections:
            assert connection.transport is not None
            sock = connection.transport.get_extra_info("socket")
            # Linux doubles what is asked, for its own book-keeping.
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 256 * 1024


@pytest.mark.parametrize("version", ["1.2", "2.0"])
async def test_a_request_that_claims_a_later_version_is_answered_in_1_1_and_closed(version: str) -> None:
    """Its answer began with `HTTP/2.0`, which no client reads."""
    async with live_server(next_token=spell("x")) as live:
        reader, writer = await live.raw(http_request("/v1/completions", WHOLE, version=version))
        answer = await reader.read()
        writer.close()
    assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), answer[:100]
