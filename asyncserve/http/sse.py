"""Streamed answers: outputs of the engine become server-sent events, written straight to the transport.

No coroutine runs per token: the detokenizer calls `StreamSink.put`, which renders one chunk and calls
`transport.write` once; the handler only awaits `EventStream.ended`. A client that reads too slowly has its
outputs merged until its connection drains, and is given up when it takes nothing for a while.
An `EventStream` is one HTTP response; a `StreamSink` is one request in the engine; a completion call with
several prompts has several sinks on one stream. Shapes are the `ChunkRenderer`'s business.

While a stream is open nobody else may write to the response: aiohttp prepared its headers and ends its body.
"""

import asyncio
import enum
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import orjson

from asyncserve.errors import EngineError
from asyncserve.http.connection import WRITE_HIGH_BYTES, WRITE_LOW_BYTES
from asyncserve.request import FinishReason, RequestOutput, Usage, merge_all, total_usage

BEHIND_POLL_S = 0.05
"""How often a connection that is behind is looked at."""


class EscapedTexts(dict[str, bytes]):
    """JSON-escaped UTF-8 of token texts, without quotes. Texts repeat: most are one token's."""

    MAX_ENTRIES = 200_000
    MAX_TEXT_LEN = 32

    def __missing__(self, text: str) -> bytes:
        """Escape a text, and remember it if it is short."""
        escaped = orjson.dumps(text)[1:-1]
        if len(text) <= self.MAX_TEXT_LEN and len(self) < self.MAX_ENTRIES:
            self[text] = escaped
        return escaped


class ChunkHeads(dict[int, bytes]):
    """What HTTP/1.1's chunked framing puts before so many bytes; remembered, as it is for every token."""

    MAX_REMEMBERED = 4096

    def __missing__(self, size: int) -> bytes:
        """Spell the size."""
        head = b"%x\r\n" % size
        if size < self.MAX_REMEMBERED:
            self[size] = head
        return head


class NoHeads(dict[int, bytes]):
    """The same for HTTP/1.0, which has no chunks."""

    def __missing__(self, size: int) -> bytes:
        """Give nothing."""
        return b""


def data_event(data: bytes) -> bytes:
    """Return an event as it is sent: OpenAI's completions and chat have no others."""
    return b"data: %b\n\n" % data


def named_event(name: bytes, data: bytes) -> bytes:
    """Return an event with a name, as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (name, data)


class ChunkRenderer(Protocol):
    """What one endpoint's stream looks like. Events are complete: made by `data_event` or `named_event`."""

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what stands before and after the text in an event with nothing but new text.

        None if a choice has no such event, or counts what it is given: then `events` is given all output.
        """

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output of a choice.

        Args:
            index: The choice, counted over all prompts of the call.
            is_first: Nothing of this choice was rendered before.
            usage: Counts so far, where every event is to have them.
        """

    def last_events(self, usages: Sequence[Usage]) -> list[bytes]:
        """Render what follows when all choices are done, `[DONE]` included.

        Args:
            usages: One per prompt.
        """

    def error(self, error: BaseException) -> bytes:
        """Render the event that ends a stream in failure."""


class StreamEnd(enum.Enum):
    """How a stream ended."""

    COMPLETE = enum.auto()
    FAILED = enum.auto()
    STALLED = enum.auto()


class EventStream:
    """One response's stream of events: framing, the client's pace, the end.

    Args:
        renderer: The endpoint's shapes.
        clock: Monotonic seconds.
        stall_timeout_s: Seconds without progress after which a client that is behind is given up.
    """

    def __init__(
        self, renderer: ChunkRenderer, *, clock: Callable[[], float], stall_timeout_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.renderer = renderer
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[StreamEnd] = loop.create_future()
        self.failure: BaseException | None = None
        self.takes_writes = False
        self._loop = loop
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._sinks: list[StreamSink] = []
        self._num_beginning = 0
        self._transport: asyncio.Transport | None = None
        self._heads: dict[int, bytes] = NoHeads()
        self._tail = b""
        self._end: StreamEnd | None = None
        self._unsent_bytes = 0
        self._progress_s = 0.0

    def add_sink(
        self, *, base_index: int, num_choices: int, wants_usage: bool, escaped: EscapedTexts
    ) -> "StreamSink":
        """Make the sink of one engine request, whose choices are numbered from `base_index`."""
        sink = StreamSink(
            self, base_index=base_index, num_choices=num_choices, wants_usage=wants_usage, escaped=escaped
        )
        self._sinks.append(sink)
        self._num_beginning += 1
        return sink

    def sink_begun(self) -> None:
        """Note that one more prompt is tokenized; `begun` is set when all are."""
        self._num_beginning -= 1
        if self._num_beginning == 0 and not self.begun.done():
            self.begun.set_result(None)

    def open(self, transport: asyncio.Transport, *, heads: ChunkHeads | None) -> None:
        """Start writing: the response's headers are out.

        Args:
            transport: The client's connection.
            heads: For HTTP/1.1, whose body comes in chunks; None for a bare body.
        """
        self._transport = transport
        if heads is not None:
            self._heads, self._tail = heads, b"\r\n"
        for sink in self._sinks:
            sink.make_frames(self._tail)
        self.takes_writes = True
        self._flush()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error event, or, while it is not open, only note the error."""
        self.note_failure(error)
        if self.takes_writes:
            self.take([])

    def note_failure(self, error: BaseException) -> None:
        """Keep the first error of the call: it ends the stream at the next write."""
        if self.failure is None and self._end is None:
            self.failure = error
            if not self.begun.done():
                self.begun.set_result(None)

    def write_text(self, before: bytes, text: bytes, after: bytes, frame_len: int) -> None:
        """Write one event with new text: the path of almost every token.

        Args:
            before: The event up to the text.
            after: The rest of the event, and of the chunk.
            frame_len: Bytes of the event without its text.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            self._finish(StreamEnd.FAILED)
            return
        transport.write(b"".join((self._heads[frame_len + len(text)], before, text, after)))
        if transport.get_write_buffer_size() > WRITE_HIGH_BYTES:
            self._fall_behind(transport.get_write_buffer_size())

    def write_events(self, events: Sequence[bytes]) -> None:
        """Write events at once."""
        transport = self._transport
        # uvloop raises on a closed transport, which would stop the writing of other streams.
        if transport is None or transport.is_closing():
            self._finish(StreamEnd.FAILED)
        elif events:
            body = b"".join(events)
            transport.write(b"".join((self._heads[len(body)], body, self._tail)))
            if transport.get_write_buffer_size() > WRITE_HIGH_BYTES:
                self._fall_behind(transport.get_write_buffer_size())

    def take(self, events: list[bytes]) -> None:
        """Write events and what follows from them: the error that came up, or the end of the call."""
        if self.failure is not None:
            self.write_events([*events, self.renderer.error(self.failure)])
            self._finish(StreamEnd.FAILED)
        elif all(sink.is_done for sink in self._sinks):
            last = self.renderer.last_events([sink.usage() for sink in self._sinks])
            self.write_events([*events, *last])
            self._finish(StreamEnd.COMPLETE)
        else:
            self.write_events(events)

    def close(self) -> None:
        """Take nothing more: the handler is done, or its client has left."""
        self.takes_writes = False
        self._end = self._end or StreamEnd.FAILED
        self._transport = None

    def _flush(self) -> None:
        """Write what piled up while the stream was not open or behind."""
        self.take([event for sink in self._sinks for event in sink.render_pending()])

    def _finish(self, end: StreamEnd) -> None:
        # A connection that is behind ends when it has drained: see _look_again.
        self._end = end
        if self.takes_writes and not self.ended.done():
            self.ended.set_result(end)
        self.takes_writes = False

    def _fall_behind(self, unsent_bytes: int) -> None:
        self.takes_writes = False
        self._unsent_bytes = unsent_bytes
        self._progress_s = self._clock()
        self._loop.call_later(BEHIND_POLL_S, self._look_again)

    def _look_again(self) -> None:
        transport = self._transport
        if transport is None or self.ended.done():
            return
        if transport.is_closing():
            self._end = StreamEnd.FAILED
            self.ended.set_result(self._end)
            return
        unsent_bytes = transport.get_write_buffer_size()
        now_s = self._clock()
        if unsent_bytes <= WRITE_LOW_BYTES:
            if self._end is not None:
                self.ended.set_result(self._end)
                return
            self.takes_writes = True
            try:
                self._flush()
            except BaseException:
                # Nobody is above us to end the request; its handler must not wait for ever.
                self._finish(StreamEnd.FAILED)
                raise
            return
        if unsent_bytes < self._unsent_bytes:
            self._unsent_bytes = unsent_bytes
            self._progress_s = now_s
        elif now_s - self._progress_s >= self._stall_timeout_s:
            self._end = StreamEnd.STALLED
            self.ended.set_result(StreamEnd.STALLED)
            return
        self._loop.call_later(BEHIND_POLL_S, self._look_again)


class StreamSink:
    """The `OutputSink` of one engine request on an `EventStream`; made by `EventStream.add_sink`."""

    def __init__(
        self,
        stream: EventStream,
        *,
        base_index: int,
        num_choices: int,
        wants_usage: bool,
        escaped: EscapedTexts,
    ) -> None:
        self.wants_usage = wants_usage
        self.prompt_token_ids: array[int] = array("i")
        self._stream = stream
        self._escaped = escaped
        self._base_index = base_index
        self._frames: list[tuple[bytes, bytes, int] | None] = [None] * num_choices
        self._has_started = [False] * num_choices
        self._pending: list[list[RequestOutput]] = [[] for _ in range(num_choices)]
        self._usages: list[Usage | None] = [None] * num_choices
        self._num_unfinished = num_choices

    @property
    def is_done(self) -> bool:
        """Whether the last output of every choice has been rendered."""
        return self._num_unfinished == 0

    def usage(self) -> Usage:
        """Return the counts of the whole request; valid when it is done."""
        return total_usage([usage for usage in self._usages if usage is not None])

    def make_frames(self, tail: bytes) -> None:
        """Prepare what stands around the text of each choice's events.

        Args:
            tail: What ends a chunk.
        """
        for index in range(len(self._pending)):
            frame = self._stream.renderer.frame(self._base_index + index)
            if frame is not None:
                before, after = frame
                self._frames[index] = (before, after + tail, len(before) + len(after))

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Take note of the tokenized prompt."""
        self.prompt_token_ids = prompt_token_ids
        self._stream.sink_begun()

    def put(self, output: RequestOutput) -> None:
        """Write new output, or keep it while the connection is behind."""
        index = output.index
        stream = self._stream
        if not stream.takes_writes:
            self._pending[index].append(output)
        elif (
            self._has_started[index]
            and (frame := self._frames[index]) is not None
            and output.finish_reason is None
            and output.logprobs is None
            and not self.wants_usage
        ):
            if output.text:
                before, after, frame_len = frame
                stream.write_text(before, self._escaped[output.text], after, frame_len)
        else:
            self._put_whole(index, output)

    def fail(self, error: BaseException) -> None:
        """End the whole stream: its other requests end with this one."""
        self._stream.fail(error)

    def render_pending(self) -> list[bytes]:
        """Render what was kept, as one output per choice."""
        events: list[bytes] = []
        for index, outputs in enumerate(self._pending):
            if outputs:
                self._pending[index] = []
                events += self._render(index, merge_all(outputs))
        return events

    def _put_whole(self, index: int, output: RequestOutput) -> None:
        events = self._render(index, output)
        if output.finish_reason is None:
            self._stream.write_events(events)
        else:
            self._stream.take(events)

    def _render(self, index: int, output: RequestOutput) -> list[bytes]:
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._stream.note_failure(output.error or EngineError("the request was aborted"))
            return []
        if output.finish_reason is not None:
            self._usages[index] = output.usage
            self._num_unfinished -= 1
        is_first = not self._has_started[index]
        if is_first and not output.token_ids and output.finish_reason is None:
            return []
        self._has_started[index] = True
        return self._stream.renderer.events(
            self._base_index + index,
            output,
            is_first=is_first,
            usage=output.usage if self.wants_usage else None,
        )
