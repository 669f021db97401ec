"""Streams that send on a connection's own socket, past its transport."""

import asyncio
import os
import socket
import ssl
from typing import Any

import pytest

from asyncserve.http.borrowed_socket import borrow_socket
from asyncserve.http.connection import WRITE_HIGH_BYTES
from asyncserve.http.sse import EscapedTexts, EventStream
from asyncserve.http.write_pacing import WritePacer
from asyncserve.token_path import SocketHandle
from tests.http.live import live_server, until
from tests.http.test_sse import Clock, Renderer, output, pass_texts


class Ends:
    """Both ends of a connection: a transport here, a socket there."""

    def __init__(self, transport: asyncio.Transport, far: socket.socket) -> None:
        self.transport = transport
        self.far = far
        handle = borrow_socket(transport)
        assert handle is not None
        self.handle = handle

    async def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += await asyncio.get_running_loop().sock_recv(self.far, 1 << 20)
        return data


async def connected() -> Ends:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, near)
    return Ends(transport, far)


def open_stream(ends: Ends) -> EventStream:
    clock = Clock()
    pacer = WritePacer(clock=clock, stream_interval=1)
    stream = EventStream(Renderer(), clock=clock, stall_timeout_s=60.0, pacer=pacer)
    sink = stream.add_sink(base_index=0, num_choices=1, wants_usage=False, escaped=EscapedTexts())
    stream.open(ends.transport, ends.handle, is_chunked=True)
    sink.put(output("first"))
    return stream


def chunk(text: str) -> bytes:
    event = f"data: 0:{text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


class Spy:
    """Counts what a stream writes to a transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_the_end_of_a_handle_closes_nothing() -> None:
    ends = await connected()
    os.write(ends.handle.fd, b"a")
    del ends.handle
    ends.transport.write(b"b")
    assert await ends.read(2) == b"ab"
    ends.transport.close()
    ends.far.close()


async def test_texts_go_past_the_transport_and_what_the_socket_does_not_take_through_it_in_order() -> None:
    ends = await connected()
    spy = ends.transport = Spy(ends.transport)  # type: ignore[assignment]
    stream = open_stream(ends)
    first = chunk("^first")
    expected = first
    pass_texts(stream, "direct")
    expected += chunk("direct")
    assert spy.num_bytes == len(first)
    pass_texts(stream, "x" * 40_000)  # more than the socket takes, not so much that the stream is behind
    expected += chunk("x" * 40_000)
    assert 0 < ends.transport.get_write_buffer_size() <= spy.num_bytes - len(first) < 40_000
    read = ends.far.recv(1 << 20)
    pass_texts(stream, "behind")  # the socket has room again, but what waits goes before
    expected += chunk("behind")
    assert read + await ends.read(len(expected) - len(read)) == expected
    await until(lambda: not ends.transport.get_write_buffer_size())
    pass_texts(stream, "after")  # by the transport, which turns out to have nothing left
    num_bytes = spy.num_bytes
    pass_texts(stream, "direct again")
    assert spy.num_bytes == num_bytes
    assert await ends.read(1) == chunk("after") + chunk("direct again")
    stream.close()
    ends.transport.close()
    ends.far.close()


async def test_a_stream_whose_client_reads_nothing_falls_behind() -> None:
    ends = await connected()
    stream = open_stream(ends)
    num_flushed = 0
    while stream.takes_writes:
        pass_texts(stream, "x" * 1000)
        num_flushed += 1
        assert num_flushed < 10_000
    assert ends.transport.get_write_buffer_size() > WRITE_HIGH_BYTES
    stream.close()
    ends.transport.abort()
    ends.far.close()


async def test_a_stream_whose_socket_was_let_go_of_ends() -> None:
    ends = await connected()
    stream = open_stream(ends)
    ends.handle.fd = -1
    ends.transport.abort()
    pass_texts(stream, "late")
    assert stream.ended.done()
    ends.far.close()


async def test_a_connection_lets_go_of_its_socket_when_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SocketHandle] = []

    def note(transport: asyncio.BaseTransport) -> SocketHandle | None:
        handle = borrow_socket(transport)
        made.extend([handle] if handle is not None else [])
        return handle

    monkeypatch.setattr("asyncserve.http.connection.borrow_socket", note)
    async with live_server() as live:
        reader, writer = await live.raw(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readline()
        assert len(made) == 1
        assert made[0].fd >= 0
        writer.close()
        await until(lambda: made[0].fd < 0)


class Encrypted:
    def get_extra_info(self, name: str) -> object:
        return {"socket": object(), "sslcontext": ssl.create_default_context()}.get(name)


def test_nothing_is_sent_past_tls() -> None:
    assert borrow_socket(Encrypted()) is None  # type: ignore[arg-type]


async def test_a_transport_without_a_socket_has_none_to_lend() -> None:
    assert borrow_socket(asyncio.Transport()) is None
