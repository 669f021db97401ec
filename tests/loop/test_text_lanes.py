"""Plain tokens take a shorter way to sinks that have one; what they tell is the same."""

import random
from array import array
from typing import Any

import pytest

from asyncserve.request import FinishReason, RequestOutput, TextSink, Usage
from asyncserve.token_path import TextLane
from tests.fakes.engine import VOCAB_SIZE, bench
from tests.fakes.executor import fake_info
from tests.fakes.sink import RecordingSink

MANY_SLOTS = fake_info(
    vocab_size=VOCAB_SIZE, num_slots=64, num_blocks=2000, max_num_batched_tokens=1024, max_model_len=4096
)


class Due(list["Lane"]):
    """An outbox of lanes that write into lists."""

    def write(self) -> None:
        for lane in self:
            lane.num_writes += 1
            lane.take()
        self.clear()


class Lane(TextLane):
    """Its texts are received when it is written, or when an output comes behind them."""

    __slots__ = ("num_writes", "received")

    def __init__(self, flush_len: int) -> None:
        super().__init__()
        self.flush_len = flush_len
        self.outbox = Due()
        self.received: list[bytes] = []
        self.num_writes = 0

    def take(self) -> None:
        self.received += self.texts
        self.texts.clear()


class LaneSink(TextSink, RecordingSink):
    """Has a lane for every choice, from its first output on; `pieces` is all that came, in order."""

    def __init__(self, num_choices: int = 1, *, flush_len: int = 1, closes: bool = False) -> None:
        super().__init__(num_choices)
        self.lanes = [Lane(flush_len) for _ in range(num_choices)]
        self.pieces: list[list[str]] = [[] for _ in range(num_choices)]
        self.num_outputs = 0
        self._closes = closes

    @staticmethod
    def encode(text: str) -> bytes:
        return text.encode()

    def lane(self, index: int) -> TextLane | None:
        return None if self._closes and self.num_outputs % 3 == 0 else self.lanes[index]

    def put(self, output: RequestOutput) -> None:
        self.num_outputs += 1
        self.lanes[output.index].take()
        self.collect(output.index)
        self.pieces[output.index].append(output.text)
        super().put(output)

    def collect(self, index: int) -> str:
        lane = self.lanes[index]
        self.pieces[index] += [text.decode() for text in lane.received]
        lane.received.clear()
        return "".join(self.pieces[index])


CHARACTERS = "plain words, Größe, 東京, 👩‍🚀 stop here; "


def spelling(seed: int) -> Any:
    """Return a device that writes bytes of a text, sometimes a byte too few."""
    data = CHARACTERS.encode() * 5
    draw = random.Random(seed)
    data = bytes(byte for byte in data if draw.random() > 0.05)

    def next_token(token_ids: "array[int]", prompt_len: int) -> int:
        return data[(len(token_ids) - prompt_len + prompt_len * 7) % len(data)]

    return next_token


@pytest.mark.parametrize("flush_len", [1, 3, 1000])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"stop": ["rds", "東"]}, {"stop": ["e, 東"], "min_tokens": 40}, {"stop": ["nothing like it"]}],
    ids=str,
)
@pytest.mark.parametrize("closes", [False, True])
async def test_sinks_with_a_lane_and_without_hear_the_same(
    sampling: dict[str, Any], flush_len: int, closes: bool
) -> None:
    async with bench(MANY_SLOTS, next_token=spelling(flush_len)) as b:
        for length in (1, 2, 3):
            prompt = "x" * length
            plain = b.send(prompt, f"plain {length}", max_tokens=64, n=2, **sampling)
            short = LaneSink(2, flush_len=flush_len, closes=closes)
            b.send(prompt, f"short {length}", sink=short, max_tokens=64, n=2, **sampling)
            await plain.wait()
            await short.wait()
            for index in range(2):
                wanted = plain.choice(index)
                assert short.collect(index) == wanted.text
                got = short.choice(index)
                assert (got.usage, got.finish_reason, got.stop_reason) == (
                    wanted.usage,
                    wanted.finish_reason,
                    wanted.stop_reason,
                )


async def test_plain_tokens_make_no_output_of_their_own() -> None:
    async with bench(MANY_SLOTS, next_token=lambda *_: 97) as b:
        sink = LaneSink(flush_len=4)
        b.send("x", sink=sink, max_tokens=42)
        await sink.wait()
        assert sink.num_outputs == 2, "the first and the last"
        assert sink.lanes[0].num_writes == 10
        assert sink.collect(0) == "a" * 42
        assert sink.choice().usage == Usage(2, 42, 0)


async def test_tokens_of_the_short_way_are_reported_as_all_are() -> None:
    async with bench(MANY_SLOTS) as b:
        sinks = [LaneSink() for _ in range(20)]
        for i, sink in enumerate(sinks):
            b.send("x", str(i), sink=sink, max_tokens=2 + i)
        for sink in sinks:
            await sink.wait()
        await b.settle()
        assert len(b.observer.first_tokens) == 20
        assert b.observer.num_gaps == sum(1 + i for i in range(20))
        assert {timeline.num_output_tokens for timeline, _ in b.observer.finished} == set(range(2, 22))
        assert all(timeline.last_token_s is not None for timeline, _ in b.observer.finished)


async def test_gaps_are_those_of_each_sequence() -> None:
    class Clock:
        now_s = 0.0

        def __call__(self) -> float:
            return self.now_s

    clock = Clock()
    async with bench(MANY_SLOTS, clock=clock, next_token=lambda *_: 97) as b:
        b.executor.hold()
        sinks = [LaneSink(), LaneSink()]
        b.send("x", "first", sink=sinks[0], max_tokens=4)
        await b.turn()
        for clock.now_s in (1.0, 3.0, 6.0, 10.0, 15.0):
            if clock.now_s == 3.0:  # it comes into a later step than the next, which is on its way
                b.send("y", "second", sink=sinks[1], max_tokens=2)
                await b.turn()
            b.executor.complete()
            await b.turn()
        assert all(sink.has_ended for sink in sinks)
        assert [list(gaps_s) for *_, gaps_s, _ in b.observer.steps] == [[], [2.0], [3.0], [4.0], [5.0]]
        ends = {timeline.num_output_tokens: timeline.last_token_s for timeline, _ in b.observer.finished}
        assert ends == {4: 10.0, 2: 15.0}


class FaultySink(LaneSink):
    """Raises in one of its methods, with what is not the first output of its request."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def encode(self, text: str) -> bytes:  # type: ignore[override]
        if self._fault == "encode":
            raise ZeroDivisionError
        return super().encode(text)

    def lane(self, index: int) -> TextLane | None:
        if self._fault == "lane":
            raise ZeroDivisionError
        return super().lane(index)

    def put(self, output: RequestOutput) -> None:
        super().put(output)
        if self._fault == "put" and self.num_outputs == 2:
            raise ZeroDivisionError


@pytest.mark.parametrize("fault", ["encode", "lane", "put"])
async def test_sink_that_raises_ends_its_own_request_alone(fault: str) -> None:
    async with bench(MANY_SLOTS) as b:
        faulty, sound = FaultySink(fault), LaneSink()
        b.send("x", "faulty", sink=faulty, max_tokens=30)
        b.send("x", "sound", sink=sound, max_tokens=30)
        await sound.wait()
        await faulty.wait()
        if fault != "put":  # it was the last, and has ended by then
            assert faulty.error is not None
        assert sound.error is None
        assert sound.choice().usage == Usage(2, 30, 0)
        await b.settle()
        assert b.observer.reasons[FinishReason.ERROR] == 1


async def test_request_that_is_aborted_between_two_tokens_hears_nothing_more() -> None:
    async with bench(MANY_SLOTS, next_token=lambda *_: 97) as b:
        b.executor.hold()
        sink = LaneSink(flush_len=1000)
        b.send("x", sink=sink, max_tokens=100)
        for _ in range(5):
            await b.turn()
            b.executor.complete()
        await b.turn()
        num_texts = len(sink.lanes[0].texts)
        assert num_texts > 0
        b.engine.abort("r")
        b.executor.resume()
        await b.settle()
        assert len(sink.lanes[0].texts) == num_texts
        [(timeline, reason)] = b.observer.finished
        assert reason is FinishReason.ABORT
        assert timeline.num_output_tokens >= num_texts
        assert timeline.last_token_s is not None
