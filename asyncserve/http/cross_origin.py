"""CORS: which web pages may use the server from a browser, and what every response says to browsers.

Takes the allowed origins, methods and headers; answers preflight requests for every path, and adds the
headers to each response when it is prepared, hence to errors and streams too. This restrains browsers,
not clients: who may use the server is decided by keys.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from asyncserve.http.failures import OriginNotAllowed

PREFLIGHT_LIFETIME_S = 600
"""How long a browser may remember what a preflight request said."""
ALL_METHODS = ("GET", "POST", "DELETE")
"""What `*` stands for: the methods that any path takes."""
EXPOSED_HEADERS = "X-Request-Id, Request-Id, Retry-After"
"""Response headers that pages may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossOrigin:
    """What pages of other origins may do.

    Args:
        origins: Whose pages; `*` for any.
        methods: Which HTTP methods; `*` for all.
        headers: Which request headers; `*` for any.
        allows_credentials: Whether browsers may send cookies and client certificates along.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allows_credentials: bool = False

    def allowed_origin(self, request: web.Request) -> str | None:
        """Return what a response says is allowed: the request's origin, `*`, or nothing."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None:
            return None
        if "*" in self.origins:
            return "*"
        return origin if origin.lower() in {allowed.lower() for allowed in self.origins} else None


def response_headers(policy: CrossOrigin) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Build the hook that adds what every response says to browsers."""
    varies = bool(policy.origins) and "*" not in policy.origins

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        headers = response.headers
        # JSON that quotes a prompt with HTML in it is never to be shown as a page.
        headers["X-Content-Type-Options"] = "nosniff"
        if varies:
            # A cache must not give the answer made for one origin to another.
            headers.add(hdrs.VARY, "Origin")
        if policy.origins and (origin := policy.allowed_origin(request)) is not None:
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED_HEADERS
            if policy.allows_credentials:
                headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"

    return add


def answer_preflight(policy: CrossOrigin) -> Middleware:
    """Build the middleware that answers browsers' questions before a request, for every path."""
    methods = ALL_METHODS if "*" in policy.methods else tuple(method.upper() for method in policy.methods)

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != hdrs.METH_OPTIONS or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return await handler(request)
        if policy.allowed_origin(request) is None:
            raise OriginNotAllowed("pages of this origin may not use the server; see --allowed-origins")
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        # Browsers do not take * for Authorization, so what they ask for is named.
        headers = asked if "*" in policy.headers else ", ".join(policy.headers)
        response = web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: ", ".join(methods),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_LIFETIME_S),
                hdrs.VARY: "Access-Control-Request-Method, Access-Control-Request-Headers",
            },
        )
        if headers:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = headers
        return response

    return answer
