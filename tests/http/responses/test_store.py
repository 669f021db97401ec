import contextlib
import dataclasses

import pytest

from asyncserve.errors import InvalidRequest, Overloaded
from asyncserve.http.responses.store import ResponseNotFound, ResponseStore, StoredResponse


def stored(response_id: str, *, num_bytes: int = 10, owner: bytes = b"") -> StoredResponse:
    return StoredResponse(
        response_id=response_id, owner=owner, body=b"b" * (num_bytes - 1), items=b"i", events=None
    )


def kept(store: ResponseStore, *response_ids: str) -> list[str]:
    found = []
    for response_id in response_ids:
        with contextlib.suppress(ResponseNotFound):
            found.append(store.find(response_id, b"").response_id)
    return found


class Running:
    """A response that runs, as far as the store looks at it."""

    def __init__(self, response_id: str, owner: bytes = b"") -> None:
        self.response_id = response_id
        self.owner = owner
        self.items = b"[]"
        self.events: list[bytes] | None = None
        self.num_bytes = len(self.items)
        self.is_done = False

    def body(self) -> bytes:
        return b"{}"

    def cancel(self) -> None:
        raise AssertionError

    def discard(self) -> None:
        raise AssertionError

    async def wait_for_news(self) -> None:
        raise AssertionError


def test_the_longest_unused_goes_when_there_are_too_many() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1000)
    store.add(stored("a"))
    store.add(stored("b"))
    assert store.find("a", b"").response_id == "a"
    store.add(stored("c"))
    assert kept(store, "a", "b", "c") == ["a", "c"]
    assert (len(store), store.num_bytes) == (2, 20)


def test_the_longest_unused_go_when_they_are_too_large_together() -> None:
    store = ResponseStore(max_responses=100, max_bytes=100)
    for response_id in "abcd":
        store.add(stored(response_id, num_bytes=25))
    store.add(dataclasses.replace(stored("e", num_bytes=10), events=(b"x" * 20, b"y" * 20)))
    assert kept(store, *"abcde") == ["c", "d", "e"]
    assert store.num_bytes == 100


def test_what_is_too_large_by_itself_is_not_kept_and_costs_nobody_a_place() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.add(stored("a"))
    store.add(stored("b", num_bytes=101))
    assert kept(store, "a", "b") == ["a"]


def test_a_response_is_found_only_by_its_owner() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.add(stored("a", owner=b"me"))
    store.add_running(Running("b", owner=b"me"))
    assert store.find("a", b"me").response_id == "a"
    for response_id in ("a", "b", "c"):
        with pytest.raises(ResponseNotFound) as missing:
            store.find(response_id, b"you", param="previous_response_id")
        assert missing.value.param == "previous_response_id"


def test_removed_ones_take_no_room() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.add(stored("a"))
    store.add_running(Running("b"))
    store.remove("a")
    store.remove("b")
    store.remove("c")
    assert (len(store), store.num_bytes) == (0, 0)


def test_running_ones_are_bounded_and_never_dropped() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    for response_id in ("a", "b"):
        store.check_room()
        store.add_running(Running(response_id))
    with pytest.raises(Overloaded):
        store.check_room()
    for number in range(5):
        store.add(stored(f"done-{number}"))
    assert kept(store, "a", "b") == ["a", "b"]
    store.add(stored("a"))
    store.check_room()
    assert kept(store, "a") == ["a"]


def test_what_running_ones_take_counts_and_others_go_for_it() -> None:
    store = ResponseStore(max_responses=10, max_bytes=100)
    for response_id in ("a", "b"):
        store.add(stored(response_id, num_bytes=40))
    running = Running("r")
    store.add_running(running)
    assert store.resize_running(running, 50)
    assert kept(store, "a", "b") == ["b"]
    assert not store.resize_running(running, 101), "more than all there is"
    assert kept(store, "b") == ["b"], "nobody goes for what is refused"
    assert store.resize_running(running, 100)
    assert kept(store, "b") == []
    with pytest.raises(Overloaded):
        store.check_room()
    assert store.resize_running(running, 30)
    store.check_room()
    store.remove("r")
    assert (store.num_bytes, store.num_running_bytes) == (0, 0)


def test_what_cannot_do_with_less_is_never_too_much_but_keeps_others_from_starting() -> None:
    store = ResponseStore(max_responses=10, max_bytes=100)
    store.check_room(200)  # alone, it may
    running = Running("r")
    store.add_running(running)
    assert store.resize_running(running, 60)
    store.check_room(30)
    with pytest.raises(Overloaded):
        store.check_room(40)
    assert store.resize_running(running, 150, is_needed=True)
    assert not store.resize_running(running, 160)
    with pytest.raises(Overloaded):
        store.check_room()
    store.remove("r")
    assert store.num_running_bytes == 0


def test_a_store_of_no_size_keeps_nothing() -> None:
    store = ResponseStore(max_responses=0, max_bytes=100)
    store.add(stored("a"))
    assert not store.is_on
    assert len(store) == 0
    with pytest.raises(InvalidRequest):
        store.check_room()
