"""API keys: who may use the server.

Deny by default: every path needs a key but those of `OPEN_PATHS`, unknown paths included. Only OPTIONS, which
browsers send without a key, needs none; no path takes it. Keys are compared as hashes and in constant time,
all of them each time, so that neither their length nor their order shows.
"""

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncserve.http.failures import Unauthorized

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping"})


def require_key(api_keys: Iterable[str]) -> Middleware:
    """Build the middleware that lets only requests with one of `api_keys` pass."""
    digests = tuple(_digest(key) for key in api_keys)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS or request.method == "OPTIONS":
            return await handler(request)
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credentials.strip():
            raise Unauthorized("no API key given; send it as `Authorization: Bearer KEY`")
        given = _digest(credentials.strip())
        is_known = False
        for digest in digests:
            is_known |= hmac.compare_digest(digest, given)
        if not is_known:
            raise Unauthorized("the API key is not one of this server's")
        return await handler(request)

    return check


def _digest(key: str) -> bytes:
    # surrogateescape: headers may carry bytes that are not UTF-8.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
