"""Handles, lanes and rows: what they hold at first, what can be set, and what a subclass may add."""

import gc
import weakref
from array import array
from typing import Any

import pytest

from tests.token_path.implementations import NATIVE, PYTHON, Implementation, state_of

LANE = {
    "texts": [],
    "flush_len": -1,
    "socket": None,
    "before": b"",
    "between": b"",
    "after": b"",
    "is_chunked": False,
    "held": (),
    "is_resting": False,
    "num_quiet_ticks": 0,
}
ROW = {"encoded": None, "lane": None, "last_token_s": None, "num_passed": 0}


def test_a_handle_has_the_descriptor_it_is_given(path: Implementation) -> None:
    handle = path.SocketHandle(5)
    assert handle.fd == 5
    handle.fd = -1
    assert handle.fd == -1
    assert path.SocketHandle(fd=6).fd == 6


@pytest.mark.parametrize("arguments", [(), (1, 2)])
def test_a_handle_is_made_of_one_number(path: Implementation, arguments: tuple[int, ...]) -> None:
    with pytest.raises(TypeError):
        path.SocketHandle(*arguments)


def test_a_new_lane_has_nothing_to_write_and_nowhere_to_write_it(path: Implementation) -> None:
    lane = path.TextLane()
    assert state_of(lane) == LANE
    assert not hasattr(lane, "outbox")
    assert lane.texts is not path.TextLane().texts


def test_a_new_row_has_had_no_token_and_has_no_lane(path: Implementation) -> None:
    assert state_of(path.TextRow()) == ROW


@pytest.mark.parametrize("name", ["TextLane", "TextRow", "SequenceRow"])
def test_they_are_made_of_nothing_and_take_no_other_attributes(path: Implementation, name: str) -> None:
    made = getattr(path, name)()
    with pytest.raises(TypeError):
        getattr(path, name)(1)
    with pytest.raises(AttributeError):
        made.another = 1


def test_attributes_are_what_was_set(path: Implementation) -> None:
    texts, outbox, handle = [b"a"], [1], path.SocketHandle(1)
    values: dict[str, Any] = {
        "texts": texts,
        "outbox": outbox,
        "socket": handle,
        "before": b"1",
        "between": b"2",
        "after": b"3",
        "held": (b"h",),
        "flush_len": 7,
        "is_chunked": True,
        "is_resting": True,
        "num_quiet_ticks": 2**40,
    }
    lane = path.lane(**values)
    assert state_of(lane) == values
    assert lane.texts is texts
    assert lane.outbox is outbox
    assert lane.socket is handle
    assert lane.is_chunked is True
    row_values = {"encoded": {1: b"x"}, "lane": lane, "last_token_s": 1.5, "num_passed": 3}
    assert state_of(path.row(**row_values)) == row_values
    known = array("i", [1])
    sequence_values = {
        "token_ids": known,
        "stop_token_ids": frozenset({1}),
        "slot": -1,
        "max_len": 2**40,
        "plain_until": 5,
        "num_computed_tokens": 6,
        "num_unseen_tokens": -7,
        "last_step_id": 2**62,
        "accepts_output": False,
    }
    sequence = path.sequence(**sequence_values)
    assert state_of(sequence) == sequence_values
    assert sequence.token_ids is known
    assert sequence.accepts_output is False


@pytest.mark.parametrize(("name", "attribute"), [("TextLane", "texts"), ("TextRow", "encoded")])
def test_made_again_it_is_as_new(path: Implementation, name: str, attribute: str) -> None:
    made = getattr(path, name)()
    at_first = state_of(made)
    setattr(made, attribute, [b"a"])
    made.__init__()
    assert state_of(made) == at_first


def subclass(base: Any) -> Any:
    """Return a class with attributes of its own, as those are that the server uses."""

    class Larger(base):  # type: ignore[misc]
        __slots__ = ("__weakref__", "_own", "other")

        def __init__(self, own: int) -> None:
            super().__init__()
            self._own = own
            self.other = [own]

    return Larger


@pytest.mark.parametrize("name", ["TextLane", "TextRow", "SequenceRow"])
def test_a_subclass_has_attributes_of_its_own_beside_them(path: Implementation, name: str) -> None:
    base = getattr(path, name)
    made = subclass(base)(3)
    assert isinstance(made, base)
    assert (made._own, made.other) == (3, [3])
    assert not hasattr(made, "__dict__")
    with pytest.raises(AttributeError):
        made.another = 1


@pytest.mark.parametrize("name", ["TextLane", "TextRow", "SequenceRow"])
def test_objects_in_a_cycle_are_collected(path: Implementation, name: str) -> None:
    larger = subclass(getattr(path, name))
    references = []
    for attribute in {"TextLane": ["texts", "outbox", "socket", "held"], "TextRow": ["encoded", "lane"]}.get(
        name, ["token_ids", "stop_token_ids", "other"]
    ):
        made = larger(1)
        setattr(made, attribute, [made])
        made.other = made
        references.append(weakref.ref(made))
        del made
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_both_have_the_same_attributes() -> None:
    if NATIVE is None:
        pytest.skip("not compiled")
    for name in ("SocketHandle", "TextLane", "TextRow", "SequenceRow"):
        of_python, of_native = (
            {each for each in dir(getattr(path, name)) if not each.startswith("_")}
            for path in (PYTHON, NATIVE)
        )
        assert of_python == of_native, name
