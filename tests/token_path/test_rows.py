"""Planning and applying a step for sequences that decode."""

from array import array
from typing import Any

import pytest

from tests.token_path.implementations import Implementation, state_of


def plan(
    path: Implementation, *sequences: Any, step_id: int = 4
) -> tuple[Any, list[int], list[int], list[Any]]:
    slots: list[int] = []
    starts: list[int] = []
    planned: list[Any] = []
    lacking = path.plan_rows(list(sequences), step_id, slots, starts, planned)
    return lacking, slots, starts, planned


def test_a_planned_sequence_computes_its_last_token(path: Implementation) -> None:
    row = path.sequence(slot=7, num_computed_tokens=2, num_unseen_tokens=5)
    before = state_of(row)
    assert plan(path, row) == ([], [7], [2], [row])
    assert state_of(row) == {
        **before,
        "num_computed_tokens": 3,
        "num_unseen_tokens": 6,
        "last_step_id": 4,
    }


def test_what_is_planned_comes_behind_what_is_there_in_the_order_of_the_sequences(
    path: Implementation,
) -> None:
    rows = [path.sequence(slot=slot, num_computed_tokens=10 - slot) for slot in (3, 1, 2)]
    slots, starts, planned = [9], [90], [None]
    assert path.plan_rows(rows, 5, slots, starts, planned) == []
    assert (slots, starts) == ([9, 3, 1, 2], [90, 7, 9, 8])
    assert planned == [None, *rows]


@pytest.mark.parametrize("start", [14, 15, 16, 17, 98, 99, 100])
def test_one_that_lacks_a_block_is_returned_and_one_at_its_end_left_out(
    path: Implementation, start: int
) -> None:
    row = path.sequence(num_computed_tokens=start, plain_until=16, max_len=100)
    before = state_of(row)
    lacking, slots, starts, planned = plan(path, row)
    assert planned == ([row] if start < 16 else [])
    assert (slots, starts) == (([7], [start]) if start < 16 else ([], []))
    assert lacking == ([row] if 16 <= start < 99 else [])
    assert (state_of(row) == before) == (start >= 16)


@pytest.mark.parametrize("plain_until", [-1, 0, 3])
def test_one_that_is_never_plain_is_lacking_wherever_it_stands(
    path: Implementation, plain_until: int
) -> None:
    row = path.sequence(num_computed_tokens=3, plain_until=plain_until)
    assert plan(path, row) == ([row], [], [], [])


def test_the_plain_are_planned_beside_those_that_are_not(path: Implementation) -> None:
    rows = [path.sequence(slot=i, plain_until=16 if i % 2 else 2) for i in range(6)]
    lacking, slots, starts, planned = plan(path, *rows)
    assert (lacking, planned) == (rows[::2], rows[1::2])
    assert (slots, starts) == ([1, 3, 5], [2, 2, 2])
    assert plan(path, *rows)[2] == [3, 3, 3], "and the next step goes on from there"


def test_nothing_is_planned_of_nothing(path: Implementation) -> None:
    assert plan(path) == ([], [], [], [])


def test_the_same_sequence_twice_takes_two_positions(path: Implementation) -> None:
    row = path.sequence(plain_until=4)
    assert plan(path, row, row, row) == ([row], [7, 7], [2, 3], [row, row])


def test_large_numbers_are_kept(path: Implementation) -> None:
    row = path.sequence(slot=2**40, num_computed_tokens=2**41, plain_until=2**42, max_len=2**43)
    assert plan(path, row, step_id=2**50) == ([], [2**40], [2**41], [row])
    assert row.last_step_id == 2**50


def test_a_plan_that_meets_no_sequence_raises_and_keeps_what_was_planned(path: Implementation) -> None:
    row, after = path.sequence(), path.sequence()
    slots: list[int] = []
    with pytest.raises((TypeError, AttributeError)):
        path.plan_rows([row, object(), after], 4, slots, [], [])
    assert (slots, row.num_computed_tokens, after.num_computed_tokens) == ([7], 3, 2)


@pytest.mark.parametrize("position", range(5))
def test_plan_rows_takes_lists_and_a_number_in_c(native: Implementation, position: int) -> None:
    arguments: list[Any] = [[], 1, [], [], []]
    arguments[position] = ()
    with pytest.raises(TypeError):
        native.plan_rows(*arguments)
    with pytest.raises(TypeError):
        native.plan_rows([], 1, [], [])


def test_a_plain_token_is_appended(path: Implementation) -> None:
    rows = [path.sequence(num_unseen_tokens=2), path.sequence(num_unseen_tokens=1, slot=8)]
    before = [state_of(row) for row in rows]
    known = [row.token_ids for row in rows]
    assert path.apply_rows(rows, [50, 0], {}) == []
    for row, earlier, token_ids, token_id in zip(rows, before, known, (50, 0), strict=True):
        assert row.token_ids is token_ids
        assert state_of(row) == {
            **earlier,
            "token_ids": array("i", [1, 2, 3, token_id]),
            "num_unseen_tokens": earlier["num_unseen_tokens"] - 1,
        }


NOT_PLAIN: dict[str, tuple[dict[str, Any], int, dict[int, Any]]] = {
    "stop token": ({}, 99, {}),
    "last by length": ({"max_len": 4}, 5, {}),
    "beyond its length": ({"max_len": 2}, 5, {}),
    "no token": ({}, -1, {}),
    "bad logits": ({}, -2, {}),
    "too late": ({"accepts_output": False}, 5, {}),
    "more to be said": ({}, 5, {7: None}),
    "all of it": ({"accepts_output": False, "max_len": 4}, 99, {7: 1}),
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_a_token_that_may_mean_more_is_returned_and_changes_nothing(path: Implementation, case: str) -> None:
    attributes, token_id, special_slots = NOT_PLAIN[case]
    row, plain = path.sequence(**attributes), path.sequence(slot=8)
    before = {**state_of(row), "token_ids": row.token_ids[:]}
    assert path.apply_rows([plain, row, plain], [5, token_id, 6], special_slots) == [(row, token_id)]
    assert state_of(row) == before
    assert plain.token_ids.tolist() == [1, 2, 3, 5, 6]


def test_what_is_just_not_so_is_plain(path: Implementation) -> None:
    row = path.sequence(max_len=5, stop_token_ids=frozenset({4, 6}), slot=7)
    assert path.apply_rows([row], [5], {6: 1, 8: 1}) == []
    assert row.token_ids.tolist() == [1, 2, 3, 5]
    assert path.apply_rows([row], [5], {}) == [(row, 5)]


def test_others_come_in_order_with_the_very_objects(path: Implementation) -> None:
    rows = [path.sequence(accepts_output=i % 2 == 0) for i in range(6)]
    token_ids = [1000 + i for i in range(6)]
    others = path.apply_rows(rows, tuple(token_ids), {})
    assert others == [(rows[i], token_ids[i]) for i in (1, 3, 5)]
    assert all(type(other) is tuple for other in others)
    assert all(other[0] is rows[i] for other, i in zip(others, (1, 3, 5), strict=True))


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_another_number_of_tokens_is_refused_before_anything_is_done(
    path: Implementation, num_tokens: int
) -> None:
    rows = [path.sequence(), path.sequence()]
    with pytest.raises(ValueError):  # noqa: PT011 - which of the two says it differs
        path.apply_rows(rows, [5] * num_tokens, {})
    assert [len(row.token_ids) for row in rows] == [3, 3]
    assert path.apply_rows([], [], {}) == []


@pytest.mark.parametrize(("token_id", "error"), [("5", TypeError), (5.0, TypeError), (2**31, OverflowError)])
def test_a_token_that_is_none_raises_and_keeps_what_was_applied(
    path: Implementation, token_id: Any, error: type[Exception]
) -> None:
    first, bad, after = path.sequence(), path.sequence(), path.sequence()
    before = {**state_of(bad), "token_ids": bad.token_ids[:]}
    with pytest.raises(error):
        path.apply_rows([first, bad, after], [5, token_id, 6], {})
    assert (first.token_ids.tolist(), after.token_ids.tolist()) == ([1, 2, 3, 5], [1, 2, 3])
    assert state_of(bad) == before


def test_an_item_that_is_no_sequence_raises(path: Implementation) -> None:
    row = path.sequence()
    with pytest.raises((TypeError, AttributeError)):
        path.apply_rows([row, object()], [5, 5], {})
    assert row.token_ids.tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("position", range(3))
def test_apply_rows_takes_a_list_tokens_and_a_dict_in_c(native: Implementation, position: int) -> None:
    arguments: list[Any] = [[], [], {}]
    arguments[position] = 3
    with pytest.raises(TypeError):
        native.apply_rows(*arguments)
    with pytest.raises(TypeError):
        native.apply_rows([], [])
