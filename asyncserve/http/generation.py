"""One HTTP call's way through the engine: submit its requests, wait for their output, abort what is left.

Both generating endpoints use it: `collect` for answers in one piece, `stream` for events. Whatever ends the
wait (the answer, an error, the client's leaving, which cancels the handler), every request of the call is
aborted at the end; for those that are done, that is nothing.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from asyncserve.errors import EngineError
from asyncserve.http.serving import REQUEST_ID_HEADER, Serving
from asyncserve.http.sse import ChunkRenderer, EventStream, StreamEnd, merge_all, total_usage
from asyncserve.request import FinishReason, Request, RequestOutput, Usage

EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """All output of one engine request: one `RequestOutput` per choice."""

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
        outputs = [merge_all(outputs) for outputs in self._outputs]
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
        for request, sink in zip(requests, sinks, strict=True):
            serving.engine.submit(request, sink)
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
    renderer: ChunkRenderer,
    *,
    request_id: str,
    wants_usage: bool = False,
    on_begun: Callable[[Sequence["array[int]"]], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Answer a call with events.

    Args:
        requests: Choices are numbered through all of them, in order.
        renderer: The endpoint's shapes.
        request_id: For the response's header.
        wants_usage: Every event is to have token counts.
        on_begun: Awaited with the tokenized prompts before the first event.

    Raises:
        AsyncserveError: A request was refused or failed before the response began.
    """
    events = EventStream(renderer, clock=serving.clock, stall_timeout_s=serving.stall_timeout_s)
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
        for request, sink in zip(requests, sinks, strict=True):
            serving.engine.submit(request, sink)
        await events.begun
        if on_begun is not None and events.failure is None:
            await on_begun([sink.prompt_token_ids for sink in sinks])
        if events.failure is not None:
            raise events.failure
        response = web.StreamResponse(headers={**EVENT_STREAM_HEADERS, REQUEST_ID_HEADER: request_id})
        await response.prepare(http_request)
        transport = http_request.transport
        if transport is None:
            raise ConnectionResetError("the client left")
        events.open(transport, heads=serving.chunk_heads if http_request.version >= (1, 1) else None)
        if await events.ended is StreamEnd.STALLED:
            transport.abort()
        return response
    finally:
        events.close()
        for request in requests:
            serving.engine.abort(request.request_id)


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
