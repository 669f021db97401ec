"""Grammars for calls: compiled by xgrammar, followed at random, and what comes out is read and validated."""

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from asyncserve.errors import InvalidRequest
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.registry import TOOL_PARSERS
from asyncserve.request import StructuredOutput, StructureKind
from tests.http.parsers.reading import read, written_as

WEATHER = {
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["°C", 'f/"K"']},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "on": {"type": "boolean"},
            "more": {
                "type": "object",
                "properties": {"x": {"type": "array", "items": {"type": ["boolean", "null"]}}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["city", "more"],
        "additionalProperties": False,
    },
}
PLACES = {
    "name": "find-place",
    "strict": True,
    "parameters": {
        "properties": {"a": {"type": ["string", "null"]}, "b": {"$ref": "#/$defs/B"}},
        "$defs": {"B": {"type": "number"}},
    },
}
REFERRED = {
    "name": "refer",
    "parameters": {
        "$ref": "#/$defs/A",
        "$defs": {"A": {"type": "object", "properties": {"c": {"type": "string", "maxLength": 3}}}},
    },
}
TIME = {"name": "get_time"}
NOTHING = {"name": "nothing", "parameters": {"type": "object", "properties": {}}}
TOOLS = (WEATHER, PLACES, REFERRED, TIME, NOTHING)
SCHEMAS = {str(tool["name"]): tool.get("parameters", {"type": "object"}) for tool in TOOLS}

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = (
    '"',
    '{"name": "',
    '"parameters": ',
    '"arguments": ',
    "[get_weather(",
    "[get_time(",
    "[find-place(",
    *MARKERS,
)
VOCABULARY = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), b"<eos>"]
EOS = len(VOCABULARY) - 1


@cache
def compiler(special: frozenset[str]) -> xgrammar.GrammarCompiler:
    # To a grammar, special tokens are no text: they have one that nothing begins with.
    tokens = [b"\xff" + word if word.decode("latin-1") in special else word for word in VOCABULARY]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def compiled(constraint: StructuredOutput | None, special: Sequence[str] = ()) -> xgrammar.CompiledGrammar:
    """Compile a constraint as the engine does: special tokens by their ids, marks of strictness left out."""
    assert constraint is not None
    assert constraint.kind is StructureKind.STRUCTURAL_TAG

    def prepared(node: Any) -> Any:
        if isinstance(node, list):
            return [prepared(each) for each in node]
        if not isinstance(node, dict):
            return node
        return {
            key: _token_ids(value) if key in TOKEN_FIELDS else prepared(value)
            for key, value in node.items()
            if key != "strict"
        }

    source = json.dumps(prepared(json.loads(constraint.source)))
    return compiler(frozenset(special)).compile_structural_tag(source)


TOKEN_FIELDS = ("token", "trigger_tokens", "exclude_tokens")


def _token_ids(texts: Any) -> Any:
    return (
        VOCABULARY.index(texts.encode()) if isinstance(texts, str) else [_token_ids(text) for text in texts]
    )


def _weights(is_late: bool) -> list[float]:
    """Return how likely each token is where it is allowed; late in a text, those that end things."""
    weights = [0.02] * 256
    for byte in b"abcdefghij ":
        weights[byte] = 1.0
    for byte in b"0123456789\\/<[{(,:.\n'-_=>":
        weights[byte] = 0.4
    for byte in b'"}])':
        weights[byte] = 1000.0 if is_late else 2.0
    weights += [2000.0 if is_late and word in ("</think>", '"') else 4.0 for word in WORDS]
    return [*weights, 1e6 if is_late else 3.0]


EARLY, LATE = np.array(_weights(False)), np.array(_weights(True))


def followed(grammar: xgrammar.CompiledGrammar, rng: random.Random, *, late_after: int = 150) -> str:
    """Return a text that a grammar allows, whole."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
    text = b""
    for num_tokens in range(4000):
        matcher.fill_next_token_bitmask(mask)
        allowed = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")[: len(VOCABULARY)]
        weights = (LATE if num_tokens > late_after else EARLY) * allowed
        token = rng.choices(range(len(VOCABULARY)), weights=weights.tolist())[0]
        assert matcher.accept_token(token)
        if token == EOS:
            return text.decode(errors="replace")
        text += VOCABULARY[token]
    raise AssertionError("the text does not end")


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether a grammar allows exactly this text. Markers that are special tokens are given as such."""
    matcher = xgrammar.GrammarMatcher(grammar)
    while text:
        marker = next((marker for marker in MARKERS if text.startswith(marker)), "")
        step = VOCABULARY.index(marker.encode()) if marker else text[0].encode()[0]
        for token in [step] if marker else list(text[0].encode()):
            if not matcher.accept_token(token):
                return False
        text = text[len(marker) or 1 :]
    return matcher.accept_token(EOS)


def check_calls(calls: Sequence[Any]) -> None:
    for call in calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, SCHEMAS[call.name])


def choice(mode: str, *, parallel: bool = True, tools: Sequence[Mapping[str, Any]] = TOOLS) -> ToolChoice:
    name = "get_weather" if mode == "named" else None
    return ToolChoice(tools=tuple(tools), mode=mode, name=name, parallel=parallel)


EVERY_FORMAT = pytest.mark.parametrize("tool_parser", sorted(TOOL_PARSERS))
SPECIAL = pytest.mark.parametrize("special", [(), MARKERS], ids=["text", "special"])


@pytest.mark.slow
@EVERY_FORMAT
@SPECIAL
@pytest.mark.parametrize("mode", ["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("reasoning", "is_open"), [("none", False), ("think", False), ("think", True)])
def test_what_must_be_calls_is_read_as_valid_calls(
    tool_parser: str, special: tuple[str, ...], mode: str, parallel: bool, reasoning: str, is_open: bool
) -> None:
    written = written_as(tool_parser, reasoning, *special)
    asked = choice(mode, parallel=parallel)
    grammar = compiled(written.constraint(asked, None, starts_in_reasoning=is_open), special)
    rng = random.Random(f"{tool_parser}{mode}{parallel}{is_open}")
    for _ in range(4):
        text = followed(grammar, rng)
        parsed = read(written.parser(asked, starts_in_reasoning=is_open), [text])
        assert not parsed.content, text
        assert parsed.tool_calls, text
        check_calls(parsed.tool_calls)
        if mode == "named" or not parallel:
            assert len(parsed.tool_calls) == 1, text
        if mode == "named":
            assert parsed.tool_calls[0].name == "get_weather"
        if is_open:
            assert "</think>" in text


@pytest.mark.slow
@EVERY_FORMAT
@SPECIAL
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("reasoning", ["none", "think"])
def test_calls_of_strict_tools_in_free_text_are_valid(
    tool_parser: str, special: tuple[str, ...], parallel: bool, reasoning: str
) -> None:
    written = written_as(tool_parser, reasoning, *special)
    asked = choice("auto", parallel=parallel)
    grammar = compiled(written.constraint(asked, None, starts_in_reasoning=False), special)
    rng = random.Random(f"{tool_parser}{parallel}")
    num_calls = 0
    for _ in range(30):
        text = followed(grammar, rng, late_after=60)
        parsed = read(written.parser(asked), [text])
        num_calls += len(parsed.tool_calls)
        # Free text may spell a call of Llama's in a way that does not trigger the grammar.
        if tool_parser != "llama3_json" or '{"name": ' in text:
            check_calls(parsed.tool_calls)
    assert num_calls, "no text called anything: the test shows nothing"


def test_free_text_is_free_unless_a_tool_is_strict() -> None:
    written = written_as("hermes", "think")
    lax = choice("auto", tools=[TIME, REFERRED])
    assert written.constraint(lax, None, starts_in_reasoning=True) is None
    assert written.constraint(choice("none"), None, starts_in_reasoning=True) is None
    assert written.constraint(ToolChoice(), None, starts_in_reasoning=True) is None


HERMES_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "more": {"x": []}}}\n</tool_call>'
)


@SPECIAL
def test_free_text_holds_calls_of_strict_tools_to_their_schema_and_others_to_objects(
    special: tuple[str, ...],
) -> None:
    written = written_as("hermes", "none", *special)
    grammar = compiled(written.constraint(choice("auto"), None, starts_in_reasoning=False), special)
    assert accepts(grammar, "No tool is needed.")
    assert accepts(grammar, f"Let me see. {HERMES_CALL}\n{HERMES_CALL} Done.")
    assert not accepts(grammar, HERMES_CALL.replace('"Oslo"', "5"))
    assert accepts(grammar, '<tool_call>\n{"name": "refer", "arguments": {"c": 5}}\n</tool_call>')
    assert not accepts(grammar, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>')
    alone = compiled(
        written.constraint(choice("auto", parallel=False), None, starts_in_reasoning=False), special
    )
    assert accepts(alone, HERMES_CALL)
    assert not accepts(alone, f"{HERMES_CALL}\n{HERMES_CALL}")


@SPECIAL
def test_required_calls_are_nothing_but_calls(special: tuple[str, ...]) -> None:
    written = written_as("hermes", "none", *special)
    grammar = compiled(written.constraint(choice("required"), None, starts_in_reasoning=False), special)
    assert accepts(grammar, f"{HERMES_CALL}\n{HERMES_CALL}")
    assert not accepts(grammar, f"So: {HERMES_CALL}")
    assert not accepts(grammar, "")
    alone = compiled(
        written.constraint(choice("required", parallel=False), None, starts_in_reasoning=False), special
    )
    assert not accepts(alone, f"{HERMES_CALL}\n{HERMES_CALL}")


def test_a_tool_without_parameters_takes_any_object() -> None:
    written = written_as("mistral_args")
    grammar = compiled(written.constraint(choice("required"), None, starts_in_reasoning=False))
    assert accepts(grammar, "[TOOL_CALLS]get_time[ARGS]{}")
    assert accepts(grammar, '[TOOL_CALLS]get_time[ARGS]{"a": [1]}')
    assert not accepts(grammar, "[TOOL_CALLS]get_time[ARGS][1]")
    assert not accepts(grammar, '[TOOL_CALLS]nothing[ARGS]{"a": 1}')


PYTHON_CALLS = [
    ("[get_weather(city='Oslo')]", False),
    ('[get_weather(city="Oslo", more={"x": [true]})]', True),
    ('[get_weather(city="Oslo", more={"x": []}, days=3, on=True)]', True),
    ('[get_weather(city="Oslo", more={"x": []}, on=true)]', False),
    ('[get_weather(city="Oslo", more={"x": []}, on=False), get_time(), find-place(b=1.5)]', True),
    ('[get_weather(more={"x": []}, city="Oslo")]', False),
    ("[find-place()]", True),
    ("[find-place(a=null, b=2)][get_time()]", False),
    ('[refer(c="abc")]', True),
    ('[refer(c="abcd")]', False),
    ('[get_time(a=1, b={"c": 2})]', True),
    ("[nothing()]", True),
    ("[nothing(a=1)]", False),
]


@pytest.mark.parametrize(("text", "is_allowed"), PYTHON_CALLS)
def test_python_calls_take_keyword_arguments_required_ones_first(text: str, is_allowed: bool) -> None:
    written = written_as("pythonic")
    grammar = compiled(written.constraint(choice("required"), None, starts_in_reasoning=False))
    assert accepts(grammar, text) is is_allowed


def test_an_argument_that_python_cannot_name_is_refused_if_it_is_required() -> None:
    def tool(required: list[str]) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"a b": {}, "c": {}}, "required": required}
        return {"name": "f", "parameters": schema}

    written = written_as("pythonic")
    with pytest.raises(InvalidRequest, match="no argument named 'a b'") as refused:
        written.constraint(choice("required", tools=[tool(["a b"])]), None, starts_in_reasoning=False)
    assert refused.value.param == "tools"
    grammar = compiled(
        written.constraint(choice("required", tools=[tool(["c"])]), None, starts_in_reasoning=False)
    )
    assert accepts(grammar, "[f(c=1)]")


STRUCTURES = [
    (StructureKind.JSON_OBJECT, "", '{"a": 1}', "[1]"),
    (StructureKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}}', "[1]", '{"a": 1}'),
    (StructureKind.REGEX, "[ab]+", "abba", "abc"),
    (StructureKind.CHOICE, '["yes", "no"]', "no", "maybe"),
    (StructureKind.GRAMMAR, 'root ::= "x" root | "y"', "xxy", "x"),
    (StructureKind.GRAMMAR, 'start: "x"+ "y"', "xxy", "x"),
    (
        StructureKind.STRUCTURAL_TAG,
        '{"type": "structural_tag", "format": {"type": "const_string", "value": "z"}}',
        "z",
        "y",
    ),
]


@SPECIAL
@pytest.mark.parametrize(("kind", "source", "allowed", "refused"), STRUCTURES)
def test_an_answer_of_a_shape_may_follow_reasoning(
    kind: StructureKind, source: str, allowed: str, refused: str, special: tuple[str, ...]
) -> None:
    structured = StructuredOutput(kind=kind, source=source, param="response_format")
    none = choice("none")
    assert written_as("hermes").constraint(none, structured, starts_in_reasoning=False) is structured
    written = written_as("hermes", "think", *special)
    constraint = written.constraint(none, structured, starts_in_reasoning=False)
    assert constraint is not None
    assert constraint.param == "response_format"
    grammar = compiled(constraint, special)
    for reasoning in ("", "<think>", "<think>\nHm </thin\n</think>\n\n"):
        is_whole = not reasoning or "</think>" in reasoning
        assert accepts(grammar, reasoning + allowed) is is_whole
    assert not accepts(grammar, f"<think>a</think>{refused}")
    inside = compiled(written.constraint(none, structured, starts_in_reasoning=True), special)
    assert accepts(inside, f"Hm</think>{allowed}")
    assert not accepts(inside, f"Hm</think>{refused}")
    assert not accepts(inside, allowed)


def test_an_answer_of_a_shape_may_be_calls_instead() -> None:
    structured = StructuredOutput(kind=StructureKind.JSON_OBJECT)
    grammar = compiled(written_as("hermes").constraint(choice("auto"), structured, starts_in_reasoning=False))
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, HERMES_CALL)
    assert not accepts(grammar, "text")
    assert not accepts(grammar, f'{{"a": 1}}{HERMES_CALL}')


@pytest.mark.parametrize("source", ["no JSON", "[]", '{"format": 5}', "{}"])
def test_a_structural_tag_that_is_none_is_left_to_the_compiler(source: str) -> None:
    structured = StructuredOutput(kind=StructureKind.STRUCTURAL_TAG, source=source)
    written = written_as("hermes", "think")
    assert written.constraint(choice("none"), structured, starts_in_reasoning=False) is structured
