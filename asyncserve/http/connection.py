"""Sockets and HTTP that cannot be parsed: what aiohttp decides below the application.

`Runner` makes aiohttp serve an application with our protocol class: send buffers of a bounded size, write
limits set explicitly (event loops differ), and OpenAI's error shape even for bytes that are not HTTP.
A handler is cancelled when its client leaves. A known limit: a client that shuts down its sending side and
goes on reading counts as one that has left, for both begin with the same FIN, and waiting for the difference
to show would let requests of clients that are gone run on.
"""

import asyncio
import logging
import socket
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from asyncserve.http.body import unsupported_encoding
from asyncserve.http.failures import response_to

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 256 * 1024
"""Kernel send buffer of a connection. Unbounded, the kernel takes 4 MB for a client that does not read."""
WRITE_HIGH_BYTES = 64 * 1024
"""A connection with more than this unsent is behind: its outputs are merged instead of written."""
WRITE_LOW_BYTES = 16 * 1024
"""A connection that was behind is written to again when at most this is unsent."""
KEEPALIVE_TIMEOUT_S = 75.0
"""How long an idle connection stays open; above the 60 s of common proxies, so that they close first."""


class Connection(web.RequestHandler):
    """One client connection."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound the buffers of a new connection."""
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        cast("asyncio.Transport", transport).set_write_buffer_limits(
            high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES
        )
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never reached the application: HTTP that cannot be parsed, or a bug outside it."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response had begun when the error came")
        if isinstance(exc, ContentEncodingError):
            response = response_to(unsupported_encoding())
        elif status < 500:
            logger.debug("bad HTTP from %s", request.remote, exc_info=exc)
            text = f"this is not valid HTTP: {message or exc}".splitlines()[0]
            response = response_to(web.HTTPBadRequest(text=text))
            response.set_status(status)
        else:
            logger.error("handling a request from %s failed", request.remote, exc_info=exc)
            response = response_to(exc or RuntimeError())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a bug; not that the rest of a body cannot be read either, when its request is answered."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


class _Server(web.Server):
    """Makes a `Connection` for each client, as an aiohttp server makes its own."""

    def __init__(self, inner: web.Server, **settings: Any) -> None:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await inner.request_handler(request)
            except web.HTTPException as error:
                # Raised before the middlewares run, e.g. for an Expect header nobody can meet.
                return response_to(error)

        super().__init__(answer, request_factory=inner.request_factory, handler_cancellation=True)
        self._settings = settings

    def __call__(self) -> Connection:
        return Connection(self, loop=asyncio.get_running_loop(), **self._settings)


class Runner(web.AppRunner):
    """Serves an application over `Connection`s; used like any aiohttp runner."""

    async def _make_server(self) -> web.Server:
        inner = await super()._make_server()
        return _Server(inner, access_log=None, keepalive_timeout=KEEPALIVE_TIMEOUT_S)
