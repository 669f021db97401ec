"""What holds for every text, every format and every way of cutting."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncserve.http.parsers.registry import TOOL_PARSERS
from tests.http.parsers.reading import TOOLS, choice, cut, message, read, written_as

PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "<think>",
        "</think>",
        "</thi",
        "<|python_tag|>",
        "<|x|>",
        "<|x",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_", "[get_weather(city=", "[{", "}}", '{"a":1}'),
    *"[]{}()'\",:;=\\1é \n\x01",
    *(
        '"""',
        "'''",
        "\\u00e9",
        "\\u",
        "\\n",
        "\\x4",
        "-2.5e3",
        "0x1",
        "true",
        "True",
        "null",
        "None",
        "\t\n ",
    ),
    *("name", '"name"', '"arguments"', '"parameters"', '"id"', "get_time", "get_weather", "f", "city="),
    *('{"name":"f","arguments":{', '{"name":"get_time","parameters":{'),
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)
FORMATS = st.sampled_from(sorted(TOOL_PARSERS))
MARKERS_INSIDE = st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "</think>",
        '"}]',
        "\\",
        "'",
        '"""',
        "[get_time()]",
    ]
)
STRINGS = st.lists(MARKERS_INSIDE | st.text(st.characters(codec="utf-8"), max_size=6), max_size=3).map(
    "".join
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "x_1"]), VALUES, max_size=3)
CALLS = st.lists(
    st.tuples(st.sampled_from([tool["name"] for tool in TOOLS]), ARGUMENTS), min_size=1, max_size=3
)
PLACES = st.lists(st.integers(0, 400), max_size=12)


@given(TEXTS, PLACES, FORMATS, st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None)
def test_any_cutting_of_a_text_gives_what_the_whole_gives(
    text: str, places: list[int], tool_parser: str, reasons: bool, is_open: bool, parallel: bool
) -> None:
    written = written_as(tool_parser, "think" if reasons else "none", "[TOOL_CALLS]", "<|x|>")
    asked = choice(parallel=parallel)
    whole, by_character, in_pieces = (
        read(written.parser(asked, starts_in_reasoning=is_open), pieces)
        for pieces in ([text], text, cut(text, [place for place in places if place < len(text)]))
    )
    assert by_character == whole
    assert in_pieces == whole
    assert parallel or len(whole.tool_calls) <= 1


@given(TEXTS, FORMATS)
@settings(deadline=None)
def test_a_text_without_calls_is_content_as_it_is(text: str, tool_parser: str) -> None:
    parsed = read(written_as(tool_parser).parser(choice()), [text])
    if not parsed.tool_calls:
        assert parsed.content == text


@given(st.text(st.characters(exclude_characters="<"), max_size=60), st.booleans())
def test_a_text_without_tags_is_an_answer(text: str, is_open: bool) -> None:
    parsed = read(written_as("none", "think").parser(choice("none")), [text])
    assert parsed == message(text)
    parsed = read(written_as("none", "think").parser(choice("none"), starts_in_reasoning=True), [text])
    assert parsed == message("", reasoning=text.strip())


def _hermes(calls: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls
    )


def _hermes_reversed(calls: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<tool_call>{{"arguments":{text},"id":[{{"name":1}}],"name":"{name}"}}</tool_call>'
        for name, text in calls
    )


def _llama(calls: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def _mistral(calls: Sequence[tuple[str, str]]) -> str:
    objects = ", ".join(f'{{"name": "{name}", "arguments": {text}, "id": "abc"}}' for name, text in calls)
    return f"[TOOL_CALLS] [{objects}]"


def _mistral_args(calls: Sequence[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)


@pytest.mark.parametrize(
    ("tool_parser", "rendered"),
    [
        ("hermes", _hermes),
        ("hermes", _hermes_reversed),
        ("llama3_json", _llama),
        ("mistral", _mistral),
        ("mistral_args", _mistral_args),
    ],
)
@given(
    calls=CALLS,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    before=st.sampled_from(["", "Let me see.\n"]),
    places=PLACES,
)
@settings(deadline=None)
def test_the_arguments_of_a_call_are_its_json_as_it_was_written(
    tool_parser: str,
    rendered: Callable[[Sequence[tuple[str, str]]], str],
    calls: list[tuple[str, Any]],
    ascii_only: bool,
    indent: int | None,
    before: str,
    places: list[int],
) -> None:
    written = [(name, json.dumps(given, ensure_ascii=ascii_only, indent=indent)) for name, given in calls]
    text = before + rendered(written)
    parsed = read(written_as(tool_parser).parser(choice()), cut(text, places))
    assert parsed == message(before, *written)


@given(CALLS, st.booleans(), PLACES)
@settings(deadline=None)
def test_the_arguments_of_a_python_call_are_what_python_reads(
    calls: list[tuple[str, Any]], as_json: bool, places: list[int]
) -> None:
    value: Callable[[Any], str] = json.dumps if as_json else repr
    shown = ", ".join(
        f"{name}({', '.join(f'{key}={value(item)}' for key, item in given.items())})" for name, given in calls
    )
    parsed = read(written_as("pythonic").parser(choice()), cut(f"[{shown}]", places))
    assert not parsed.content
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls


ADVERSARIES = [
    "<tool_cal",
    "<tool_call>",
    '<tool_call>{"',
    '<tool_call>{"name": "f", "arguments": {"a": "',
    '<tool_call>{"name": "f", "arguments": {',
    "[TOOL_CALLS]",
    "[TOOL_CALLS][",
    "[TOOL_CALLS]f[ARGS]{",
    "[TOOL_CALLS] [{",
    "[get_weather(city=",
    "[get_weather(city='",
    "[",
    "{",
    '{"name": "get_time", "parameters": {',
    '{"name": "get_time", "parameters": {}};',
    "<think>",
    "</think",
    " ",
    "\\",
    "1",
    "<|x",
]


def _num_calls(tool_parser: str, text: str, step: int) -> int:
    """Return how many functions, Python's and built-in ones, reading a text calls."""
    parser = written_as(tool_parser, "think", "[TOOL_CALLS]", "<|x|>").parser(choice())
    assert parser is not None
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    pieces = [text[begin : begin + step] for begin in range(0, len(text), step)]
    sys.setprofile(count)
    try:
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.slow
@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json", "mistral", "pythonic"])
@pytest.mark.parametrize("step", [3, 10_000])
def test_work_grows_with_the_text_and_not_faster(tool_parser: str, step: int) -> None:
    for unit in ADVERSARIES:
        for opening in ("", '<tool_call>{"name": "f", "arguments": {"a": ', "[TOOL_CALLS]f[ARGS]"):
            less, more = (_num_calls(tool_parser, opening + unit * num, step) for num in (100, 400))
            assert more < 4.5 * less + 200, unit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool_parser", "near_marker"),
    [
        ("hermes", "<tool_cal"),
        ("mistral", "[TOOL_CALL"),
        ("pythonic", "[get_weather(cit"),
        ("llama3_json", '{"nam'),
    ],
)
def test_a_hundred_thousand_near_markers_are_read_piece_by_piece(tool_parser: str, near_marker: str) -> None:
    parser = written_as(tool_parser).parser(choice())
    assert parser is not None
    contents = [parser.feed(near_marker).content for _ in range(100_000)]
    assert "".join(contents) + parser.finish().content == near_marker * 100_000
