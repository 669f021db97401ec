"""Sequences of one request: the first computes the prompt, the others begin as branches of it."""

from typing import Any

import pytest

from asyncserve.kv_spec import FullAttention, KVSpec, RecurrentState, SlidingWindow
from asyncserve.request import FinishReason
from asyncserve.step import StepPlan
from tests.fakes.executor import fake_continuation, fake_info, fake_logprobs
from tests.loop.scheduling import Bench

VOCAB = 512


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % VOCAB for i in range(length)]


def expected(prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    return fake_continuation(prompt_token_ids, num_tokens, VOCAB)


def num_prompt_tokens(plans: list[StepPlan]) -> int:
    """Return how many tokens of prompts the plans compute, each prompt being longer than a token."""
    return sum(s.num_tokens for plan in plans for s in plan.sequences if s.num_tokens > 1)


def branches(plan: StepPlan) -> list[int]:
    return [sequence.slot for sequence in plan.sequences if not sequence.num_tokens]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("prompt_len", "budget"), [(10, 32), (8, 32), (3, 32), (22, 6)])
def test_a_prompt_is_computed_once_for_all_choices(
    prompt_len: int, budget: int, enable_prefix_caching: bool, async_scheduling: bool
) -> None:
    bench = Bench(
        fake_info(max_num_batched_tokens=budget),
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
    )
    bench.add_family(4, prompt(prompt_len), max_tokens=5)
    plans = bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(prompt_len), 5) for i in range(4))
    num_computed = sum(plan.num_tokens for plan in plans)
    assert num_computed == prompt_len + 4 * 4
    first = next(plan for plan in plans if branches(plan))
    assert [(s.start, s.num_tokens, s.samples) for s in first.sequences[-3:]] == [(prompt_len, 0, True)] * 3


def test_branches_share_full_blocks_and_copy_the_one_that_is_not() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.add_family(3, prompt(10), max_tokens=5)
    plan, _ = bench.step()
    tables = {append.slot: append.block_ids for append in plan.block_appends}
    leader, *others = (tables[sequence.slot] for sequence in plan.sequences)
    assert all(table[:2] == leader[:2] and table[2] != leader[2] for table in others)
    assert [tuple(copy) for copy in plan.block_copies] == [(leader[2], table[2]) for table in others]
    statistics = bench.statistics()
    assert (statistics.num_blocks_used, statistics.num_blocks_saved) == (5, 4)
    assert statistics.num_copied_blocks == 2
    bench.run()
    assert (bench.statistics().num_blocks_saved, bench.statistics().num_copied_blocks) == (0, 2)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(8, 5), (10, 1)])
def test_nothing_is_copied_that_is_full_or_never_written(prompt_len: int, max_tokens: int) -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.add_family(3, prompt(prompt_len), max_tokens=max_tokens)
    plan = bench.must_plan()
    assert len(branches(plan)) == 2
    assert not plan.block_copies
    assert bench.statistics().num_blocks_used == -(-prompt_len // 4)
    bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(prompt_len), max_tokens) for i in range(3))


FULL = FullAttention(block_len=4, num_kv_heads=1, head_dim=1, dtype="float32")
WINDOW = SlidingWindow(block_len=4, num_kv_heads=1, head_dim=1, dtype="float32", window_len=6)
STATE = RecurrentState(state_bytes=64, page_bytes=32)


@pytest.mark.parametrize("specs", [(FULL, WINDOW), (WINDOW,), (FULL, STATE), (STATE,)])
@pytest.mark.parametrize("max_tokens", [1, 9])
@pytest.mark.parametrize(("prompt_len", "budget"), [(3, 32), (8, 32), (21, 6), (22, 6), (23, 6)])
def test_branches_share_what_layers_of_any_kind_see_of_the_prompt(
    prompt_len: int, budget: int, max_tokens: int, specs: tuple[KVSpec, ...]
) -> None:
    bench = Bench(fake_info(max_num_batched_tokens=budget, num_blocks=80, specs=specs))
    bench.add_family(4, prompt(prompt_len), max_tokens=max_tokens)
    plans = bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(prompt_len), max_tokens) for i in range(4))
    assert sum(plan.num_tokens for plan in plans) == prompt_len + 4 * (max_tokens - 1)
    num_each = sum(
        2 if spec is STATE else int(prompt_len % 4 > 0) for spec in specs
    )  # a state is written on whole
    assert bench.statistics().num_copied_blocks == (0 if max_tokens == 1 else 3 * num_each)


def test_branches_are_planned_before_those_that_arrived_later() -> None:
    bench = Bench(fake_info(num_slots=3))
    bench.add_family(3, prompt(6))
    bench.add(prompt(5, 100))
    plan, _ = bench.step()
    assert [sequence.num_tokens for sequence in plan.sequences] == [6, 0, 0]
    bench.run()
    assert bench.tokens_of(3) == expected(prompt(5, 100), 4)


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_of_those_that_find_no_slot_the_first_leads_the_others(num_slots: int) -> None:
    bench = Bench(fake_info(num_slots=num_slots), enable_prefix_caching=False)
    bench.add_family(7, prompt(9), max_tokens=3)
    plans = bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(9), 3) for i in range(7))
    assert num_prompt_tokens(plans) == 9 * -(-7 // num_slots)


def test_those_that_find_no_block_wait_for_some() -> None:
    # A leader of 3 blocks, one for each copy: two more fit, and then nobody can go on in a block of its own.
    bench = Bench(fake_info(num_blocks=6, max_model_len=16), enable_prefix_caching=False)
    bench.add_family(6, prompt(10), max_tokens=2)
    plan = bench.must_plan()
    assert len(branches(plan)) == 2
    bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(10), 2) for i in range(6))


def test_branches_leave_decode_steps_the_blocks_that_are_kept_for_them() -> None:
    bench = Bench(fake_info(num_blocks=200, max_num_batched_tokens=999, max_model_len=900))
    bench.add(prompt(194 * 4 - 1, 100), max_tokens=1)  # of 199 blocks, 2 are spared
    bench.add_family(5, prompt(3), max_tokens=4)
    assert len(branches(bench.must_plan())) == 2
    bench.run()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_branches_that_are_preempted_go_on_by_themselves(enable_prefix_caching: bool) -> None:
    bench = Bench(fake_info(num_blocks=9, max_model_len=28), enable_prefix_caching=enable_prefix_caching)
    bench.add_family(4, prompt(10), max_tokens=14)
    bench.run()
    assert bench.statistics().num_preemptions > 0
    assert all(bench.tokens_of(i) == expected(prompt(10), 14) for i in range(4))


def test_a_leader_preempted_before_its_prompt_ends_still_leads() -> None:
    bench = Bench(
        fake_info(num_blocks=8, max_num_batched_tokens=5, max_model_len=28), enable_prefix_caching=False
    )
    bench.add(prompt(7), max_tokens=20)
    while len(bench.tokens_of(0)) < 5:
        bench.step()
    bench.add_family(3, prompt(16, 100), max_tokens=1)
    plans = bench.run()
    assert bench.timelines[1].num_preemptions == 1
    assert sum(len(branches(plan)) for plan in plans) == 2
    assert all(bench.tokens_of(i) == expected(prompt(16, 100), 1) for i in (1, 2, 3))


@pytest.mark.parametrize("leaves", [Bench.abort, lambda bench, each: bench.scheduler.pause(each)])
@pytest.mark.parametrize("num_planned", [0, 1, 2])
def test_when_the_leader_leaves_before_its_prompt_ends_the_next_one_leads(
    leaves: Any, num_planned: int
) -> None:
    bench = Bench(fake_info(max_num_batched_tokens=8), enable_prefix_caching=False)
    bench.add_family(4, prompt(20), max_tokens=3)
    for _ in range(num_planned):
        bench.must_plan()
    leaves(bench, 0)
    bench.scheduler.check()
    plans = bench.run()
    assert num_prompt_tokens(plans) == 20
    assert sum(len(branches(plan)) for plan in plans) == 2
    assert all(bench.tokens_of(i) == expected(prompt(20), 3) for i in (1, 2, 3))
    if bench.scheduler.resume(0):
        bench.run()
        assert bench.tokens_of(0) == expected(prompt(20), 3)


@pytest.mark.parametrize("leaves", [Bench.abort, lambda bench, each: bench.scheduler.pause(each)])
def test_a_follower_that_leaves_is_no_branch(leaves: Any) -> None:
    bench = Bench(fake_info(max_num_batched_tokens=8), enable_prefix_caching=False)
    bench.add_family(3, prompt(20), max_tokens=3)
    bench.must_plan()
    leaves(bench, 1)
    bench.scheduler.check()
    plans = bench.run()
    assert sum(len(branches(plan)) for plan in plans) == 1
    assert [bench.tokens_of(i) for i in (0, 2)] == [expected(prompt(20), 3)] * 2
    assert bench.tokens_of(1) == []
    if bench.scheduler.resume(1):
        bench.run()
        assert bench.tokens_of(1) == expected(prompt(20), 3)


def test_branches_outlive_a_leader_that_ends_with_its_first_token() -> None:
    bench = Bench(enable_prefix_caching=False)
    first = expected(prompt(10), 1)[0]
    leader = bench.add(prompt(10), max_tokens=6, stop_token_ids=frozenset({first}))
    for _ in range(2):
        bench.add(prompt(10), max_tokens=6, leader_id=leader)
    bench.add(prompt(12, 100), max_tokens=6)  # whose blocks may be those of the leader
    bench.run()
    assert bench.received[0].finish_reason is FinishReason.STOP
    assert [bench.tokens_of(i) for i in (1, 2)] == [expected(prompt(10), 6)] * 2


def test_one_aborted_between_plan_and_output_leaves_the_others_what_they_share() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.add_family(3, prompt(10), max_tokens=6)
    bench.must_plan()
    bench.abort(0)
    bench.add(prompt(12, 100), max_tokens=6)
    bench.run()
    assert [bench.tokens_of(i) for i in (1, 2)] == [expected(prompt(10), 6)] * 2


def test_one_that_comes_after_the_prompt_was_begun_computes_it_for_itself() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=6))
    leader = bench.add(prompt(10))
    bench.step()
    bench.add(prompt(10), leader_id=leader)
    assert not any(map(branches, bench.run()))


def test_requests_that_happen_to_be_alike_are_no_branches() -> None:
    bench = Bench()
    for _ in range(3):
        bench.add(prompt(10))
    plans = bench.run()
    assert not any(map(branches, plans))


# What fails


@pytest.mark.parametrize("budget", [32, 2])
@pytest.mark.parametrize("prompt_len", [3, 8, 10])
def test_branches_of_a_failed_step_are_computed_again(prompt_len: int, budget: int) -> None:
    bench = Bench(fake_info(max_num_batched_tokens=budget))
    bench.add_family(3, prompt(prompt_len), max_tokens=4)
    while not branches(bench.must_plan()):
        bench.apply()
    while len(bench.in_flight) > 1:
        bench.apply()
    bench.plan()  # one step ahead, which reads what the failed one should have written
    bench.fail()
    bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(prompt_len), 4) for i in range(3))


@pytest.mark.parametrize("prompt_len", [3, 6, 8])
def test_branches_behind_a_failed_chunk_are_set_back_with_their_leader(prompt_len: int) -> None:
    bench = Bench(fake_info(max_num_batched_tokens=prompt_len - 1))
    bench.add_family(3, prompt(prompt_len), max_tokens=4)
    bench.must_plan()
    assert branches(bench.must_plan())
    bench.fail()
    bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(prompt_len), 4) for i in range(3))


def test_nobody_branches_off_in_a_trial_and_the_followers_do_not_wait_for_ever() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=10), enable_prefix_caching=False)
    bench.add(prompt(2, 100), max_tokens=9)
    bench.step()
    bench.add_family(3, prompt(10), max_tokens=4)
    assert bench.must_plan().num_tokens == 10
    bench.fail()
    plans = bench.run()
    whole = [plan for plan in plans if any(s[1:] == (0, 10, True) for s in plan.sequences)]
    assert [(len(plan.sequences), len(branches(plan))) for plan in whole] == [(1, 0)]
    assert sum(len(branches(plan)) for plan in plans) == 1
    assert all(bench.tokens_of(i) == expected(prompt(10), 4) for i in (1, 2, 3))


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_whose_steps_fail_ends_alone(culprit: int) -> None:
    bench = Bench()
    bench.add_family(3, prompt(10), max_tokens=4)
    bench.culprits[culprit] = 11
    bench.run()
    assert bench.received[culprit].finish_reason is FinishReason.ERROR
    others = [i for i in range(3) if i != culprit]
    assert [bench.tokens_of(i) for i in others] == [expected(prompt(10), 4)] * 2


@pytest.mark.parametrize("num_planned", [1, 2, 3])
def test_a_lost_device_takes_nothing_from_branches_and_followers(num_planned: int) -> None:
    bench = Bench(fake_info(max_num_batched_tokens=6), enable_prefix_caching=False)
    bench.add_family(3, prompt(10), max_tokens=4)
    for _ in range(num_planned - 1):
        bench.step()
    bench.must_plan()
    bench.lose_device()
    bench.run()
    assert all(bench.tokens_of(i) == expected(prompt(10), 4) for i in range(3))


# What is counted


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_followers_wait_as_any_other_sequence(policy: str) -> None:
    bench = Bench(fake_info(max_num_batched_tokens=6), policy=policy)
    bench.add_family(4, prompt(10), max_tokens=4)
    assert bench.scheduler.waiting_load == (4, 40)
    bench.step()
    assert bench.scheduler.waiting_load == (3, 30)
    bench.step()
    assert bench.scheduler.waiting_load == (0, 0)
    bench.run()


def test_a_tenant_pays_for_branches_what_others_would_cost_it() -> None:
    served = []
    for leads in (True, False):
        bench = Bench(policy="fair", enable_prefix_caching=False)
        leader = bench.add(prompt(10), tenant="a")
        for _ in range(3):
            bench.add(prompt(10), tenant="a", leader_id=leader if leads else None)
        bench.run()
        served.append(bench.scheduler._live.waiting.served("a"))  # type: ignore[attr-defined]
    assert served[0] == served[1]


def test_of_a_branch_no_prompt_token_was_computed() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=6))
    bench.add_family(3, prompt(10), max_tokens=2)
    bench.run()
    assert [bench.timelines[i].num_cached_tokens for i in range(3)] == [0, 10, 10]
    assert bench.statistics().prefix_cache_queries == 10


def test_scored_prompts_are_scored_once_for_all_choices() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=6))
    bench.add_family(3, prompt(10), max_tokens=2, num_prompt_logprobs=1, num_logprobs=1)
    plans = bench.run()
    assert num_prompt_tokens(plans) + sum(plan.num_tokens == 1 for plan in plans) == 10
    for i in range(3):
        received = bench.received[i]
        assert received.prompt_logprobs == [[fake_logprobs(token, 1, VOCAB) for token in prompt(10)[1:]]]
        assert received.logprobs == [fake_logprobs(token, 1, VOCAB) for token in expected(prompt(10), 2)]


def test_scores_of_a_leader_aborted_with_its_steps_in_flight_reach_its_branches() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=12))
    bench.add_family(2, prompt(10), max_tokens=2, num_prompt_logprobs=1)
    bench.must_plan()
    assert branches(bench.must_plan())
    bench.abort(0)
    bench.run()
    assert bench.received[1].prompt_logprobs == [[fake_logprobs(token, 1, VOCAB) for token in prompt(10)[1:]]]


def test_slots_of_a_partial_block_that_branches_share_are_unused_once() -> None:
    bench = Bench(fake_info())
    block_len = bench.info.kv_groups[0].spec.block_len
    bench.add_family(4, list(range(1, block_len + 2)), max_tokens=1)
    bench.must_plan()
    (group,) = bench.statistics().kv_groups
    assert (group.num_slots, group.num_slots_unused) == (2 * block_len, block_len - 1)
