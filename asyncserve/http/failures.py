"""Exception in, OpenAI's or Anthropic's error object out: one table, used by every path of the server.

Takes any exception a handler may raise (our own tree, aiohttp's HTTP errors, bugs) and gives status, body
and headers; the path says whose shape the body has. Knows neither the engine nor the endpoints. A bug is
logged with its traceback and answered with 500 and no details.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from asyncserve.errors import (
    AsyncserveError,
    DeadlineExceeded,
    DeviceLost,
    EngineStopped,
    InvalidRequest,
    NotReady,
    Overloaded,
    PromptTooLong,
    RequestError,
    StepFailed,
    UnknownModel,
)
from asyncserve.http.responses.store import ResponseNotFound

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
OURS = "server_error"


class OriginNotAllowed(RequestError):
    """A browser asks whether a page may use the server, and it may not."""

    status_hint = 403


class UnsupportedEndpoint(RequestError):
    """The path is one that this server will never have."""


KINDS: Mapping[type[Exception], tuple[str, str | None]] = {
    PromptTooLong: (INVALID, "context_length_exceeded"),
    UnknownModel: (INVALID, "model_not_found"),
    ResponseNotFound: (INVALID, "response_not_found"),
    OriginNotAllowed: (INVALID, "origin_not_allowed"),
    UnsupportedEndpoint: (INVALID, "unsupported_endpoint"),
    Overloaded: ("rate_limit_error", "overloaded"),
    DeadlineExceeded: (OURS, "deadline_exceeded"),
    RequestError: (INVALID, None),
    NotReady: (OURS, "not_ready"),
    EngineStopped: (OURS, "engine_stopped"),
    StepFailed: (OURS, "step_failed"),
    DeviceLost: (OURS, "device_lost"),
    AsyncserveError: (OURS, None),
}
"""Exception class to OpenAI's `type` and `code`; the nearest class of an exception counts."""

UNAVAILABLE_RETRY_S = 5
"""Seconds a client is told to wait after a 503: so long at least takes a device that is opened anew, or a new
process."""

HTTP_CODES: Mapping[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_encoding",
    431: "headers_too_large",
}
"""Status to `code` for what aiohttp refuses by itself."""

ANTHROPIC_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Status to Anthropic's `type`. Other errors of the client are `invalid_request_error`, ours `api_error`."""

TOO_LONG = "prompt is too long"
"""Words by which Anthropic's clients know that a conversation must be shortened; there is no code for it."""

ANTHROPIC_PATH = "/v1/messages"
"""This path and those below it answer in Anthropic's shapes."""
ANTHROPIC_VERSION_HEADER = "anthropic-version"
"""What Anthropic's clients send; on paths that both APIs have it tells which one is meant."""
SHARED_PATH = "/v1/models"
"""A path that both APIs have, with those below it."""

REQUEST_ID = web.RequestKey("REQUEST_ID", str)
"""Under it a request holds the id that an answer without another one carries."""

CLIENT_GONE = 499
"""Status in the access log of a request whose client left before the answer."""
ENDLESS = web.RequestKey("ENDLESS", bool)
"""Under it a request says that its answer goes on until the client leaves: that is its ordinary end."""

MAX_SHOWN_PATH_LEN = 64
"""A path is shown in messages up to so many characters."""

KEPT_HEADERS = ("Allow",)
"""Headers of aiohttp's own errors that go into ours."""


class Unauthorized(RequestError):
    """The request carries no key, or a wrong one."""

    status_hint = 401


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as the client sees it.

    Args:
        status: HTTP status.
        kind: OpenAI's `type`.
        code: OpenAI's `code`, a word a program can compare.
        param: The request field at fault.
        headers: Further response headers.
    """

    status: int
    message: str
    kind: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_object(self) -> dict[str, Any]:
        """Return the body's object, in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def failure_of(error: BaseException) -> Failure:
    """Describe `error` for a client; unknown exceptions become a 500 without details."""
    if isinstance(error, Unauthorized):
        return Failure(
            status=401,
            message=error.message,
            kind=INVALID,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if isinstance(error, AsyncserveError):
        kind, code = next(KINDS[cls] for cls in type(error).__mro__ if cls in KINDS)
        headers = {}
        if isinstance(error, Overloaded):
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        elif error.status_hint == web.HTTPServiceUnavailable.status_code:
            headers["Retry-After"] = str(UNAVAILABLE_RETRY_S)
        return Failure(
            status=error.status_hint,
            message=str(error),
            kind=kind,
            code=code,
            param=error.param if isinstance(error, RequestError) else None,
            headers=headers,
        )
    if isinstance(error, web.HTTPException):
        return Failure(
            status=error.status,
            message=error.text or error.reason,
            kind=INVALID if error.status < 500 else OURS,
            code=HTTP_CODES.get(error.status),
            headers={name: error.headers[name] for name in KEPT_HEADERS if name in error.headers},
        )
    return Failure(status=500, message="internal error; the server's log has it", kind=OURS)


def speaks_anthropic(request: web.BaseRequest) -> bool:
    """Return whether a request is one of Anthropic's API."""
    path = request.path
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return True
    is_shared = path == SHARED_PATH or path.startswith(f"{SHARED_PATH}/")
    return is_shared and ANTHROPIC_VERSION_HEADER in request.headers


def anthropic_error(failure: Failure, request_id: str | None) -> dict[str, Any]:
    """Return the body's object in Anthropic's shape."""
    kind = ANTHROPIC_KINDS.get(failure.status)
    if kind is None:
        kind = INVALID if failure.status < 500 else "api_error"
    if failure.code == KINDS[NotReady][1]:
        kind = "overloaded_error"
    message = failure.message
    if failure.code == KINDS[PromptTooLong][1]:
        message = f"{TOO_LONG}: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def response_to(error: BaseException, request: web.BaseRequest | None = None) -> web.Response:
    """Build the response that answers a failed request.

    Args:
        error: What went wrong.
        request: Says whose API is spoken; without one it is OpenAI's.
    """
    failure = failure_of(error)
    body = failure.as_object()
    if request is not None and speaks_anthropic(request):
        body = anthropic_error(failure, request.get(REQUEST_ID))
    response = web.Response(
        status=failure.status,
        body=orjson.dumps(body),
        content_type="application/json",
        headers=failure.headers,
    )
    if failure.status == web.HTTPRequestTimeout.status_code:
        response.force_close()  # the rest of the body may still come, and is no request
    return response


def shown_path(request: web.Request) -> str:
    """Return the request's path, as much as a message shows of it."""
    return request.rel_url.raw_path[:MAX_SHOWN_PATH_LEN]


@web.middleware
async def answer_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an error response, bugs included, which are logged here."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        error.text = f"the request body is too large: more than {request.client_max_size} bytes"
        return response_to(error, request)
    except web.HTTPNotFound as error:
        error.text = f"there is no {shown_path(request)} here"
        return response_to(error, request)
    except web.HTTPMethodNotAllowed as error:
        error.text = f"{shown_path(request)} does not take {request.method}, but {error.headers['Allow']}"
        return response_to(error, request)
    except (AsyncserveError, web.HTTPException) as error:
        return response_to(error, request)
    except web.RequestPayloadError as error:
        unreadable = InvalidRequest("the request body cannot be read: " + " ".join(str(error).split()))
        return response_to(unreadable, request)
    except ConnectionError:
        # The client left while we wrote; nobody reads this, and it is no bug.
        return web.Response(status=CLIENT_GONE)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.rel_url.raw_path)
        if request.writer.output_size > 0 and request.transport is not None:
            # A response has begun: all that can still be said is that it breaks off.
            request.transport.abort()
        return response_to(error, request)
