"""Streams of a live server, byte by byte, as JSON on stdout: a test runs it with the C and without."""

import asyncio
import json
import re
import sys
from typing import Any

from asyncserve.token_path import IS_NATIVE
from tests.http.live import MODEL, Live, live_server, spell
from tests.http.test_stream_equality import CALLS, PACES, TEXT

VARYING = re.compile(rb'"id":"[^"]*"|"created":\d+')


async def body_of(live: Live, fields: dict[str, Any]) -> str:
    """Return a stream's body without what differs from call to call; its framing is held to the letter."""
    request = json.dumps(
        {"model": MODEL, "prompt": "ab", "max_tokens": 150, "stream": True, **fields}
    ).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    reader, writer = await live.raw(head + b"Content-Length: %d\r\n\r\n" % len(request) + request)
    headers = await reader.readuntil(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 "), headers
    assert b"\r\ntransfer-encoding: chunked\r\n" in headers.lower(), headers
    body = b""
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.read() == b"\r\n"
    writer.close()
    return VARYING.sub(b"", body).decode()


async def stream_all() -> dict[str, list[str]]:
    """Stream each kind of call at each pace, several at once."""
    bodies: dict[str, list[str]] = {}
    for pace, options in PACES.items():
        info = {"max_model_len": 1024, "num_blocks": 1024}
        async with live_server(next_token=spell(TEXT), check_plans=False, info=info, **options) as live:
            for call, fields in CALLS.items():
                streams = (body_of(live, fields) for _ in range(4))
                bodies[f"{pace}, {call}"] = list(await asyncio.gather(*streams))
    return bodies


if __name__ == "__main__":
    json.dump({"is_native": IS_NATIVE, "bodies": asyncio.run(stream_all())}, sys.stdout)
