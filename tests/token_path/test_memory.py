"""The C neither loses a reference nor keeps one, however a call ends, and hides none from the collector."""

import gc
import sys
import tracemalloc
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from asyncserve.token_path import NEVER
from tests.token_path.implementations import Implementation, Pair, State

NUM_CALLS = 200

Arguments = list[Any]
Call = Callable[[], object]


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Let the collector look at what a test makes, and at nothing else."""
    gc.freeze()
    yield
    gc.unfreeze()


class Table(dict[int, Any]):
    """So that the collector can be asked for it."""


class Watched:
    """Objects whose references are counted, and a call that is given them."""

    def __init__(self, call: Call, *objects: Any, after: Call = lambda: None) -> None:
        self.call = call
        self.after = after
        # Everybody refers to None and small numbers.
        self.objects = [
            each for each in objects if each is not None and not (isinstance(each, int) and each < 10**6)
        ]

    def run(self) -> None:
        with suppress(TypeError, AttributeError, ValueError, IndexError, OverflowError, ZeroDivisionError):
            self.call()
        self.after()

    def counts(self) -> list[int]:
        return [sys.getrefcount(each) for each in self.objects]


def large(number: int) -> int:
    """Return an integer that is an object of its own."""
    return int(str(10**6 + number))


def deliveries(path: Implementation) -> dict[str, Watched]:
    """Return calls of `deliver`, with all that can come of one and all that can be wrong."""
    text, now_s, last_s, token_id, unknown = b"text " * 3, float("20.5"), float("20.0"), large(1), large(2)
    table = Table({token_id: text})
    calls: dict[str, Watched] = {}

    def add(
        name: str, *, states: Any = None, tokens: Any = None, rows: Any = None, flush_len: int = 1, **bad: Any
    ) -> None:
        outbox: list[Any] = []
        lane = path.lane(outbox=bad.get("outbox", outbox), flush_len=flush_len)
        row = path.row(
            lane=bad.get("lane", lane), encoded=bad.get("encoded", table), last_token_s=bad.get("at_s")
        )
        if "texts" in bad:
            lane.texts = bad["texts"]
        all_rows = {large(5): row} if rows is None else rows
        all_states = [State(large(5)), State(large(5)), State(large(6))] if states is None else states
        all_tokens = [token_id, unknown, token_id] if tokens is None else tokens
        arguments = (all_rows, all_states, all_tokens, 0, bad.get("end", len(all_states)), 9, now_s, last_s)
        arguments = arguments[: bad.get("num_arguments", 8)]

        def clean() -> None:
            outbox.clear()
            if isinstance(lane.texts, list):
                lane.texts.clear()
            row.last_token_s = bad.get("at_s")

        ids = [*all_rows, *(state.sequence_id for state in all_states if isinstance(state, State))]
        objects = (text, now_s, last_s, token_id, unknown, table, lane, row, outbox, all_rows, all_states)
        calls[name] = Watched(lambda: path.deliver(*arguments), *objects, *ids, *bad.values(), after=clean)

    add("all is well")
    add("not due", flush_len=NEVER)
    add("came before", at_s=float("3.5"))
    add("came with the last step", at_s=last_s)
    add("a state without a number", states=[State(large(5)), object(), State(large(5))])
    add("a number that cannot be looked up", states=[State(large(5)), State([]), State(large(5))])  # type: ignore[arg-type]
    add("a token that cannot be looked up", tokens=[token_id, [], token_id])
    add("a row that is none", rows={large(5): object()})
    add("a lane that is none", lane=object())
    add("texts that are no dict", encoded=[1])
    add("no time", at_s="never")
    add("no list of texts", texts=(1, 2))
    add("no outbox", outbox=(1, 2))
    add("too short", end=4)
    add("an argument too few", num_arguments=7)
    return calls


def writes(path: Implementation, pair: Pair) -> dict[str, Watched]:
    """The same of `write`."""
    text, before, between, after = b"text " * 3, b"before " * 3, b"between " * 3, b"after " * 3
    handle = path.SocketHandle(pair.near.fileno())
    closed = path.SocketHandle(-1)
    calls: dict[str, Watched] = {}

    def add(name: str, *items: Any, handle: Any = handle, **attributes: Any) -> None:
        lane = path.lane(socket=handle, before=before, between=between, after=after, flush_len=9)
        for attribute, value in attributes.items():
            setattr(lane, attribute, value)
        lanes = [lane, *items, lane]

        def call() -> None:
            if isinstance(lane.texts, list):
                lane.texts += [text, text]
            path.write(lanes, 1)

        def clean() -> None:
            pair.read()
            if isinstance(lane.texts, list):
                lane.texts.clear()

        objects = (text, before, between, after, handle, lane, lanes, lane.texts, lane.outbox)
        calls[name] = Watched(call, *objects, *items, *attributes.values(), after=clean)

    add("all is well")
    add("in chunks", is_chunked=True)
    add("closed", handle=closed)
    add("no socket", handle=None)
    add("held", held=(b"event",))
    add("another lane", path.lane(texts=[text]))
    add("an item that is no lane", object())
    add("a text that is not bytes", texts=["no"])
    add("no list of texts", texts=(1, 2))
    add("no bytes around", between="no")
    return calls


def steps(path: Implementation) -> dict[str, Watched]:
    """The same of `plan_rows`, `apply_rows` and `extend_digests`."""
    calls: dict[str, Watched] = {}

    def rows(**attributes: Any) -> list[Any]:
        numbers = {
            "slot": large(1),
            "num_computed_tokens": large(2),
            "plain_until": large(9),
            "max_len": large(20),
        }
        return [path.sequence(**{**numbers, **attributes}) for _ in range(3)]

    def add(name: str, call: Callable[..., Any], *arguments: Any, after: Call = lambda: None) -> None:
        inner = [each for argument in arguments if isinstance(argument, list) for each in argument]
        held = [row.token_ids for row in inner if isinstance(row, path.SequenceRow)]

        def clean() -> None:
            after()
            for token_ids in held:
                if isinstance(token_ids, array):
                    del token_ids[3:]

        calls[name] = Watched(lambda: call(*arguments), *arguments, *inner, *held, after=clean)

    for name, attributes in {
        "planned": {},
        "lacking": {"plain_until": 0},
        "at its end": {"max_len": 0, "plain_until": 0},
    }.items():
        lists: tuple[list[Any], ...] = ([], [], [])
        add(
            name,
            path.plan_rows,
            rows(**attributes),
            large(3),
            *lists,
            after=lambda lists=lists: [each.clear() for each in lists],
        )  # type: ignore[misc]
    lists = ([], [], [])
    add(
        "no sequence",
        path.plan_rows,
        [*rows(), object()],
        large(3),
        *lists,
        after=lambda: [each.clear() for each in lists],
    )
    add("no list to plan in", path.plan_rows, rows(), large(3), [], [], ())
    add("no number of a step", path.plan_rows, rows(), "no", [], [], [])
    add("no number that large", path.plan_rows, rows(), 2**70, [], [], [])

    for name, attributes in {
        "applied": {},
        "too late": {"accepts_output": False},
        "special": {"slot": 5},
    }.items():
        add(name, path.apply_rows, rows(**attributes), [large(1), large(2), large(3)], {5: object()})
    add("another number of tokens", path.apply_rows, rows(), [large(1)], {})
    add("a token that is none", path.apply_rows, rows(), [large(1), "no", large(3)], {})
    add("a token too large", path.apply_rows, rows(), [large(1), 2**40, large(3)], {})
    add("a token much too large", path.apply_rows, rows(), [large(1), 2**70, large(3)], {})
    add("tokens that cannot be appended", path.apply_rows, rows(token_ids=(1, 2)), [large(1)] * 3, {})
    add("tokens without a length", path.apply_rows, rows(token_ids=3), [large(1)] * 3, {})
    add("stop tokens that are none", path.apply_rows, rows(stop_token_ids=3), [large(1)] * 3, {})
    add("no sequence to apply to", path.apply_rows, [*rows(), object()], [large(1)] * 4, {})
    add("tokens that are no sequence", path.apply_rows, rows(), 3, {})

    token_ids = array("i", range(48))
    for name, first, tokens, num_blocks in [
        ("digests", b"first " * 6, token_ids, 3),
        ("no digests", b"first " * 6, token_ids, 1),
        ("too few tokens", b"first " * 6, token_ids, 4),
        ("a digest that is none", "first", token_ids, 3),
        ("no tokens", b"first " * 6, [1, 2], 3),
        ("no number", b"first " * 6, token_ids, "no"),
    ]:
        digests: list[Any] = [first]
        add(
            name,
            path.extend_digests,
            digests,
            tokens,
            num_blocks,
            16,
            after=lambda digests=digests: digests.__delitem__(slice(1, None)),
        )  # type: ignore[misc]
    return calls


def all_calls(path: Implementation, pair: Pair) -> dict[str, Watched]:
    groups = {"deliver": deliveries(path), "write": writes(path, pair), "steps": steps(path)}
    return {f"{group}: {name}": call for group, calls in groups.items() for name, call in calls.items()}


@pytest.mark.slow
def test_no_call_loses_or_keeps_a_reference_to_what_it_is_given(native: Implementation, pair: Pair) -> None:
    for name, watched in all_calls(native, pair).items():
        watched.run()
        before = watched.counts()
        for _ in range(NUM_CALLS):
            watched.run()
        grown = [now - then for now, then in zip(watched.counts(), before, strict=True)]
        assert grown == [0] * len(grown), name


@pytest.mark.slow
def test_no_call_leaves_memory_behind(native: Implementation, pair: Pair) -> None:
    for name, watched in all_calls(native, pair).items():
        for _ in range(20):
            watched.run()
        tracemalloc.start()
        try:
            watched.run()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(NUM_CALLS):
                watched.run()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 16 * NUM_CALLS, name


def subclass(base: Any) -> Any:
    class Larger(base):  # type: ignore[misc]
        __slots__ = ("__weakref__", "other")

    return Larger


def test_lanes_rows_and_outboxes_that_refer_to_one_another_are_collected(native: Implementation) -> None:
    lane, row, sequence = (
        subclass(getattr(native, name))() for name in ("TextLane", "TextRow", "SequenceRow")
    )
    lane.outbox = [lane]
    lane.other = row
    row.lane = lane
    row.other = sequence
    row.encoded = Table({1: b"a"})
    sequence.token_ids = [lane]
    sequence.other = row
    references = [weakref.ref(each) for each in (lane, row, sequence)]
    del lane, row, sequence
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize("name", ["TextLane", "TextRow", "SequenceRow"])
def test_the_collector_sees_what_they_refer_to(native: Implementation, name: str) -> None:
    made = getattr(native, name)()
    attributes = {
        "TextLane": ("texts", "outbox", "socket", "before", "between", "after", "held"),
        "TextRow": ("encoded", "lane", "last_token_s"),
        "SequenceRow": ("token_ids", "stop_token_ids"),
    }[name]
    values = [Table() for _ in attributes]
    for attribute, value in zip(attributes, values, strict=True):
        setattr(made, attribute, value)
    assert gc.is_tracked(made)
    assert sorted(map(id, gc.get_referents(made))) == sorted(map(id, values))


@pytest.mark.parametrize("name", ["TextLane", "TextRow", "SequenceRow"])
def test_what_they_refer_to_lives_as_long_as_they_do(native: Implementation, name: str) -> None:
    class Value:
        pass

    attribute = {"TextLane": "held", "TextRow": "encoded", "SequenceRow": "token_ids"}[name]
    for kind in (getattr(native, name), subclass(getattr(native, name))):
        made, value = kind(), Value()
        reference = weakref.ref(value)
        setattr(made, attribute, value)
        del value
        gc.collect()
        assert reference() is getattr(made, attribute)
        if name != "SequenceRow":
            made.__init__()
        else:
            del made.token_ids
        assert reference() is None
        setattr(made, attribute, value := Value())
        reference = weakref.ref(value)
        del value, made
        assert reference() is None


def test_a_class_made_from_them_ends_with_its_last_object(native: Implementation) -> None:
    for name in ("TextLane", "TextRow", "SequenceRow"):
        kind = subclass(getattr(native, name))
        made, reference = kind(), weakref.ref(kind)
        del kind
        gc.collect()
        assert reference() is type(made)
        del made
        gc.collect()
        assert reference() is None
