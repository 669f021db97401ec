"""Streamed answers: outputs of the engine become server-sent events, written straight to the connection.

No coroutine runs per token. Outputs come by `StreamSink.put`; texts of plain tokens come shorter still: an
`EventStream` is a lane of `token_path`, which the `Outbox` writes when it has enough. How many events go into
one write is `write_pacing`'s business; the first and the last go at once. The handler only awaits
`EventStream.ended`. A client that reads too slowly has its outputs merged until its connection drains; what
else becomes of it is `slow_reader`'s business. In a long silence, before the first event too, a stream is
kept alive.
An `EventStream` is one HTTP response; a `StreamSink` is one request in the engine; a completion call with
several prompts has several sinks on one stream. Shapes are the `ChunkRenderer`'s business.

While a stream is open nobody else may write to the response: aiohttp prepared its headers and ends its body.
"""

import asyncio
import dataclasses
import enum
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import orjson

from asyncserve.errors import EngineError
from asyncserve.http.connection import WRITE_HIGH_BYTES, WRITE_LOW_BYTES
from asyncserve.http.outbox import PacedStream
from asyncserve.http.slow_reader import SlowReader, Verdict
from asyncserve.http.write_pacing import WritePacer
from asyncserve.request import FinishReason, RequestOutput, TextSink, Usage, merge_all, total_usage
from asyncserve.token_path import NEVER, SocketHandle

BEHIND_POLL_S = 0.05
"""How often a connection that is behind is looked at."""


def escape_json(text: str) -> bytes:
    """Return a text as it stands in a JSON string, in UTF-8 and without the quotes."""
    return orjson.dumps(text)[1:-1]


class EscapedTexts(dict[str, bytes]):
    """JSON-escaped UTF-8 of token texts, without quotes. Texts repeat: most are one token's."""

    MAX_ENTRIES = 200_000
    MAX_TEXT_LEN = 32

    def __missing__(self, text: str) -> bytes:
        """Escape a text, and remember it if it is short."""
        escaped = escape_json(text)
        if len(text) <= self.MAX_TEXT_LEN and len(self) < self.MAX_ENTRIES:
            self[text] = escaped
        return escaped


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which no client takes for an event."""


def data_event(data: bytes) -> bytes:
    """Return an event as it is sent: OpenAI's completions and chat have no others."""
    return b"data: %b\n\n" % data


def named_event(name: bytes, data: bytes) -> bytes:
    """Return an event with a name, as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (name, data)


class ChunkRenderer(Protocol):
    """What one endpoint's stream looks like. Events are complete: made by `data_event` or `named_event`."""

    def first_events(self) -> list[bytes]:
        """Render what is sent before there is any output, when the prompts are known."""

    def keep_alive(self) -> bytes:
        """Render what means nothing, and may come at any time."""

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


class EventStream(PacedStream):
    """One response's stream of events: framing, the client's pace, the end.

    It is the lane of its choice, if it has but one: `texts` are events whose frame is not yet around them.
    What waits to be written is `held`, then `texts`.

    Args:
        renderer: The endpoint's shapes.
        clock: Monotonic seconds.
        stall_timeout_s: Seconds without progress after which a client that is behind is given up.
        pacer: Says when to write.
        keep_alive_s: Seconds without an event after which it is kept alive; 0 for never.
        on_pause: Told that the client does not read (true), and that it reads again (false).
    """

    # So many attributes that without slots each would be looked up in a table of the instance's own.
    __slots__ = (
        "_clock",
        "_end",
        "_event_end",
        "_is_paused",
        "_loop",
        "_num_beginning",
        "_num_held",
        "_on_pause",
        "_pacer",
        "_reader",
        "_sinks",
        "_socket",
        "_stall_timeout_s",
        "_tick",
        "_tick_s",
        "_transport",
        "begun",
        "due",
        "ended",
        "failure",
        "renderer",
        "takes_writes",
    )

    def __init__(
        self,
        renderer: ChunkRenderer,
        *,
        clock: Callable[[], float],
        stall_timeout_s: float,
        pacer: WritePacer,
        keep_alive_s: float = 0.0,
        on_pause: Callable[[bool], None] = lambda is_paused: None,
    ) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self.outbox = pacer.outbox
        self.renderer = renderer
        self.begun: asyncio.Future[None] = loop.create_future()
        self.due: asyncio.Future[None] = loop.create_future()
        """Set with `begun`, or when it is time for headers all the same, to keep the connection alive."""
        self.ended: asyncio.Future[StreamEnd] = loop.create_future()
        self.failure: BaseException | None = None
        self.takes_writes = False
        self._pacer = pacer
        self._event_end = b""
        self._num_held = 0
        self._loop = loop
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._sinks: list[StreamSink] = []
        self._num_beginning = 0
        self._transport: asyncio.Transport | None = None
        self._socket: SocketHandle | None = None  # `socket`, also while the transport has something unsent
        self._end: StreamEnd | None = None
        self._reader: SlowReader | None = None
        self._on_pause = on_pause
        self._is_paused = False
        # Two ticks make the interval: one alone would let a silence of two intervals pass.
        self._tick_s = keep_alive_s / 2
        self._tick: asyncio.TimerHandle | None = None
        if keep_alive_s > 0.0:
            self._tick = loop.call_later(self._tick_s, self._keep_alive)

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
        if self._num_beginning == 0:
            self._begin()

    def _begin(self) -> None:
        for future in (self.begun, self.due):
            if not future.done():
                future.set_result(None)

    @property
    def is_attached(self) -> bool:
        """Whether headers are out, so that a failure can only be told by an event."""
        return self._transport is not None

    def attach(
        self, transport: asyncio.Transport, handle: SocketHandle | None = None, *, is_chunked: bool
    ) -> None:
        """Keep the client's connection alive: the response's headers are out.

        Args:
            transport: The client's connection.
            handle: The socket below it, if texts may go there directly.
            is_chunked: The body comes in chunks, as HTTP/1.1's do.
        """
        self._transport = transport
        self._socket = handle
        self.is_chunked = is_chunked

    def open(
        self, transport: asyncio.Transport, handle: SocketHandle | None = None, *, is_chunked: bool
    ) -> None:
        """Start writing: everything has begun, or failed; as `attach`, which may have been called before."""
        self.attach(transport, handle, is_chunked=is_chunked)
        for sink in self._sinks:
            sink.make_frames()
        self.takes_writes = True
        self._flush([] if self.failure is not None else self.renderer.first_events())

    def set_frame(self, before: bytes, after: bytes) -> None:
        """Prepare for `texts`: what stands before and after each in its event."""
        self.before = before
        self.between = after + before
        self.after = after + b"\r\n" if self.is_chunked else after
        self._event_end = after

    @property
    def has_one_choice(self) -> bool:
        """Whether all its events are of one choice."""
        return len(self._sinks) == 1 and self._sinks[0].num_choices == 1

    @property
    def num_waiting(self) -> int:
        """Tokens, as far as they have a text, that are kept for the next write."""
        return self._num_held + len(self.texts) + sum(sink.num_pending for sink in self._sinks)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error event, or, while it is not open, only note the error."""
        self.note_failure(error)
        if self.takes_writes:
            self.take([])

    def note_failure(self, error: BaseException) -> None:
        """Keep the first error of the call: it ends the stream at the next write."""
        if self.failure is None and self._end is None:
            self.failure = error
            self._begin()

    def _write(self, data: bytes) -> bool:
        """Write through the transport; return whether the client is connected and not behind."""
        transport = self._transport
        # uvloop raises on a closed transport, which would stop the writing of other streams.
        if transport is None or transport.is_closing():
            self._finish(StreamEnd.FAILED)
            return False
        transport.write(data)
        num_unsent = transport.get_write_buffer_size()
        self.socket = None if num_unsent else self._socket
        if num_unsent > WRITE_HIGH_BYTES:
            self._fall_behind(num_unsent)
            return False
        return True

    def hold(self, events: Sequence[bytes], num_tokens: int) -> None:
        """Take events of so many tokens; they are written when it is time."""
        self._hold_texts()
        self.held += tuple(events)
        self._num_held += num_tokens
        if self.is_resting:
            return
        num_more = self._pacer.flush_len - self._num_held
        if num_more <= 0:
            self.write_events(())
        else:
            self.flush_len = num_more

    def end_rest(self) -> bool:
        """See `PacedStream`."""
        if not self.takes_writes:
            return False  # it is behind, or has ended
        if self.texts or self.held:
            self.outbox.append(self)
            return True
        self.flush_len = self._pacer.flush_len
        return False

    def write_rest(self, rest: bytes | None) -> None:
        """See `PacedStream`."""
        if rest is None:
            self.write_events(())
        elif self._write(rest):
            self._pacer.note_writes((self,), 0)

    def give_up(self) -> None:
        """See `PacedStream`."""
        # What was sent may end within a chunk: the client is to see that it is not all.
        if self._transport is not None:
            self._transport.abort()
        self._finish(StreamEnd.FAILED)

    def write_events(self, events: Sequence[bytes]) -> None:
        """Write at once what waits, and events behind it."""
        self._hold_texts()
        body = b"".join((*self.held, *events))
        num_tokens = max(self._num_held, len(events))
        self.held = ()
        self._num_held = 0
        self.flush_len = NEVER if self.is_resting else self._pacer.flush_len
        if not body:
            return
        self.num_quiet_ticks = 0
        if self._write(b"%x\r\n%b\r\n" % (len(body), body) if self.is_chunked else body):
            self._pacer.note_writes((self,), num_tokens)

    def _hold_texts(self) -> None:
        """Put events around the waiting texts: one for each, or one for all if the client is behind."""
        texts = self.texts
        if texts:
            body = (self.between if self.takes_writes else b"").join(texts)
            self.held += (self.before + body + self._event_end,)
            self._num_held += len(texts)
            texts.clear()

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
        self.flush_len = NEVER
        self.texts.clear()
        self.held = ()
        self._end = self._end or StreamEnd.FAILED
        self._transport = self._socket = self.socket = None
        if self._tick is not None:
            self._tick.cancel()

    def _flush(self, first_events: Sequence[bytes] = ()) -> None:
        """Write what piled up while the stream was not open or behind."""
        self.take([*first_events, *(event for sink in self._sinks for event in sink.render_pending())])

    def _keep_alive(self) -> None:
        """Send something if nothing was sent for the time of two ticks."""
        self._tick = self._loop.call_later(self._tick_s, self._keep_alive)
        self.num_quiet_ticks += 1
        if self.num_quiet_ticks < 2 or self._end is not None:
            return
        if self._transport is None:
            if not self.due.done():
                self.due.set_result(None)
        elif self.takes_writes or not self.begun.done():
            self.write_events((self.renderer.keep_alive(),))

    def _finish(self, end: StreamEnd) -> None:
        # A connection that is behind ends when it has drained: see _look_again.
        self._end = end
        if self.takes_writes and not self.ended.done():
            self.ended.set_result(end)
        self.takes_writes = False
        self.flush_len = NEVER

    def _fall_behind(self, unsent_bytes: int) -> None:
        self.takes_writes = False
        self.flush_len = NEVER
        self._reader = SlowReader(unsent_bytes, self._clock(), stall_timeout_s=self._stall_timeout_s)
        self._loop.call_later(BEHIND_POLL_S, self._look_again)

    def _look_again(self) -> None:
        transport, reader = self._transport, self._reader
        if transport is None or reader is None or self.ended.done():
            return
        if transport.is_closing():
            self._end = StreamEnd.FAILED
            self.ended.set_result(self._end)
            return
        unsent_bytes = transport.get_write_buffer_size()
        if unsent_bytes <= WRITE_LOW_BYTES:
            if self._end is not None:
                self.ended.set_result(self._end)
                return
            self._hold_texts()  # as one event, while it is still behind
            self.takes_writes = True
            try:
                self._flush()
            except BaseException:
                # Nobody is above us to end the request; its handler must not wait for ever.
                self._finish(StreamEnd.FAILED)
                raise
            if self._is_paused and self.takes_writes:
                self._is_paused = False
                self._on_pause(False)
            return
        verdict = reader.verdict(unsent_bytes, self.num_waiting, self._clock())
        if verdict is Verdict.GIVE_UP:
            self._end = StreamEnd.STALLED
            self.ended.set_result(StreamEnd.STALLED)
            return
        if verdict is Verdict.PAUSE and not self._is_paused:
            self._is_paused = True
            self._on_pause(True)
        self._loop.call_later(BEHIND_POLL_S, self._look_again)


class StreamSink(TextSink):
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
        self.num_choices = num_choices
        self.prompt_token_ids: array[int] = array("i")
        self._stream = stream
        self._escaped = escaped
        self._base_index = base_index
        self._frames: list[tuple[bytes, bytes] | None] = [None] * num_choices
        self._has_started = [False] * num_choices
        self._pending: list[list[RequestOutput]] = [[] for _ in range(num_choices)]
        self._usages: list[Usage | None] = [None] * num_choices
        self._num_unfinished = num_choices

    @property
    def is_done(self) -> bool:
        """Whether the last output of every choice has been rendered."""
        return self._num_unfinished == 0

    @property
    def num_pending(self) -> int:
        """Outputs kept while the stream takes no writes."""
        return sum(map(len, self._pending))

    def usage(self) -> Usage:
        """Return the counts of the whole request; valid when it is done."""
        return total_usage([usage for usage in self._usages if usage is not None])

    def make_frames(self) -> None:
        """Prepare what stands around the text of each choice's events."""
        for index in range(self.num_choices):
            frame = self._stream.renderer.frame(self._base_index + index)
            self._frames[index] = frame
            if frame is not None and self._stream.has_one_choice:
                self._stream.set_frame(*frame)

    @staticmethod
    def encode(text: str) -> bytes:
        """Return a text as it stands in the events; see `TextSink`."""
        return escape_json(text)

    def lane(self, index: int) -> EventStream | None:
        """Return the stream while it can be given bare texts; see `TextSink`."""
        stream = self._stream
        if (
            stream.takes_writes
            and stream.has_one_choice
            and self._has_started[index]
            and self._frames[index] is not None
            and not self.wants_usage
        ):
            return stream
        return None

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Take note of the tokenized prompt."""
        self.prompt_token_ids = prompt_token_ids
        self._stream.sink_begun()

    def put(self, output: RequestOutput) -> None:
        """Write new output, or keep it while it is not time or the connection is behind."""
        index = output.index
        stream = self._stream
        if not stream.takes_writes:
            self._pending[index].append(output)
            return
        if not self._has_started[index] or output.finish_reason is not None:
            stream.take(self._render(index, output))
        elif (frame := self._frames[index]) is not None and output.logprobs is None and not self.wants_usage:
            if output.text:
                before, after = frame
                stream.hold((before + self._escaped[output.text] + after,), len(output.token_ids))
        else:
            stream.hold(self._render(index, output), len(output.token_ids))

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

    def _render(self, index: int, output: RequestOutput) -> list[bytes]:
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._stream.note_failure(output.error or EngineError("the request was aborted"))
            if not output.text:
                return []
            # It came before the failure, and was kept while the connection was behind.
            output = dataclasses.replace(output, finish_reason=None)
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
