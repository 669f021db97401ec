"""What is done to objects of both kinds has the same results, leaves the same behind, and sends the same."""

from array import array
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from asyncserve.token_path import NEVER, add_text
from tests.token_path.implementations import NATIVE, PYTHON, Implementation, Pair, State

pytestmark = pytest.mark.skipif(NATIVE is None, reason="not compiled")

NUM_LANES = 5
IDS = range(8)
TABLES: list[dict[int, bytes | None] | None] = [
    {i: b"t%d" % i for i in range(6)},
    {0: b"\xf0\x9f", 1: None, 2: b"x" * 300, 3: b"%d%s"},
    {},
    None,
]
FRAMES = [(b"", b"", b""), (b"data: ", b"\n\ndata: ", b"\n\n"), (b"<" * 40, b"|", b">" * 300)]


class Side:
    """One of the twins: rows, lanes and sockets of one implementation."""

    def __init__(self, path: Implementation) -> None:
        self.path = path

        class Lane(path.TextLane):  # type: ignore[misc, name-defined]
            __slots__ = ("_own", "number")

        class Row(path.TextRow):  # type: ignore[misc, name-defined]
            __slots__ = ("number", "owner")

        self.new_row = Row
        self.outboxes: list[list[Any]] = [[], []]
        self.pairs = [Pair() for _ in range(NUM_LANES)]
        self.received = [b""] * NUM_LANES
        self.lanes: list[Any] = []
        for number in range(NUM_LANES):
            lane = Lane()
            lane.number, lane._own = number, [number]
            lane.outbox = self.outboxes[number % 2]
            lane.socket = path.SocketHandle(self.pairs[number].near.fileno())
            self.lanes.append(lane)
        self.rows: dict[int, Any] = {}

    def set_row(self, sequence_id: int, number: int | None, table: int) -> None:
        row = self.new_row()
        row.number = sequence_id
        row.owner = row
        row.lane = None if number is None else self.lanes[number]
        row.encoded = TABLES[table]
        self.rows[sequence_id] = row

    def deliver(self, steps: list[tuple[int, int]], *arguments: Any) -> Any:
        """Return what `deliver` gives, or raises, with names in place of objects."""
        states = [State(sequence_id) for sequence_id, _ in steps]
        token_ids = [token_id for _, token_id in steps]
        try:
            position, num_alike, gaps_s, others, outboxes = self.path.deliver(
                self.rows, states, token_ids, *arguments
            )
        except (IndexError, TypeError) as error:
            return type(error)
        told = [(row.number, token_id) for row, token_id in others]
        return position, num_alike, gaps_s, told, [self._outbox(outbox) for outbox in outboxes]

    def add(self, number: int, text: bytes) -> list[int]:
        outboxes: list[Any] = []
        add_text(self.lanes[number], text, outboxes)
        return [self._outbox(outbox) for outbox in outboxes]

    def write(self, numbers: list[int], flush_len: int) -> Any:
        """Return what `write` gives; of rests, which depend on the sockets, only whose they are."""
        num_texts, unwritten = self.path.write([self.lanes[number] for number in numbers], flush_len)
        for lane, rest in unwritten:
            if rest is not None:
                self.drain(lane.number)
                self.received[lane.number] += rest
        return num_texts, [(lane.number, rest is None) for lane, rest in unwritten]

    def drain(self, number: int) -> None:
        if self.lanes[number]._own:
            self.received[number] += self.pairs[number].read()

    def _outbox(self, outbox: Any) -> int:
        return next(i for i, each in enumerate(self.outboxes) if each is outbox)

    def state(self) -> Any:
        """Return all there is to see, with names in place of objects."""
        names = ("texts", "flush_len", "held", "is_chunked", "is_resting", "num_quiet_ticks", "before")
        lanes = [[getattr(lane, name) for name in names] + [lane._own, lane.number] for lane in self.lanes]
        rows = {
            key: (row.number, row.num_passed, row.last_token_s, row.encoded, row.owner is row)
            for key, row in self.rows.items()
        }
        return lanes, rows, [[lane.number for lane in outbox] for outbox in self.outboxes]

    def close(self) -> None:
        for row in self.rows.values():
            row.owner = None
        for pair in self.pairs:
            pair.close()


lane_numbers = st.integers(0, NUM_LANES - 1)
flush_lens = st.sampled_from([NEVER, 0, 1, 2, 3, 7])


class Twins(RuleBasedStateMachine):
    """The same calls on both."""

    @initialize()
    def begin(self) -> None:
        assert NATIVE is not None
        self.sides = [Side(PYTHON), Side(NATIVE)]
        self.last_s = 0.0
        self.now_s = 1.0

    def _same(self, results: list[Any]) -> None:
        assert results[0] == results[1]

    @rule(sequence_id=st.sampled_from(IDS), number=st.none() | lane_numbers, table=st.integers(0, 3))
    def set_row(self, sequence_id: int, number: int | None, table: int) -> None:
        for side in self.sides:
            side.set_row(sequence_id, number, table)

    @rule(sequence_id=st.sampled_from(IDS))
    def drop_row(self, sequence_id: int) -> None:
        for side in self.sides:
            side.rows.pop(sequence_id, None)

    @rule(
        number=lane_numbers,
        flush_len=flush_lens,
        is_resting=st.booleans(),
        is_chunked=st.booleans(),
        held=st.sampled_from([(), (), (), (b"event",)]),
        frame=st.sampled_from(FRAMES),
        ticks=st.integers(0, 3),
    )
    def set_lane(
        self,
        number: int,
        flush_len: int,
        is_resting: bool,
        is_chunked: bool,
        held: tuple[bytes, ...],
        frame: tuple[bytes, bytes, bytes],
        ticks: int,
    ) -> None:
        for side in self.sides:
            lane = side.lanes[number]
            lane.flush_len, lane.is_resting, lane.is_chunked = flush_len, is_resting, is_chunked
            lane.held, lane.num_quiet_ticks = held, ticks
            lane.before, lane.between, lane.after = frame
            if is_chunked:
                lane.after += b"\r\n"

    @rule(
        steps=st.lists(st.tuples(st.sampled_from(IDS), st.integers(0, 6)), max_size=30),
        first=st.integers(-1, 4) | st.just(0),
        num_beyond=st.integers(-3, 1) | st.just(0),
        most=st.integers(-1, 12) | st.just(100),
        advances=st.booleans(),
    )
    def deliver(
        self, steps: list[tuple[int, int]], first: int, num_beyond: int, most: int, advances: bool
    ) -> None:
        end = len(steps) + num_beyond
        self._same([side.deliver(steps, first, end, most, self.now_s, self.last_s) for side in self.sides])
        if advances:
            self.last_s, self.now_s = self.now_s, self.now_s + 0.5

    @rule(number=lane_numbers, text=st.binary(min_size=1, max_size=2000))
    def add(self, number: int, text: bytes) -> None:
        self._same([side.add(number, text) for side in self.sides])

    @rule(flush_len=flush_lens, i=st.integers(0, 1))
    def write_outbox(self, flush_len: int, i: int) -> None:
        numbers = [lane.number for lane in self.sides[0].outboxes[i]]
        for side in self.sides:
            side.outboxes[i].clear()
        self._same([side.write(numbers, flush_len) for side in self.sides])

    @rule(numbers=st.lists(lane_numbers, max_size=12), flush_len=flush_lens)
    def write_any(self, numbers: list[int], flush_len: int) -> None:
        self._same([side.write(numbers, flush_len) for side in self.sides])

    @rule(number=lane_numbers)
    def let_go(self, number: int) -> None:
        for side in self.sides:
            if side.lanes[number].socket is not None:
                side.lanes[number].socket.fd = -1

    @rule(number=lane_numbers)
    def take_socket_away(self, number: int) -> None:
        for side in self.sides:
            side.lanes[number].socket = None

    @rule(number=lane_numbers)
    def give_socket_back(self, number: int) -> None:
        for side in self.sides:
            fd = side.pairs[number].near.fileno()
            side.lanes[number].socket = side.path.SocketHandle(fd)

    @rule(number=lane_numbers)
    def close_far_end(self, number: int) -> None:
        for side in self.sides:
            side.drain(number)
            side.pairs[number].far.close()
            side.lanes[number]._own.clear()

    @invariant()
    def is_alike(self) -> None:
        if hasattr(self, "sides"):
            python, native = (side.state() for side in self.sides)
            assert python == native

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        for number in range(NUM_LANES):
            for side in self.sides:
                side.drain(number)
        received = [side.received for side in self.sides]
        for side in self.sides:
            side.close()
        assert received[0] == received[1]


@pytest.mark.slow
def test_lanes_and_rows_of_both_kinds_live_the_same_life() -> None:
    run_state_machine_as_test(Twins, settings=settings(max_examples=150, stateful_step_count=40))


numbers = st.integers(0, 8) | st.integers(-(2**40), 2**40)
SEQUENCES = st.lists(
    st.fixed_dictionaries(
        {
            "token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=8),
            "stop_token_ids": st.frozensets(st.integers(0, 6), max_size=3),
            "slot": st.integers(-1, 6),
            "max_len": numbers,
            "plain_until": numbers,
            "num_computed_tokens": numbers,
            "num_unseen_tokens": numbers,
            "last_step_id": numbers,
            "accepts_output": st.sampled_from([True, True, True, False]),
        }
    ),
    max_size=12,
)
NAMES = (
    *("token_ids", "stop_token_ids", "slot", "max_len", "plain_until", "num_computed_tokens"),
    *("num_unseen_tokens", "last_step_id", "accepts_output", "number"),
)


def sequences_of(path: Implementation, drawn: list[dict[str, Any]]) -> list[Any]:
    class Sequence(path.SequenceRow):  # type: ignore[misc, name-defined]
        __slots__ = ("number", "other")

    made = []
    for number, attributes in enumerate(drawn):
        row = Sequence()
        for name, value in attributes.items():
            setattr(row, name, array("i", value) if name == "token_ids" else value)
        row.number, row.other = number, row
        made.append(row)
    return made


def seen(sequences: list[Any]) -> list[list[Any]]:
    for row in sequences:
        assert row.other is row
    return [[getattr(row, name) for name in NAMES] for row in sequences]


def clear(sequences: list[Any]) -> None:
    for row in sequences:
        row.other = None


@pytest.mark.slow
@given(SEQUENCES, st.lists(st.integers(0, 11), max_size=20), st.integers(-1, 2**50))
def test_steps_are_planned_alike(drawn: list[dict[str, Any]], order: list[int], step_id: int) -> None:
    results = []
    for path in (PYTHON, NATIVE):
        assert path is not None
        sequences = sequences_of(path, drawn)
        chosen = [sequences[i] for i in order if i < len(sequences)] or sequences
        slots, starts, planned = [5], [6], []
        lacking = path.plan_rows(chosen, step_id, slots, starts, planned)
        told = [[row.number for row in rows] for rows in (lacking, planned)]
        results.append((told, slots, starts, seen(sequences)))
        clear(sequences)
    assert results[0] == results[1]


@pytest.mark.slow
@given(
    SEQUENCES,
    st.lists(st.integers(-2, 8) | st.integers(0, 2**31 + 1), max_size=13),
    st.dictionaries(st.integers(0, 6), st.none(), max_size=3),
    st.sampled_from([list, tuple]),
    st.integers(-1, 1) | st.just(0),
)
def test_steps_are_applied_alike(
    drawn: list[dict[str, Any]],
    token_ids: list[int],
    special_slots: dict[int, None],
    kind: Any,
    num_more: int,
) -> None:
    num_tokens = max(0, len(drawn) + num_more)
    token_ids = (token_ids + [3] * 13)[:num_tokens]
    results = []
    for path in (PYTHON, NATIVE):
        assert path is not None
        sequences = sequences_of(path, drawn)
        told: Any
        try:
            others = path.apply_rows(sequences, kind(token_ids), special_slots)
            told = [(row.number, token_id) for row, token_id in others]
        except (ValueError, OverflowError) as error:
            told = type(error)
        results.append((told, seen(sequences)))
        clear(sequences)
    assert results[0] == results[1]
