"""Which JSON schemas an output can be held to, exactly: the check before a schema is compiled.

The library that compiles schemas enforces most keywords, passes over some and lets others change what their
neighbours mean, mostly without a word. An output that does not satisfy its schema is worse than a refusal, so
what cannot be enforced is refused here, with the keyword and its place. Takes a schema as JSON text, gives it
in the form to be compiled. Knows nothing of tokens; what the compiler itself refuses is not repeated here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_DEPTH = 64
"""Schemas nested deeper are refused: compiling recurses."""
MAX_SCHEMAS = 20_000
"""Schemas with more subschemas than this are refused."""

UNENFORCED = (
    "contains",
    "minContains",
    "maxContains",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "additionalItems",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that nothing enforces, whatever their value (`uniqueItems` may be false)."""

_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$vocabulary",
        "$defs",
        "definitions",
    )
)
"""Keywords that assert nothing about a value. So do names that JSON schema does not define."""

_OF_TYPE: Mapping[str, Sequence[str]] = {
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_TYPE_OF = {keyword: kind for kind, keywords in _OF_TYPE.items() for keyword in keywords}
_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_ASSERTIONS = frozenset((*_TYPE_OF, *_COMBINERS, *UNENFORCED, "type"))
_MAX_INTEGER = 2**63 - 1

Schema = dict[str, Any]


class SchemaRefused(ValueError):
    """The schema is none, or outputs cannot be held to it; says what and where."""


def enforceable_schema(source: str) -> str:
    """Return the schema as it is to be compiled: it allows nothing that `source` does not.

    What it does besides checking is to write out what JSON schema leaves to be inferred: a type that only
    some keywords speak of, a property that is required but not declared.

    Raises:
        SchemaRefused: It is no JSON schema, or holds something that cannot be enforced.
    """
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise SchemaRefused(f"the schema is no JSON: {error}") from error
    if isinstance(schema, Mapping) and not schema:
        schema = True
    for count, (place, each) in enumerate(_walk(schema)):
        if count >= MAX_SCHEMAS:
            raise SchemaRefused(f"the schema has more than {MAX_SCHEMAS} subschemas")
        if isinstance(each, dict):
            _check(each, place)
        elif not isinstance(each, bool):
            raise SchemaRefused(f"{place} is no schema but {_shown(each)}")
    return json.dumps(schema)


def _walk(schema: object) -> Iterator[tuple[str, Any]]:
    """Give every subschema with its place, outer ones first; inner ones may be changed meanwhile."""
    todo: list[tuple[str, Any, int]] = [("the schema", schema, 0)]
    while todo:
        place, each, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise SchemaRefused(f"the schema is nested more than {MAX_DEPTH} deep")
        if not isinstance(each, dict):
            yield place, each
            continue
        for keyword, value in each.items():
            if keyword in _MAPS and not isinstance(value, dict):
                raise SchemaRefused(f"{place}.{keyword} is not an object")
            if keyword in _LISTS and not isinstance(value, list):
                raise SchemaRefused(f"{place}.{keyword} is not a list")
        yield place, each
        for keyword, value in each.items():
            below = f"{place}.{keyword}"
            if keyword in _MAPS:
                todo += [(f"{below}.{name[:64]}", inner, depth + 1) for name, inner in value.items()]
            elif keyword in _LISTS:
                todo += [(f"{below}[{index}]", inner, depth + 1) for index, inner in enumerate(value)]
            elif keyword in _SINGLE:
                todo.append((below, value, depth + 1))


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")


def _check(schema: Schema, place: str) -> None:
    """Refuse what one schema, its subschemas left aside, asks for in vain; write out what it implies."""
    for keyword in UNENFORCED:
        if keyword in schema:
            _refuse(keyword, place, "is not supported")
    if schema.get("uniqueItems"):
        _refuse("uniqueItems", place, "is not supported")
    if "$id" in schema and place != "the schema":
        _refuse("$id", place, "is only supported at the top")
    combiner = next((keyword for keyword in _COMBINERS if keyword in schema), None)
    if combiner is not None:
        _check_combiner(schema, combiner, place)
        return
    _infer_type(schema, place)
    _check_object(schema, place)
    if "pattern" in schema:
        for other in ("minLength", "maxLength", "format"):
            if other in schema:
                _refuse(other, place, "is not supported together with pattern")
        check_pattern(schema["pattern"], f"{place}.pattern")
    if "format" in schema:
        for other in ("minLength", "maxLength"):
            if other in schema:
                _refuse(other, place, "is not supported together with format")


def _check_combiner(schema: Schema, combiner: str, place: str) -> None:
    """Check a schema with one of the keywords beside which the compiler sees no other."""
    value = schema[combiner]
    beside = [keyword for keyword in schema if keyword in _ASSERTIONS and keyword != combiner]
    if combiner in ("enum", "const"):
        values = value if combiner == "enum" else [value]
        if not isinstance(values, list) or not values:
            raise SchemaRefused(f"{place}.enum must be a list of one or more values")
        _check_values(values, f"{place}.{combiner}")
        # The compiler would pass over a type beside them, and over the values that are not of it.
        if beside == ["type"]:
            kept = [each for each in values if _is_of_type(each, schema["type"])]
            if not kept:
                raise SchemaRefused(f"{place}: no value of {combiner} is of the type asked for")
            del schema["type"], schema[combiner]
            schema["enum"] = kept
            return
    elif combiner == "$ref":
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            _refuse("$ref", place, "is only supported within the schema itself: # or #/…")
    elif not value:
        raise SchemaRefused(f"{place}.{combiner} must be a list of one or more schemas")
    elif combiner == "allOf" and len(value) > 1:
        _refuse("allOf", place, "is only supported with a single schema")
    elif beside == ["type"] and combiner != "allOf" and _push_type(schema, combiner):
        return
    if beside:
        _refuse(beside[0], place, f"is not supported beside {combiner}")


def _push_type(schema: Schema, combiner: str) -> bool:
    """Move a type into all alternatives, where that means the same; return whether it did."""
    alternatives = schema[combiner]
    for each in alternatives:
        if not isinstance(each, dict) or each.get("type", schema["type"]) != schema["type"]:
            return False
        if any(keyword in each for keyword in _COMBINERS):
            return False
    for each in alternatives:
        each["type"] = schema["type"]
    del schema["type"]
    return True


def _infer_type(schema: Schema, place: str) -> None:
    if "type" in schema:
        return
    kinds = {_TYPE_OF[keyword] for keyword in schema if keyword in _TYPE_OF}
    if len(kinds) > 1:
        keywords = ", ".join(keyword for keyword in schema if keyword in _TYPE_OF)
        raise SchemaRefused(f"{place} has {keywords} but no type, which they need")
    if kinds:
        # Values of other types would satisfy such a schema too; nobody who writes one means them.
        schema["type"] = kinds.pop()


def _check_object(schema: Schema, place: str) -> None:
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    if "propertyNames" in schema and (properties or patterns):
        _refuse("propertyNames", place, "is not supported beside properties or patternProperties")
    if patterns:
        if schema.get("additionalProperties", False) is not False:
            _refuse("additionalProperties", place, "is not supported beside patternProperties")
        if len(patterns) > 1:
            _refuse("patternProperties", place, "is only supported with a single pattern")
        for pattern in patterns:
            check_pattern(pattern, f"{place}.patternProperties")
            for name in properties:
                if _may_match(pattern, name):
                    raise SchemaRefused(
                        f"{place}: patternProperties speaks of {_shown(name)}, which properties declares"
                    )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaRefused(f"{place}.required must be a list of strings")
    undeclared = [name for name in required if name not in properties]
    if not undeclared:
        return
    others = schema.get("additionalProperties", True)
    if others is False or patterns or "propertyNames" in schema or "unevaluatedProperties" in schema:
        raise SchemaRefused(
            f"{place}.required names {_shown(undeclared[0])}, which properties does not declare"
        )
    schema["properties"] = {**properties, **dict.fromkeys(undeclared, others)}


def _check_values(values: Sequence[Any], place: str) -> None:
    """Refuse numbers that the compiler would round."""
    todo: list[Any] = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise SchemaRefused(f"{place} holds an integer of more than 64 bits")


def _is_of_type(value: object, kinds: object) -> bool:
    names = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer" in names or "number" in names
    if isinstance(value, float):
        return "number" in names
    for kind, type_of in (("null", type(None)), ("string", str), ("array", list), ("object", dict)):
        if isinstance(value, type_of):
            return kind in names
    return False


_ESCAPED = re.compile(r"""\\(?:c[A-Za-z]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|.)|.""", re.DOTALL)
_CONTROL_ESCAPES = frozenset('nrtfv0\\"bc')


def check_pattern(pattern: object, place: str) -> None:
    """Refuse a pattern that asks for characters which stand escaped in JSON: they would be written bare.

    Raises:
        SchemaRefused: It does, or it is no text.
    """
    if not isinstance(pattern, str):
        raise SchemaRefused(f"{place} is not a string")
    in_negated_class = in_class = False
    is_first = False
    for found in _ESCAPED.finditer(pattern):
        sign = found.group()
        if in_class:
            if sign == "^" and is_first:
                in_negated_class = True
            elif sign == "]":
                in_class = in_negated_class = False
            is_first = False
        elif sign == "[":
            in_class = is_first = True
        # What a negated class leaves out does no harm; what it lets in is never a bare control character.
        if not in_negated_class and _is_escaped_in_json(sign, in_class=in_class):
            raise SchemaRefused(
                f"{place} asks for {_shown(sign)}, which JSON text escapes; that is not supported in patterns"
            )


def _is_escaped_in_json(sign: str, *, in_class: bool) -> bool:
    if len(sign) == 1:
        return sign == '"' or ord(sign) < 0x20
    kind = sign[1]
    if len(sign) > 2 and kind in "xu":
        value = int(sign[2:].strip("{}"), 16)
        return value < 0x20 or value in (0x22, 0x5C)
    if kind == "b":
        return in_class  # outside it is a word's border
    return kind in _CONTROL_ESCAPES


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _refuse(keyword: str, place: str, why: str) -> None:
    raise SchemaRefused(f"the keyword {keyword} {why} (in {place})")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:60]} …"
