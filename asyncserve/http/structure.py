"""The shape an answer is asked to have: what bodies say of it → `StructuredOutput`.

Both generating endpoints take OpenAI's `response_format`, vLLM's `structured_outputs` and the older fields
`guided_*`, but not together. Whether a schema or a grammar can be used is found out when it is compiled, in
the engine; here it is only brought into one form.
"""

from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from asyncserve.errors import InvalidRequest
from asyncserve.request import MAX_STRUCTURE_CHARACTERS, StructuredOutput, StructureKind

MAX_CHOICE_STRINGS = 4096
"""Most strings of `structured_outputs.choice`."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema with a name."""

    name: Annotated[str | None, Meta(description="For the client's own use")] = None
    description: Annotated[str | None, Meta(description="For the client's own use")] = None
    schema: Annotated[dict[str, Any] | bool | None, Meta(description="The JSON schema")] = None
    strict: Annotated[bool | None, Meta(description="Taken; the schema is always kept to")] = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's way to ask for a shape."""

    type: Annotated[str, Meta(description="`text`, `json_object`, `json_schema` or `structural_tag`")]
    json_schema: Annotated[JsonSchemaFormat | None, Meta(description="With `json_schema`")] = None
    schema: Annotated[
        dict[str, Any] | bool | None,
        Meta(description="With `json_object`, as some servers have it: the JSON schema"),
    ] = None
    format: Annotated[dict[str, Any] | None, Meta(description="With `structural_tag`: the tag")] = None
    structures: Annotated[
        list[dict[str, Any]] | None, Meta(description="With `structural_tag`, older form: begin, schema, end")
    ] = None
    triggers: Annotated[
        list[str] | None, Meta(description="With `structural_tag`, older form: what begins a structure")
    ] = None


ChoiceStrings = Annotated[list[str], Meta(max_length=MAX_CHOICE_STRINGS)]


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's way to ask for a shape: exactly one of the first six fields is given."""

    json: Annotated[
        str | dict[str, Any] | bool | None, Meta(description="A JSON schema, as an object or as text")
    ] = None
    regex: Annotated[str | None, Meta(description="A regular expression for the whole text")] = None
    choice: Annotated[ChoiceStrings | None, Meta(description="The texts to choose from")] = None
    grammar: Annotated[str | None, Meta(description="An EBNF grammar in GBNF notation")] = None
    json_object: Annotated[bool | None, Meta(description="Any JSON object")] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None, Meta(description="A structural tag, as an object or as text")
    ] = None
    disable_any_whitespace: Annotated[bool | None, Meta(description="Not implemented: true is refused")] = (
        None
    )
    disable_additional_properties: Annotated[
        bool | None, Meta(description="Not implemented: true is refused")
    ] = None
    whitespace_pattern: Annotated[str | None, Meta(description="Not implemented: a pattern is refused")] = (
        None
    )


GuidedJson = Annotated[
    str | dict[str, Any] | bool | None, Meta(description="Older name of `structured_outputs.json`")
]
GuidedRegex = Annotated[str | None, Meta(description="Older name of `structured_outputs.regex`")]
GuidedChoice = Annotated[ChoiceStrings | None, Meta(description="Older name of `structured_outputs.choice`")]
GuidedGrammar = Annotated[str | None, Meta(description="Older name of `structured_outputs.grammar`")]


class StructuredFields(Protocol):
    """A body, as far as it says which shape its answer is to have."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: str | dict[str, Any] | bool | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def structured_output(body: StructuredFields) -> StructuredOutput | None:
    """Return the shape that a request asks for; None if any text will do.

    Raises:
        InvalidRequest: Several are asked for, or one is incomplete, contradictory, too long or of an unknown
            type.
    """
    asked = [
        _of_response_format(body.response_format),
        _of_structured_outputs(body.structured_outputs),
        None if body.guided_json is None else _schema(body.guided_json, "guided_json"),
        None if body.guided_regex is None else _shape(StructureKind.REGEX, body.guided_regex, "guided_regex"),
        None if body.guided_choice is None else _choice(body.guided_choice, "guided_choice"),
        None
        if body.guided_grammar is None
        else _shape(StructureKind.GRAMMAR, body.guided_grammar, "guided_grammar"),
    ]
    found = [shape for shape in asked if shape is not None]
    if len(found) > 1:
        names = " and ".join(shape.param for shape in found)
        raise InvalidRequest(f"{names} all ask for a shape; give one of them", param=found[1].param)
    return found[0] if found else None


def _of_response_format(given: ResponseFormat | None) -> StructuredOutput | None:
    param = "response_format"
    if given is None or given.type == "text":
        return None
    match given.type:
        case "json_object" if given.schema is not None:
            return _schema(given.schema, param)
        case "json_object":
            return _shape(StructureKind.JSON_OBJECT, "", param)
        case "json_schema":
            if given.json_schema is None or given.json_schema.schema is None:
                raise InvalidRequest(
                    "response_format has the type json_schema but no json_schema.schema", param=param
                )
            return _schema(given.json_schema.schema, param)
        case "structural_tag":
            tag = {"format": given.format, "structures": given.structures, "triggers": given.triggers}
            return _structural_tag(tag, param)
        case _:
            raise InvalidRequest(
                f"response_format has the type {given.type[:64]!r}; types are text, json_object, json_schema"
                " and structural_tag",
                param=param,
            )


def _of_structured_outputs(given: StructuredOutputs | None) -> StructuredOutput | None:
    param = "structured_outputs"
    if given is None:
        return None
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name):
            raise InvalidRequest(f"{param}.{name} is not supported by this server", param=param)
    shapes: dict[str, StructuredOutput] = {}
    if given.json is not None:
        shapes["json"] = _schema(given.json, param)
    if given.regex is not None:
        shapes["regex"] = _shape(StructureKind.REGEX, given.regex, param)
    if given.choice is not None:
        shapes["choice"] = _choice(given.choice, param)
    if given.grammar is not None:
        shapes["grammar"] = _shape(StructureKind.GRAMMAR, given.grammar, param)
    if given.json_object:
        shapes["json_object"] = _shape(StructureKind.JSON_OBJECT, "", param)
    if given.structural_tag is not None:
        shapes["structural_tag"] = _structural_tag(_decoded(given.structural_tag, param), param)
    if len(shapes) != 1:
        raise InvalidRequest(
            f"{param} takes exactly one of json, regex, choice, grammar, json_object and structural_tag;"
            f" {' and '.join(shapes) or 'none'} is given",
            param=param,
        )
    return next(iter(shapes.values()))


def _shape(kind: StructureKind, source: str, param: str) -> StructuredOutput:
    return StructuredOutput(kind=kind, source=source, param=param)


def _schema(schema: str | dict[str, Any] | bool, param: str) -> StructuredOutput:
    # A text is brought into the same form as an object: what means the same is compiled once.
    decoded = _decoded(schema, param) if isinstance(schema, str) else schema
    return _shape(StructureKind.JSON_SCHEMA, _text(decoded, param), param)


def _choice(choices: list[str], param: str) -> StructuredOutput:
    if not choices or not all(choices):
        raise InvalidRequest(
            f"{param}: a choice must hold one or more strings that are not empty", param=param
        )
    return _shape(StructureKind.CHOICE, _text(choices, param), param)


def _structural_tag(tag: dict[str, Any], param: str) -> StructuredOutput:
    """Make the shape of a structural tag; its older form has structures and triggers, and no format."""
    form, structures, triggers = (tag.get(name) for name in ("format", "structures", "triggers"))
    if form is None:
        if not structures or not triggers:
            raise InvalidRequest(
                f"{param}: a structural tag needs a format, or structures and triggers", param=param
            )
        try:
            tags = [
                {
                    "type": "tag",
                    "begin": structure["begin"],
                    "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                    "end": structure["end"],
                }
                for structure in structures
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{param}: each of a structural tag's structures has a begin, a schema and an end",
                param=param,
            ) from error
        form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    source = _text({"type": "structural_tag", "format": form}, param)
    return _shape(StructureKind.STRUCTURAL_TAG, source, param)


def _decoded(text: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return a JSON object that may have come as its text."""
    if not isinstance(text, str):
        return text
    if len(text) > MAX_STRUCTURE_CHARACTERS:  # decoding it would hold up the event loop
        raise InvalidRequest(
            f"{param} has {len(text)} characters; at most {MAX_STRUCTURE_CHARACTERS} are taken", param=param
        )
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} must hold a JSON object: {error}", param=param) from error


def _text(value: object, param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from error
