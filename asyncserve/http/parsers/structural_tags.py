"""Structural tags, the shapes a grammar backend holds an output to, put together from parts.

A shape is what xgrammar's structural tag JSON says it is; here are short names for the kinds in use, and the
translation of a request's own structured output into such a shape, so that it can follow reasoning or stand
beside tool calls. A special token is no text to a grammar: markers that are special tokens are asked for as
tokens.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from asyncserve.request import StructuredOutput, StructureKind

Shape = dict[str, Any]

MAX_SPACE = 20
"""Most white space in a row between the tokens of JSON: small models write nothing else if they may."""

ANY_OBJECT: Shape = {"type": "object"}


def literal(text: str, special_tokens: Collection[str] = ()) -> Shape:
    """Return the shape of exactly this text, special tokens in it as tokens."""
    return sequence(*_literal_parts(text, special_tokens))


def _literal_parts(text: str, special_tokens: Collection[str]) -> list[Shape]:
    parts: list[Shape] = []
    while text or not parts:
        begins = [(text.index(token), -len(token), token) for token in special_tokens if token in text]
        begin, _, token = min(begins, default=(len(text), 0, ""))
        if begin or not token:
            parts.append({"type": "const_string", "value": text[:begin]})
        if token:
            parts.append({"type": "token", "token": token})
        text = text[begin + len(token) :]
    return parts


def sequence(*shapes: Shape) -> Shape:
    """Return the shape of these shapes, one after the other."""
    return shapes[0] if len(shapes) == 1 else {"type": "sequence", "elements": list(shapes)}


def any_of(*shapes: Shape) -> Shape:
    """Return the shape of any one of these."""
    return shapes[0] if len(shapes) == 1 else {"type": "or", "elements": list(shapes)}


def optional(shape: Shape) -> Shape:
    """Return the shape of nothing or this."""
    return {"type": "optional", "content": shape}


def star(shape: Shape) -> Shape:
    """Return the shape of this any number of times, or not at all."""
    return {"type": "star", "content": shape}


def regex(pattern: str) -> Shape:
    """Return the shape of what a regular expression matches."""
    return {"type": "regex", "pattern": pattern}


def json_value(schema: Any, *, is_strict: bool = False) -> Shape:
    """Return the shape of a JSON value after a schema, which is refused if it cannot be kept to strictly."""
    shape = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_SPACE}
    return {**shape, "strict": True} if is_strict else shape


def tag(begin: str, content: Shape, end: str, special_tokens: Collection[str] = ()) -> Shape:
    """Return the shape of a content between two texts, special tokens in them as tokens."""
    first, *others = _literal_parts(begin, special_tokens)
    parts = [*others, content]
    if any(token in end for token in special_tokens):
        # A tag ends with a bare text or one token; more than that is as well part of its content.
        parts += _literal_parts(end, special_tokens)
        end = ""
    return {"type": "tag", "begin": first.get("value", first), "content": sequence(*parts), "end": end}


def separated(tags: Sequence[Shape], separator: str, *, is_single: bool) -> Shape:
    """Return the shape of one or more tags and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def in_text(
    triggers: Sequence[str], tags: Sequence[Shape], *, is_single: bool, excludes: Sequence[str] = ()
) -> Shape:
    """Return the shape of free text in which each trigger, a text or a special token, begins a tag.

    What is excluded stands in none of the text around the tags.
    """
    is_token = not isinstance(tags[0]["begin"], str)
    return {
        "type": "token_triggered_tags" if is_token else "triggered_tags",
        "trigger_tokens" if is_token else "triggers": list(triggers),
        "exclude_tokens" if is_token else "excludes": list(excludes),
        "tags": list(tags),
        "stop_after_first": is_single,
    }


def until(end: str, special_tokens: Collection[str]) -> Shape:
    """Return the shape of free text that ends with `end`, which may be a special token."""
    if end in special_tokens:
        return sequence({"type": "any_tokens", "exclude_tokens": [end]}, literal(end, special_tokens))
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}


def shape_of(structured: StructuredOutput) -> Shape | None:
    """Return a structured output as a shape; None if its source is not what its kind asks for."""
    try:
        return _shape_of(structured)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _shape_of(structured: StructuredOutput) -> Shape | None:
    source = structured.source
    match structured.kind:
        case StructureKind.JSON_OBJECT:
            return json_value(ANY_OBJECT)
        case StructureKind.JSON_SCHEMA:
            return json_value(json.loads(source), is_strict=True)
        case StructureKind.REGEX:
            return regex(source)
        case StructureKind.CHOICE:
            return any_of(*map(literal, json.loads(source)))
        case StructureKind.GRAMMAR:
            syntax = "lark" if "::=" not in source and "start:" in source else "ebnf"
            return {"type": "grammar", "grammar": source, "syntax": syntax}
        case StructureKind.STRUCTURAL_TAG:
            shape = json.loads(source)["format"]
            return shape if isinstance(shape, dict) else None


def structural_tag(shape: Shape, *, param: str) -> StructuredOutput:
    """Return the structured output that a shape describes."""
    source = json.dumps({"type": "structural_tag", "format": shape}, ensure_ascii=False)
    return StructuredOutput(kind=StructureKind.STRUCTURAL_TAG, source=source, param=param)
