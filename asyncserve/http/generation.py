"""One HTTP call's way through the engine: submit its requests, wait for their output, abort what is left.

Both generating endpoints use it: `engine_requests` and `respond` for a call, `Shapes` for what their answers
have in common. `collect` gives answers in one piece, `stream` events. Whatever ends the wait (the answer, an
error, the client's leaving, which cancels the handler), every request of the call is aborted at the end; for
those that are done, that is nothing.
"""

import asyncio
import dataclasses
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson
from aiohttp import web

from asyncserve import __version__
from asyncserve.errors import EngineError
from asyncserve.http.caller import Caller
from asyncserve.http.connection import Connection
from asyncserve.http.failures import failure_of
from asyncserve.http.schema import GenerationBody
from asyncserve.http.serving import REQUEST_ID_HEADER, Serving
from asyncserve.http.sse import KEEP_ALIVE, ChunkRenderer, EventStream, StreamEnd, data_event
from asyncserve.request import (
    FinishReason,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    Usage,
    merge_all,
    total_usage,
)
from asyncserve.token_path import SocketHandle

EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}

DONE = data_event(b"[DONE]")
"""The event that ends a complete stream."""

LARGE_TEXT_LEN = 4096
"""Answers with longer texts are put together in a thread: reading calls takes microseconds a character."""

OnBegun = Callable[[Sequence["array[int]"]], Awaitable[None]]
"""Awaited with a call's tokenized prompts before anything of its answer is written."""


class Shapes(ABC):
    """What the answers to a call look like, as far as both endpoints agree; a `ChunkRenderer`.

    Args:
        response_id: The `id` of answers and events.
        model: The name the client used.
        includes_usage: A stream ends with the usage, and its events have a place for it.
        gives_logprobs: Answers hold log-probabilities.
    """

    WHOLE: ClassVar[str]
    """`object` of an answer in one piece."""
    CHUNK: ClassVar[str]
    """`object` of an event."""

    def __init__(self, *, response_id: str, model: str, includes_usage: bool, gives_logprobs: bool) -> None:
        self.includes_usage = includes_usage
        self.gives_logprobs = gives_logprobs
        self._id = response_id
        self._facts = {
            "created": int(time.time()),
            "model": model,
            # With equal seeds, answers are equal only from equal software.
            "system_fingerprint": f"asyncserve-{__version__}",
        }

    def answer(self, outputs: Sequence[RequestOutput], usages: Sequence[Usage]) -> bytes:
        """Return the whole answer, from one output per choice and one usage per prompt.

        The choices are numbered through all prompts.
        """
        choices = [self.whole_choice(output.index, output) for output in outputs]
        return self._body(self.WHOLE, choices, {"usage": self.usage(usages), **self.whole_extras(outputs)})

    def whole_extras(self, outputs: Sequence[RequestOutput]) -> Mapping[str, Any]:
        """Return what stands beside the choices of an answer in one piece."""
        return {}

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Return the token counts of the call so far."""
        return usage_object(usages)

    @abstractmethod
    def whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return one choice of an answer in one piece."""

    def first_events(self) -> list[bytes]:
        """See `ChunkRenderer`: a choice's role comes with its first output."""
        return []

    def keep_alive(self) -> bytes:
        """See `ChunkRenderer`."""
        return KEEP_ALIVE

    @abstractmethod
    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """See `ChunkRenderer`."""

    @abstractmethod
    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """See `ChunkRenderer`."""

    def chunk(
        self,
        choices: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Render one event.

        Args:
            extras: What stands beside the choices.
        """
        more = {"usage": usage, **(extras or {})} if self.includes_usage else extras or {}
        return data_event(self._body(self.CHUNK, choices, more))

    def last_events(self, usages: Sequence[Usage]) -> list[bytes]:
        """Render the usage, if asked for, and the end mark."""
        if not self.includes_usage:
            return [DONE]
        return [self.chunk([], self.usage(usages)), DONE]

    def error(self, error: BaseException) -> bytes:
        """Render the event that ends a stream in failure."""
        return data_event(orjson.dumps(failure_of(error).as_object()))

    def _body(self, kind: str, choices: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> bytes:
        return orjson.dumps({"id": self._id, "object": kind, **self._facts, "choices": choices, **more})


def engine_requests(
    serving: Serving,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    response_id: str,
    caller: Caller,
) -> list[Request]:
    """Return one request per prompt, under ids the engine has not seen.

    Raises:
        InvalidRequest: `truncate_prompt_tokens` is out of range.
    """
    return [
        Request(
            request_id=serving.engine_id(response_id),
            prompt=prompt,
            sampling=sampling,
            arrival_s=caller.arrival_s,
            tenant=caller.tenant,
            deadline_s=caller.deadline_s,
            trace_headers=caller.trace_headers,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        for prompt in prompts
    ]


def includes_usage(body: GenerationBody) -> bool:
    """Return whether a stream is to end with its usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def respond(
    http_request: web.Request,
    serving: Serving,
    body: GenerationBody,
    requests: Sequence[Request],
    shapes: Shapes,
    *,
    request_id: str,
    on_begun: OnBegun | None = None,
) -> web.StreamResponse:
    """Answer a call as its body asks: with events, or in one piece.

    Args:
        requests: Choices are numbered through all of them, in order.
        request_id: For the response's header.

    Raises:
        AsyncserveError: A request was refused or failed before the response began.
    """
    options = body.stream_options
    if body.stream:
        return await stream(
            http_request,
            serving,
            requests,
            shapes,
            request_id=request_id,
            wants_usage=shapes.includes_usage
            and options is not None
            and bool(options.continuous_usage_stats),
            on_begun=on_begun,
        )
    collected = await collect(serving, requests)
    if on_begun is not None:
        await on_begun([each.prompt_token_ids for each in collected])
    outputs = [
        dataclasses.replace(output, index=position * requests[0].sampling.n + output.index)
        for position, each in enumerate(collected)
        for output in each.outputs
    ]
    usages = [each.usage for each in collected]
    # Thousands of tokens with twenty rivals each take a while to write down, too.
    if shapes.gives_logprobs or any(
        output.prompt_logprobs or len(output.text) > LARGE_TEXT_LEN for output in outputs
    ):
        answer = await asyncio.to_thread(shapes.answer, outputs, usages)
    else:
        answer = shapes.answer(outputs, usages)
    return web.Response(body=answer, content_type="application/json", headers={REQUEST_ID_HEADER: request_id})


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """All output of one engine request: one `RequestOutput` per choice, those that are missing left out."""

    prompt_token_ids: "array[int]"
    outputs: Sequence[RequestOutput]
    usage: Usage


class _Gathering:
    """The end of several collecting sinks: when all are done or one has failed."""

    def __init__(self, num_open: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: BaseException | None = None
        self._num_open = num_open

    def sink_done(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._end()

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class CollectingSink:
    """An `OutputSink` that keeps everything and joins it at the end."""

    wants_usage = False

    def __init__(self, gathering: _Gathering, num_choices: int) -> None:
        self._gathering = gathering
        self._prompt_token_ids: array[int] = array("i")
        self._outputs: list[list[RequestOutput]] = [[] for _ in range(num_choices)]
        self._num_open = num_choices

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Take note of the tokenized prompt."""
        self._prompt_token_ids = prompt_token_ids

    def put(self, output: RequestOutput) -> None:
        """Keep an output."""
        self._outputs[output.index].append(output)
        if output.finish_reason is None:
            return
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.fail(output.error or EngineError("the request was aborted"))
            return
        self._num_open -= 1
        if self._num_open == 0:
            self._gathering.sink_done()

    def fail(self, error: BaseException) -> None:
        """End the whole call with an error."""
        self._gathering.fail(error)

    def collected(self) -> Collected:
        """Return everything; valid when the gathering has ended without failure."""
        merged = map(merge_all, self._outputs)
        outputs = [output for output in merged if output.finish_reason is not FinishReason.MISSING]
        return Collected(
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            usage=total_usage([output.usage for output in outputs if output.usage is not None]),
        )


async def collect(serving: Serving, requests: Sequence[Request]) -> list[Collected]:
    """Run requests to their ends.

    Raises:
        AsyncserveError: One of them was refused or failed; the others are aborted.
    """
    gathering = _Gathering(len(requests))
    sinks = [CollectingSink(gathering, request.sampling.n) for request in requests]
    try:
        serving.engine.submit_all(requests, sinks)
        await gathering.ended
    finally:
        for request in requests:
            serving.engine.abort(request.request_id)
    if gathering.failure is not None:
        raise gathering.failure
    return [sink.collected() for sink in sinks]


async def stream(
    http_request: web.Request,
    serving: Serving,
    requests: Sequence[Request],
    shapes: ChunkRenderer,
    *,
    request_id: str,
    wants_usage: bool = False,
    on_begun: OnBegun | None = None,
) -> web.StreamResponse:
    """Answer a call with events.

    Args:
        requests: Choices are numbered through all of them, in order.
        request_id: For the response's header.
        wants_usage: Every event is to have token counts.

    Raises:
        AsyncserveError: A request was refused or failed before the response began.
    """
    engine = serving.engine

    def note_pace(is_paused: bool) -> None:
        for request in requests:
            (engine.pause if is_paused else engine.resume)(request.request_id)

    events = EventStream(
        shapes,
        clock=serving.clock,
        stall_timeout_s=serving.stall_timeout_s,
        pacer=serving.pacer,
        keep_alive_s=serving.keep_alive_s,
        on_pause=note_pace,
    )
    sinks = []
    base_index = 0
    for request in requests:
        sinks.append(
            events.add_sink(
                base_index=base_index,
                num_choices=request.sampling.n,
                wants_usage=wants_usage,
                escaped=serving.escaped,
            )
        )
        base_index += request.sampling.n
    try:
        engine.submit_all(requests, sinks)
        await events.due
        response = event_stream(http_request, request_id)
        is_chunked = http_request.version >= (1, 1)
        if not events.begun.done():
            # It takes long: the client gets its headers, and hears of a failure by an event.
            events.attach(*await _prepare(response, http_request), is_chunked=is_chunked)
            await events.begun
        if on_begun is not None and events.failure is None:
            await on_begun([sink.prompt_token_ids for sink in sinks])
        if events.failure is not None and not events.is_attached:
            raise events.failure
        transport, handle = await _prepare(response, http_request)
        events.open(transport, handle, is_chunked=is_chunked)
        if await events.ended is StreamEnd.STALLED:
            transport.abort()
        return response
    finally:
        events.close()
        for request in requests:
            engine.abort(request.request_id)


def event_stream(http_request: web.Request, request_id: str) -> web.StreamResponse:
    """Return a response whose body is events, not yet prepared."""
    response = web.StreamResponse(headers={**EVENT_STREAM_HEADERS, REQUEST_ID_HEADER: request_id})
    if http_request.version < (1, 1):
        response.force_close()  # without chunks, only the connection's end shows where the stream ends
    return response


async def _prepare(
    response: web.StreamResponse, http_request: web.Request
) -> tuple[asyncio.Transport, SocketHandle | None]:
    """Send the response's headers, if they are not out, and return the client's connection and its socket.

    Raises:
        ConnectionResetError: The client has left.
    """
    await response.prepare(http_request)
    transport = http_request.transport
    if transport is None:
        raise ConnectionResetError("the client left")
    connection = http_request.protocol
    return transport, connection.borrowed_socket if isinstance(connection, Connection) else None


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the `usage` of an answer to several prompts."""
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in usages)
    num_output_tokens = sum(usage.num_output_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in usages)},
    }
