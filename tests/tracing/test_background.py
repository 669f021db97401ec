import logging
import threading
from collections.abc import Sequence

import pytest

from asyncserve.tracing.background import BackgroundWriter


class Gate:
    """Takes batches, and holds the thread that brings them until it is opened."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def write(self, batch: Sequence[int]) -> None:
        self.arrived.set()
        self.opened.wait()
        self.batches.append(list(batch))


def test_items_arrive_in_order_and_in_batches() -> None:
    gate = Gate()
    gate.opened.set()
    writer = BackgroundWriter[int](gate.write, name="t", capacity=100, batch_len=4, linger_s=60.0)
    for number in range(10):
        writer.put(number)
    writer.close(60.0)
    assert gate.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (writer.num_written, writer.num_dropped) == (10, 0)


def test_a_batch_does_not_wait_for_ever_to_be_full() -> None:
    gate = Gate()
    writer = BackgroundWriter[int](gate.write, name="t", capacity=100, batch_len=4, linger_s=0.0)
    writer.put(1)
    assert gate.arrived.wait(30.0)
    gate.opened.set()
    writer.close(60.0)


def test_what_comes_while_too_many_wait_is_dropped_and_counted() -> None:
    gate = Gate()
    writer = BackgroundWriter[int](gate.write, name="t", capacity=3, batch_len=1, linger_s=0.0)
    writer.put(0)
    assert gate.arrived.wait(30.0)
    for number in range(1, 8):
        writer.put(number)
    assert writer.num_dropped == 5
    gate.opened.set()
    writer.close(60.0)
    assert gate.batches == [[0], [1], [2]]
    assert (writer.num_written, writer.num_dropped) == (3, 5)
    writer.put(9)
    assert writer.num_dropped == 6


def test_a_batch_that_cannot_be_written_is_dropped_and_the_next_one_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written: list[int] = []

    def write(batch: Sequence[int]) -> None:
        if batch[0] < 2:
            raise ConnectionError("down")
        written.extend(batch)

    writer = BackgroundWriter[int](write, name="t", capacity=10, batch_len=1, linger_s=0.0)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            writer.put(number)
        writer.close(60.0)
    assert written == [2, 3]
    assert (writer.num_written, writer.num_dropped) == (2, 2)
    assert len(caplog.records) == 1


def test_closing_does_not_wait_for_a_write_that_hangs() -> None:
    gate = Gate()
    writer = BackgroundWriter[int](gate.write, name="t", capacity=10, batch_len=1, linger_s=0.0)
    writer.put(0)
    assert gate.arrived.wait(30.0)
    writer.close(0.0)
    assert gate.batches == []
    gate.opened.set()
    writer.close(60.0)
    assert gate.batches == [[0]]
