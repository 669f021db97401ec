"""How many clients may be connected, how long a silent one stays, and how one ends that has vanished."""

import asyncio
import contextlib
import gc
import json
import socket
from pathlib import Path

import pytest
from aiohttp import web

from asyncserve.http.connection import MAX_REFUSALS, ConnectionBound
from tests.http.live import live_server, spell, until
from tests.http.test_connection import WHOLE, http_request, read_head


async def test_accepted_sockets_end_when_their_client_has_vanished() -> None:
    async with live_server() as live:
        await live.call("/live")
        assert live.runner.server is not None
        [connection] = live.runner.server.connections
        assert connection.transport is not None
        sock = connection.transport.get_extra_info("socket")

        def option(name: int) -> int:
            return int(sock.getsockopt(socket.IPPROTO_TCP, name))

        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silent_s = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPCNT) * option(socket.TCP_KEEPINTVL)
        assert 60 < silent_s <= 120
        # Later than a stream whose client does not read is given up, which is the better end.
        assert 60_000 < option(socket.TCP_USER_TIMEOUT) <= 120_000


async def test_a_unix_socket_needs_none_of_that(tmp_path: Path) -> None:
    async with live_server() as live:
        path = str(tmp_path / "socket")
        await web.UnixSite(live.runner, path).start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(http_request("/live", method="GET"))
        assert (await read_head(reader))[0] == 200
        writer.close()


async def test_connections_beyond_the_bound_are_told_so_and_closed_and_others_go_on() -> None:
    bound = ConnectionBound(2)
    async with live_server(next_token=spell("x"), bound=bound) as live:
        kept = [await live.raw(http_request("/live", method="GET")) for _ in range(2)]
        for reader, _ in kept:
            _, headers = await read_head(reader)
            await reader.readexactly(int(headers["content-length"]))
        for _ in range(2):
            reader, writer = await live.raw(http_request("/v1/completions", WHOLE))
            status, headers = await read_head(reader)
            error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
            assert await reader.read() == b""
            writer.close()
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "5")
            assert (error["type"], error["code"]) == ("server_error", "too_many_connections")
            assert "at most 2 connections" in error["message"]
        assert bound.num_refused == 2
        kept[0][1].write(http_request("/live", method="GET"))
        assert (await read_head(kept[0][0]))[0] == 200, "one that is open is not disturbed"
        kept[1][1].close()
        assert live.runner.server is not None
        await until(lambda: len(live.runner.server.connections) == 1)
        assert (await live.complete()).status == 200, "there is room again"
        kept[0][1].close()


async def test_a_flood_of_connections_holds_no_more_files_than_are_set_aside() -> None:
    bound = ConnectionBound(1)
    async with live_server(bound=bound) as live:
        _, kept = await live.raw(http_request("/live", method="GET"))
        assert live.runner.server is not None
        await until(lambda: len(live.runner.server.connections) == 1)
        clients = []
        for number in range(2 * MAX_REFUSALS):
            clients.append(await live.raw(b""))
            await until(lambda: bound.num_refused > number)  # noqa: B023 - it is awaited here
        ended = 0
        for reader, _ in clients[MAX_REFUSALS:]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b"", "these are closed without a word"
            ended += 1
        assert ended == MAX_REFUSALS
        for _, writer in clients:
            writer.close()
        kept.close()


async def test_a_connection_without_a_request_is_closed_after_its_time() -> None:
    async with live_server(keepalive_timeout_s=0.01) as live:
        silent, writer = await live.raw(b"")
        assert await silent.read() == b"", "one that never sent anything"
        writer.close()
        answer = b""
        while not answer:  # on a slow machine its time may be over before the request is read
            reader, writer = await live.raw(http_request("/live", method="GET"))
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200")
        half, writer = await live.raw(b"POST /v1/completions HTTP/1.1\r\nHost:")
        await half.read()
        writer.close()


@pytest.mark.slow
async def test_an_idle_connection_holds_neither_what_was_asked_nor_what_was_answered() -> None:
    def held() -> list[object]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) in (web.Response, web.StreamResponse)]

    others = held()
    async with live_server(next_token=spell("x" * 50)) as live:
        for body in (WHOLE, {**WHOLE, "stream": True}, {"prompt": 3}):
            await live.call("/v1/completions", body)
        assert live.runner.server is not None
        assert len(live.runner.server.connections) == 1, "it is kept, and was used for all"
        assert [each for each in held() if not any(each is other for other in others)] == []
