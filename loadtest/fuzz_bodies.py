"""Request bodies drawn from `/openapi.json` with hypothesis: mostly valid, then damaged.

`Bodies` makes a strategy for each operation from the schema of its body, with likely values for fields whose
type says little (a model's name, a JSON schema, a regular expression). `damaged` breaks values, names and
bytes. Knows no endpoint: what the document lists is drawn.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

MAX_DEPTH = 6
"""Structures nested deeper than this are left empty."""

TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        (
            "",
            " ",
            "Hello",
            "a\0b",
            "\u2028é漢🙂\ufffd",
            "e\u0301" * 3,
            "<think>hm</think>",
            "</think>",
            "<tool_call>",
            '{"name": "f", "arguments": {}}',
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "<bos>",
            "<turn>user:",
            "data: [DONE]\n\n",
            "\r\n\r\nHTTP/1.1 200 OK",
            "{{ 7 * 7 }}{% raise %}",
            "x" * 300,
        )
    ),
)
NUMBERS = st.one_of(
    st.sampled_from(
        (0, 1, -1, 0.5, 2, 1e-9, -0.0, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64, 10**30, 1e308, 0.1)
    ),
    st.integers(-10, 600),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
JSON_SCHEMAS = st.sampled_from(
    (
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
        {"type": "string", "maxLength": 4},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "boolean"}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"type": "nonsense"},
        {"anyOf": []},
        {"type": "integer", "minimum": 10, "maximum": 1},
        {"not": {}},
        {"pattern": "(", "type": "string"},
        True,
    )
)
LIKELY: Mapping[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 24),
    "max_completion_tokens": st.integers(1, 24),
    "max_output_tokens": st.integers(1, 24),
    "min_tokens": st.integers(0, 4),
    "n": st.integers(1, 4),
    "tokens": st.lists(st.integers(0, 511), max_size=8),
    "stop_token_ids": st.lists(st.integers(0, 511), max_size=4),
    "allowed_token_ids": st.lists(st.integers(0, 511), min_size=1, max_size=8),
    "prompt": st.one_of(
        TEXTS, st.lists(TEXTS, min_size=1, max_size=3), st.lists(st.integers(0, 511), min_size=1)
    ),
    "logprobs": st.integers(0, 5),
    "top_logprobs": st.integers(0, 5),
    "schema": JSON_SCHEMAS,
    "json": JSON_SCHEMAS,
    "parameters": JSON_SCHEMAS,
    "input_schema": JSON_SCHEMAS,
    "regex": st.sampled_from(("[ab]{1,3}", "(", "a*", ".*", "(a+)+$", r"\d", "", "(?=a)b", "[")),
    "grammar": st.sampled_from(('root ::= "a" | "b"', "root ::=", "root ::= root", "nonsense", "")),
    "choice": st.lists(TEXTS, max_size=3),
    "type": st.sampled_from(
        (
            *("text", "text", "function", "function", "message", "input_text", "output_text"),
            *("json_object", "json_schema", "function_call_output", "image_url", "allowed_tools"),
        )
    ),
    "content": TEXTS,
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(("user", "user", "assistant")), "content": TEXTS}),
        min_size=1,
        max_size=3,
    ),
    "role": st.sampled_from(("user", "assistant", "system", "developer", "tool")),
    "name": st.sampled_from(("f", "get_weather", "a b", "")),
    "arguments": st.sampled_from(("{}", '{"a": 1}', "{", "[]", "")),
    "reasoning_effort": st.sampled_from(("none", "low", "high")),
}
"""What a field of this name likely has, whichever body it is in."""
EITHER = frozenset({"prompt", "messages"})
"""Where a body may have both of these, one is needed."""


class Bodies:
    """Strategies for the bodies of a document's operations.

    Args:
        document: What `/openapi.json` says.
        model_names: Served ones.
    """

    def __init__(self, document: Mapping[str, Any], model_names: Sequence[str]) -> None:
        self._components: Mapping[str, Any] = document["components"]["schemas"]
        self._likely: Mapping[str, st.SearchStrategy[Any]] = {
            **LIKELY,
            "model": st.sampled_from((*model_names, *model_names, *model_names, "other")),
        }
        self._made: dict[str, st.SearchStrategy[Any]] = {}

    def of(self, schema: Mapping[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
        """Return values a schema allows, and a few that other checks refuse."""
        if "$ref" in schema:
            name = f"{schema['$ref'].rpartition('/')[2]} {depth}"
            if name not in self._made:
                component = self._components[schema["$ref"].rpartition("/")[2]]
                self._made[name] = self.of(component, depth)
            return self._made[name]
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches:
            return st.one_of([self.of(branch, depth) for branch in branches])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        match schema.get("type"):
            case "string":
                return TEXTS
            case "integer":
                return self._integers(schema)
            case "number":
                low, high = (
                    schema.get("minimum", schema.get("exclusiveMinimum", -100)),
                    schema.get("maximum", 100),
                )
                return st.floats(low, high, width=64) | st.sampled_from((low, high))
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case "array":
                if depth >= MAX_DEPTH:
                    return st.just([])
                return st.lists(
                    self.of(schema.get("items", {}), depth + 1),
                    min_size=schema.get("minItems", 0),
                    max_size=3,
                )
            case "object":
                return self._objects(schema, depth)
            case _:
                return ANYTHING

    def _integers(self, schema: Mapping[str, Any]) -> st.SearchStrategy[int]:
        low, high = int(schema.get("minimum", -(2**63))), int(schema.get("maximum", 2**63 - 1))
        near = st.integers(max(low, -8), min(high, 40)) if low <= 40 else st.just(low)
        return near | near | near | st.sampled_from((low, high))

    def _objects(self, schema: Mapping[str, Any], depth: int) -> st.SearchStrategy[Any]:
        fields: Mapping[str, Any] = schema.get("properties", {})
        if not fields:
            inner = schema.get("additionalProperties", {})
            values = self.of(inner if isinstance(inner, dict) else {}, depth + 1)
            names = st.integers(0, 600).map(str) | TEXTS
            return st.dictionaries(names, values, max_size=3) if depth < MAX_DEPTH else st.just({})
        if depth >= MAX_DEPTH:
            return st.just({})
        required = [name for name in schema.get("required", ()) if name in fields]
        optional = [name for name in fields if name not in required]
        values_of = {name: self.of(field, depth + 1) for name, field in fields.items()}
        likely = {
            name: self._likely[name]
            for name, field in fields.items()
            if name in self._likely
            and "enum" not in field
            and {"type": "boolean"} not in field.get("anyOf", ())
        }

        @st.composite
        def objects(draw: st.DrawFn) -> dict[str, Any]:
            names = [*required]
            if fields.keys() >= EITHER and not EITHER & set(required):
                names.append(draw(st.sampled_from(sorted(EITHER))))
            if optional:
                most = draw(st.sampled_from((0, 2, 2, 6)))
                names += draw(st.lists(st.sampled_from(optional), max_size=most, unique=True))
            return {
                name: draw(likely[name] if name in likely and draw(st.integers(0, 9)) else values_of[name])
                for name in names
            }

        return objects()


@st.composite
def damaged(draw: st.DrawFn, body: Any) -> bytes:
    """Return the JSON of `body` with one or a few things wrong: a value, a name, or its bytes."""
    value = json.loads(json.dumps(body))
    kind = draw(st.sampled_from(("value", "value", "value", "name", "drop", "bytes", "bytes", "cut", "deep")))
    if kind in ("value", "name", "drop") and isinstance(value, dict):
        for _ in range(draw(st.integers(1, 3))):
            _break_one(draw, value, kind)
        data = bytearray(_dumped(value))
    elif kind == "deep":
        depth = draw(st.sampled_from((10, 500, 5_000, 100_000)))
        field = (
            json.dumps(draw(st.sampled_from(sorted(value)))) if isinstance(value, dict) and value else '"a"'
        )
        data = bytearray(b"{" + field.encode() + b":" + b"[" * depth + b"]" * depth + b"}")
    else:
        data = bytearray(_dumped(value))
        if kind == "cut":
            del data[draw(st.integers(0, len(data))) :]
        else:
            for _ in range(draw(st.integers(1, 4))):
                place = draw(st.integers(0, max(0, len(data) - 1)))
                data[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(data)


def _dumped(value: Any) -> bytes:
    """Return JSON in which NaN and infinities are spelled as Python does, which no JSON has."""
    return json.dumps(value, ensure_ascii=True).encode()


def _break_one(draw: st.DrawFn, value: Any, kind: str) -> None:
    """Walk to some place in `value`, and break it there."""
    while True:
        keys: Sequence[Any] = sorted(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            value = inner
            continue
        if kind == "drop":
            del value[key]
        elif kind == "name" and isinstance(value, dict):
            value[draw(TEXTS)] = value.pop(key)
        else:
            junk = ANYTHING | st.sampled_from((math.nan, math.inf, "\ud800", [[]] * 50, "y" * 5_000))
            value[key] = draw(junk)
        return
