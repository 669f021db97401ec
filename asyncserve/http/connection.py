"""Sockets and HTTP that cannot be parsed: what aiohttp decides below the application.

`Runner` makes aiohttp serve an application with our protocol class: at most so many connections, send buffers
of a bounded size, write limits set explicitly (event loops differ), an end for connections whose client has
vanished, and OpenAI's error shape even for bytes that are not HTTP.
A handler is cancelled when its client leaves. A known limit: a client that shuts down its sending side and
goes on reading counts as one that has left, for both begin with the same FIN, and waiting for the difference
to show would let requests of clients that are gone run on.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, ContentEncodingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import HttpVersion11
from yarl import URL

from asyncserve.http.body import unsupported_encoding
from asyncserve.http.borrowed_socket import borrow_socket
from asyncserve.http.failures import OURS, UNAVAILABLE_RETRY_S, Failure, response_to
from asyncserve.token_path import SocketHandle

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 256 * 1024
"""Kernel send buffer of a connection. Unbounded, the kernel takes 4 MB for a client that does not read."""
WRITE_HIGH_BYTES = 64 * 1024
"""A connection with more than this unsent is behind: its outputs are merged instead of written."""
WRITE_LOW_BYTES = 16 * 1024
"""A connection that was behind is written to again when at most this is unsent."""
KEEPALIVE_TIMEOUT_S = 75.0
"""How long an idle connection stays open; above the 60 s of common proxies, so that they close first."""
GONE_S = 90
"""A client whose machine acknowledges nothing for so long is gone, though no FIN has come: half-open sockets
end. Above the time after which a stream whose client reads nothing is given up, which gives the reason."""
TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # The kernel's own numbers find a dead client after two hours.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, GONE_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, GONE_S // 6),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # The same for what is sent and never acknowledged, where probes do not come into play.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000),
)
REFUSAL_S = 2.0
"""How long a refused connection has to read why."""
MAX_REFUSALS = 64
"""Refused connections that are told why at once; further ones are just closed."""
SLASHED_PREFIX = web.RequestKey("SLASHED_PREFIX", str)
"""Under it a request whose path was the proxy's prefix without a slash behind it holds the address with one,
relative: what a page names would be looked for beside the prefix, not below it."""
TOO_MANY_HEADERS = "Too many headers received"
"""What aiohttp's parser says of them; it has no class of its own for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderLimits:
    """How much may stand before a request's body.

    Args:
        num_bytes: Of the request line, and of all headers together.
        count: Of headers.
    """

    num_bytes: int = 32 * 1024
    count: int = 128

    def refusal(self) -> web.HTTPException:
        """Return the error for a request that has more."""
        return web.HTTPRequestHeaderFieldsTooLarge(
            text=f"the request line or the headers are too large: at most {self.num_bytes} bytes and"
            f" {self.count} headers are taken"
        )


@dataclass(frozen=True, slots=True)
class _Sent:
    """What is asked of a response when it is sent."""

    keep_alive: bool | None


class ConnectionBound:
    """How many clients may be connected, and what becomes of the others.

    Args:
        max_connections: Most connections that are served; None for no bound.
    """

    def __init__(self, max_connections: int | None = None) -> None:
        self.max_connections = max_connections
        self.num_refused = 0
        self._num_telling = 0

    def takes(self, num_connections: int) -> bool:
        """Whether one more is taken beside so many."""
        return self.max_connections is None or num_connections < self.max_connections

    def refuse(self, transport: asyncio.Transport) -> None:
        """Tell a client that it is one too many; `forget` is to be called when its connection has ended."""
        self.num_refused += 1
        self._num_telling += 1
        if self._num_telling > MAX_REFUSALS:
            transport.abort()
            return
        text = f"this server takes at most {self.max_connections} connections, and they are in use"
        failure = Failure(status=503, message=text, kind=OURS, code="too_many_connections")
        body = orjson.dumps(failure.as_object())
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {UNAVAILABLE_RETRY_S}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        # Closed at once, with the client's request unread, the kernel would throw away what is written.
        if transport.can_write_eof():
            transport.write_eof()
        asyncio.get_running_loop().call_later(REFUSAL_S, transport.abort)

    def forget(self) -> None:
        """Note the end of a refused connection."""
        self._num_telling -= 1


class Connection(web.RequestHandler):
    """One client connection.

    Args:
        bound: Of the server's connections.
        on_refused: Given the status of each answer to what is no HTTP.
    """

    __slots__ = ("_bound", "_is_refused", "_on_refused", "borrowed_socket")

    def __init__(
        self,
        manager: web.Server,
        *,
        bound: ConnectionBound,
        on_refused: Callable[[int], None],
        **settings: Any,
    ) -> None:
        super().__init__(manager, **settings)
        self._bound = bound
        self._on_refused = on_refused
        self._is_refused = False
        self.borrowed_socket: SocketHandle | None = None
        """The connection's socket, for whoever streams to it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound the buffers of a new connection, and see to its end; or refuse it."""
        stream = cast("asyncio.Transport", transport)
        assert self._manager is not None
        if not self._bound.takes(len(self._manager.connections)):
            self._is_refused = self._force_close = True
            self._bound.refuse(stream)
            return
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                for option in TCP_OPTIONS:
                    connection.setsockopt(*option)
        stream.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        self.borrowed_socket = borrow_socket(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Note the end of the connection; its socket is closed next."""
        if self.borrowed_socket is not None:
            self.borrowed_socket.fd = -1
        if self._is_refused:
            self._bound.forget()
        else:
            super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of a response, and let go of it and of its request.

        aiohttp's loop keeps hold of both until the connection's next request, and of all they hold: an
        answer of megabytes for as long as the connection is idle.
        """
        resp, was_reset = await super().finish_response(request, resp, start_time)
        vars(request).clear()
        return cast("web.StreamResponse", _Sent(resp.keep_alive)), was_reset

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
        elif isinstance(exc, LineTooLong) or (
            isinstance(exc, BadHttpMessage) and exc.message == TOO_MANY_HEADERS
        ):
            limits = HeaderLimits(num_bytes=self.max_field_size, count=self.max_headers)
            response = response_to(limits.refusal())
        elif status < 500:
            logger.debug("bad HTTP from %s", request.remote, exc_info=exc)
            text = f"this is not valid HTTP: {message or exc}".splitlines()[0]
            response = response_to(web.HTTPBadRequest(text=text))
            response.set_status(status)
        else:
            logger.error("handling a request from %s failed", request.remote, exc_info=exc)
            response = response_to(exc or RuntimeError())
        response.force_close()
        if status < 500:  # a bug is one of a request that has been counted
            self._on_refused(response.status)
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a bug; not that the rest of a body cannot be read either, when its request is answered."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


class _Server(web.Server):
    """Makes a `Connection` for each client, as an aiohttp server makes its own."""

    def __init__(
        self,
        inner: web.Server,
        *,
        limits: HeaderLimits,
        bound: ConnectionBound,
        root_path: str,
        on_refused: Callable[[int], None],
        **settings: Any,
    ) -> None:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            try:
                if sum(len(name) + len(value) for name, value in request.raw_headers) > limits.num_bytes:
                    raise limits.refusal()
                return await inner.request_handler(request)
            except web.HTTPException as error:
                # Raised before the middlewares run, e.g. for an Expect header nobody can meet.
                on_refused(error.status)
                return response_to(error, request)

        def make_request(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
            if message.version > HttpVersion11:
                # A request that says HTTP/2.0 in HTTP/1's syntax; its answer would begin with the same.
                message = message._replace(version=HttpVersion11, should_close=True)
            if not root_path:
                return inner.request_factory(message, *rest)
            request = inner.request_factory(_without_prefix(message, root_path), *rest)
            if message.path.partition("?")[0] == root_path:
                request[SLASHED_PREFIX] = f"{root_path.rpartition('/')[2]}/"
            return request

        super().__init__(answer, request_factory=make_request, handler_cancellation=True)
        self._settings = {
            "bound": bound,
            "on_refused": on_refused,
            "max_line_size": limits.num_bytes,
            "max_field_size": limits.num_bytes,
            "max_headers": limits.count,
            **settings,
        }

    def __call__(self) -> Connection:
        return Connection(self, loop=asyncio.get_running_loop(), **self._settings)


class Runner(web.AppRunner):
    """Serves an application over `Connection`s; used like any aiohttp runner.

    Args:
        app: The application.
        limits: Of what stands before a request's body.
        root_path: Prefix that is taken off paths which have it.
        bound: Of the number of connections.
        on_refused: Given the status of each answer that the application knows nothing of: to what is no HTTP,
            and to headers that are too large or cannot be met.
        keepalive_timeout_s: Seconds that a connection without a request stays open.
        settings: Of any aiohttp runner.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        limits: HeaderLimits,
        root_path: str,
        bound: ConnectionBound,
        on_refused: Callable[[int], None],
        keepalive_timeout_s: float,
        **settings: Any,
    ) -> None:
        super().__init__(app, **settings)
        self._limits = limits
        self._root_path = root_path
        self._bound = bound
        self._on_refused = on_refused
        self._keepalive_timeout_s = keepalive_timeout_s

    async def _make_server(self) -> web.Server:
        inner = await super()._make_server()
        return _Server(
            inner,
            limits=self._limits,
            bound=self._bound,
            root_path=self._root_path,
            on_refused=self._on_refused,
            access_log=None,
            keepalive_timeout=self._keepalive_timeout_s,
        )


def _without_prefix(message: RawRequestMessage, prefix: str) -> RawRequestMessage:
    """Return the message as it would be without the proxy's prefix in its path."""
    path = message.path
    if not path.startswith(prefix) or path[len(prefix) : len(prefix) + 1] not in ("", "/", "?"):
        return message
    rest = path[len(prefix) :]
    rest = rest if rest.startswith("/") else f"/{rest}"
    bare, _, query = rest.partition("#")[0].partition("?")
    return message._replace(path=rest, url=URL.build(path=bare, query_string=query, encoded=True))
