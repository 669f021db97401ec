"""From the JSON schema of a function's arguments to the shape of its keyword arguments in Python.

A grammar backend knows JSON schemas and no Python, so each property becomes `name=` and a JSON value; truth
values alone are asked for as Python writes them. Required arguments come first, in the schema's order, then
the optional ones, each at most once.
"""

import re
from collections.abc import Mapping
from typing import Any

from asyncserve.errors import InvalidRequest
from asyncserve.http.parsers.structural_tags import (
    Shape,
    any_of,
    json_value,
    literal,
    optional,
    regex,
    sequence,
    star,
)

MAX_FIRST = 8
"""So many optional arguments may be the first of a call without required ones."""

_IDENTIFIER = re.compile(r"[\w.:/-]+")
_ANY_KEY = "[A-Za-z_][A-Za-z0-9_]*"


def arguments_shape(schema: Any, *, is_strict: bool) -> Shape:
    """Return the shape of keyword arguments after a schema: the required ones first, each at most once.

    Raises:
        InvalidRequest: A required argument has a name that is none in Python.
    """
    schema = _resolved(schema)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        if schema.get("additionalProperties", properties is None) is False:
            return literal("")
        any_argument = sequence(regex(_ANY_KEY), literal("="), json_value(True))
        return optional(sequence(any_argument, star(sequence(literal(", "), any_argument))))
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = [name for name in schema.get("required", ()) if name in properties]
    names = required + [name for name in properties if name not in required]
    for name in required:
        if not _IDENTIFIER.fullmatch(name):
            raise InvalidRequest(
                f"the model writes calls as Python, which has no argument named {name[:100]!r}", param="tools"
            )
    names = [name for name in names if _IDENTIFIER.fullmatch(name)]
    shapes = [_argument_shape(name, properties[name], definitions, is_strict=is_strict) for name in names]
    if required:
        return sequence(shapes[0], *_further(shapes[1:], len(required) - 1))
    return optional(
        any_of(
            *(
                sequence(shapes[first], *_further(shapes[first + 1 :], 0))
                for first in range(min(len(shapes), MAX_FIRST))
            )
        )
    )


def _further(shapes: list[Shape], num_required: int) -> list[Shape]:
    """Return the shapes of arguments behind another one."""
    further = [sequence(literal(", "), shape) for shape in shapes]
    return further[:num_required] + [optional(shape) for shape in further[num_required:]]


def _argument_shape(name: str, schema: Any, definitions: Mapping[str, Any], *, is_strict: bool) -> Shape:
    value = schema
    if isinstance(schema, Mapping):
        if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
            return any_of(literal(f"{name}=True"), literal(f"{name}=False"))
        value = {**schema, **definitions}
    return sequence(literal(f"{name}="), json_value(value, is_strict=is_strict))


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that one made of a mere reference refers to."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target: Any = schema
    for part in reference[2:].split("/"):
        target = target.get(part, {}) if isinstance(target, Mapping) else {}
    return {**schema, **target} if isinstance(target, Mapping) else schema
