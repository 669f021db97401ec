"""Who asks, since when and until when: what a call's engine requests are told besides its body.

Takes a request's headers and the key it came with; gives a `Caller`. A tenant is told by the digest of its
key, never by the key; without keys all are one tenant. Does not know what is asked.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from asyncserve.errors import InvalidRequest
from asyncserve.http.auth import owner_of

TIMEOUT_HEADER = "X-Request-Timeout"
"""Header in which a client says how many seconds its answer may take, from the request to its last token."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of W3C's trace context."""
TENANT_LEN = 16
"""Hexadecimal digits of a key's digest that tell tenants apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks.

    Args:
        arrival_s: Monotonic time at which the request was received.
        tenant: See `Request`.
        deadline_s: Monotonic time at which the answer must be complete, if there is one.
        trace_headers: See `Request`.
    """

    arrival_s: float = 0.0
    tenant: str = ""
    deadline_s: float | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)


def caller_of(request: web.Request, *, arrival_s: float, request_timeout_s: float | None) -> Caller:
    """Return who asks.

    Args:
        request_timeout_s: Seconds that any answer may take; a client can only ask for fewer.

    Raises:
        InvalidRequest: The header is no number of seconds.
    """
    timeout_s = request_timeout_s
    given = request.headers.get(TIMEOUT_HEADER)
    if given is not None:
        timeout_s = min(_seconds(given), math.inf if timeout_s is None else timeout_s)
    return Caller(
        arrival_s=arrival_s,
        tenant=owner_of(request).hex()[:TENANT_LEN],
        deadline_s=None if timeout_s is None else arrival_s + timeout_s,
        trace_headers={name: request.headers[name] for name in TRACE_HEADERS if name in request.headers},
    )


def _seconds(text: str) -> float:
    try:
        # Digits alone: Python also reads 1_0, and digits of other scripts.
        seconds = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise InvalidRequest(
            f"the header {TIMEOUT_HEADER} is {text[:32]!r}; it must be a number of seconds above 0"
        )
    return seconds
