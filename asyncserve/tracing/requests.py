"""A trace of each request: one span for all of it, and below that one for each stage it passed.

Takes the engine's calls as an `Observer`; when the last sequence of a request has ended, the request's times
are handed on as one plain `FinishedRequest`, which costs the loop a few microseconds. What becomes of it is
the business of whoever takes it: `otlp` makes spans of it. Counts no metric and knows no OpenTelemetry.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from asyncserve.observer import NullObserver, RequestTimeline
from asyncserve.request import FinishReason


class FinishedSequence(NamedTuple):
    """One sequence of a request that has ended; times are monotonic seconds, None if it never came so far."""

    reason: str
    tokenized_s: float | None
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_output_len: int
    num_preemptions: int
    missed_deadline: bool = False


class FinishedRequest(NamedTuple):
    """A request all of whose sequences have ended.

    Args:
        request_id: As the engine knows it.
        arrived_s: Monotonic seconds.
        epoch_offset_s: What must be added to monotonic seconds to get Unix time.
        temperature: Of its sampling.
        top_p: Of its sampling.
        trace_headers: `traceparent` and `tracestate` as the client sent them.
        sequences: In the order in which they ended.
    """

    request_id: str
    arrived_s: float
    epoch_offset_s: float
    temperature: float
    top_p: float
    trace_headers: Mapping[str, str]
    sequences: tuple[FinishedSequence, ...]


class RequestTracer(NullObserver):
    """An `Observer` that puts together what each request did.

    Args:
        take: Given every finished request, on the loop's thread.
    """

    def __init__(self, take: Callable[[FinishedRequest], None]) -> None:
        self._take = take
        self._ended: dict[str, list[FinishedSequence]] = {}

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Note the end of a sequence; with the last one of its request, hand the request on."""
        request = timeline.request
        if request is None:
            return
        now_s = time.monotonic()
        sequence = FinishedSequence(
            reason=reason.value,
            tokenized_s=timeline.tokenized_s,
            first_scheduled_s=timeline.first_scheduled_s,
            first_token_s=timeline.first_token_s,
            last_token_s=timeline.last_token_s,
            finished_s=now_s if timeline.finished_s is None else timeline.finished_s,
            num_prompt_tokens=timeline.num_prompt_tokens,
            num_cached_tokens=timeline.num_cached_tokens,
            num_output_tokens=timeline.num_output_tokens,
            max_output_len=timeline.max_output_len,
            num_preemptions=timeline.num_preemptions,
            missed_deadline=timeline.missed_deadline,
        )
        sequences = self._ended.setdefault(request.request_id, [])
        sequences.append(sequence)
        if len(sequences) < request.sampling.num_sequences:
            return
        del self._ended[request.request_id]
        self._take(
            FinishedRequest(
                request_id=request.request_id,
                arrived_s=timeline.arrived_s,
                epoch_offset_s=time.time() - now_s,
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                trace_headers=request.trace_headers,
                sequences=tuple(sequences),
            )
        )
