"""What is complete of a JSON object that breaks off."""

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncserve.http.messages.partial_json import MAX_DEPTH, is_object, partial_object

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    st.integers(0, 400),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_the_beginning_of_an_object_means_what_streaming_clients_read_in_it(
    value: dict[str, Any], cut: int, escapes: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=escapes, indent=indent)
    beginning = text[: max(1, cut % (len(text) + 1))]
    assert partial_object(beginning) == jiter.from_json(beginning.encode(), partial_mode=True)


@pytest.mark.parametrize("text", ["", "[1", '"a', "1", "x", "}", '{"a": 1]'])
def test_what_begins_no_object_is_none(text: str) -> None:
    assert partial_object(text) is None


@pytest.mark.parametrize(("opening", "num_opened"), [("[", 1), ('{"a":', 1), ('[{"a": 1, "b":', 2)])
def test_nesting_is_followed_so_far_and_looked_at_no_further(opening: str, num_opened: int) -> None:
    assert partial_object('{"a":' + opening * ((MAX_DEPTH - 1) // num_opened)) is not None
    assert partial_object('{"a":' + opening * MAX_DEPTH) is None
    # Would take minutes if each bracket were worth a look at all that are open.
    assert partial_object('{"a":' + opening * 200_000) is None


def test_many_values_side_by_side_are_looked_at_once() -> None:
    text = '{"a":' + "[" * (MAX_DEPTH - 2) + "[1]," * 50_000
    found = partial_object(text)
    assert found is not None
    assert json.dumps(found).count("1") == 50_000


def test_what_follows_a_fault_does_not_count() -> None:
    assert partial_object('{"a": "x", "b": oops, "c": 1}') == {"a": "x"}


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_an_object_is_one(value: dict[str, Any]) -> None:
    assert is_object(json.dumps(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": "\\ud800"}',
        '{"a": 1} x',
        "{" * 9,
        '{"a":' * 10**5,
    ],
)
def test_what_an_answer_cannot_hold_is_no_object(text: str) -> None:
    assert not is_object(text)
