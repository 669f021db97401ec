"""API keys: who may use the server.

Deny by default: every path needs a key but those of `OPEN_PATHS`, unknown paths included. Only OPTIONS, which
browsers send without a key, needs none; no path takes it. A key comes as `Authorization: Bearer KEY`, as
OpenAI's clients send it, or as `X-Api-Key: KEY`, as Anthropic's do. Keys are compared as hashes and in
constant time, all of them each time, so that neither their length nor their order shows. Handlers learn from
`owner_of` whose request it is, and never the key.
"""

import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncserve.errors import ConfigError
from asyncserve.http.failures import Unauthorized
from asyncserve.http.live_page.page import PAGE_PATHS
from asyncserve.http.regular_file import read_regular

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/docs", *PAGE_PATHS})

KEY_DIGEST = web.RequestKey("KEY_DIGEST", bytes)
"""Under it a request holds the digest of the key it came with."""


class KeyFile:
    """Keys in a file: one a line; empty lines and those that begin with # do not count.

    A file that cannot be read when it has changed leaves the keys as they were; one that has no keys any more
    opens the server to nobody.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, is no regular file, or holds no key.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._digests = _read_digests(path)
        if not self._digests:
            raise ConfigError(f"api_key_file {path} holds no key")
        if Path(path).stat().st_mode & 0o077:
            logger.warning("others than its owner may read the API keys in %s; chmod 600 it", path)

    @property
    def digests(self) -> Sequence[bytes]:
        """What keys are compared with."""
        return self._digests

    def reload(self) -> None:
        """Read the file again."""
        try:
            self._digests = _read_digests(self.path)
        except ConfigError as error:
            logger.error("keeping the API keys as they are: %s", error)
        else:
            logger.info("%s holds %d API keys now", self.path, len(self._digests))


def require_key(api_keys: Iterable[str], further: Callable[[], Sequence[bytes]] = tuple) -> Middleware:
    """Build the middleware that lets only requests with a known key pass.

    Args:
        api_keys: Keys that do not change.
        further: Gives the digests of those that do.
    """
    fixed = tuple(map(_digest, api_keys))

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS or request.method == "OPTIONS":
            return await handler(request)
        given = _digest(_key_of(request))
        is_known = False
        for digest in (*fixed, *further()):
            is_known |= hmac.compare_digest(digest, given)
        if not is_known:
            raise Unauthorized("the API key is not one of this server's")
        request[KEY_DIGEST] = given
        return await handler(request)

    return check


def owner_of(request: web.Request) -> bytes:
    """Return what tells the holders of different keys apart; empty where no key is needed."""
    owner: bytes = request.get(KEY_DIGEST, b"")
    return owner


def _key_of(request: web.Request) -> str:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    key = credentials.strip() if scheme.lower() == "bearer" else ""
    key = key or request.headers.get("X-Api-Key", "").strip()
    if not key:
        raise Unauthorized("no API key given; send it as `Authorization: Bearer KEY`")
    return key


def _read_digests(path: str) -> tuple[bytes, ...]:
    try:
        # With or without the mark that some editors put before the first line.
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read api_key_file {path}: {reason}") from error
    keys = [line.strip() for line in lines]
    return tuple(_digest(key) for key in keys if key and not key.startswith("#"))


def _digest(key: str) -> bytes:
    # surrogateescape: headers may carry bytes that are not UTF-8.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
