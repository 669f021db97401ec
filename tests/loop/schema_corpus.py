"""JSON schemas of the kinds that clients send, each of which an output can be held to."""

from typing import Any

_INTEGER: dict[str, Any] = {"type": "integer"}
_STRING: dict[str, Any] = {"type": "string"}

SCHEMAS: dict[str, Any] = {
    "anything": {},
    "integer": _INTEGER,
    "integer in a range": {"type": "integer", "minimum": -3, "exclusiveMaximum": 117},
    "multiple": {"type": "integer", "multipleOf": 7},
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.75},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "string": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern without anchors": {"type": "string", "pattern": "ab+"},
    "negated class": {"type": "string", "pattern": '^[^"x]{1,4}$'},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["a", 1, None, True, {"x": [1, "\n"]}]},
    "enum with a type": {"type": "string", "enum": ["a", "b", 3]},
    "constant": {"const": {"a": 'quote " and \\ and é'}},
    "several types": {"type": ["string", "null"], "minLength": 3},
    "no type": {"minLength": 3},
    "any object": {"type": "object"},
    "flat object": {
        "type": "object",
        "properties": {
            "name": _STRING,
            "age": {"type": "integer", "minimum": 0},
            "is_new": {"type": "boolean"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional properties": {"type": "object", "properties": {"a": _INTEGER, "b": _STRING, "c": _INTEGER}},
    "open object": {
        "type": "object",
        "properties": {"a": _INTEGER},
        "required": ["a"],
        "additionalProperties": True,
    },
    "map of integers": {
        "type": "object",
        "additionalProperties": _INTEGER,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "keys after a pattern": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": _INTEGER},
        "additionalProperties": False,
    },
    "keys of a kind": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": _INTEGER,
    },
    "required and not declared": {"type": "object", "required": ["z"], "additionalProperties": _INTEGER},
    "number of properties": {
        "type": "object",
        "properties": {"a": _INTEGER, "b": _INTEGER, "c": _INTEGER},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "odd names": {
        "type": "object",
        "properties": {'a"b\\c': _INTEGER, "é": _INTEGER},
        "required": ['a"b\\c', "é"],
    },
    "array": {"type": "array", "items": _INTEGER, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [_INTEGER, _STRING], "items": False, "minItems": 2},
    "tuple with a rest": {"type": "array", "prefixItems": [_INTEGER], "items": {"type": "boolean"}},
    "alternatives": {"anyOf": [_INTEGER, {"type": "array", "items": _STRING}, {"type": "null"}]},
    "one of several types": {"oneOf": [_INTEGER, {"type": "boolean"}]},
    "tagged union": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}},
                "required": ["kind", "radius"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "square"}, "side": {"type": "number"}},
                "required": ["kind", "side"],
            },
        ]
    },
    "type beside alternatives": {
        "type": "object",
        "anyOf": [{"required": ["a"]}, {"properties": {"b": _INTEGER}, "required": ["b"]}],
    },
    "reference": {
        "type": "object",
        "properties": {"home": {"$ref": "#/$defs/place"}, "work": {"$ref": "#/$defs/place", "title": "Work"}},
        "required": ["home"],
        "$defs": {"place": {"type": "object", "properties": {"city": _STRING}, "required": ["city"]}},
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": _INTEGER,
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
            }
        },
    },
    "as pydantic writes it": {
        "title": "Order",
        "type": "object",
        "properties": {
            "item": {"title": "Item", "type": "string", "description": "What is ordered"},
            "count": {"title": "Count", "type": "integer", "default": 1, "exclusiveMinimum": 0},
            "note": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}], "default": None},
            "size": {"$ref": "#/$defs/Size"},
        },
        "required": ["item", "size"],
        "$defs": {"Size": {"enum": ["small", "large"], "title": "Size", "type": "string"}},
    },
}
