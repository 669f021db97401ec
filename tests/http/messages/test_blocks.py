"""From the text of an answer to Anthropic's content blocks."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncserve.http.messages.blocks import BlockStep, BlockWriter
from asyncserve.http.parsers.hermes import HermesParser
from asyncserve.http.parsers.interface import MessageDelta, ToolCallDelta, ToolChoice

CHOICE = ToolChoice(tools=({"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}), mode="auto")
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": "x > y", "b": [1, {"c": ")"}]}}\n</tool_call>'
CALL_G = '<tool_call>{"arguments": {}, "name": "g"}</tool_call>'
BROKEN = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'


class Script:
    """A parser that gives what it is told, piece for piece, whatever it is fed."""

    def __init__(self, deltas: Iterable[MessageDelta], last: MessageDelta | None = None) -> None:
        self._deltas = iter(deltas)
        self._last = last or MessageDelta()

    def feed(self, text: str) -> MessageDelta:
        return next(self._deltas, MessageDelta())

    def finish(self) -> MessageDelta:
        return self._last


def blocks(steps: Iterable[BlockStep]) -> list[tuple[str, str, str]]:
    """Kind, tool and text of each block, once its steps are in order: it begins, grows, ends."""
    made: list[tuple[str, str, str]] = []
    is_open = False
    for step in steps:
        if step.ends or step.text is not None:
            assert is_open
            assert step.index == len(made) - 1
            assert step.kind == made[-1][0]
        if step.ends:
            is_open = False
        elif step.text is not None:
            kind, name, text = made[-1]
            made[-1] = (kind, name, text + step.text)
        else:
            assert not is_open
            assert step.index == len(made)
            assert step.call_id.startswith("toolu_") == (step.kind == "tool_use")
            made.append((step.kind, step.name, ""))
            is_open = True
    assert not is_open
    return made


def written(
    pieces: Sequence[str], parser: Any = None, *, is_cut: bool = False, **options: Any
) -> list[tuple[str, str, str]]:
    writer = BlockWriter(HermesParser(CHOICE) if parser is None else parser, **options)
    steps = [step for piece in pieces for step in writer.feed(piece)]
    return blocks([*steps, *writer.finish(is_cut=is_cut)])


TEXTS = st.lists(
    st.sampled_from(
        [CALL_F, CALL_G, BROKEN, "<tool_call>", "</tool_call>", "{", "}", "text", " ", "\n", "(a)", "1 > 0"]
    ),
    max_size=8,
).map("".join)


@given(TEXTS, st.lists(st.integers(0, 400), max_size=20), st.booleans(), st.booleans())
def test_blocks_do_not_depend_on_how_the_text_is_cut(
    text: str, cuts: list[int], is_cut: bool, is_eager: bool
) -> None:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    eager = {"f"} if is_eager else set()
    whole = written([text], is_cut=is_cut, eager_tools=eager)
    assert written(pieces, is_cut=is_cut, eager_tools=eager) == whole
    assert written(list(text), is_cut=is_cut, eager_tools=eager) == whole


def test_text_and_calls_stay_in_order() -> None:
    assert written([f"one {CALL_F} two {CALL_G}{CALL_G}three"]) == [
        ("text", "", "one "),
        ("tool_use", "f", '{"a": "x > y", "b": [1, {"c": ")"}]}'),
        ("text", "", " two "),
        ("tool_use", "g", "{}"),
        ("tool_use", "g", "{}"),
        ("text", "", "three"),
    ]


def test_input_that_is_no_object_is_text() -> None:
    writer = BlockWriter(HermesParser(CHOICE))
    steps = [*writer.feed(f"so {BROKEN} and"), *writer.finish(is_cut=False)]
    [(kind, _, text)] = blocks(steps)
    assert kind == "text"
    assert text.startswith('so {"name": "f", "arguments": {"a": oops}')
    assert text.endswith(" and")
    assert writer.num_calls == 0


@pytest.mark.parametrize(("is_cut", "expected"), [(True, ("tool_use", "f", '{"a": "x"}')), (False, None)])
def test_a_call_that_breaks_off_is_one_only_if_a_limit_cut_it(
    is_cut: bool, expected: tuple[str, str, str] | None
) -> None:
    [block] = written(['<tool_call>{"name": "f", "arguments": {"a": "x", "b": "y'], is_cut=is_cut)
    if expected is not None:
        assert block == expected
    else:
        assert block[0] == "text"


def test_an_eager_tools_input_is_given_as_it_comes() -> None:
    writer = BlockWriter(HermesParser(CHOICE), eager_tools={"f"})
    steps = list(writer.feed('<tool_call>{"name": "f", "arguments": {"a": "xy'))
    assert [step.text for step in steps] == [None, '{"a": "xy']


def test_a_held_tools_input_is_given_when_it_is_whole() -> None:
    writer = BlockWriter(HermesParser(CHOICE))
    assert list(writer.feed('<tool_call>{"name": "f", "arguments": {"a": 1}')) == []
    steps = list(writer.feed("}</tool_call>then"))
    assert [(step.kind, step.text) for step in steps][:2] == [("tool_use", None), ("tool_use", '{"a": 1}')]


def test_reasoning_comes_in_a_block_of_its_own() -> None:
    deltas = [MessageDelta(reasoning="I "), MessageDelta(reasoning="think", content="So")]
    assert written(["a", "b"], Script(deltas)) == [("thinking", "", "I think"), ("text", "", "So")]


def test_reasoning_that_is_not_shown_leaves_an_empty_block() -> None:
    deltas = [MessageDelta(reasoning="I think", content="So")]
    made = written(["a"], Script(deltas), shows_thinking=False)
    assert made == [("thinking", "", ""), ("text", "", "So")]


def test_what_the_parser_held_back_is_not_lost() -> None:
    last = MessageDelta(content="<too", tool_calls=[ToolCallDelta(0, "f", "")])
    assert written(["a"], Script([], last)) == [("text", "", "<too"), ("tool_use", "f", "{}")]


def test_an_empty_answer_is_one_empty_text_block() -> None:
    assert written([]) == [("text", "", "")]
    writer = BlockWriter(None)
    assert blocks([*writer.open_text(), *writer.feed(""), *writer.finish(is_cut=False)]) == [("text", "", "")]
