import json
from typing import Any

import msgspec
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.http.schema import BodyDecoder, CompletionBody
from asyncserve.http.structure import MAX_CHOICE_STRINGS, structured_output
from asyncserve.request import MAX_STRUCTURE_CHARACTERS, StructuredOutput, StructureKind

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
OLD_TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [
        {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</f>",
        }
    ],
}
TAG = {"type": "structural_tag", "format": FORMAT}


def asked(**fields: Any) -> StructuredOutput | None:
    """The shape that a body with these fields asks for, read as it comes over HTTP."""
    return structured_output(BodyDecoder().decode(msgspec.json.encode(fields), CompletionBody))


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, StructureKind.JSON_OBJECT, None),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            StructureKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            StructureKind.JSON_SCHEMA,
            SCHEMA,
        ),
        ({"response_format": TAG}, StructureKind.STRUCTURAL_TAG, TAG),
        (
            {"response_format": {"type": "structural_tag", **OLD_TAG}},
            StructureKind.STRUCTURAL_TAG,
            TAG,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": True}}, StructureKind.JSON_SCHEMA, True),
        ({"structured_outputs": {"choice": ["a", 'é"']}}, StructureKind.CHOICE, ["a", 'é"']),
        ({"structured_outputs": {"json_object": True}}, StructureKind.JSON_OBJECT, None),
        ({"structured_outputs": {"structural_tag": TAG}}, StructureKind.STRUCTURAL_TAG, TAG),
        (
            {"structured_outputs": {"structural_tag": json.dumps(OLD_TAG)}},
            StructureKind.STRUCTURAL_TAG,
            TAG,
        ),
        ({"guided_json": SCHEMA}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, StructureKind.JSON_SCHEMA, SCHEMA),
        ({"guided_choice": ["a"]}, StructureKind.CHOICE, ["a"]),
    ],
)
def test_every_way_to_ask_for_json_gives_its_kind_with_its_source(
    fields: dict[str, Any], kind: StructureKind, source: Any
) -> None:
    shape = asked(**fields)
    assert shape is not None
    assert shape.kind is kind
    assert shape.source == "" if source is None else json.loads(shape.source) == source
    assert shape.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"structured_outputs": {"regex": "a+"}}, StructureKind.REGEX),
        ({"structured_outputs": {"grammar": "a+"}}, StructureKind.GRAMMAR),
        ({"guided_regex": "a+"}, StructureKind.REGEX),
        ({"guided_grammar": "a+"}, StructureKind.GRAMMAR),
    ],
)
def test_expressions_and_grammars_are_passed_on_as_they_are(
    fields: dict[str, Any], kind: StructureKind
) -> None:
    assert asked(**fields) == StructuredOutput(kind=kind, source="a+")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "text"}},
    ],
)
def test_a_body_that_asks_for_no_shape_gets_none(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_the_order_of_a_schemas_properties_is_kept_and_its_spelling_does_not_matter() -> None:
    as_text = asked(guided_json=json.dumps(SCHEMA, indent=3))
    as_object = asked(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    assert as_text == as_object
    assert as_text is not None
    assert list(json.loads(as_text.source)["properties"]) == ["b", "a"]


LONG = "a" * (MAX_STRUCTURE_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema"),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": "json_object"}, "response_format", "object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "format"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": ["a"]}},
            "response_format",
            "begin",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "none is given"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "none is given"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "JSON object"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "JSON object"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs", "json"),
        ({"structured_outputs": {"json": LONG}}, "structured_outputs", str(MAX_STRUCTURE_CHARACTERS)),
        ({"structured_outputs": {"json": {"a": LONG}}}, "structured_outputs", str(MAX_STRUCTURE_CHARACTERS)),
        ({"structured_outputs": {"regex": LONG}}, "structured_outputs", str(MAX_STRUCTURE_CHARACTERS)),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "not empty"),
        (
            {"structured_outputs": {"choice": ["a"] * (MAX_CHOICE_STRINGS + 1)}},
            "structured_outputs",
            "choice",
        ),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "JSON object"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "format"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "whitespace_pattern",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs",
            "disable_any_whitespace",
        ),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs",
        ),
        ({"guided_choice": []}, "guided_choice", "not empty"),
    ],
)
def test_what_describes_no_shape_or_several_is_refused_by_name(
    fields: dict[str, Any], param: str, word: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.param == param
    assert word in str(caught.value)
