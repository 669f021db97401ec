import json
from typing import Any

import pytest

from asyncserve.http.connection import HeaderLimits
from tests.http.live import Live, live_server, spell

LIMITS = HeaderLimits(num_bytes=4096, count=30)


async def ask(live: Live, head: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Send a request's head and return status, error object and headers."""
    reader, writer = await live.raw(head.encode() + b"\r\n\r\n")
    text = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = text.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    writer.close()
    return int(status.split()[1]), body.get("error", {}), headers


@pytest.mark.parametrize(
    "head",
    [
        "GET /" + "a" * 5000 + " HTTP/1.1\r\nHost: x",
        "GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret" + "a" * 5000,
        "GET /version HTTP/1.1\r\nHost: x\r\n" + "secret" * 1000 + ": a",
        "GET /version HTTP/1.1\r\nHost: x" + "".join(f"\r\nA{n}: secret" for n in range(40)),
        "GET /version HTTP/1.1\r\nHost: x" + "".join(f"\r\nA{n}: {'secret' * 40}" for n in range(25)),
    ],
    ids=["line", "value", "name", "count", "sum"],
)
async def test_too_much_before_the_body_is_a_431_that_says_the_limits_and_quotes_nothing(head: str) -> None:
    async with live_server(next_token=spell("x"), limits=LIMITS) as live:
        status, error, headers = await ask(live, head)
        assert (await live.complete()).status == 200
    assert status == 431
    assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_large")
    assert "4096 bytes" in error["message"]
    assert "30 headers" in error["message"]
    assert "secret" not in json.dumps([error, headers])


@pytest.mark.parametrize(
    "head",
    [
        "GET /version?" + "a" * 3900 + " HTTP/1.1\r\nHost: x",
        "GET /version HTTP/1.1\r\nHost: x\r\nA: " + "a" * 4000,
        "GET /version HTTP/1.1\r\nHost: x" + "".join(f"\r\nA{n}: a" for n in range(28)),
    ],
    ids=["line", "value", "count"],
)
async def test_what_is_within_the_limits_is_taken(head: str) -> None:
    async with live_server(limits=LIMITS) as live:
        assert (await ask(live, head))[0] == 200


async def test_large_cookies_of_proxies_are_taken_as_things_are() -> None:
    async with live_server() as live:
        assert (await live.call("/version", headers={"Cookie": "a" * 20_000})).status == 200
        assert (await live.call("/version", headers={"Cookie": "a" * 40_000})).status == 431
