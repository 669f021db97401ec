"""What every handler of the HTTP interface shares: the engine, the model's names, limits and caches.

One `Serving` is made by `build_app` and found in the application under `SERVING`. `ServedEngine` lists all
that HTTP needs of the engine, so that the interface can be tested over a scripted one.
"""

import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from asyncserve.errors import RequestError, UnknownModel
from asyncserve.http.caller import Caller, caller_of
from asyncserve.http.logprobs import TokenTexts
from asyncserve.http.parsers.registry import MessageFormat
from asyncserve.http.responses.store import ResponseStore
from asyncserve.http.schema import REQUEST_ID_PATTERN, BodyDecoder
from asyncserve.http.sse import EscapedTexts
from asyncserve.http.write_pacing import WritePacer
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.observer import EngineStatistics
from asyncserve.request import OutputSink, Request, TokenizedRequest
from asyncserve.step import ExecutorInfo

REQUEST_ID_HEADER = "X-Request-Id"


class ServedEngine(Protocol):
    """The engine, as far as HTTP uses it; all calls are made on the loop thread."""

    @property
    def info(self) -> ExecutorInfo:
        """What the device side offers; valid once the engine has started."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; its methods may run in any thread."""

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are taken: started, not draining, not failed."""

    @property
    def failure(self) -> BaseException | None:
        """What stopped the engine, if something did."""

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Take in a request; raises NotReady or Overloaded."""

    def submit_all(self, requests: Sequence[Request], sinks: Sequence[OutputSink]) -> None:
        """Take in all requests of a call, or none of them for lack of room; raises NotReady or Overloaded."""

    def tokenized(self, request: Request) -> TokenizedRequest:
        """Return the first sequence that a request would become; may run in any thread."""

    def pause(self, request_id: str) -> None:
        """Let a request rest, if it is still there."""

    def resume(self, request_id: str) -> None:
        """Let a paused request go on, if it is still there."""

    def abort(self, request_id: str) -> None:
        """End a request, if it is still there."""

    def statistics(self) -> EngineStatistics:
        """Return the state of the engine now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What handlers share.

    Args:
        model_names: Names clients may use; the first is reported where none is given.
        default_sampling: Sampling values for fields a request leaves unset.
        message_format: How the model writes reasoning and tool calls.
        reasoning_ids: Tokens that open and close its reasoning, if it reasons and has such tokens.
        trusts_request_templates: Requests may bring chat templates, and set any variable of them.
        max_logprobs: Most log-probabilities a client may ask for with each token.
        pacer: Says when streams are written to.
        health_timeout_s: Seconds without progress, while there is work, after which health is bad.
        stall_timeout_s: Seconds after which a streaming client that reads nothing is given up.
        body_timeout_s: Seconds after which a client that sends nothing of its body is given up.
        request_timeout_s: Seconds that an answer may take; None for no limit.
        keep_alive_s: Seconds without an event after which a stream is kept alive; 0 for never.
        metrics_renderer: Gives the text of /metrics.
        on_rejected: Told of each generating request that is refused before the engine hears of it.
        root_path: Prefix under which a proxy shows the server, such as /llm; empty for none.
        server_info: Options, without secrets, and versions.
        created: Unix time at which the server was built, for /v1/models.
        clock: Monotonic seconds, the engine's clock.
        responses: Those of /v1/responses that are kept.
    """

    engine: ServedEngine
    model_names: tuple[str, ...]
    default_sampling: Mapping[str, Any]
    message_format: MessageFormat
    reasoning_ids: tuple[int, int] | None
    trusts_request_templates: bool
    max_logprobs: int
    pacer: WritePacer
    health_timeout_s: float
    stall_timeout_s: float
    body_timeout_s: float
    request_timeout_s: float | None
    keep_alive_s: float
    metrics_renderer: Callable[[], Awaitable[bytes]]
    on_rejected: Callable[[Exception], None]
    root_path: str
    server_info: Mapping[str, Any]
    created: int
    clock: Callable[[], float]
    token_texts: TokenTexts
    responses: ResponseStore
    bodies: BodyDecoder = field(default_factory=BodyDecoder)
    escaped: EscapedTexts = field(default_factory=EscapedTexts)
    serials: Iterator[int] = field(default_factory=itertools.count)

    def model_name(self, asked: str | None) -> str:
        """Return the name to report for the model a request asks for.

        Raises:
            UnknownModel: It is not served here.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            served = ", ".join(self.model_names)
            raise UnknownModel(
                f"the model {asked[:200]!r} is not served here; served: {served}", param="model"
            )
        return asked

    def caller(self, request: web.Request, arrival_s: float) -> Caller:
        """Return who asks.

        Raises:
            InvalidRequest: A header says what cannot be meant.
        """
        return caller_of(request, arrival_s=arrival_s, request_timeout_s=self.request_timeout_s)

    @contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Tell `on_rejected` of a refusal raised inside; what the engine refuses it counts itself."""
        try:
            yield
        except RequestError as error:
            self.on_rejected(error)
            raise

    def engine_id(self, response_id: str) -> str:
        """Return an id for the engine: clients may send the same request id twice, it may not."""
        return f"{response_id}-{next(self.serials)}"


SERVING = web.AppKey("SERVING", Serving)


def request_id_of(request: web.Request, default: str | None = None) -> str:
    """Return the id the client gave in its header; else `default`, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if REQUEST_ID_PATTERN.fullmatch(given) else default or uuid.uuid4().hex
