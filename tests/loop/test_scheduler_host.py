"""The host's memory behind the scheduler: who comes back from there, what is found there, what is not."""

import dataclasses
from typing import Any

import pytest

from asyncserve.errors import StepFailed
from asyncserve.request import FinishReason
from asyncserve.step import BAD_LOGITS, StepPlan
from tests.fakes.executor import fake_continuation, fake_info
from tests.loop.scheduling import Bench

FIRST = list(range(10, 17))
SECOND = list(range(30, 35))


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return fake_continuation(prompt, num_tokens, fake_info().vocab_size)


def starts(plan: StepPlan) -> list[int]:
    """Return where the sequences begin that a plan admits."""
    admitted = {each.slot for each in plan.admitted}
    return [sequence.start for sequence in plan.sequences if sequence.slot in admitted]


def tight_bench(**options: Any) -> Bench:
    """Return a scheduler whose pool holds six blocks: too few for two sequences of more than 12 tokens."""
    info = {"num_blocks": 7, "block_len": 4, "num_host_blocks": 20, "num_swap_blocks": 19}
    return Bench(
        fake_info(**{**info, **options.pop("info", {})}),
        async_scheduling=False,
        **options,
    )


def preempt_the_second(bench: Bench) -> tuple[int, int]:
    """Let two sequences run until the first lacks a block and the second has given its own back.

    Returns:
        Their ids.
    """
    first = bench.add(FIRST, max_tokens=12)
    second = bench.add(SECOND, max_tokens=12)
    while bench.statistics().num_running < 2:
        bench.step()
    while bench.statistics().num_running == 2:
        bench.step()
    assert bench.statistics().num_preemptions == 1
    return first, second


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_sequence_comes_back_with_all_it_had_computed(caching: bool) -> None:
    bench = tight_bench(enable_prefix_caching=caching)
    first, second = preempt_the_second(bench)
    statistics = bench.statistics()
    assert (statistics.num_swapped, statistics.num_swaps) == (1, 1)
    known = len(SECOND) + len(bench.tokens_of(second))
    assert known == 12
    assert statistics.num_host_blocks_used == 3
    plans = bench.run()
    (back,) = [plan for plan in plans if plan.admitted]
    assert starts(back) == [known - 1]
    # The last block, which is partly filled, among them.
    assert len(back.block_loads) == 3 or (caching and back.block_loads)
    assert bench.tokens_of(first) == expected(FIRST, 12)
    assert bench.tokens_of(second) == expected(SECOND, 12)
    assert bench.timelines[second].num_preemptions == 1
    assert bench.statistics().num_swapped == 0
    assert bench.statistics().num_host_blocks_used == 0


def test_its_blocks_are_stored_in_the_very_plan_that_gives_them_to_another() -> None:
    bench = tight_bench(enable_prefix_caching=False)
    preempt_the_second(bench)
    storing = bench.must_plan()
    given = {block_id for append in storing.block_appends for block_id in append.block_ids}
    assert given & {transfer.device_block for transfer in storing.block_stores}


def test_without_swap_space_a_preempted_sequence_is_computed_again() -> None:
    bench = tight_bench(info={"num_swap_blocks": 0}, enable_prefix_caching=False)
    _, second = preempt_the_second(bench)
    plans = bench.run()
    (back,) = [plan for plan in plans if plan.admitted]
    assert starts(back) == [0]
    assert bench.statistics().num_swaps == 0
    assert bench.tokens_of(second) == expected(SECOND, 12)


@pytest.mark.parametrize(("token_s", "is_swapped"), [(1.0, True), (1e-3, False)])
def test_what_was_measured_decides_whether_it_is_swapped(token_s: float, is_swapped: bool) -> None:
    bench = tight_bench(info={"host_block_s": 0.1})
    bench.add(FIRST, max_tokens=12)
    bench.add(SECOND, max_tokens=12)
    while not bench.statistics().num_preemptions:
        plan = bench.must_plan()
        output = bench.runner.run(bench.in_flight.popleft())
        bench.apply_output(dataclasses.replace(output, device_s=plan.num_tokens * token_s))
    assert bench.statistics().num_swaps == is_swapped
    bench.run()


def test_a_sequence_that_is_aborted_while_it_is_swapped_leaves_nothing_held() -> None:
    bench = tight_bench(enable_prefix_caching=False)
    first, second = preempt_the_second(bench)
    assert bench.abort(second)
    statistics = bench.statistics()
    assert (statistics.num_swapped, statistics.num_host_blocks_used) == (0, 0)
    bench.run()
    assert bench.tokens_of(first) == expected(FIRST, 12)


def test_a_paused_sequence_is_swapped_and_comes_back_when_it_is_resumed() -> None:
    bench = tight_bench(enable_prefix_caching=False)
    first = bench.add(FIRST, max_tokens=12)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.pause(first)
    bench.scheduler.check()
    assert bench.statistics().num_swapped == 1
    # Another needs its blocks meanwhile.
    second = bench.add(SECOND, max_tokens=18)
    bench.step()
    assert bench.scheduler.resume(first)
    plans = []
    while bench.received[first].end is None:
        plans.append(bench.step()[0])
    assert [starts(plan) for plan in plans if plan.admitted] == [[len(FIRST) + 2]]
    bench.run()
    assert bench.tokens_of(first) == expected(FIRST, 12)
    assert bench.tokens_of(second) == expected(SECOND, 18)


def test_one_that_goes_first_by_priority_comes_back_first() -> None:
    bench = tight_bench(policy="priority", info={"num_slots": 2}, enable_prefix_caching=False)
    low = bench.add(SECOND, max_tokens=12, priority=2)
    high = bench.add(FIRST, max_tokens=12, priority=0)
    while not bench.statistics().num_swapped:
        bench.step()
    between = bench.add([1, 2, 3], max_tokens=3, priority=1)
    plans = bench.run()
    assert next(starts(plan) for plan in plans if plan.admitted) == [0]
    assert bench.received[between].end is not None
    order = sorted((low, high, between), key=lambda each: bench.timelines[each].last_token_s or 0.0)
    assert order == [between, high, low]
    assert bench.statistics().num_swaps == 1
    assert bench.tokens_of(low) == expected(SECOND, 12)


def roomy_bench(**options: Any) -> Bench:
    """Return a scheduler that keeps evicted blocks on the host, and swaps nothing."""
    info = fake_info(**{"num_blocks": 9, "block_len": 4, "num_host_blocks": 30, **options})
    return Bench(info, async_scheduling=False)


def fill_pool(bench: Bench) -> None:
    """Let a sequence take every block, so that all that was cached is evicted."""
    bench.add(list(range(200, 230)), max_tokens=1)
    bench.run()


def test_an_evicted_prefix_is_found_on_the_host_and_loaded() -> None:
    bench = roomy_bench()
    prompt = list(range(100, 114))
    bench.add(prompt, max_tokens=2)
    bench.run()
    fill_pool(bench)
    assert bench.statistics().num_host_blocks_cached == 3
    again = bench.add([*prompt, 7], max_tokens=2)
    plan, _ = bench.step()
    assert starts(plan) == [12]
    assert len(plan.block_loads) == 3
    bench.run()
    assert bench.timelines[again].num_cached_tokens == 12
    statistics = bench.statistics()
    # All that was looked up there: three prompts, and of the last one what is not found.
    assert (statistics.host_cache_queries, statistics.host_cache_hits) == (14 + 30 + 15, 12)
    assert bench.tokens_of(again) == expected([*prompt, 7], 2)
    bytes_per_block = 2 * 4 * 4
    assert statistics.host_loaded_bytes == 3 * bytes_per_block
    assert statistics.host_stored_bytes >= 3 * bytes_per_block


@pytest.mark.parametrize(("token_s", "is_loaded"), [(3e-4, True), (2e-4, False)])
def test_what_is_found_on_the_host_is_loaded_where_that_is_cheaper(token_s: float, is_loaded: bool) -> None:
    bench = roomy_bench(host_block_s=2e-3)  # three blocks one way: 3 ms, as twelve tokens of 0.25 ms
    prompt = list(range(100, 114))
    bench.add(prompt, max_tokens=2)
    bench.run()
    fill_pool(bench)
    tier = bench.scheduler._live.allocator.host_tier
    assert tier is not None
    tier.note_step(1000, 0, 1000 * token_s)
    again = bench.add([*prompt, 7], max_tokens=2)
    plan, _ = bench.step()
    assert starts(plan) == [12 if is_loaded else 0]
    assert len(plan.block_loads) == (3 if is_loaded else 0)
    bench.run()
    assert bench.timelines[again].num_cached_tokens == (12 if is_loaded else 0)
    assert bench.tokens_of(again) == expected([*prompt, 7], 2)


def test_who_asks_at_the_same_time_shares_what_is_loaded() -> None:
    bench = roomy_bench()
    prompt = list(range(100, 114))
    bench.add(prompt, max_tokens=2)
    bench.run()
    fill_pool(bench)
    for last in (7, 8):
        bench.add([*prompt, last], max_tokens=2)
    plan, _ = bench.step()
    assert starts(plan) == [12, 12]
    assert len(plan.block_loads) == 3
    bench.run()


def test_the_device_is_asked_before_the_host() -> None:
    bench = roomy_bench(num_blocks=14)
    prompt = list(range(100, 114))
    bench.add(prompt, max_tokens=2)
    bench.run()
    bench.add(list(range(200, 246)), max_tokens=1)  # evicts the last of the three blocks
    bench.run()
    bench.add([*prompt, 7], max_tokens=2)
    plan, _ = bench.step()
    assert starts(plan) == [12]
    assert 0 < len(plan.block_loads) < 3
    bench.run()


def test_a_sequence_whose_store_failed_is_computed_again() -> None:
    bench = tight_bench(enable_prefix_caching=False)
    _, second = preempt_the_second(bench)
    assert bench.statistics().num_swapped == 1
    plan = bench.must_plan()
    assert plan.block_stores
    bench.fail()
    assert bench.statistics().num_swapped == 0
    plans = bench.run()
    assert 0 in [start for plan in plans for start in starts(plan)]
    assert bench.tokens_of(second) == expected(SECOND, 12)


def test_what_a_failed_step_loaded_serves_nobody() -> None:
    bench = roomy_bench()
    prompt = list(range(100, 114))
    bench.add(prompt, max_tokens=2)
    bench.run()
    fill_pool(bench)
    again = bench.add([*prompt, 7], max_tokens=2)
    plan = bench.must_plan()
    assert plan.block_loads
    bench.fail()
    # The host has them still: what was read is not lost.
    plan, _ = bench.step()
    assert starts(plan) == [12]
    assert len(plan.block_loads) == 3
    bench.run()
    assert bench.tokens_of(again) == expected([*prompt, 7], 2)


def test_what_a_failed_step_stored_is_not_taken_from_the_step_behind_it() -> None:
    bench = Bench(fake_info(num_blocks=9, block_len=4, num_host_blocks=30))
    prompt = list(range(100, 114))
    for first in (prompt, list(range(200, 214))):
        bench.add(first, max_tokens=2)
        bench.run()
    bench.add(list(range(300, 312)), max_tokens=2)
    storing = bench.must_plan()
    again = bench.add([*prompt, 7], max_tokens=2)
    behind = bench.must_plan()
    assert starts(behind) == [12]
    stored = {transfer.host_block for transfer in storing.block_stores}
    assert stored & {transfer.host_block for transfer in behind.block_loads}
    bench.fail()
    bench.apply()
    assert bench.tokens_of(again) == []
    bench.run()
    assert bench.tokens_of(again) == expected([*prompt, 7], 2)


def test_bad_logits_make_the_copies_on_the_host_unfindable_too() -> None:
    is_bad = False
    info = fake_info(num_blocks=9, block_len=4, num_host_blocks=30)

    def next_token(token_ids: Any, prompt_len: int) -> int:
        return BAD_LOGITS if is_bad and token_ids[-1] == 7 else 1

    bench = Bench(info, async_scheduling=False, next_token=next_token)
    prompt = list(range(100, 114))
    bench.add(prompt, max_tokens=2)
    bench.run()
    fill_pool(bench)
    is_bad = True
    ended = bench.add([*prompt, 7], max_tokens=2)
    plan, _ = bench.step()
    assert plan.block_loads
    assert bench.received[ended].finish_reason is FinishReason.ERROR
    bench.add([*prompt, 8], max_tokens=2)
    plan, _ = bench.step()
    assert starts(plan) == [0]
    bench.run()


def test_a_lost_device_takes_the_host_tier_with_it() -> None:
    bench = tight_bench(enable_prefix_caching=False)
    _, second = preempt_the_second(bench)
    bench.must_plan()
    bench.lose_device()
    assert bench.statistics().num_swapped == 0
    stored = bench.statistics().host_stored_bytes
    assert stored > 0
    plans = bench.run()
    assert 0 in [start for plan in plans for start in starts(plan)]
    assert bench.tokens_of(second) == expected(SECOND, 12)
    assert bench.statistics().host_stored_bytes >= stored, "what is counted never falls"


def test_a_suspect_that_is_swapped_is_tried_from_where_it_was() -> None:
    bench = tight_bench(enable_prefix_caching=False)
    first = bench.add(FIRST, max_tokens=12)
    second = bench.add(SECOND, max_tokens=12)
    for _ in range(3):
        bench.step()
    bench.must_plan()
    bench.fail(StepFailed)
    bench.run()
    assert bench.tokens_of(first) == expected(FIRST, 12)
    assert bench.tokens_of(second) == expected(SECOND, 12)
