"""The seam of output parsers: text of one choice in, reasoning, content and tool calls out.

A parser is fed the text of one choice in pieces and gives what is new in it. It decides on accumulated text,
never on where a piece ends: the deltas of any cutting of a text, joined, are those of the whole text. What
may still become a marker is held back until that is clear or `finish` is called. Pure: no JSON shapes of any
API, no asyncio, no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class ToolCallDelta:
    """News of one tool call.

    Args:
        index: Which call of the message, from 0.
        name: The function, in the first delta of the call; None in all others.
        arguments: New text of its arguments. Those of all deltas, joined, are one JSON object as text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """News of one message; empty where nothing is new."""

    reasoning: str = ""
    content: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str


@dataclass(slots=True)
class ParsedMessage:
    """A whole message: what the deltas add up to."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        """Take in what is new."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.tool_calls:
            if call.name is not None:
                self.tool_calls.append(ToolCall(call.name, call.arguments))
            else:
                self.tool_calls[call.index].arguments += call.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """The tools of a request and how they may be used.

    Args:
        tools: Each as `{"name": ..., "description": ..., "parameters": JSON schema, "strict": bool}`.
        mode: `none`, `auto`, `required` (one or more calls), or `named` (the tool called `name`, once).
        parallel: More than one call is allowed.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    mode: str = "none"
    name: str | None = None
    parallel: bool = True


class MessageParser(Protocol):
    """One choice's text on its way to a message."""

    def feed(self, text: str) -> MessageDelta:
        """Take more text and return what is certain by now."""

    def finish(self) -> MessageDelta:
        """Return what was held back: the text has ended. Nothing is fed afterwards."""
