"""What a response looks like: the text of one choice → output items, typed events, the response object.

A `ResponseWriter` is fed the engine's outputs and is the only thing that knows items, events and statuses,
so that an answer in one piece, a stream and a response that runs in the background say the same.
`ResponseEvents` lets it write a stream (a `ChunkRenderer`). Items come in the order in which the model wrote
them; where the text is cut makes no difference. Knows neither the engine nor the store.
"""

import codecs
import re
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from asyncserve.errors import DeadlineExceeded, Overloaded, RequestError
from asyncserve.http.failures import failure_of
from asyncserve.http.logprobs import TokenTexts, chat_content
from asyncserve.http.parsers.interface import MessageDelta, MessageParser, ToolCallDelta
from asyncserve.http.reasoning_tokens import ReasoningCount
from asyncserve.http.sse import KEEP_ALIVE, named_event
from asyncserve.http.tools import new_call_id
from asyncserve.request import FinishReason, RequestOutput, TokenLogprobs, Usage

MESSAGE, REASONING, FUNCTION_CALL = "message", "reasoning", "function_call"
FUNCTION_CALL_OUTPUT = "function_call_output"
ID_PREFIXES: Mapping[str, str] = {
    MESSAGE: "msg",
    REASONING: "rs",
    FUNCTION_CALL: "fc",
    FUNCTION_CALL_OUTPUT: "fco",
}
"""Type of an item to what its id begins with."""

_PIECES = re.compile(r"[<>\[\]{}|]|[^<>\[\]{}|]+")
"""A parser's deltas have no order among content and calls. No marker begins or ends within such a piece, so
what one piece gives is in order."""


def new_id(prefix: str) -> str:
    """Return an id nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a part of a message with text that the model wrote."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written.

    Args:
        index: Its place in the output.
        texts: All its text (of a call: its arguments), in pieces.
        unshown: Text that no event has shown yet.
        logprobs: All entries, as JSON.
        unshown_logprobs: Entries that no event has shown yet.
    """

    kind: str
    index: int
    id: str
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    unshown: list[str] = field(default_factory=list)
    logprobs: list[orjson.Fragment] = field(default_factory=list)
    unshown_logprobs: list[orjson.Fragment] = field(default_factory=list)

    def added(self) -> dict[str, Any]:
        """Return the item as it begins."""
        return self._shown("in_progress", "", [])

    def whole(self, status: str) -> dict[str, Any]:
        """Return the item with all it has."""
        return self._shown(status, "".join(self.texts), [self.part("".join(self.texts), self.logprobs)])

    def part(self, text: str = "", logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the one part that a message and reasoning have."""
        if self.kind == MESSAGE:
            return text_part(text, logprobs)
        return {"type": "reasoning_text", "text": text}

    def _shown(self, status: str, text: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "message":
                return {**item, "role": "assistant", "content": parts}
            case "reasoning":
                return {**item, "summary": [], "content": parts, "encrypted_content": None}
            case _:
                return {**item, "arguments": text, "call_id": self.call_id, "name": self.name}


class ResponseWriter:
    """One response, from its beginning to its end.

    Methods that write return the new events, complete frames of an event stream; none if `writes_events` is
    false. `begin` comes first, then `feed` for every output, then one of `complete`, `fail` and `cancel`.

    Args:
        facts: What is known of the response before it begins.
        parser: Finds reasoning and tool calls; None if all text is content.
        texts: The tokens' texts.
        gives_logprobs: Messages hold the log-probabilities of their tokens.
        skips_special: Special tokens have no text.
        reasoning_count: Counts tokens of reasoning exactly. Without it, those count whose text comes before
            that of the next item.
        writes_events: Whether there is somebody to read them.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        *,
        parser: MessageParser | None,
        texts: TokenTexts,
        gives_logprobs: bool = False,
        skips_special: bool = True,
        reasoning_count: ReasoningCount | None = None,
        writes_events: bool = True,
    ) -> None:
        self.status = "queued"
        self.has_begun = False
        self.num_bytes = 0
        """What was written takes so much memory, without small change."""
        self._facts = facts
        self._parser = parser
        self._texts = texts
        self._gives_logprobs = gives_logprobs
        self._skips_special = skips_special
        self._reasoning_count = reasoning_count
        self._writes_events = writes_events
        self._frames: list[bytes] = []
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._blank = ""
        """White space that becomes content only if content follows."""
        self._finish: FinishReason | None = None
        self._error: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None
        self._completed_at: int | None = None

        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: deque[tuple[int, TokenLogprobs | None]] = deque()
        """Tokens that no item has yet: where their text ends, and their entry."""
        self._tokens_end = 0
        self._num_read = 0
        self._unplaced: list[TokenLogprobs | None] = []
        """Tokens read before the first item began."""
        self._num_reasoning_tokens = 0

    # ---- what is written -------------------------------------------------------------------------------

    def begin(self, *, is_queued: bool = False) -> list[bytes]:
        """Announce the response.

        Args:
            is_queued: It waits; `progress` is to be called when it no longer does.
        """
        self.has_begun = True
        self.status = "queued" if is_queued else "in_progress"
        self._lifecycle_event("response.created")
        if is_queued:
            self._lifecycle_event("response.queued")
            return self._taken()
        self._lifecycle_event("response.in_progress")
        return self._taken()

    def progress(self) -> list[bytes]:
        """Take note that a queued response is being made."""
        if self.status == "queued":
            self.status = "in_progress"
            self._lifecycle_event("response.in_progress")
        return self._taken()

    def feed(self, output: RequestOutput) -> list[bytes]:
        """Take more output; with its finish reason, items are closed."""
        if self._reasoning_count is not None:
            self._reasoning_count.take(output.token_ids)
        if self._parser is None:
            if output.text or output.logprobs:
                self._add_text(MESSAGE, output.text)
                self._give_logprobs(output.logprobs or ())
        else:
            self._note_tokens(output)
            for delta in self._read(output.text):
                self._take(delta)
            if output.finish_reason is not None:
                for _, entry in self._tokens:
                    self._place(entry)
                self._tokens.clear()
                self._take(self._parser.finish())
        if output.finish_reason is not None:
            self._finish = output.finish_reason
            if self._open is None and not self._items:
                # An answer without a word is an empty message.
                self._add_text(MESSAGE, self._blank)
            self._close("incomplete" if output.finish_reason is FinishReason.LENGTH else "completed")
        else:
            self._show()
        return self._taken()

    def complete(self, usage: Usage) -> list[bytes]:
        """End the response: everything has been fed."""
        is_cut = self._finish is FinishReason.LENGTH
        self.status = "incomplete" if is_cut else "completed"
        self._completed_at = None if is_cut else int(time.time())
        num_reasoning_tokens = self._num_reasoning_tokens
        if self._reasoning_count is not None:
            num_reasoning_tokens = self._reasoning_count.num_tokens
        self._usage = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }
        self._lifecycle_event(f"response.{self.status}")
        return self._taken()

    def fail(self, error: BaseException) -> list[bytes]:
        """End the response with an error."""
        begun = [] if self.has_begun else self.begin()
        failure = failure_of(error)
        code = "server_error"
        if isinstance(error, RequestError) and not isinstance(error, DeadlineExceeded):
            code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "invalid_prompt"
        self._close("incomplete")
        self.status = "failed"
        self._error = {"code": code, "message": failure.message, "param": failure.param, "type": failure.kind}
        self._event("error", code=failure.code or code, message=failure.message, param=failure.param)
        self._lifecycle_event("response.failed")
        return begun + self._taken()

    def cancel(self) -> list[bytes]:
        """End the response as its client wants it; no event tells of that."""
        self._close("incomplete")
        self.status = "cancelled"
        return self._taken()

    def response(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        output = self._items
        if self._open is not None:
            output = [*self._items, self._open.whole("in_progress")]
        return {
            **self._facts,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": output,
            "usage": self._usage,
        }

    # ---- items -----------------------------------------------------------------------------------------

    def _take(self, delta: MessageDelta) -> None:
        if delta.reasoning:
            self._add_text(REASONING, delta.reasoning)
        if delta.content:
            self._add_content(delta.content)
        for call in delta.tool_calls:
            self._add_call(call)

    def _add_content(self, text: str) -> None:
        """Add content that a parser has found: space around calls and reasoning is none."""
        if self._open is not None and self._open.kind == MESSAGE:
            self._add_text(MESSAGE, text)
        elif text.isspace():
            self._blank += text
        else:
            self._add_text(MESSAGE, self._blank + text)

    def _add_text(self, kind: str, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin_item(kind)
        self._write(text)

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.name is not None:
            self._begin_item(FUNCTION_CALL, name=call.name)
        self._write(call.arguments)

    def _write(self, text: str) -> None:
        assert self._open is not None
        if text:
            self.num_bytes += sys.getsizeof(text)
            self._open.texts.append(text)
            self._open.unshown.append(text)

    def _begin_item(self, kind: str, *, name: str = "") -> None:
        is_first = self._open is None and not self._items
        self._close("completed")
        self._blank = ""
        item = _OpenItem(kind, len(self._items), new_id(ID_PREFIXES[kind]), name)
        if kind == FUNCTION_CALL:
            item.call_id = new_call_id()
        self._open = item
        self._event("response.output_item.added", output_index=item.index, item=item.added())
        if kind != FUNCTION_CALL:
            self._part_event("response.content_part.added", item, item.part())
        if is_first:
            unplaced, self._unplaced = self._unplaced, []
            for entry in unplaced:
                self._place(entry)

    def _show(self) -> None:
        """Write an event with what is new in the open item."""
        item = self._open
        if item is None or not (item.unshown or item.unshown_logprobs):
            return
        new, item.unshown = "".join(item.unshown), []
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        match item.kind:
            case "message":
                logprobs, item.unshown_logprobs = item.unshown_logprobs, []
                self._event(
                    "response.output_text.delta", **where, content_index=0, delta=new, logprobs=logprobs
                )
            case "reasoning":
                self._event("response.reasoning_text.delta", **where, content_index=0, delta=new)
            case _:
                self._event("response.function_call_arguments.delta", **where, delta=new)

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        self._show()
        self._open = None
        whole = item.whole(status)
        self._items.append(whole)
        text = "".join(item.texts)
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        match item.kind:
            case "message":
                self._event(
                    "response.output_text.done", **where, content_index=0, text=text, logprobs=item.logprobs
                )
            case "reasoning":
                self._event("response.reasoning_text.done", **where, content_index=0, text=text)
            case _:
                self._event("response.function_call_arguments.done", **where, name=item.name, arguments=text)
        if item.kind != FUNCTION_CALL:
            self._part_event("response.content_part.done", item, item.part(text, item.logprobs))
        self._event("response.output_item.done", output_index=item.index, item=whole)

    # ---- tokens ----------------------------------------------------------------------------------------

    def _note_tokens(self, output: RequestOutput) -> None:
        """Find out where each token's text ends: it says which item a token belongs to."""
        entries = output.logprobs or (None,) * len(output.token_ids)
        for token_id, entry in zip(output.token_ids, entries, strict=True):
            if not (self._skips_special and self._texts.is_special(token_id)):
                self._tokens_end += len(self._decoder.decode(bytes(self._texts[token_id][1])))
            self._tokens.append((self._tokens_end, entry))

    def _read(self, text: str) -> Iterator[MessageDelta]:
        """Yield what the parser finds, one piece after the other; each ends where a token or marker does."""
        assert self._parser is not None
        start, at = self._num_read, 0
        self._place_read()
        while at < len(text):
            end = len(text)
            if self._tokens:
                end = min(end, self._tokens[0][0] - start)
            for piece in _PIECES.findall(text[at:end]):
                yield self._parser.feed(piece)
            at = end
            self._num_read = start + at
            self._place_read()

    def _place_read(self) -> None:
        """Give tokens whose text has been read to the item that is open."""
        while self._tokens and self._tokens[0][0] <= self._num_read:
            self._place(self._tokens.popleft()[1])

    def _place(self, entry: TokenLogprobs | None) -> None:
        if self._open is None:
            self._unplaced.append(entry)
        elif self._open.kind == REASONING:
            self._num_reasoning_tokens += 1
        elif self._open.kind == MESSAGE and entry is not None:
            self._give_logprobs((entry,))

    def _give_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        if self._gives_logprobs and entries and self._open is not None:
            # Bytes, because they are written several times: with the delta, and with all that ends.
            written = [orjson.dumps(entry) for entry in chat_content(entries, self._texts)]
            self.num_bytes += sum(map(sys.getsizeof, written))
            shown = list(map(orjson.Fragment, written))
            self._open.logprobs += shown
            self._open.unshown_logprobs += shown

    # ---- events ----------------------------------------------------------------------------------------

    def _lifecycle_event(self, kind: str) -> None:
        if self._writes_events:
            self._event(kind, response=self.response())

    def _part_event(self, kind: str, item: _OpenItem, part: Mapping[str, Any]) -> None:
        self._event(kind, item_id=item.id, output_index=item.index, content_index=0, part=part)

    def _event(self, kind: str, **fields: Any) -> None:
        if self._writes_events:
            body = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
            self._frames.append(named_event(kind.encode(), body))
            self._num_events += 1

    def _taken(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        return frames


class ResponseEvents:
    """A response as a stream of events; a `ChunkRenderer`.

    Args:
        writer: Of the response, not yet begun.
        on_complete: Told when the response is complete, before the client can know.
        shown_error: Puts an error in the client's terms.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        *,
        on_complete: Callable[[], None],
        shown_error: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        self._writer = writer
        self._on_complete = on_complete
        self._shown_error = shown_error

    def first_events(self) -> list[bytes]:
        """Announce the response."""
        return self._writer.begin()

    def keep_alive(self) -> bytes:
        """Return a comment: an event would need a number."""
        return KEEP_ALIVE

    def frame(self, index: int) -> None:
        """Return nothing: every event has a number of its own."""
        return

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output."""
        return self._writer.feed(output)

    def last_events(self, usages: Sequence[Usage]) -> list[bytes]:
        """Render the end; there is no `[DONE]`."""
        [usage] = usages
        events = self._writer.complete(usage)
        self._on_complete()
        return events

    def error(self, error: BaseException) -> bytes:
        """Render the events that end a stream in failure."""
        return b"".join(self._writer.fail(self._shown_error(error)))
