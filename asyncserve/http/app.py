"""The HTTP application: its routes, its middlewares, and the runner that serves it.

`build_app` takes an engine and plain values and gives an aiohttp application; `make_runner` gives the runner
with the settings streaming needs. Neither listens nor starts anything: that is `serve`'s business.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncserve.http import status
from asyncserve.http.auth import OPEN_PATHS, KeyFile, require_key
from asyncserve.http.body import BODY_TIMEOUT_S
from asyncserve.http.chat import chat
from asyncserve.http.completions import complete
from asyncserve.http.connection import KEEPALIVE_TIMEOUT_S, ConnectionBound, HeaderLimits, Runner
from asyncserve.http.cross_origin import CrossOrigin, answer_preflight, response_headers
from asyncserve.http.failures import CLIENT_GONE, ENDLESS, REQUEST_ID, answer_failures
from asyncserve.http.live_page.recorder import PipelineRecorder
from asyncserve.http.live_page.routes import add_live_page
from asyncserve.http.logprobs import TokenTexts
from asyncserve.http.messages.handlers import count_tokens, messages, name_request_id
from asyncserve.http.openapi.docs_page import docs_page
from asyncserve.http.openapi.document import API_DOCUMENT, ApiDocument, openapi, routes_of
from asyncserve.http.parsers.registry import message_format
from asyncserve.http.reasoning_tokens import reasoning_ids
from asyncserve.http.refusals import refusals
from asyncserve.http.render import render_chat, render_completion
from asyncserve.http.responses import handlers as responses
from asyncserve.http.responses.store import ResponseStore
from asyncserve.http.serving import REQUEST_ID_HEADER, SERVING, ServedEngine, Serving, request_id_of
from asyncserve.http.tokenization import detokenize, tokenize
from asyncserve.http.write_pacing import WritePacer
from asyncserve.metrics.http_traffic import UNKNOWN_ROUTE, HttpTraffic

access_logger = logging.getLogger("asyncserve.http.access")

TRAFFIC = web.AppKey("TRAFFIC", HttpTraffic)
GENERATING_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Routes that make the engine generate."""
QUIET_PATHS = OPEN_PATHS | {"/metrics"}
"""Paths asked every few seconds by machines: logged at debug level."""


def build_app(
    engine: ServedEngine,
    *,
    model_names: Sequence[str],
    metrics_renderer: Callable[[], Awaitable[bytes]],
    traffic: HttpTraffic | None = None,
    on_rejected: Callable[[Exception], None] = lambda error: None,
    default_sampling: Mapping[str, Any] | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    trusts_request_templates: bool = False,
    api_keys: Sequence[str] = (),
    api_key_file: KeyFile | None = None,
    cross_origin: CrossOrigin | None = None,
    root_path: str = "",
    max_logprobs: int = 20,
    stream_interval: int | None = None,
    max_body_bytes: int = 4 * 1024 * 1024,
    response_store_size: int = 1000,
    response_store_bytes: int = 256 * 1024 * 1024,
    health_timeout_s: float = 60.0,
    stall_timeout_s: float = 60.0,
    body_timeout_s: float = BODY_TIMEOUT_S,
    request_timeout_s: float | None = None,
    keep_alive_s: float = 15.0,
    access_log: bool = True,
    unlogged_paths: Collection[str] = (),
    server_info: Mapping[str, Any] | None = None,
    pipeline_recorder: PipelineRecorder | None = None,
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
        tool_call_parser: How the model writes tool calls: `auto` tells it by the chat template, `none` for
            not at all, or a name.
        reasoning_parser: The same of reasoning.
        trusts_request_templates: Requests may bring chat templates, and set any variable of them.
        api_keys: Keys, one of which clients must send; none, and no file either, means open.
        api_key_file: Further keys.
        cross_origin: Which web pages may use the server; none if left out.
        root_path: Prefix under which a proxy shows the server.
        max_logprobs: Most log-probabilities a client may ask for with each token.
        stream_interval: Tokens of a stream in one write; None for one, and under load those of 4 ms.
        max_body_bytes: Largest request body.
        response_store_size: Most responses of /v1/responses that are kept; 0 keeps none.
        response_store_bytes: Most bytes of them together.
        health_timeout_s: Seconds without progress, while there is work, after which /health turns bad.
        stall_timeout_s: Seconds after which a streaming client that reads nothing is given up.
        body_timeout_s: Seconds after which a client that sends nothing of its body is given up.
        request_timeout_s: Seconds that an answer may take; None for no limit.
        keep_alive_s: Seconds without an event after which a stream is kept alive; 0 for never.
        access_log: Log one line for each request.
        unlogged_paths: But not for these.
        server_info: Options and versions, for /server_info.
        traffic: Told of every request.
        pipeline_recorder: What the live page at / shows; without it there is no page.
        clock: Monotonic seconds, the engine's clock.
    """
    cross_origin = cross_origin or CrossOrigin()
    traffic = traffic or HttpTraffic(model_names[0])
    middlewares: list[Middleware] = [
        _frame(
            traffic,
            access_log=access_log,
            unlogged_paths=frozenset(unlogged_paths),
        ),
        answer_failures,
    ]
    if cross_origin.origins:
        middlewares.append(answer_preflight(cross_origin))
    if api_key_file is not None:
        middlewares.append(require_key(api_keys, lambda: api_key_file.digests))
    elif api_keys:
        middlewares.append(require_key(api_keys))
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    app[TRAFFIC] = traffic
    app.on_response_prepare.append(response_headers(cross_origin))
    app.on_response_prepare.append(name_request_id)
    written_as = message_format(
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        chat_template=engine.tokenizer.chat_template_text,
        special_tokens=engine.tokenizer.special_tokens,
    )
    app[SERVING] = Serving(
        engine=engine,
        model_names=tuple(model_names),
        default_sampling=dict(default_sampling or {}),
        message_format=written_as,
        reasoning_ids=reasoning_ids(engine.tokenizer, written_as),
        trusts_request_templates=trusts_request_templates,
        max_logprobs=max_logprobs,
        pacer=WritePacer(clock=clock, stream_interval=stream_interval),
        health_timeout_s=health_timeout_s,
        stall_timeout_s=stall_timeout_s,
        body_timeout_s=body_timeout_s,
        request_timeout_s=request_timeout_s,
        keep_alive_s=keep_alive_s,
        metrics_renderer=metrics_renderer,
        on_rejected=on_rejected,
        root_path=root_path,
        server_info=server_info or {},
        created=int(time.time()),
        clock=clock,
        token_texts=TokenTexts(engine.tokenizer.token_bytes, engine.tokenizer.is_special),
        responses=ResponseStore(max_responses=response_store_size, max_bytes=response_store_bytes),
    )
    app.add_routes(
        [
            web.post("/v1/completions", complete),
            web.post("/v1/completions/render", render_completion),
            web.post("/v1/chat/completions", chat),
            web.post("/v1/chat/completions/render", render_chat),
            web.post("/v1/responses", responses.create_response),
            web.get("/v1/responses/{response_id}", responses.get_response),
            web.delete("/v1/responses/{response_id}", responses.delete_response),
            web.post("/v1/responses/{response_id}/cancel", responses.cancel_response),
            web.get("/v1/responses/{response_id}/input_items", responses.list_input_items),
            web.post("/v1/messages", messages),
            web.post("/v1/messages/count_tokens", count_tokens),
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
            web.get("/load", status.load),
            web.get("/kv_cache", status.kv_cache),
            web.get("/server_info", status.server_info),
            web.get("/tokenizer_info", status.tokenizer_info),
            web.get("/metrics", status.metrics),
            web.get("/openapi.json", openapi),
            web.get("/docs", docs_page),
        ]
    )
    app[API_DOCUMENT] = ApiDocument(
        routes_of(app), has_keys=bool(api_keys or api_key_file), root_path=root_path
    )
    app.add_routes(refusals())
    if pipeline_recorder is not None:
        add_live_page(app, app[SERVING], pipeline_recorder)
    return app


def make_runner(
    app: web.Application,
    *,
    shutdown_timeout_s: float = 5.0,
    limits: HeaderLimits | None = None,
    bound: ConnectionBound | None = None,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> web.AppRunner:
    """Return the runner that serves `app`.

    Args:
        shutdown_timeout_s: Seconds `cleanup` leaves handlers to end; drain the engine before.
        limits: Of what stands before a request's body; the usual ones if left out.
        bound: Of the number of connections; none if left out.
        keepalive_timeout_s: Seconds that a connection without a request stays open.
    """
    serving = app.get(SERVING)
    traffic = app.get(TRAFFIC)
    return Runner(
        app,
        limits=limits or HeaderLimits(),
        root_path="" if serving is None else serving.root_path,
        bound=bound or ConnectionBound(),
        on_refused=(lambda status_code: None) if traffic is None else traffic.refuse,
        keepalive_timeout_s=keepalive_timeout_s,
        shutdown_timeout=shutdown_timeout_s,
    )


def _frame(traffic: HttpTraffic, *, access_log: bool, unlogged_paths: Collection[str]) -> Middleware:
    """Build the outermost middleware: the request id in every response; every request counted and logged."""

    @web.middleware
    async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
        started_s = time.monotonic()
        status_code, request_id = CLIENT_GONE, "-"
        traffic.begin()
        request[REQUEST_ID] = request_id_of(request)
        try:
            response = await handler(request)
            status_code = response.status
            if not response.prepared and REQUEST_ID_HEADER not in response.headers:
                response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
            request_id = response.headers[REQUEST_ID_HEADER]
            return response
        finally:
            # A handler that is cancelled, because its client has left, comes by here too.
            if status_code == CLIENT_GONE and request.get(ENDLESS):
                status_code = web.HTTPOk.status_code
            resource = request.match_info.route.resource
            traffic.end(UNKNOWN_ROUTE if resource is None else resource.canonical, status_code)
            if access_log and request.path not in unlogged_paths:
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
