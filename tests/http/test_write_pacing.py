"""Which streams rest, how long, and what is written when they have."""

import asyncio
from itertools import pairwise

import pytest

from asyncserve.http import write_pacing
from asyncserve.http.outbox import PacedStream
from asyncserve.http.write_pacing import (
    JOIN_INTERVAL_S,
    JOINED_WRITES_PER_S,
    JUDGED_TOKENS,
    WRITES_PER_SLICE,
    WritePacer,
)
from asyncserve.token_path import NEVER
from tests.http.live import until


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Stream(PacedStream):
    """Writes nothing but its name into a list, if anything waits; it has no socket."""

    __slots__ = ("has_waiting", "name", "pacer", "written")

    def __init__(self, pacer: WritePacer, name: str = "", written: list[str] | None = None) -> None:
        super().__init__()
        self.outbox = pacer.outbox
        self.flush_len = pacer.flush_len
        self.has_waiting = False
        self.pacer = pacer
        self.name = name
        self.written = written if written is not None else []

    def end_rest(self) -> bool:
        if not self.has_waiting:
            self.flush_len = self.pacer.flush_len
            return False
        self.outbox.append(self)
        return True

    def write_rest(self, rest: bytes | None) -> None:
        assert rest is None
        if self.name == "faulty":
            raise ZeroDivisionError
        self.written.append(self.name)
        self.has_waiting = False
        self.pacer.note_writes((self,), 1)

    def give_up(self) -> None:
        self.written.append(f"{self.name}: given up")


def loaded(clock: Clock, **options: int) -> WritePacer:
    """Return a pacer that has just seen many tokens in no time."""
    pacer = WritePacer(clock=clock, **options)
    pacer.note_writes((Stream(pacer),), JUDGED_TOKENS)
    return pacer


@pytest.fixture(autouse=True)
def quick_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's; timers of the loop only ask it."""
    monkeypatch.setattr(write_pacing, "LEAST_DELAY_S", 0.0)


async def test_stream_does_not_rest_below_the_load() -> None:
    clock = Clock()
    pacer = WritePacer(clock=clock)
    stream = Stream(pacer)
    for _ in range(100):
        clock.now_s += 0.001
        pacer.note_writes((stream,), 40)
        assert (stream.is_resting, stream.flush_len) == (False, 1)


async def test_stream_that_was_written_to_under_load_rests() -> None:
    pacer = loaded(Clock())
    stream = Stream(pacer)
    pacer.note_writes((stream,), 1)
    assert (stream.is_resting, stream.flush_len) == (True, NEVER)


async def test_load_that_falls_lets_streams_go_without_rest_again() -> None:
    clock = Clock()
    pacer = loaded(clock)
    assert pacer.joins
    clock.now_s += 0.0125  # 41,000 a second
    pacer.note_writes((Stream(pacer),), JUDGED_TOKENS)
    assert pacer.joins, "a little below where it begins, it does not end yet"
    clock.now_s += 0.02
    pacer.note_writes((Stream(pacer),), JUDGED_TOKENS)
    assert not pacer.joins


async def test_what_came_during_the_rest_is_written_when_it_is_over_and_not_before() -> None:
    clock = Clock()
    written: list[str] = []
    pacer = loaded(clock)
    first, second = Stream(pacer, "first", written), Stream(pacer, "second", written)
    pacer.note_writes((first,), 1)
    clock.now_s += JOIN_INTERVAL_S / 2
    pacer.note_writes((second,), 1)
    first.has_waiting = second.has_waiting = True
    clock.now_s += JOIN_INTERVAL_S / 2
    await until(lambda: bool(written))
    for _ in range(10):
        await asyncio.sleep(0.0005)
    assert written == ["first"]
    assert first.is_resting
    clock.now_s += JOIN_INTERVAL_S / 2
    await until(lambda: len(written) == 2)
    assert written == ["first", "second"]


async def test_stream_with_nothing_to_write_may_write_at_once_after_its_rest() -> None:
    clock = Clock()
    pacer = loaded(clock)
    stream = Stream(pacer)
    pacer.note_writes((stream,), 1)
    clock.now_s += JOIN_INTERVAL_S
    await until(lambda: not stream.is_resting)
    assert stream.flush_len == 1


async def test_many_rests_that_end_together_are_written_in_slices() -> None:
    clock = Clock()
    written: list[str] = []
    pacer = loaded(clock)
    for number in range(100):
        stream = Stream(pacer, str(number), written)
        pacer.note_writes((stream,), 1)
        stream.has_waiting = True
    clock.now_s += JOIN_INTERVAL_S
    lens = [0]
    while lens[-1] < 100:
        await asyncio.sleep(0)
        lens.append(len(written))
    assert max(after - before for before, after in pairwise(lens)) == WRITES_PER_SLICE
    assert written == [str(number) for number in range(100)]


async def test_many_streams_rest_longer_so_that_writes_do_not_exceed_their_bound() -> None:
    clock = Clock()
    written: list[str] = []
    pacer = loaded(clock)
    num_due = int(JOIN_INTERVAL_S * JOINED_WRITES_PER_S)
    for number in range(3 * num_due):
        stream = Stream(pacer, str(number), written)
        pacer.note_writes((stream,), 1)
        stream.has_waiting = True
    clock.now_s += JOIN_INTERVAL_S
    await until(lambda: len(written) >= num_due)
    for _ in range(10):
        await asyncio.sleep(0.0005)
    assert len(written) < 2 * num_due, "those behind rest longer"
    clock.now_s += 2 * JOIN_INTERVAL_S
    await until(lambda: len(written) == 3 * num_due)
    assert written == [str(number) for number in range(3 * num_due)]


async def test_stream_that_cannot_be_written_does_not_hold_up_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    written: list[str] = []
    pacer = loaded(clock)
    for name in ("a", "faulty", "b"):
        stream = Stream(pacer, name, written)
        pacer.note_writes((stream,), 1)
        stream.has_waiting = True
    clock.now_s += JOIN_INTERVAL_S
    await until(lambda: len(written) == 3)
    assert written == ["a", "faulty: given up", "b"]
    assert "could not be written" in caplog.text


async def test_stream_that_rests_already_is_not_woken_twice() -> None:
    clock = Clock()
    written: list[str] = []
    pacer = loaded(clock)
    stream = Stream(pacer, "a", written)
    pacer.note_writes((stream,), 1)
    pacer.note_writes((stream,), 1)  # its first or last event, which does not wait
    stream.has_waiting = True
    clock.now_s += JOIN_INTERVAL_S
    await until(lambda: bool(written))
    stream.has_waiting = True
    for _ in range(10):
        await asyncio.sleep(0.0005)
    assert written == ["a"]


async def test_nobody_rests_where_the_number_of_tokens_is_given() -> None:
    pacer = loaded(Clock(), stream_interval=3)
    stream = Stream(pacer)
    pacer.note_writes((stream,), JUDGED_TOKENS)
    assert (stream.is_resting, stream.flush_len) == (False, 3)


async def test_pacer_without_resting_streams_asks_for_no_time() -> None:
    clock = Clock()
    pacer = loaded(clock)
    stream = Stream(pacer)
    pacer.note_writes((stream,), 1)
    clock.now_s += JOIN_INTERVAL_S
    await until(lambda: not stream.is_resting)
    assert not pacer.is_waking
