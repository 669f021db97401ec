"""How one model family writes tool calls, as one value: its parser, its markers, and the shapes of its calls.

`CallShapes` is what a grammar needs to know of a format; from it come the shape of an answer that must call
tools and of free text in which a call must fit its tool. The formats themselves are in the modules named
after them.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncserve.http.parsers.call_text import CallTextParser
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.structural_tags import (
    ANY_OBJECT,
    Shape,
    in_text,
    json_value,
    separated,
    tag,
)

Tool = Mapping[str, Any]


class ArgumentsShape(Protocol):
    """Gives the shape of arguments."""

    def __call__(self, schema: Any, *, is_strict: bool) -> Shape:
        """Return the shape of arguments after a schema, to be kept to strictly or as far as can be."""


_ROOT_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShapes:
    """How calls look: `opening call separator call … closing`, a call being `begin arguments end`.

    Args:
        begin: What a call begins with, by the function's name.
        arguments: Gives the shape of the arguments, by their schema.
        end: What a call ends with.
        trigger: What makes free text a call; None if only the whole beginning of a call does.
    """

    begin: Callable[[str], str]
    end: str
    trigger: str | None
    arguments: ArgumentsShape = json_value
    opening: str = ""
    separator: str = ""
    closing: str = ""

    def calls(self, tools: Sequence[Tool], special_tokens: Collection[str], *, is_single: bool) -> Shape:
        """Return the shape of one or more calls (just one, if `is_single`), and nothing else."""
        tags = [self._tag(tool, arguments_schema(tool), special_tokens) for tool in tools]
        calls = separated(tags, self.separator, is_single=is_single)
        return tag(self.opening, calls, self.closing, special_tokens) if self.opening else calls

    def text(
        self,
        tools: Sequence[Tool],
        special_tokens: Collection[str],
        *,
        is_single: bool,
        excludes: Sequence[str] = (),
    ) -> Shape:
        """Return the shape of free text in which the calls of strict tools fit their schema.

        Args:
            tools: That may be called; of those that are not strict, any object will do.
            special_tokens: Markers that are special tokens.
            is_single: Allow one call.
            excludes: Special tokens that are no part of the text, such as those around reasoning: where two
                shapes allow one special token, the backend may lose one of them.
        """
        schemas = [arguments_schema(tool) if tool.get("strict") else ANY_OBJECT for tool in tools]
        pairs = list(zip(tools, schemas, strict=True))
        if self.trigger is None:
            # One call in each list: to allow all others after each would write every schema as often.
            triggers = [self.opening + self.begin(tool["name"]) for tool in tools]
            tags = [self._tag(tool, schema, (), self.opening, self.closing) for tool, schema in pairs]
            return in_text(triggers, tags, is_single=is_single, excludes=excludes)
        tags = [self._tag(tool, schema, special_tokens) for tool, schema in pairs]
        if self.opening:
            calls = separated(tags, self.separator, is_single=is_single)
            tags = [tag(self.opening, calls, self.closing, special_tokens)]
        return in_text([self.trigger], tags, is_single=is_single, excludes=excludes)

    def _tag(
        self, tool: Tool, schema: Any, special_tokens: Collection[str], opening: str = "", closing: str = ""
    ) -> Shape:
        begin = opening + self.begin(tool["name"])
        arguments = self.arguments(schema, is_strict=bool(tool.get("strict")))
        return tag(begin, arguments, self.end + closing, special_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls.

    Args:
        parser: Makes the parser of one choice.
        markers: Texts without which no call is seen; the output must show them if they are special tokens.
        shapes: What a grammar holds calls to.
        call_id_len: Chat templates of the family take only ids of so many letters and digits; None if any
            id will do.
    """

    parser: Callable[[ToolChoice], CallTextParser]
    markers: tuple[str, ...]
    shapes: CallShapes
    call_id_len: int | None = None


def arguments_schema(tool: Tool) -> Any:
    """Return the schema of a tool's arguments, which allows nothing but objects; any if it has none."""
    schema = tool.get("parameters")
    if not isinstance(schema, Mapping) or not schema:
        return ANY_OBJECT
    if schema.get("type") == "object" or any(key in schema for key in _ROOT_ALTERNATIVES):
        return dict(schema)
    return {**schema, "type": "object"}


def quoted(name: str) -> str:
    """Return a name as JSON writes it."""
    return json.dumps(name, ensure_ascii=False)
