"""The HTTP application: its routes, its middlewares, and the runner that serves it.

`build_app` takes an engine and plain values and gives an aiohttp application; `make_runner` gives the runner
with the settings streaming needs. Neither listens nor starts anything: that is `serve`'s business.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncserve.http import status
from asyncserve.http.auth import OPEN_PATHS, require_key
from asyncserve.http.body import BODY_TIMEOUT_S
from asyncserve.http.chat import chat
from asyncserve.http.completions import complete
from asyncserve.http.connection import Runner
from asyncserve.http.failures import CLIENT_GONE, answer_failures
from asyncserve.http.logprobs import TokenTexts
from asyncserve.http.serving import REQUEST_ID_HEADER, SERVING, ServedEngine, Serving, request_id_of
from asyncserve.http.tokenization import detokenize, tokenize

access_logger = logging.getLogger("asyncserve.http.access")

QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Paths asked every few seconds by machines: logged at debug level."""


def build_app(
    engine: ServedEngine,
    *,
    model_names: Sequence[str],
    metrics_renderer: Callable[[], bytes],
    on_rejected: Callable[[Exception], None] = lambda error: None,
    default_sampling: Mapping[str, Any] | None = None,
    api_keys: Sequence[str] = (),
    max_logprobs: int = 20,
    max_body_bytes: int = 4 * 1024 * 1024,
    health_timeout_s: float = 60.0,
    stall_timeout_s: float = 60.0,
    body_timeout_s: float = BODY_TIMEOUT_S,
    access_log: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """Build the application.

    Args:
        engine: Started or not; until it is, generating requests get 503.
        model_names: Names clients may use, the first being the one reported.
        metrics_renderer: Gives the text of /metrics.
        on_rejected: Told of each generating request that is refused before the engine hears of it (bad
            fields, an unknown model); the engine's observer is told of the others.
        default_sampling: Sampling values (fields of `SamplingParams`) where a request leaves them unset.
        api_keys: Keys, one of which clients must send; none means open.
        max_logprobs: Most log-probabilities a client may ask for with each token.
        max_body_bytes: Largest request body.
        health_timeout_s: Seconds without progress, while there is work, after which /health turns bad.
        stall_timeout_s: Seconds after which a streaming client that reads nothing is given up.
        body_timeout_s: Seconds after which a client that sends nothing of its body is given up.
        access_log: Log one line for each request.
        clock: Monotonic seconds, the engine's clock.
    """
    middlewares: list[Middleware] = [_frame(access_log=access_log), answer_failures]
    if api_keys:
        middlewares.append(require_key(api_keys))
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    app[SERVING] = Serving(
        engine=engine,
        model_names=tuple(model_names),
        default_sampling=dict(default_sampling or {}),
        max_logprobs=max_logprobs,
        health_timeout_s=health_timeout_s,
        stall_timeout_s=stall_timeout_s,
        body_timeout_s=body_timeout_s,
        metrics_renderer=metrics_renderer,
        on_rejected=on_rejected,
        created=int(time.time()),
        clock=clock,
        token_texts=TokenTexts(engine.tokenizer.token_bytes, engine.tokenizer.is_special),
    )
    app.add_routes(
        [
            web.post("/v1/completions", complete),
            web.post("/v1/chat/completions", chat),
            web.get("/v1/models", status.models),
            web.get("/v1/models/{name:.+}", status.model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", status.health),
            web.get("/ping", status.health),
            web.post("/ping", status.health),
            web.get("/live", status.live),
            web.get("/ready", status.ready),
            web.get("/version", status.version),
            web.get("/metrics", status.metrics),
        ]
    )
    return app


def make_runner(app: web.Application, *, shutdown_timeout_s: float = 5.0) -> web.AppRunner:
    """Return the runner that serves `app`.

    Args:
        shutdown_timeout_s: Seconds `cleanup` leaves handlers to end; drain the engine before.
    """
    return Runner(app, shutdown_timeout=shutdown_timeout_s)


def _frame(*, access_log: bool) -> Middleware:
    """Build the outermost middleware: the request id in every response, one log line for every request."""

    @web.middleware
    async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_s = time.monotonic()
        status_code, request_id = CLIENT_GONE, "-"
        try:
            response = await handler(request)
            status_code = response.status
            if not response.prepared and REQUEST_ID_HEADER not in response.headers:
                response.headers[REQUEST_ID_HEADER] = request_id_of(request)
            request_id = response.headers[REQUEST_ID_HEADER]
            return response
        finally:
            # A handler that is cancelled, because its client has left, comes by here too.
            if access_log:
                access_logger.log(
                    logging.DEBUG if request.path in QUIET_PATHS else logging.INFO,
                    "%s %s %d %.1f ms %s",
                    request.method,
                    request.rel_url.raw_path,
                    status_code,
                    (time.monotonic() - started_s) * 1e3,
                    request_id,
                )

    return frame
