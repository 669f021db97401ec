import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncserve.cache_events import BlocksStored, CacheEvent
from asyncserve.errors import InvalidRequest
from asyncserve.loop.admission import LONG_TEXT_LEN
from asyncserve.loop.intake import STARTED_PER_TURN
from asyncserve.loop.pipeline import ROWS_PER_TURN, SLICE_LEN, Turn
from asyncserve.loop.scheduler import Scheduler
from asyncserve.loop.step_planner import MAX_ADMITTED
from asyncserve.request import ChatPrompt, FinishReason, RequestOutput
from tests.fakes.engine import VOCAB_SIZE, Bench, bench
from tests.fakes.executor import FakeExecutor, fake_info
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import FakeTokenizer

LONG_TEXT = "x" * 2000
MANY_SLOTS = fake_info(
    vocab_size=VOCAB_SIZE,
    num_slots=128,
    num_blocks=2000,
    max_num_batched_tokens=1024,
    max_model_len=4096,
)


class Clock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s


# ---- tokenize ------------------------------------------------------------------------------------------


async def test_long_prompts_and_conversations_are_encoded_in_threads_and_short_ones_in_place() -> None:
    async with bench(MANY_SLOTS) as b:
        await b.send("short", "short").wait()
        assert b.tokenizer.encoding_threads == [threading.main_thread().name]
        await b.send(LONG_TEXT, "long").wait()
        await b.send(ChatPrompt(messages=({"role": "user", "content": "x"},)), "chat").wait()
        assert [name.partition("_")[0] for name in b.tokenizer.encoding_threads[1:]] == ["tokenize"] * 2


class OrderedSink(RecordingSink):
    """Notes in which order prompts are admitted."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self.name = name
        self.order = order

    def begin(self, prompt_token_ids: Any) -> None:
        super().begin(prompt_token_ids)
        self.order.append(self.name)


async def test_short_prompts_are_admitted_in_order_of_arrival_and_do_not_wait_for_slow_ones() -> None:
    gate = threading.Event()
    order: list[str] = []
    async with bench(MANY_SLOTS, tokenizer=FakeTokenizer(gate=gate)) as b:
        slow = [b.send(LONG_TEXT, f"slow {i}") for i in range(4 * STARTED_PER_TURN)]
        shorts = [OrderedSink(f"short {i}", order) for i in range(5)]
        for sink in shorts:
            b.send("x", sink.name, sink=sink)
        for sink in shorts:
            await sink.wait()
        assert not any(sink.has_ended for sink in slow)
        gate.set()
        for each in slow:
            await each.wait()
    assert order == [sink.name for sink in shorts]


@pytest.mark.parametrize("chats", [False, True])
async def test_very_long_prompts_hold_up_nothing_but_very_long_prompts(chats: bool) -> None:
    gate = threading.Event()

    class GatedTokenizer(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> Any:
            if len(text) > LONG_TEXT_LEN:
                gate.wait(timeout=30)
                threads.add(threading.current_thread().name)
            return super().encode(text, add_special_tokens=add_special_tokens)

    threads: set[str] = set()
    info = fake_info(vocab_size=VOCAB_SIZE, num_slots=8, num_blocks=5000, max_model_len=16_384)
    text = "x" * (LONG_TEXT_LEN + 1)
    long_prompt = ChatPrompt(messages=({"role": "user", "content": text},)) if chats else text
    async with bench(info, tokenizer=GatedTokenizer()) as b:
        slow = [b.send(long_prompt, f"slow {i}") for i in range(5)]
        await b.send(LONG_TEXT, "text").wait()
        await b.send(ChatPrompt(messages=({"role": "user", "content": "x"},)), "chat").wait()
        assert not any(sink.has_ended for sink in slow)
        b.engine.abort("slow 4")
        gate.set()
        for sink in slow[:4]:
            assert (await sink.wait()).error is not None, "more tokens than the context"
        await b.until(lambda: b.engine.statistics().num_waiting == 0)
    assert threads == {"tokenize-long_0"}
    assert b.tokenizer.encoding_threads.count("tokenize-long_0") == 4, "what was aborted is not encoded"


async def test_a_burst_of_short_prompts_is_encoded_one_per_turn_of_the_loop() -> None:
    class CountingTokenizer(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> Any:
            turns.append(turn)
            return super().encode(text, add_special_tokens=add_special_tokens)

    turn = 0
    turns: list[int] = []
    async with bench(MANY_SLOTS, tokenizer=CountingTokenizer()) as b:
        for i in range(40):
            b.send("x" * 500, str(i))
        while len(turns) < 40:
            turn += 1
            await asyncio.sleep(0)
        assert len(set(turns)) == 40
        await b.until(lambda: b.observer.reasons[FinishReason.LENGTH] == 40)


# ---- detokenize ----------------------------------------------------------------------------------------


async def test_outputs_of_a_step_reach_the_sinks_in_slices() -> None:
    puts_per_turn: dict[int, int] = {}
    turn = 0

    def count(output: RequestOutput) -> None:
        puts_per_turn[turn] = puts_per_turn.get(turn, 0) + 1

    async with bench(MANY_SLOTS) as b:
        b.executor.hold()
        sinks = [RecordingSink(on_put=count) for _ in range(100)]
        for i, sink in enumerate(sinks):
            b.send("x", str(i), sink=sink, max_tokens=30)
        await b.until(lambda: len(b.tokenizer.encoding_threads) == 100)
        await b.turn()
        b.executor.resume()
        while not all(sink.has_ended for sink in sinks):
            turn += 1
            await asyncio.sleep(0)
        assert max(puts_per_turn.values()) == SLICE_LEN


async def test_many_sequences_that_end_in_one_step_end_a_few_per_turn() -> None:
    ends_per_turn: dict[int, int] = {}
    turn = 0

    def count(output: RequestOutput) -> None:
        if output.finish_reason is not None:
            ends_per_turn[turn] = ends_per_turn.get(turn, 0) + 1

    async with bench(MANY_SLOTS) as b:
        b.executor.hold()
        sinks = [RecordingSink(on_put=count) for _ in range(40)]
        for i, sink in enumerate(sinks):
            b.send("x", str(i), sink=sink, max_tokens=1)
        await b.until(lambda: len(b.tokenizer.encoding_threads) == 40)
        await b.turn()
        b.executor.resume()
        while not all(sink.has_ended for sink in sinks):
            turn += 1
            await asyncio.sleep(0)
        assert max(ends_per_turn.values()) <= 8


# ---- the cycle -----------------------------------------------------------------------------------------


async def test_the_device_has_the_next_step_before_the_sinks_have_the_last_one() -> None:
    depths: list[int] = []
    async with bench() as b:
        b.executor.hold()
        sink = RecordingSink(on_put=lambda _: depths.append(len(b.executor.pending_step_ids)))
        b.send("x", sink=sink, max_tokens=10)
        for _ in range(8):
            await b.turn()
            b.executor.complete()
            await b.turn()
        assert depths == [2] * 8
        b.executor.resume()
        await sink.wait()


async def test_channels_never_hold_more_steps_than_may_be_unapplied() -> None:
    info = fake_info(vocab_size=VOCAB_SIZE, max_unapplied=3)
    async with bench(info) as b:
        for i in range(20):
            b.send("x", str(i))
        await b.until(lambda: b.observer.reasons[FinishReason.LENGTH] == 20)
        channels = {each.name: each for each in b.engine.statistics().channels}
        for name in ("plans", "launched", "completions"):
            assert channels[name].capacity == 3
            assert 1 <= channels[name].peak <= 3


async def test_plans_that_admit_many_are_not_made_in_one_turn() -> None:
    async with bench(MANY_SLOTS) as b:
        b.executor.hold()
        sinks = [b.send("x", str(i), max_tokens=2) for i in range(80)]
        await b.until(lambda: len(b.tokenizer.encoding_threads) == 80)
        await b.turn()
        b.executor.complete()
        b.executor.complete()
        plans_per_turn = []
        num_submitted = len(b.executor.plans)
        for _ in range(12):
            b.observer.stages.clear()
            await asyncio.sleep(0)
            plans_per_turn.append([stage for stage, *_ in b.observer.stages].count("plan"))
        admitted = [len(plan.admitted) for plan in b.executor.plans[num_submitted:]]
        assert sorted(admitted)[-2:] == [MAX_ADMITTED] * 2
        assert max(plans_per_turn) == 1
        b.executor.resume()
        for sink in sinks:
            await sink.wait()


async def test_a_turn_ends_whenever_as_much_was_done_as_an_iteration_has_room_for() -> None:
    num_iterations = 0

    def count() -> None:
        nonlocal num_iterations
        num_iterations += 1

    turn = Turn()
    for num_rows, yields in [(ROWS_PER_TURN - 1, False), (1, True), (1, False), (ROWS_PER_TURN, True)]:
        before = num_iterations
        asyncio.get_running_loop().call_soon(count)
        await turn.use(num_rows)
        assert (num_iterations > before) == yields


async def test_a_step_of_many_rows_is_not_applied_and_followed_in_one_turn() -> None:
    """The scheduler's stage held the loop for over a millisecond, whatever there was to apply and plan."""
    info = fake_info(
        vocab_size=VOCAB_SIZE,
        num_slots=ROWS_PER_TURN,
        num_blocks=4 * ROWS_PER_TURN,
        max_num_batched_tokens=4 * ROWS_PER_TURN,
        max_model_len=4096,
    )
    async with bench(info, max_num_queued_requests=ROWS_PER_TURN) as b:
        b.executor.hold()
        sinks = [b.send("x", str(i), max_tokens=40) for i in range(ROWS_PER_TURN)]
        await b.until(lambda: len(b.tokenizer.encoding_threads) == ROWS_PER_TURN)
        while not b.executor.plans or len(b.executor.plans[-1].sequences) < ROWS_PER_TURN:
            await b.turn(40)
            b.executor.complete()
        await b.turn(40)
        b.executor.complete()
        turns = []
        for _ in range(20):
            b.observer.stages.clear()
            await asyncio.sleep(0)
            turns.append([stage for stage, *_ in b.observer.stages if stage in ("apply", "plan")])
        assert [stages for stages in turns if stages] == [["apply"], ["plan"]]
        b.executor.resume()
        for sink in sinks:
            await sink.wait()


async def test_filled_blocks_are_hashed_when_the_device_has_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_do(*args: Any) -> Any:
            done.append(name)
            return method(*args)

        return note_and_do

    monkeypatch.setattr(FakeExecutor, "submit", noted("submit", FakeExecutor.submit))
    monkeypatch.setattr(Scheduler, "register_some", noted("hash", Scheduler.register_some))
    async with bench() as b:
        await b.send("x", max_tokens=20).wait()
    assert done == ["submit", "hash"] * len(b.executor.plans)


async def test_blocks_that_a_stream_fills_become_findable_while_it_runs() -> None:
    """Not only when it ends: another turn of the same conversation may come before."""
    num_findable = 0

    def listen(events: Sequence[CacheEvent]) -> None:
        nonlocal num_findable
        num_findable += sum(len(event.token_ids) for event in events if isinstance(event, BlocksStored))

    def note(output: RequestOutput) -> None:
        if output.finish_reason is None:
            findable.append(num_findable)

    findable: list[int] = []
    async with bench(MANY_SLOTS, cache_listener=listen) as b:
        await b.send("x", max_tokens=64, sink=RecordingSink(on_put=note)).wait()
    assert findable[-1] > 48, "all but the last few blocks"


# ---- what is reported ----------------------------------------------------------------------------------


async def test_every_step_first_token_gap_and_end_is_reported_once() -> None:
    async with bench() as b:
        sinks = [b.send("x", str(i), max_tokens=2 + i, n=1 + i % 2) for i in range(6)]
        for sink in sinks:
            await sink.wait()
        await b.settle()
        num_sequences = sum(1 + i % 2 for i in range(6))
        num_tokens = sum((2 + i) * (1 + i % 2) for i in range(6))
        assert [plan.step_id for plan, *_ in b.observer.steps] == list(range(len(b.executor.plans)))
        assert all(plan.step_id == output.step_id for plan, output, *_ in b.observer.steps)
        assert len(b.observer.first_tokens) == num_sequences
        assert b.observer.num_gaps == num_tokens - num_sequences
        assert b.observer.reasons == {FinishReason.LENGTH: num_sequences}


async def test_every_token_is_reported_though_a_beam_search_gives_all_of_a_text_at_once() -> None:
    async with bench() as b:
        sinks = [
            b.send("x", "beams", max_tokens=5, n=2, use_beam_search=True, temperature=0.0),
            b.send("x", "others", max_tokens=4, n=2),
        ]
        for sink in sinks:
            await sink.wait()
        await b.settle()
        num_tokens = sum(timeline.num_output_tokens for timeline, _ in b.observer.finished)
        assert num_tokens > 2 * 4 + 2
        assert b.observer.num_first_tokens + b.observer.num_gaps == num_tokens


async def test_the_timeline_tells_when_each_thing_happened() -> None:
    clock = Clock()
    async with bench(clock=clock, num_tokenizer_threads=1) as b:
        b.executor.hold()
        sink = b.send("hello", max_tokens=3)
        await b.turn()
        for clock.now_s in (101.0, 102.5, 104.0):
            b.executor.complete()
            await b.turn()
        timeline, reason = b.observer.finished[0]
        assert reason is FinishReason.LENGTH
        assert timeline.arrived_s == 0.0
        assert (timeline.tokenized_s, timeline.first_scheduled_s) == (100.0, 100.0)
        assert (timeline.first_token_s, timeline.last_token_s, timeline.finished_s) == (101.0, 104.0, 104.0)
        assert (timeline.num_prompt_tokens, timeline.num_output_tokens) == (6, 3)
        assert timeline.max_output_len == 3
        assert [gap for _, _, gaps, _ in b.observer.steps for gap in gaps] == [1.5, 1.5]
        assert [now_s for *_, now_s in b.observer.steps] == [101.0, 102.5, 104.0]
        assert sink.has_ended


async def test_progress_stands_still_only_while_there_is_work_and_no_step_ends() -> None:
    def progress_s(b: Bench) -> float:
        return b.engine.statistics().last_progress_s

    clock = Clock()
    async with bench(clock=clock) as b:
        clock.now_s = 200.0
        assert progress_s(b) == 200.0
        b.executor.hold()
        b.send("x")
        await b.turn()
        clock.now_s = 210.0
        assert progress_s(b) == 200.0
        b.executor.complete()
        await b.turn()
        clock.now_s = 220.0
        assert progress_s(b) == 210.0
        b.engine.abort("r")
        assert progress_s(b) == 210.0, "a step is still on the device"
        b.executor.resume()
        await b.turn()
        clock.now_s = 230.0
        assert progress_s(b) == 230.0


async def test_statistics_count_what_runs_and_what_waits() -> None:
    async with bench(fake_info(num_slots=2)) as b:
        b.executor.hold()
        for i in range(5):
            b.send("x", str(i))
        assert b.engine.statistics().num_waiting == 5
        await b.turn(20)
        b.executor.complete()  # the first request had come alone
        await b.turn()
        statistics = b.engine.statistics()
        assert (statistics.num_running, statistics.num_waiting) == (2, 3)
        assert statistics.num_unapplied_steps == 2
        assert statistics.num_blocks_used > 0
        assert [channel.name for channel in statistics.channels] == [
            "requests",
            "encoded",
            "arrivals",
            "resumed",
            "plans",
            "launched",
            "completions",
            "applied",
        ]
        b.executor.resume()
        await b.until(lambda: b.observer.reasons[FinishReason.LENGTH] == 5)


async def test_bad_words_are_encoded_in_a_thread_and_reach_the_device_with_every_choice() -> None:
    async with bench(next_token=lambda *_: 97) as b:
        await b.send("ab", bad_words=["c", "d e"], n=2).wait()
        assert {name.partition("_")[0] for name in b.tokenizer.encoding_threads} == {"tokenize"}
        admitted = [each for plan in b.executor.plans for each in plan.admitted]
        await b.send("ab", "without").wait()
    spellings = ((99,), (32, 99), (100, 32, 101), (32, 100, 32, 101))
    assert [each.bad_words for each in admitted] == [spellings, spellings]
    assert [each.bad_words for plan in b.executor.plans for each in plan.admitted][2:] == [()]


async def test_a_bad_word_that_is_no_text_ends_its_request_alone() -> None:
    async with bench() as b:
        bad = b.send("ab", "bad", bad_words=["\ud800"])
        good = b.send("ab", "good")
        await good.wait()
        await bad.wait()
        assert isinstance(bad.error, InvalidRequest)
        assert bad.error.param == "bad_words"


async def test_an_idle_pipeline_does_nothing() -> None:
    clock = Clock()
    async with bench(clock=clock) as b:
        await b.send("x").wait()
        await b.turn()
        num_reads = clock.num_reads
        await b.turn(100)
        assert clock.num_reads == num_reads


async def test_the_lateness_of_the_loop_is_reported() -> None:
    clock = Clock()
    async with bench(clock=clock, loop_lag_interval_s=0.01) as b:
        await b.turn(4)
        lags_s = b.observer.lags_s
        num_before = len(lags_s)  # some, if the machine stood still meanwhile
        clock.now_s = 100.26
        await b.until(lambda: len(lags_s) > num_before + 1)
        assert lags_s[num_before] == pytest.approx(0.25)
        assert lags_s[num_before + 1] == 0.0
