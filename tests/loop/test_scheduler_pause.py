"""A sequence that is left alone for a while: what it gives up, and that it goes on as if nothing had been."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncserve.loop.waiting import POLICIES
from asyncserve.request import FinishReason
from tests.fakes.executor import fake_continuation, fake_info
from tests.loop.scheduling import Bench

PROMPT = [7, 8, 9, 10, 11, 12]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return fake_continuation(prompt, num_tokens, fake_info().vocab_size)


def pause(bench: Bench, sequence_id: int) -> bool:
    did = bench.scheduler.pause(sequence_id)
    bench.scheduler.check()
    return did


def resume(bench: Bench, sequence_id: int) -> bool:
    did = bench.scheduler.resume(sequence_id)
    bench.scheduler.check()
    return did


def test_a_paused_sequence_gives_up_its_slot_to_whoever_waits_and_goes_on_where_it_was() -> None:
    bench = Bench(fake_info(num_slots=1))
    first = bench.add(PROMPT, max_tokens=8)
    bench.step()
    bench.step()
    second = bench.add([1, 2, 3], max_tokens=3)
    assert pause(bench, first)
    statistics = bench.statistics()
    assert (statistics.num_running, statistics.num_paused, statistics.num_pauses) == (0, 1, 1)
    assert (statistics.num_blocks_used, statistics.num_preemptions) == (0, 0)
    while bench.received[second].end is None:
        bench.step()
    assert bench.received[first].end is None
    assert bench.plan() is None, "a paused sequence is not planned though a slot is free"
    assert not bench.scheduler.abort(99)
    assert bench.scheduler.is_idle
    assert resume(bench, first)
    bench.run()
    assert bench.tokens_of(first) == expected(PROMPT, 8)
    assert bench.tokens_of(second) == expected([1, 2, 3], 3)
    assert bench.received[first].finish_reason is FinishReason.LENGTH


def test_its_blocks_stay_cached_until_others_need_them() -> None:
    info = fake_info(num_slots=2, num_blocks=12, block_len=4, max_model_len=44)
    bench = Bench(info)
    first = bench.add(list(range(20)), max_tokens=8)
    bench.step()
    pause(bench, first)
    assert bench.statistics().num_blocks_cached >= 4
    resume(bench, first)
    plan, _ = bench.step()
    assert plan.num_tokens < 20, "what it had computed was found again"
    pause(bench, first)
    other = bench.add([3] * 39, max_tokens=4)  # as large as the pool
    while bench.received[other].end is None:
        bench.step()
    resume(bench, first)
    bench.run()
    assert bench.tokens_of(first) == expected(list(range(20)), 8)


def test_outputs_of_steps_in_flight_still_come_and_nothing_after_them() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT, max_tokens=8)
    bench.step()
    bench.must_plan()
    bench.must_plan()
    pause(bench, sequence)
    assert bench.statistics().num_running == 1, "steps in flight mention it"
    bench.apply()
    bench.apply()
    assert len(bench.tokens_of(sequence)) == 3
    assert (bench.statistics().num_running, bench.plan()) == (0, None)


def test_a_sequence_may_be_resumed_while_the_steps_that_mention_it_are_in_flight() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT, max_tokens=8)
    bench.step()
    bench.must_plan()
    pause(bench, sequence)
    resume(bench, sequence)
    assert bench.statistics().num_paused == 0
    bench.apply()
    bench.run()
    assert bench.tokens_of(sequence) == expected(PROMPT, 8)


def test_a_sequence_that_waits_can_be_paused_and_keeps_its_age() -> None:
    bench = Bench(fake_info(num_slots=1))
    running = bench.add(PROMPT, max_tokens=3)
    bench.step()
    first, second = bench.add([1, 2], max_tokens=2), bench.add([3, 4], max_tokens=2)
    pause(bench, first)
    assert bench.statistics().num_waiting == 1
    resume(bench, first)
    ends: list[int] = []
    while bench.has_work:
        if bench.plan() is None or bench.in_flight:
            ends += [delta.sequence_id for delta in bench.apply() if delta.finish_reason is not None]
    assert ends == [running, first, second]


def test_pausing_and_resuming_twice_or_what_is_gone_is_nothing() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT, max_tokens=2)
    assert pause(bench, sequence)
    assert not pause(bench, sequence)
    assert resume(bench, sequence)
    assert not resume(bench, sequence)
    bench.run()
    assert not pause(bench, sequence)
    assert not resume(bench, sequence)
    assert not pause(bench, 99)


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_a_paused_sequence_can_be_aborted(num_in_flight: int) -> None:
    bench = Bench()
    sequence = bench.add(PROMPT, max_tokens=8)
    bench.step()
    for _ in range(num_in_flight):
        bench.must_plan()
    pause(bench, sequence)
    assert bench.abort(sequence)
    while bench.in_flight:
        bench.apply()
    bench.check_nothing_leaked()
    assert bench.statistics().num_paused == 0


def test_a_sequence_whose_last_step_is_in_flight_ends_though_it_is_paused() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT, max_tokens=2)
    bench.step()
    bench.must_plan()
    pause(bench, sequence)
    bench.apply()
    assert bench.received[sequence].finish_reason is FinishReason.LENGTH
    assert bench.statistics().num_paused == 0
    bench.check_nothing_leaked()


def test_a_paused_sequence_survives_the_loss_of_the_device() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT, max_tokens=6)
    bench.step()
    pause(bench, sequence)
    bench.lose_device()
    resume(bench, sequence)
    bench.run()
    assert bench.tokens_of(sequence) == expected(PROMPT, 6)


@given(data=st.data(), policy=st.sampled_from(POLICIES))
@settings(max_examples=60, deadline=None)
def test_whoever_is_paused_and_resumed_whenever_everybody_gets_what_they_would_have_got(
    data: st.DataObject, policy: str
) -> None:
    info = fake_info(num_slots=3, num_blocks=20, block_len=4, max_model_len=40, max_num_batched_tokens=16)
    bench = Bench(info, policy=policy)
    asked: list[tuple[list[int], int]] = []
    for _ in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(("add", "plan", "plan", "apply", "apply", "pause", "resume")))
        someone = data.draw(st.integers(0, max(0, len(asked) - 1)))
        if action == "add" and len(asked) < 6:
            prompt = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=18))
            num_tokens = data.draw(st.integers(1, 12))
            bench.add(prompt, max_tokens=num_tokens, tenant=data.draw(st.sampled_from(("", "a", "b"))))
            asked.append((prompt, num_tokens))
        elif action == "plan":
            bench.plan()
        elif action == "apply" and bench.in_flight:
            bench.apply()
        elif action == "pause":
            pause(bench, someone)
        elif action == "resume":
            resume(bench, someone)
    for sequence_id in range(len(asked)):
        resume(bench, sequence_id)
    bench.run()
    for sequence_id, (prompt, num_tokens) in enumerate(asked):
        assert bench.tokens_of(sequence_id) == fake_continuation(prompt, num_tokens, info.vocab_size)
