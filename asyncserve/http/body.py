"""Request bodies as bytes: their encoding, size and pace.

Takes a request whose body may still be on its way; gives all of it, unpacked. aiohttp unpacks gzip and
deflate by itself; any other encoding is refused here, or, where aiohttp refuses it, in `connection`.
Does not know what is in a body.
"""

import asyncio

from aiohttp import web

from asyncserve.errors import InvalidRequest

BODY_TIMEOUT_S = 60.0
"""How long a client may send nothing of a body it has announced."""
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
"""Content encodings that are taken."""


def unsupported_encoding() -> web.HTTPException:
    """Return the error for a body in another encoding."""
    return web.HTTPUnsupportedMediaType(
        text="the body's Content-Encoding is not supported; send it as gzip, deflate or without encoding"
    )


async def read_body(request: web.Request, *, timeout_s: float) -> bytes:
    """Return the whole body.

    Args:
        timeout_s: Seconds without a byte after which the client is given up.

    Raises:
        HTTPException: It is too large (413), in an encoding that is not taken (415), or stands still (408).
        InvalidRequest: It cannot be unpacked.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise unsupported_encoding()
    body = bytearray()
    try:
        while True:
            async with asyncio.timeout(timeout_s):
                chunk = await request.content.readany()
            if not chunk:
                return bytes(body)
            body += chunk
            if len(body) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(
            text=f"the request body did not come: nothing for {timeout_s:g} s after {len(body)} bytes"
        ) from error
    except web.RequestPayloadError as error:
        if encoding in ("gzip", "deflate"):
            raise InvalidRequest(f"the request body is not valid {encoding}, as its header says") from error
        raise
