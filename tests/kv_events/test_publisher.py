import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from asyncserve.cache_events import BlocksRemoved, BlocksStored
from asyncserve.errors import ConfigError
from asyncserve.kv_events import publisher as publisher_module
from asyncserve.kv_events.publisher import SENT_AT_ONCE, KVEventPublisher
from asyncserve.kv_events.settings import KVEventsSettings
from asyncserve.kv_events.wire import external_hash
from tests.kv_events.subscriber import TIMEOUT_MS, BlockRemoved, BlockStored, Subscriber

HELLO = 2**64 - 1

Opener = Callable[..., tuple[KVEventPublisher, Subscriber]]


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def removed(number: int) -> list[BlocksRemoved]:
    return [BlocksRemoved(0, (digest(number),))]


def number_of(batch: Any) -> int:
    (event,) = batch.events
    assert isinstance(event, BlockRemoved)
    return event.block_hashes[0]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Return what opens a publisher and a subscriber that hears it, and see to it that both end."""
    closing: list[Callable[[], None]] = []

    def open_both(*, kind: int = zmq.DEALER, **settings: Any) -> tuple[KVEventPublisher, Subscriber]:
        settings = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", **settings}
        publisher = KVEventPublisher(KVEventsSettings(**settings), clock=lambda: 5.0)
        subscriber = Subscriber(publisher.endpoints, topic=settings.get("topic", ""), kind=kind)
        closing.extend((subscriber.close, publisher.close))
        return publisher, subscriber

    yield open_both
    for close in closing:
        close()


def let_it_hear(publisher: KVEventPublisher, subscriber: Subscriber) -> int:
    """Publish until the subscriber hears, as nobody tells when a subscription has arrived.

    Returns:
        The number of the next batch.
    """
    heard = threading.Event()

    def tell() -> None:
        while not heard.wait(0.01):
            publisher.tell(removed(HELLO))

    telling = threading.Thread(target=tell)
    telling.start()
    _, number, _ = subscriber.receive()
    heard.set()
    telling.join()
    while number + 1 < publisher.num_told:
        _, number, _ = subscriber.receive()
    return publisher.num_told


def test_a_subscriber_gets_topic_number_and_batch_of_each_step(opened: Opener) -> None:
    publisher, subscriber = opened(topic="kv@pod@model")
    first = let_it_hear(publisher, subscriber)
    stored = BlocksStored(0, 2, None, digest(1), (digest(2),), array("i", [5, 6]), None)
    publisher.tell([stored, *removed(7)])
    publisher.tell(removed(8))
    topic, number, batch = subscriber.receive()
    assert (topic, number, batch.ts, batch.data_parallel_rank) == (b"kv@pod@model", first, 5.0, 0)
    event, gone = batch.events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([2], 1, [5, 6])
    assert isinstance(gone, BlockRemoved)
    assert subscriber.receive()[1] == first + 1


@pytest.mark.parametrize(
    ("kind", "envelope"), [(zmq.DEALER, ()), (zmq.DEALER, (b"",)), (zmq.REQ, ())], ids=str
)
def test_what_was_missed_can_be_asked_for_from_any_number_on(
    opened: Opener, kind: int, envelope: tuple[bytes, ...]
) -> None:
    publisher, subscriber = opened(kind=kind)
    for number in range(4):
        publisher.tell(removed(number))
    if kind == zmq.REQ:
        # It takes one answer to a question, so it asks for what there is not.
        assert subscriber.ask(4) == []
        return
    again = subscriber.ask(1, envelope=envelope)
    assert [(number, number_of(batch)) for number, batch in again] == [(1, 1), (2, 2), (3, 3)]
    assert subscriber.ask(4, envelope=envelope) == []
    assert len(subscriber.ask(0, envelope=envelope)) == 4


def test_a_long_replay_does_not_hold_up_new_batches_and_has_no_hole(opened: Opener) -> None:
    publisher, subscriber = opened(buffer_steps=2000)
    first = let_it_hear(publisher, subscriber)
    total = first + 10 * SENT_AT_ONCE
    for number in range(first, total):
        publisher.tell(removed(number))
    again = subscriber.ask(first)
    assert [number for number, _ in again] == list(range(first, total))
    assert [subscriber.receive()[1] for _ in range(first, total)] == list(range(first, total))


def test_only_the_last_batches_are_kept(opened: Opener) -> None:
    publisher, subscriber = opened(buffer_steps=3)
    for number in range(10):
        publisher.tell(removed(number))
    assert [number for number, _ in subscriber.ask(0)] == [7, 8, 9]
    assert len(publisher._batches) <= 3 + publisher._settings.max_queue_size


def test_what_comes_too_fast_is_left_out_leaves_a_gap_in_the_numbers_and_can_be_asked_for(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = opened(max_queue_size=5, buffer_steps=100)
    first = let_it_hear(publisher, subscriber)
    go_on, waits = threading.Event(), threading.Event()
    encode = publisher_module.encode_batch

    def slow(events: Any, now_s: float) -> bytes:
        waits.set()
        assert go_on.wait(60)
        return encode(events, now_s)

    with monkeypatch.context() as patched:
        patched.setattr(publisher_module, "encode_batch", slow)
        publisher.tell(removed(first))
        assert waits.wait(60)
        for number in range(first + 1, first + 21):
            publisher.tell(removed(number))
        go_on.set()
        numbers = [subscriber.receive()[1] for _ in range(6)]
    assert numbers == [first, *range(first + 16, first + 21)]
    assert publisher.num_left_out == 15
    assert publisher.num_sent == publisher.num_told - 15
    assert caplog.text.count("come faster than they are sent") == 1
    missed = subscriber.ask(first + 1)
    assert [number_of(batch) for _, batch in missed] == list(range(first + 1, first + 21))


def test_telling_does_not_wait_for_anybody(opened: Opener) -> None:
    publisher, _ = opened(hwm=1, max_queue_size=10, buffer_steps=10)
    for number in range(5000):
        publisher.tell(removed(number))
    assert publisher.num_told == 5000
    assert len(publisher._batches) <= 21


def test_a_request_that_is_none_is_dropped_and_the_next_one_answered(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = opened()
    publisher.tell(removed(0))
    for frames in ((b"short",), (b"no delimiter", bytes(8)), (b"", b"", bytes(8))):
        subscriber.send_raw(*frames)
    assert len(subscriber.ask(0)) == 1
    assert caplog.text.count("is not understood") == 3


def test_a_batch_that_cannot_be_written_is_empty_and_the_next_one_is_there(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = opened()
    publisher.tell(["no event"])  # type: ignore[list-item]
    publisher.tell([BlocksRemoved(0, (None,))])  # type: ignore[arg-type]
    publisher.tell(removed(2))
    again = subscriber.ask(0)
    assert [len(batch.events) for _, batch in again] == [1, 0, 1]
    assert "cannot be written" in caplog.text


def test_what_was_told_before_the_end_is_sent_and_nothing_after_it(opened: Opener) -> None:
    publisher, subscriber = opened()
    first = let_it_hear(publisher, subscriber)
    for number in range(first, first + 3 * SENT_AT_ONCE):
        publisher.tell(removed(number))
    publisher.close()
    publisher.tell(removed(0))
    assert publisher.num_told == first + 3 * SENT_AT_ONCE
    received = [subscriber.receive()[1] for _ in range(3 * SENT_AT_ONCE)]
    assert received == list(range(first, first + 3 * SENT_AT_ONCE))
    assert not publisher._thread.is_alive()


def test_an_address_that_cannot_be_used_is_named(opened: Opener) -> None:
    publisher, _ = opened()
    address, _ = publisher.endpoints
    for settings in (
        KVEventsSettings(endpoint="tcp://*:port"),
        KVEventsSettings(endpoint="nowhere"),
        KVEventsSettings(endpoint="tcp://127.0.0.1:*", replay_endpoint=address),
    ):
        with pytest.raises(ConfigError, match=r"kv_events_config: '.*' cannot be used"):
            KVEventPublisher(settings)


def test_to_an_address_without_a_wildcard_it_connects() -> None:
    context = zmq.Context()
    try:
        listening = context.socket(zmq.SUB)
        listening.setsockopt_string(zmq.SUBSCRIBE, "")
        listening.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        port = listening.bind_to_random_port("tcp://127.0.0.1")
        publisher = KVEventPublisher(KVEventsSettings(endpoint=f"tcp://127.0.0.1:{port}"))
        try:
            heard = threading.Event()

            def tell() -> None:
                while not heard.wait(0.01):
                    publisher.tell(removed(1))

            telling = threading.Thread(target=tell)
            telling.start()
            frames = listening.recv_multipart()
            heard.set()
            telling.join()
            assert len(frames) == 3
        finally:
            publisher.close()
    finally:
        context.destroy(linger=0)


def test_a_hash_of_the_wire_is_of_the_digest() -> None:
    assert external_hash(digest(7)) == 7
