import dataclasses
import os

import pytest

from loadtest.client import ConnectionLost
from loadtest.idle_connections import Cost, IdleConnections, is_dear, main
from tests.http.live import live_server


async def test_connections_are_opened_asked_once_left_alone_and_closed() -> None:
    async with live_server() as live:
        cost = await IdleConnections(live.url, os.getpid(), settle_s=0.01).measure(80, 0.01)
        assert live.runner.server is not None
        assert live.runner.server.requests_count == 64 + 80 + 40, "warming up, opening, and one in two again"
    assert cost.num_connections == 80
    assert cost.request_ms > 0


async def test_a_server_that_answers_otherwise_is_an_error() -> None:
    async with live_server() as live:
        with pytest.raises(ConnectionLost, match="404"):
            await IdleConnections(live.url, os.getpid(), path="/nowhere", settle_s=0.01).measure(1, 0.01)


def test_no_server_is_status_2_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--pid", str(os.getpid()), "--connections", "1"]) == 2
    assert "error" in capsys.readouterr().err


def test_a_server_is_too_dear_by_memory_or_by_cpu() -> None:
    cost = Cost(
        num_connections=10,
        bytes_each=9000.0,
        settling_cpu_s=0.1,
        idle_share=0.001,
        request_ms=0.1,
        left_bytes=0,
    )
    assert not is_dear(cost, 10_000)
    assert is_dear(cost, 8_000)
    assert is_dear(dataclasses.replace(cost, idle_share=0.1), 10_000)
