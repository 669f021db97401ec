import json
from typing import Any

import pytest

from asyncserve.loop.json_schema import MAX_DEPTH, MAX_SCHEMAS, SchemaRefused, enforceable_schema

INTEGER: dict[str, Any] = {"type": "integer"}


def enforceable(schema: object) -> Any:
    return json.loads(enforceable_schema(json.dumps(schema)))


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}),
        ("contains", {"type": "array", "contains": {"const": 1}}),
        ("minContains", {"type": "array", "minContains": 1}),
        ("not", {"not": INTEGER}),
        ("if", {"if": INTEGER, "then": {"minimum": 1}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {}}}),
        ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
        ("additionalItems", {"type": "array", "additionalItems": False}),
        ("$dynamicRef", {"$dynamicRef": "#x"}),
        ("allOf", {"allOf": [INTEGER, {"minimum": 1}]}),
        ("$ref", {"$ref": "https://example.com/schema"}),
        ("$ref", {"$ref": "#anchor", "$defs": {"x": {"$anchor": "anchor"}}}),
        ("minimum", {"$ref": "#/$defs/x", "minimum": 1, "$defs": {"x": INTEGER}}),
        ("properties", {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}),
        ("required", {"allOf": [{"type": "object"}], "required": ["a"]}),
        ("minLength", {"enum": ["a", "abc"], "minLength": 2}),
        ("minLength", {"type": "string", "pattern": "^a+$", "minLength": 2}),
        ("format", {"type": "string", "pattern": "^a+$", "format": "date"}),
        ("maxLength", {"type": "string", "format": "email", "maxLength": 9}),
        ("propertyNames", {"properties": {"abc": INTEGER}, "propertyNames": {"maxLength": 2}}),
        ("additionalProperties", {"patternProperties": {"^x": INTEGER}, "additionalProperties": True}),
        ("patternProperties", {"patternProperties": {"^x": INTEGER, "y$": {}}}),
        ("$id", {"properties": {"a": {"$id": "https://example.com/a"}}}),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_what_would_not_be_enforced_is_refused_by_name(keyword: str, schema: Any, is_nested: bool) -> None:
    if is_nested:
        schema = {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}
    with pytest.raises(SchemaRefused, match=rf"the keyword {keyword.replace('$', '.')} .*\(in the schema"):
        enforceable(schema)


def test_the_message_says_where() -> None:
    with pytest.raises(SchemaRefused, match=r"in the schema\.properties\.a\.items\.anyOf\[1\]\)"):
        enforceable({"properties": {"a": {"items": {"anyOf": [{}, {"not": {}}]}}}})


@pytest.mark.parametrize(
    "schema",
    [
        True,
        INTEGER,
        {"type": "array", "items": INTEGER, "uniqueItems": False},
        {"$ref": "#/$defs/x", "description": "one", "title": "X", "$defs": {"x": INTEGER}},
        {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "default": None, "$defs": {"x": INTEGER}},
        {"allOf": [{"$ref": "#/$defs/x"}], "description": "one", "$defs": {"x": INTEGER}},
        {"type": "object", "properties": {"not": INTEGER, "if": INTEGER, "pattern": INTEGER}},
        {"type": "object", "additionalProperties": INTEGER, "required": []},
        {"type": "integer", "x-order": 3, "format": "int32"},
        {"enum": ["uniqueItems", {"not": 1}, [2.5]]},
        {"type": "string", "pattern": '^[^"\\\\\\n]+\\d{2}\\.$'},
        {"$id": "https://example.com/root", "$schema": "https://json-schema.org/draft/2020-12/schema"},
    ],
)
def test_what_is_enforced_passes_unchanged(schema: Any) -> None:
    assert enforceable(schema) == schema


def test_an_empty_schema_allows_everything() -> None:
    assert enforceable({}) is True


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"minLength": 2}, {"minLength": 2, "type": "string"}),
        ({"minimum": 2}, {"minimum": 2, "type": "number"}),
        ({"items": INTEGER}, {"items": INTEGER, "type": "array"}),
        ({"properties": {"a": INTEGER}}, {"properties": {"a": INTEGER}, "type": "object"}),
    ],
)
def test_a_type_that_the_keywords_speak_of_is_written_out(schema: Any, expected: Any) -> None:
    assert enforceable(schema) == expected


def test_keywords_of_two_types_need_a_type() -> None:
    with pytest.raises(SchemaRefused, match="minLength, minimum but no type"):
        enforceable({"minLength": 2, "minimum": 3})


def test_a_type_beside_alternatives_is_moved_into_them() -> None:
    alternatives = [{"properties": {"a": INTEGER}}, {"type": "object", "required": ["b"]}]
    assert enforceable({"type": "object", "oneOf": alternatives}) == {
        "oneOf": [
            {"properties": {"a": INTEGER}, "type": "object"},
            {"type": "object", "required": ["b"], "properties": {"b": True}},
        ]
    }
    with pytest.raises(SchemaRefused, match="the keyword type is not supported beside anyOf"):
        enforceable({"type": "object", "anyOf": [{"type": "string"}, {"type": "object"}]})


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("string", ["a"]),
        ("integer", [1, 2.0]),
        ("number", [1, 2.0, 2.5]),
        ("boolean", [True]),
        (["null", "array"], [None, [1]]),
        ("object", [{"a": 1}]),
    ],
)
def test_of_listed_values_only_those_of_the_type_are_left(kind: Any, kept: list[Any]) -> None:
    values = ["a", 1, 2.0, 2.5, True, None, [1], {"a": 1}]
    assert enforceable({"type": kind, "enum": values}) == {"enum": kept}


def test_a_constant_of_another_type_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="no value of const is of the type"):
        enforceable({"type": "string", "const": 1})


def test_a_required_property_that_is_not_declared_is_one_of_the_others() -> None:
    assert enforceable({"type": "object", "required": ["a"]})["properties"] == {"a": True}
    of_integers = {"type": "object", "required": ["a"], "additionalProperties": INTEGER}
    assert enforceable(of_integers)["properties"] == {"a": INTEGER}
    with pytest.raises(SchemaRefused, match="required names 'a', which properties does not declare"):
        enforceable({"type": "object", "required": ["a"], "additionalProperties": False})


def test_a_pattern_for_properties_that_are_declared_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="patternProperties speaks of 'xa'"):
        enforceable({"properties": {"xa": {}}, "patternProperties": {"^x": INTEGER}})
    enforceable({"properties": {"ax": {}}, "patternProperties": {"^x": INTEGER}})


@pytest.mark.parametrize(
    "pattern", ['^"$', "^\\\\$", "\n", "^a\\n$", "[\\t]", '["]', "\\x22", "\\u005c", "\\cA", "[\\b]"]
)
def test_a_pattern_for_what_json_escapes_is_refused(pattern: str) -> None:
    with pytest.raises(SchemaRefused, match=r"pattern asks for .* which JSON text escapes"):
        enforceable({"type": "string", "pattern": pattern})


@pytest.mark.parametrize("pattern", ['[^"]', '[^"\\\\]*', "\\x41", "\\.", "[!-~]", "\\s\\S", "a\\/b", "[]a]"])
def test_other_patterns_pass(pattern: str) -> None:
    enforceable({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    "schema",
    [
        5,
        "a",
        [1],
        None,
        {"properties": []},
        {"properties": 5, "required": ["a"]},
        {"patternProperties": 5},
        {"properties": {"a": 5}},
        {"anyOf": {}},
        {"anyOf": []},
        {"enum": []},
        {"enum": 5},
        {"items": [INTEGER]},
        {"required": "a"},
        {"required": [1]},
        {"type": "string", "pattern": 5},
        {"$ref": 5},
        {"const": 2**64},
        {"const": [{"a": -(2**64)}]},
    ],
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaRefused):
        enforceable(schema)


@pytest.mark.parametrize("source", ["", "{", "nul", "[" * 100_000, '{"a":' * 100_000, "\x00"])
def test_what_is_no_json_is_refused(source: str) -> None:
    with pytest.raises(SchemaRefused, match="the schema is no JSON"):
        enforceable_schema(source)


def test_depth_and_number_of_subschemas_are_bounded() -> None:
    deep: Any = INTEGER
    for _ in range(MAX_DEPTH):
        deep = {"type": "array", "items": deep}
    enforceable(deep)
    with pytest.raises(SchemaRefused, match="nested more than"):
        enforceable({"type": "array", "items": deep})
    with pytest.raises(SchemaRefused, match="more than 20000 subschemas"):
        enforceable({"properties": {str(number): True for number in range(MAX_SCHEMAS)}})
