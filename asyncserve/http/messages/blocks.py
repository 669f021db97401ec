"""The text of an answer → Anthropic's content blocks, as steps: a block begins, grows, ends.

Both forms of an answer are made from the same steps, so that a stream adds up to the answer in one piece. One
block is open at a time; a change of kind, or another tool call, ends it and begins the next. A call is held
until its input is there and known to be an object; what the model wrote wrongly is text. Tools that are eager
are not held: what the model writes goes out as it comes. An answer without anything is one empty text block.
"""

import json
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from asyncserve.http.messages.partial_json import is_object, partial_object
from asyncserve.http.parsers.interface import MessageDelta, MessageParser

Kind = Literal["thinking", "text", "tool_use"]

_PIECE = re.compile(r"[^>}\])]*[>}\])]|[^>}\])]+")
"""Text up to a character that may end a tool call. A delta does not tell whether its content came before or
after its calls; fed in such pieces, a parser gives no content behind a call in the same delta."""


@dataclass(slots=True)
class BlockStep:
    """One thing that happens to one block.

    Args:
        index: Which block of the answer.
        kind: What the block is.
        text: What is new in it; None where it begins or ends.
        ends: The block is complete.
        name: The tool, where a call begins.
        call_id: The call's id, where it begins.
    """

    index: int
    kind: Kind
    text: str | None = None
    ends: bool = False
    name: str = ""
    call_id: str = ""


class BlockWriter:
    """Text of one answer on its way to blocks.

    Args:
        parser: Tells reasoning, text and tool calls apart; None if all is text.
        shows_thinking: The text of reasoning is shown; else its blocks are empty.
        eager_tools: Tools whose input is given as it comes: something else sees to its being an object, or
            the client wants it that way.
    """

    def __init__(
        self,
        parser: MessageParser | None,
        *,
        shows_thinking: bool = True,
        eager_tools: Collection[str] = (),
    ) -> None:
        self.num_calls = 0
        self._parser = parser
        self._shows_thinking = shows_thinking
        self._eager_tools = eager_tools
        self._index = -1
        self._kind: Kind | None = None
        self._held_name: str | None = None
        self._held_input: list[str] = []

    def open_text(self) -> Iterator[BlockStep]:
        """Begin a block of text before there is any."""
        yield from self._turn_to("text")

    def feed(self, text: str) -> Iterator[BlockStep]:
        """Take new text."""
        if self._parser is None:
            yield from self._add("text", text)
            return
        for piece in _PIECE.findall(text):
            yield from self._take(self._parser.feed(piece))

    def finish(self, *, is_cut: bool) -> Iterator[BlockStep]:
        """Take note that the text has ended.

        Args:
            is_cut: Something else than the model ended it, perhaps within a call.
        """
        if self._parser is not None:
            yield from self._take(self._parser.finish())
        yield from self._release(is_cut=is_cut)
        if self._index < 0:
            yield from self._turn_to("text")
        yield from self._end_block()

    def _take(self, delta: MessageDelta) -> Iterator[BlockStep]:
        if delta.reasoning:
            yield from self._add("thinking", delta.reasoning)
        if delta.content:
            yield from self._add("text", delta.content)
        for call in delta.tool_calls:
            if call.name is not None:
                yield from self._release(is_cut=False)
                if call.name in self._eager_tools:
                    yield from self._begin_call(call.name)
                else:
                    self._held_name = call.name
            if self._held_name is not None:
                self._held_input.append(call.arguments)
            elif call.arguments:
                yield BlockStep(self._index, "tool_use", call.arguments)

    def _add(self, kind: Literal["thinking", "text"], text: str) -> Iterator[BlockStep]:
        if not text:
            return
        yield from self._turn_to(kind)
        if kind == "text" or self._shows_thinking:
            yield BlockStep(self._index, kind, text)

    def _turn_to(self, kind: Literal["thinking", "text"]) -> Iterator[BlockStep]:
        yield from self._release(is_cut=False)
        if self._kind != kind:
            yield from self._end_block()
            yield self._begin(kind)

    def _release(self, *, is_cut: bool) -> Iterator[BlockStep]:
        """Give the call that is held, if there is one: it has ended."""
        if self._held_name is None:
            return
        name, written = self._held_name, "".join(self._held_input)
        self._held_name = None
        self._held_input.clear()
        text = _checked_input(written, is_cut=is_cut)
        if text is None:
            as_written = f'{{"name": {json.dumps(name)}, "arguments": {written}'
            yield from self._add("text", as_written)
            return
        yield from self._begin_call(name)
        yield BlockStep(self._index, "tool_use", text)

    def _begin_call(self, name: str) -> Iterator[BlockStep]:
        yield from self._end_block()
        self.num_calls += 1
        yield self._begin("tool_use", name=name, call_id=f"toolu_{uuid.uuid4().hex[:24]}")

    def _begin(self, kind: Kind, *, name: str = "", call_id: str = "") -> BlockStep:
        self._index += 1
        self._kind = kind
        return BlockStep(self._index, kind, name=name, call_id=call_id)

    def _end_block(self) -> Iterator[BlockStep]:
        if self._kind is not None:
            yield BlockStep(self._index, self._kind, ends=True)
            self._kind = None


def _checked_input(written: str, *, is_cut: bool) -> str | None:
    """Return a call's input as the text of a JSON object; None if the model wrote none.

    Args:
        is_cut: The end may be missing: then what is complete counts.
    """
    if not written:
        return "{}"
    if is_object(written):
        return written
    partial = partial_object(written) if is_cut else None
    return None if partial is None else json.dumps(partial)
