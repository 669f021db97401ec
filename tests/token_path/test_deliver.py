"""Texts into lanes: which tokens have one, which go back to the caller, and where a slice ends."""

from typing import Any

import pytest

from asyncserve.token_path import NEVER, add_text
from tests.token_path.implementations import Implementation, State

NOW_S, LAST_S = 20.5, 20.0
TABLE = {1: b"one", 2: b"two", 3: None}


def deliver(
    path: Implementation, rows: dict[int, Any], steps: list[tuple[int, int]], **arguments: Any
) -> tuple[Any, ...]:
    """Deliver (sequence id, token id) pairs, all of them if nothing else is said."""
    states = [State(sequence_id) for sequence_id, _ in steps]
    token_ids = [token_id for _, token_id in steps]
    values = {"first": 0, "end": len(steps), "most": 1000, "now_s": NOW_S, "last_s": LAST_S, **arguments}
    result: tuple[Any, ...] = path.deliver(rows, states, token_ids, *values.values())
    return result


def test_a_text_goes_into_its_lane(path: Implementation) -> None:
    lane = path.lane()
    row = path.row(encoded=TABLE, lane=lane)
    assert deliver(path, {5: row}, [(5, 2), (5, 1)]) == (2, 0, [0.0], [], [])
    assert lane.texts == [b"two", b"one"]
    assert lane.texts[0] is TABLE[2]
    assert (row.num_passed, row.last_token_s) == (2, NOW_S)
    assert lane.outbox == []


def test_each_text_goes_into_the_lane_of_its_own_sequence(path: Implementation) -> None:
    rows = {i: path.row(encoded={1: b"%d" % i}, lane=path.lane()) for i in range(40)}
    order = [*range(39, -1, -2), *range(0, 40, 2)]
    assert deliver(path, rows, [(i, 1) for i in order])[0] == 40
    for i, row in rows.items():
        assert (row.lane.texts, row.num_passed) == ([b"%d" % i], 1)


def test_what_has_no_row_is_passed_over(path: Implementation) -> None:
    row = path.row(encoded=TABLE, lane=path.lane())
    assert deliver(path, {5: row}, [(4, 1), (5, 1), (6, 1)]) == (3, 0, [], [], [])
    assert row.lane.texts == [b"one"]


@pytest.mark.parametrize(
    ("encoded", "has_lane", "token_id"),
    [(TABLE, True, 3), (TABLE, True, 4), (None, True, 1), (TABLE, False, 1), (None, False, 1)],
    ids=["None", "unknown", "no texts", "no lane", "neither"],
)
def test_a_token_without_a_text_or_a_lane_goes_back_to_the_caller(
    path: Implementation, encoded: dict[int, bytes | None] | None, has_lane: bool, token_id: int
) -> None:
    lane = path.lane(flush_len=1)
    row = path.row(encoded=encoded, lane=lane if has_lane else None)
    [*_, others, outboxes] = result = deliver(path, {5: row}, [(5, token_id)])
    assert result == (1, 0, [], [(row, token_id)], [])
    assert others[0][0] is row
    assert type(others[0]) is tuple
    assert (lane.texts, row.num_passed, row.last_token_s) == ([], 0, NOW_S)
    assert outboxes == []


def test_a_table_that_fills_itself_is_not_made_to(path: Implementation) -> None:
    class Filling(dict[int, bytes]):
        def __missing__(self, token_id: int) -> bytes:
            raise ZeroDivisionError

    row = path.row(encoded=Filling({1: b"one"}), lane=path.lane())
    assert deliver(path, {5: row}, [(5, 1), (5, 2)])[3] == [(row, 2)]
    assert row.lane.texts == [b"one"]


@pytest.mark.parametrize("flush_len", [1, 2, 3])
def test_a_lane_is_due_with_the_text_that_makes_it_flush_len(path: Implementation, flush_len: int) -> None:
    lane = path.lane(flush_len=flush_len)
    row = path.row(encoded=TABLE, lane=lane)
    for number in range(1, 6):
        *_, outboxes = deliver(path, {5: row}, [(5, 1)])
        assert len(outboxes) == (number == flush_len)
        assert lane.outbox == [lane] * (number >= flush_len), "behind that it stays where it is"
        assert all(outbox is lane.outbox for outbox in outboxes)


@pytest.mark.parametrize("flush_len", [NEVER, 0, 1000])
def test_a_lane_that_is_not_to_be_written_goes_into_no_outbox(path: Implementation, flush_len: int) -> None:
    lane = path.lane(flush_len=flush_len)
    assert deliver(path, {5: path.row(encoded=TABLE, lane=lane)}, [(5, 1)] * 20)[4] == []
    assert (len(lane.texts), lane.outbox) == (20, [])


def test_each_outbox_is_told_of_once_and_has_its_lanes_in_order(path: Implementation) -> None:
    equal_lists: tuple[list[Any], list[Any]] = ([], [])
    lanes = [path.lane(flush_len=1, outbox=equal_lists[i % 2]) for i in range(6)]
    rows = {i: path.row(encoded=TABLE, lane=lane) for i, lane in enumerate(lanes)}
    *_, outboxes = deliver(path, rows, [(i, 1) for i in range(6)])
    assert [id(outbox) for outbox in outboxes] == [id(outbox) for outbox in equal_lists]
    assert equal_lists == (lanes[::2], lanes[1::2])


class Subclass(list[Any]):
    """As the server's outbox is."""


def test_an_outbox_may_be_more_than_a_list(path: Implementation) -> None:
    lane = path.lane(flush_len=1, outbox=Subclass())
    assert deliver(path, {5: path.row(encoded=TABLE, lane=lane)}, [(5, 1)])[4][0] is lane.outbox
    assert lane.outbox == [lane]


def test_time_since_the_last_token_is_told_unless_that_came_with_the_step_before(
    path: Implementation,
) -> None:
    equal_s = float(str(LAST_S))
    assert equal_s is not LAST_S
    times = [None, LAST_S, 12.0, LAST_S, equal_s, NOW_S]
    rows = {i: path.row(encoded=TABLE, lane=path.lane(), last_token_s=at_s) for i, at_s in enumerate(times)}
    position, num_alike, gaps_s, _, _ = deliver(path, rows, [(i, 1) for i in range(len(times))])
    assert (position, num_alike, gaps_s) == (6, 2, [8.5, 0.5, 0.0])
    assert all(row.last_token_s is NOW_S for row in rows.values())


def test_times_are_noted_of_tokens_for_the_caller_too(path: Implementation) -> None:
    rows = {1: path.row(last_token_s=LAST_S), 2: path.row(last_token_s=1.5), 3: path.row()}
    _, num_alike, gaps_s, others, _ = deliver(path, rows, [(1, 1), (2, 1), (3, 1)])
    assert (num_alike, gaps_s) == (1, [19.0])
    assert others == [(rows[1], 1), (rows[2], 1), (rows[3], 1)]
    assert all(row.last_token_s is NOW_S for row in rows.values())


@pytest.mark.parametrize(("first", "end"), [(0, 0), (2, 5), (5, 5), (5, 3), (9, 10), (0, 10)])
def test_only_the_slice_is_delivered(path: Implementation, first: int, end: int) -> None:
    rows = {i: path.row(encoded=TABLE, lane=path.lane()) for i in range(10)}
    steps = [(i, 1) for i in range(10)]
    assert deliver(path, rows, steps, first=first, end=end)[0] == max(first, end)
    for i, row in rows.items():
        assert row.num_passed == (first <= i < end)
        assert (row.last_token_s is not None) == (first <= i < end)


@pytest.mark.parametrize("most", [-1, 0, 1, 3, 6, 7, 100])
def test_a_slice_ends_when_so_many_lanes_are_due(path: Implementation, most: int) -> None:
    outbox: list[Any] = []
    rows = {}
    for i in range(18):  # one is due, one is left to the caller, one is neither
        flush_len = NEVER if i % 3 == 2 else 1
        lane = path.lane(flush_len=flush_len, outbox=outbox)
        rows[i] = path.row(encoded=None if i % 3 == 1 else TABLE, lane=lane)
    steps = [(i, 1) for i in range(18)]
    position, _, _, others, _ = deliver(path, rows, steps, most=most)
    num_due = max(0, min(most, 6))
    assert len(outbox) == num_due
    assert position == (0 if most <= 0 else 18 if most > 6 else 3 * num_due - 2)
    assert len(others) == position // 3 + (position % 3 == 2)
    rest = deliver(path, rows, steps, first=position)
    assert rest[0] == 18
    assert len(others) + len(rest[3]) + len(outbox) == 12
    assert sum(row.num_passed for row in rows.values()) == 12


@pytest.mark.parametrize("kind", [list, tuple])
def test_states_and_tokens_are_any_sequences(path: Implementation, kind: Any) -> None:
    row = path.row(encoded=TABLE, lane=path.lane())
    path.deliver({5: row}, kind([State(5)]), kind([1]), 0, 1, 9, NOW_S, LAST_S)
    assert row.lane.texts == [b"one"]


def test_rows_and_lanes_may_be_of_subclasses(path: Implementation) -> None:
    class Lane(path.TextLane):  # type: ignore[misc, name-defined]
        __slots__ = ("other",)

    class Row(path.TextRow):  # type: ignore[misc, name-defined]
        __slots__ = ("other",)

    lane, row = Lane(), Row()
    lane.outbox, lane.flush_len, lane.other = [], 1, 3
    row.encoded, row.lane, row.other = TABLE, lane, 4
    assert deliver(path, {5: row}, [(5, 1), (5, 3)]) == (2, 0, [0.0], [(row, 3)], [[lane]])
    assert (lane.other, row.other) == (3, 4)


@pytest.mark.parametrize(("first", "end"), [(0, 3), (2, 3), (-1, 2), (-3, -1)])
def test_a_slice_beyond_the_tokens_is_refused_before_anything_is_done(
    path: Implementation, first: int, end: int
) -> None:
    row = path.row(encoded=TABLE, lane=path.lane())
    with pytest.raises(IndexError):
        deliver(path, {5: row}, [(5, 1), (5, 1)], first=first, end=end)
    with pytest.raises(IndexError):
        path.deliver({5: row}, [State(5)] * 3, [1, 1], 0, 3, 9, NOW_S, LAST_S)
    with pytest.raises(IndexError):
        path.deliver({5: row}, [State(5)] * 2, [1, 1, 1], 0, 3, 9, NOW_S, LAST_S)
    assert (row.num_passed, row.lane.texts, row.last_token_s) == (0, [], None)


def test_what_raises_half_way_leaves_what_was_done(path: Implementation) -> None:
    row = path.row(encoded=TABLE, lane=path.lane(flush_len=1))
    with pytest.raises(AttributeError):
        path.deliver({5: row}, [State(5), object(), State(5)], [1, 1, 1], 0, 3, 9, NOW_S, LAST_S)
    assert (row.num_passed, row.lane.texts, row.lane.outbox) == (1, [b"one"], [row.lane])
    with pytest.raises(TypeError):
        path.deliver({5: row}, [State(5), State([])], [1, 1], 0, 2, 9, NOW_S, LAST_S)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        path.deliver({5: row}, [State(5), State(5)], [1, []], 0, 2, 9, NOW_S, LAST_S)
    assert row.num_passed == 3
    row.last_token_s = "never"
    with pytest.raises(TypeError):
        deliver(path, {5: row}, [(5, 1)])
    assert row.num_passed == 3


@pytest.mark.parametrize("fault", ["row", "encoded", "lane", "texts"])
def test_another_type_than_described_is_an_error(path: Implementation, fault: str) -> None:
    lane = path.lane()
    row = path.row(encoded=TABLE, lane=lane)
    rows = {5: object() if fault == "row" else row}
    if fault == "texts":
        lane.texts = 3
    elif fault != "row":
        setattr(row, fault, 3)
    with pytest.raises((TypeError, AttributeError)):
        deliver(path, rows, [(5, 1)])
    assert row.num_passed == 0


@pytest.mark.parametrize(
    "arguments",
    [(), ({}, [], [], 0, 0, 0, 0.0), ({}, 1, [], 0, 0, 0, 0.0, 0.0), ({}, [], 1, 0, 0, 0, 0.0, 0.0)],
    ids=["none", "seven", "states", "tokens"],
)
def test_wrong_arguments_are_an_error(path: Implementation, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        path.deliver(*arguments)


@pytest.mark.parametrize("position", [0, 3, 4, 5])
def test_wrong_arguments_are_an_error_at_once_in_c(native: Implementation, position: int) -> None:
    arguments: list[Any] = [{}, [], [], 0, 0, 0, 0.0, 0.0]
    arguments[position] = "no"
    with pytest.raises(TypeError):
        native.deliver(*arguments)


def test_add_text_puts_a_text_into_a_lane_and_that_into_its_outbox_when_due(path: Implementation) -> None:
    lane, other = path.lane(flush_len=2), path.lane(flush_len=1)
    outboxes: list[Any] = []
    add_text(lane, b"a", outboxes)
    assert (lane.texts, lane.outbox, outboxes) == ([b"a"], [], [])
    add_text(lane, b"b", outboxes)
    assert (lane.texts, lane.outbox) == ([b"a", b"b"], [lane])
    assert outboxes[0] is lane.outbox
    add_text(lane, b"c", outboxes)
    assert (lane.outbox, len(outboxes)) == ([lane], 1)
    add_text(other, b"d", outboxes)
    assert [id(outbox) for outbox in outboxes] == [id(lane.outbox), id(other.outbox)]
    other.texts.clear()
    add_text(other, b"e", outboxes)
    assert (other.outbox, len(outboxes)) == ([other, other], 2)
