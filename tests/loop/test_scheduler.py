from array import array
from dataclasses import replace
from typing import Literal

import pytest

from asyncserve.errors import (
    AsyncserveError,
    ConfigError,
    InvalidRequest,
    InvariantError,
    PromptTooLong,
    StepFailed,
)
from asyncserve.loop import live_sequences
from asyncserve.loop.step_planner import LEAST_REGISTERED, MAX_ADMITTED, MAX_DEFERRED
from asyncserve.observer import RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import BAD_LOGITS, StepOutput
from tests.fakes.executor import fake_continuation, fake_info, fake_logprobs
from tests.loop.scheduling import Bench, lengths

VOCAB = 512


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % VOCAB for i in range(length)]


def expected(prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    return fake_continuation(prompt_token_ids, num_tokens, VOCAB)


# Batching and the token budget


def test_a_sequence_gets_the_tokens_the_device_sampled_and_ends_by_length() -> None:
    bench = Bench()
    bench.add(prompt(5), max_tokens=6)
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(5), 6)
    assert bench.received[0].finish_reason is FinishReason.LENGTH


def test_sequences_that_arrive_later_join_the_running_batch() -> None:
    bench = Bench()
    bench.add(prompt(5), max_tokens=8)
    bench.step()
    bench.add(prompt(3, 50), max_tokens=2)
    plan, deltas = bench.step()
    assert lengths(plan) == {0: 1, 1: 3}
    assert [delta.sequence_id for delta in deltas] == [0, 1]
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(5), 8)
    assert bench.tokens_of(1) == expected(prompt(3, 50), 2)


def test_decode_steps_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=10))
    bench.add(prompt(2), max_tokens=20)
    bench.step()
    bench.add(prompt(30, 50))
    bench.add(prompt(2, 90))
    plan, _ = bench.step()
    assert [(s.num_tokens, s.samples) for s in plan.sequences] == [(1, True), (7, False), (2, True)]


def test_a_long_prompt_does_not_keep_short_ones_behind_it_waiting() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16, num_blocks=200), enable_prefix_caching=False)
    bench.add(prompt(120))
    for i in range(3):
        bench.add(prompt(5, 200 + 10 * i), max_tokens=1)
    for _ in range(3):
        bench.step()
    assert all(bench.received[i].finish_reason for i in (1, 2, 3))
    assert bench.tokens_of(0) == []
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(120), 4)


def test_a_flood_of_short_prompts_does_not_stop_a_long_one() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16, num_blocks=200), enable_prefix_caching=False)
    bench.add(prompt(80))
    for step in range(10):
        for i in range(4):
            bench.add(prompt(5, 100 + 40 * step + 10 * i), max_tokens=1)
        plan, _ = bench.step()
        assert lengths(plan)[0] >= 8
        if bench.tokens_of(0):
            break
    assert bench.tokens_of(0) != []


def test_what_others_do_not_want_of_the_budget_goes_to_the_prompt_that_was_cut() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16))
    bench.add(prompt(40))
    bench.add(prompt(3, 100))
    plan, _ = bench.step()
    assert lengths(plan) == {0: 13, 1: 3}
    plan, _ = bench.step()
    assert lengths(plan) == {0: 15, 1: 1}


def test_the_long_prefill_threshold_caps_one_prompt_even_when_it_is_alone() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=32), long_prefill_token_threshold=6)
    bench.add(prompt(15))
    plans = bench.run()
    assert [lengths(plan)[0] for plan in plans[:4]] == [6, 6, 3, 1]
    assert bench.tokens_of(0) == expected(prompt(15), 4)


def test_only_the_chunk_that_reaches_the_last_token_samples() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=8))
    bench.add(prompt(17), max_tokens=1)
    plans = bench.run()
    assert [plan.sequences[0][1:] for plan in plans] == [(0, 8, False), (8, 8, False), (16, 1, True)]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole_and_lets_nobody_pass() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=10), enable_chunked_prefill=False)
    bench.add(prompt(8), max_tokens=2)
    bench.add(prompt(6, 50), max_tokens=2)
    bench.add(prompt(1, 90), max_tokens=2)
    plans = bench.run()
    assert [lengths(plan) for plan in plans[:3]] == [{0: 8}, {0: 1, 1: 6, 2: 1}, {1: 1, 2: 1}]


def test_without_chunked_prefill_a_prompt_above_the_budget_is_refused() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=10), enable_chunked_prefill=False)
    bench.scheduler.limits.check(10, 1)
    with pytest.raises(PromptTooLong, match=r"has 11 tokens; without chunked prefill .* at most 10") as info:
        bench.scheduler.limits.check(11, 1)
    assert info.value.param == "prompt"


def test_without_chunked_prefill_a_preempted_sequence_above_the_budget_still_finishes() -> None:
    info = fake_info(num_blocks=7, max_num_batched_tokens=8, max_model_len=24)
    bench = Bench(info, enable_chunked_prefill=False, enable_prefix_caching=False)
    prompts = [prompt(8), prompt(7, 100)]
    for ids in prompts:
        bench.add(ids, max_tokens=14)
    bench.run()
    assert bench.timelines[1].num_preemptions > 0
    assert [bench.tokens_of(i) for i in (0, 1)] == [expected(ids, 14) for ids in prompts]


def test_no_more_sequences_run_than_there_are_slots() -> None:
    bench = Bench(fake_info(num_slots=2))
    for i in range(5):
        bench.add(prompt(3, 10 * i), max_tokens=3)
    plans = bench.run()
    assert max(len(plan.sequences) for plan in plans) == 2
    assert all(bench.tokens_of(i) == expected(prompt(3, 10 * i), 3) for i in range(5))


# Order


def test_fcfs_admits_in_order_of_arrival() -> None:
    bench = Bench(fake_info(num_slots=1))
    for i, priority in enumerate([2, 1, 0]):
        bench.add(prompt(3, 10 * i), max_tokens=1, priority=priority)
    assert _order_of_ends(bench) == [0, 1, 2]


def test_priority_admits_lower_numbers_first_then_in_order_of_arrival() -> None:
    bench = Bench(fake_info(num_slots=1), policy="priority")
    for i, priority in enumerate([1, 0, 1, -1]):
        bench.add(prompt(3, 10 * i), max_tokens=1, priority=priority)
    assert _order_of_ends(bench) == [3, 1, 0, 2]


def _order_of_ends(bench: Bench) -> list[int]:
    ends = []
    while bench.has_work:
        ends += [delta.sequence_id for delta in bench.step()[1] if delta.finish_reason]
    return ends


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="lifo"):
        Bench(policy="lifo")


# Steps ahead


def test_no_more_steps_are_in_flight_than_credits() -> None:
    bench = Bench(fake_info(max_unapplied=2))
    bench.add(prompt(3), max_tokens=9)
    bench.must_plan()
    bench.must_plan()
    assert bench.plan() is None
    bench.apply()
    assert bench.plan() is not None


def test_without_async_scheduling_no_step_is_planned_ahead() -> None:
    bench = Bench(fake_info(max_unapplied=2), async_scheduling=False)
    bench.add(prompt(3))
    bench.must_plan()
    assert bench.plan() is None


def test_a_sequence_certain_to_end_by_length_is_not_planned_beyond_it() -> None:
    bench = Bench(fake_info(max_unapplied=3))
    bench.add(prompt(3), max_tokens=2)
    bench.must_plan()
    bench.must_plan()
    assert bench.plan() is None
    bench.apply()
    assert bench.plan() is None
    bench.apply()
    bench.check_nothing_leaked()


def test_the_token_computed_beyond_a_stop_token_is_dropped() -> None:
    tokens = expected(prompt(3), 3)
    bench = Bench()
    bench.add(prompt(3), max_tokens=9, stop_token_ids=frozenset({tokens[1]}))
    bench.run()
    assert bench.tokens_of(0) == tokens[:2]
    end = bench.received[0].end
    assert end is not None
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, tokens[1])


def test_outputs_out_of_order_are_refused() -> None:
    bench = Bench()
    bench.add(prompt(3))
    bench.must_plan()
    bench.must_plan()
    with pytest.raises(InvariantError, match="step 1 is applied; the oldest in flight is 0"):
        bench.scheduler.apply(StepOutput(step_id=1, token_ids=[1]), 0.0)


def test_an_output_with_the_wrong_number_of_tokens_is_refused() -> None:
    bench = Bench()
    bench.add(prompt(3))
    bench.must_plan()
    with pytest.raises(InvariantError, match="gave 2 tokens, not 1"):
        bench.scheduler.apply(StepOutput(step_id=0, token_ids=[1, 2]), 0.0)


# How sequences end


def test_no_stop_token_ends_a_sequence_before_min_tokens() -> None:
    tokens = expected(prompt(3), 8)
    bench = Bench()
    bench.add(prompt(3), max_tokens=8, min_tokens=3, stop_token_ids=frozenset({tokens[0], tokens[2]}))
    bench.run()
    assert bench.tokens_of(0) == tokens[:3]


def test_a_stop_token_at_the_length_limit_counts_as_stop() -> None:
    tokens = expected(prompt(3), 2)
    bench = Bench()
    bench.add(prompt(3), max_tokens=2, stop_token_ids=frozenset({tokens[1]}))
    bench.run()
    assert bench.received[0].finish_reason is FinishReason.STOP


def test_a_sequence_whose_logits_are_bad_ends_alone_with_an_error() -> None:
    def next_token(token_ids: "array[int]", prompt_len: int) -> int:
        return BAD_LOGITS if token_ids[0] == 7 and len(token_ids) == prompt_len + 1 else 5

    bench = Bench(next_token=next_token)
    bench.add(prompt(9, 7), max_tokens=5)
    bench.add(prompt(9, 50), max_tokens=5)
    bench.run()
    assert bench.tokens_of(0) == [5]
    assert bench.received[0].finish_reason is FinishReason.ERROR
    assert isinstance(_error_of(bench, 0), StepFailed)
    assert bench.tokens_of(1) == [5] * 5


def test_blocks_of_a_sequence_with_bad_logits_serve_nobody_else() -> None:
    bench = Bench(next_token=lambda token_ids, prompt_len: BAD_LOGITS)
    bench.add(prompt(9))
    bench.run()
    assert bench.statistics().num_blocks_cached == 0


def _error_of(bench: Bench, sequence_id: int) -> AsyncserveError | None:
    end = bench.received[sequence_id].end
    assert end is not None
    return end.error


# Release


def test_slot_and_blocks_come_back_when_the_last_step_that_mentions_the_sequence_is_applied() -> None:
    tokens = expected(prompt(3), 2)
    bench = Bench(fake_info(num_slots=1))
    bench.add(prompt(3), max_tokens=9, stop_token_ids=frozenset({tokens[0]}))
    bench.add(prompt(3, 50), max_tokens=1)
    bench.must_plan()
    bench.must_plan()
    bench.apply()
    assert bench.received[0].finish_reason is FinishReason.STOP
    assert bench.statistics().num_blocks_used > 0
    assert bench.plan() is None, "the slot is not free while step 1 may write to it"
    bench.apply()
    assert bench.statistics().num_blocks_used == 0
    plan = bench.must_plan()
    assert plan.released_slots == (0,)
    assert [assignment.slot for assignment in plan.admitted] == [0]


def _many_that_end_together(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench in whose last step eight sequences of two blocks ended, three of them given back."""
    monkeypatch.setattr(live_sequences, "RELEASED_BLOCKS", 5)
    bench = Bench(fake_info(num_slots=8, max_num_batched_tokens=64))
    for number in range(8):
        bench.add(prompt(5, 50 * number + 1), max_tokens=3)
    for _ in range(3):
        bench.step()
    assert bench.statistics().num_running == 5
    return bench


def test_blocks_of_many_sequences_that_end_together_come_back_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = _many_that_end_together(monkeypatch)
    assert bench.scheduler.release_some()
    bench.scheduler.check()
    assert (bench.statistics().num_running, bench.statistics().num_blocks_used) == (2, 4)
    assert not bench.scheduler.release_some()
    bench.check_nothing_leaked()


def test_what_has_not_come_back_in_parts_does_so_with_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _many_that_end_together(monkeypatch)
    for number in range(8):
        bench.add(prompt(5, 50 * number + 1), max_tokens=1)
    plan = bench.must_plan()
    assert sorted(plan.released_slots) == list(range(8))
    assert len(plan.admitted) == 8


def test_a_lost_device_has_nothing_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _many_that_end_together(monkeypatch)
    bench.lose_device()
    assert not bench.scheduler.release_some()
    bench.check_nothing_leaked()


def test_an_abort_gives_slot_and_blocks_back_only_after_the_steps_in_flight() -> None:
    bench = Bench()
    bench.add(prompt(5))
    bench.must_plan()
    bench.must_plan()
    assert bench.abort(0)
    assert bench.statistics().num_running == 1
    assert bench.apply() == []
    assert bench.statistics().num_running == 1
    assert bench.apply() == []
    bench.check_nothing_leaked()


def test_an_abort_between_steps_gives_everything_back_at_once() -> None:
    bench = Bench()
    bench.add(prompt(5))
    bench.step()
    assert bench.abort(0)
    bench.check_nothing_leaked()
    assert not bench.has_work
    bench.add(prompt(5, 50))
    assert bench.must_plan().released_slots == (0,)


def test_an_abort_is_idempotent_and_false_for_what_has_ended_or_never_was() -> None:
    bench = Bench()
    bench.add(prompt(5), max_tokens=1)
    waiting = bench.add(prompt(5))
    assert not bench.scheduler.abort(99)
    assert bench.abort(waiting)
    assert not bench.abort(waiting)
    bench.run()
    assert not bench.scheduler.abort(0)
    assert bench.tokens_of(waiting) == []


def test_blocks_stay_cached_after_an_abort() -> None:
    bench = Bench()
    bench.add(prompt(9), max_tokens=20)
    bench.step()
    bench.abort(0)
    bench.add(prompt(9), max_tokens=1)
    plan, _ = bench.step()
    assert plan.sequences[0][1:] == (8, 1, True)


# Prefix cache


def test_a_prompt_seen_before_computes_only_its_last_block() -> None:
    bench = Bench()
    bench.add(prompt(10), max_tokens=1)
    bench.run()
    bench.add([*prompt(9), 77], max_tokens=3)
    plan, _ = bench.step()
    assert plan.sequences[0][1:] == (8, 2, True)
    assert bench.timelines[1].num_cached_tokens == 8
    bench.run()
    assert bench.tokens_of(1) == expected([*prompt(9), 77], 3)
    end = bench.received[1].end
    assert end is not None
    assert end.num_cached_tokens == 8


def test_sequences_of_the_same_plan_share_their_prompt() -> None:
    bench = Bench()
    for _ in range(3):
        bench.add(prompt(10), max_tokens=3)
    plan, _ = bench.step()
    assert lengths(plan) == {0: 10, 1: 2, 2: 2}
    bench.run()
    assert [bench.tokens_of(i) for i in range(3)] == [expected(prompt(10), 3)] * 3


def test_siblings_of_a_prompt_longer_than_the_budget_wait_for_it_and_compute_it_once() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16, num_blocks=200))
    for _ in range(4):
        bench.add(prompt(50), max_tokens=2)
    plans = bench.run()
    num_prompt_tokens = sum(length for plan in plans for length in lengths(plan).values() if length > 1)
    assert num_prompt_tokens <= 50 + 3 * 2
    assert [bench.tokens_of(i) for i in range(4)] == [expected(prompt(50), 2)] * 4


def test_a_sequence_that_waits_for_a_prefix_lets_others_pass() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16, num_blocks=200))
    bench.add(prompt(50), max_tokens=1)
    bench.add(prompt(50), max_tokens=1)
    bench.add(prompt(4, 300), max_tokens=1)
    _, deltas = bench.step()
    assert [delta.sequence_id for delta in deltas] == [2]


def test_a_long_prompt_is_not_hashed_whole_when_it_is_admitted() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=64, num_blocks=3000, max_model_len=5000))
    for first in (0, 1):
        bench.add(prompt(4000, first), max_tokens=1)
    bench.step()
    assert all(len(each.block_digests) <= 64 for each in bench.scheduler._live.sequences.values())


def test_the_search_for_one_that_need_not_wait_for_a_prefix_is_bounded() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16, num_blocks=200))
    for _ in range(MAX_DEFERRED + 1):
        bench.add(prompt(20), max_tokens=1)
    last = bench.add(prompt(4, 300), max_tokens=1)
    plan, _ = bench.step()
    assert lengths(plan) == {0: 16}
    bench.run()
    assert bench.tokens_of(last) == expected(prompt(4, 300), 1)


def test_outputs_of_a_finished_sequence_are_found_by_the_next_turn() -> None:
    bench = Bench()
    bench.add(prompt(6), max_tokens=8)
    bench.run()
    bench.add([*prompt(6), *bench.tokens_of(0), 9, 9], max_tokens=1)
    bench.run()
    # The last token's KV was never computed: 13 positions, three full blocks.
    assert bench.timelines[1].num_cached_tokens == 12


def test_outputs_of_a_sequence_that_still_runs_are_found() -> None:
    bench = Bench()
    bench.add(prompt(6), max_tokens=20)
    while len(bench.tokens_of(0)) < 4:
        bench.step()
    bench.add([*prompt(6), *bench.tokens_of(0)], max_tokens=1)
    bench.step()
    assert bench.timelines[1].num_cached_tokens == 8


def test_a_better_priority_does_not_wait_for_the_prefix_that_a_worse_one_computes() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16, num_blocks=200), policy="priority")
    bench.add(prompt(50), max_tokens=1, priority=5)
    bench.step()
    urgent = bench.add([*prompt(30), *prompt(30, 200)], max_tokens=1, priority=0)
    bench.step()
    assert bench.timelines[urgent].first_scheduled_s == 1.0


def test_prompts_with_different_salts_share_nothing() -> None:
    bench = Bench()
    bench.add(prompt(10), cache_salt="a", max_tokens=1)
    bench.add(prompt(10), cache_salt="b", max_tokens=1)
    bench.run()
    assert bench.timelines[1].num_cached_tokens == 0


def test_with_prefix_caching_off_nothing_is_shared() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.add(prompt(10), max_tokens=1)
    bench.run()
    bench.add(prompt(10), max_tokens=1)
    bench.run()
    assert bench.timelines[1].num_cached_tokens == 0
    assert bench.statistics().prefix_cache_queries == 0


def test_statistics_count_prompt_tokens_looked_up_and_found() -> None:
    bench = Bench()
    bench.add(prompt(10), max_tokens=1)
    bench.run()
    bench.add(prompt(10), max_tokens=1)
    bench.run()
    bench.add(prompt(10), max_tokens=1, num_prompt_logprobs=1)
    bench.run()
    statistics = bench.statistics()
    assert (statistics.prefix_cache_queries, statistics.prefix_cache_hits) == (20, 8)


# Log-probabilities


def test_who_wants_logprobs_does_not_make_the_tokens_of_others_more_than_tokens() -> None:
    bench = Bench()
    for number in range(4):
        bench.add(prompt(5, 50 * number), max_tokens=8, num_logprobs=1 if number == 1 else None)
    bench.step()
    bench.must_plan()
    given = bench.scheduler.apply(bench.runner.run(bench.in_flight.popleft()), 0.0)
    assert [each.sequence_id for each in given.sequences] == [0, 2, 3]
    assert list(given.token_ids) == [expected(prompt(5, 50 * number), 2)[1] for number in (0, 2, 3)]
    (delta,) = given.deltas
    assert delta.token_ids == (expected(prompt(5, 50), 2)[1],)
    assert delta.logprobs == (fake_logprobs(delta.token_ids[0], 1, VOCAB),)


def test_prompt_logprobs_of_all_chunks_come_once_with_the_first_token() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=6))
    ids = prompt(15)
    bench.add(ids, max_tokens=3)
    bench.run()
    bench.add(ids, max_tokens=3, num_prompt_logprobs=2, num_logprobs=1)
    bench.run()
    received = bench.received[1]
    assert received.prompt_logprobs == [[fake_logprobs(token_id, 2, VOCAB) for token_id in ids[1:]]]
    assert received.logprobs == [fake_logprobs(token_id, 1, VOCAB) for token_id in expected(ids, 3)]


def test_a_token_that_is_scored_takes_more_of_the_budget() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=30))
    ids = prompt(25)
    bench.add(ids, max_tokens=3, num_prompt_logprobs=1)
    assert [lengths(plan) for plan in bench.run()[:4]] == [{0: 15}, {0: 10}, {0: 1}, {0: 1}]
    assert bench.tokens_of(0) == expected(ids, 3)
    assert bench.received[0].prompt_logprobs == [[fake_logprobs(token_id, 1, VOCAB) for token_id in ids[1:]]]


def test_what_scored_tokens_leave_goes_to_others_and_the_other_way_round() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=32))
    bench.add(prompt(40), num_prompt_logprobs=1)
    bench.add(prompt(8, 100))
    plan, _ = bench.step()
    assert lengths(plan) == {0: 12, 1: 8}
    bench = Bench(fake_info(max_num_batched_tokens=32))
    bench.add(prompt(8))
    bench.add(prompt(40, 100), num_prompt_logprobs=1)
    plan, _ = bench.step()
    assert lengths(plan) == {0: 8, 1: 12}


def test_a_scored_prompt_goes_on_with_what_decode_steps_leave_however_little() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=2))
    bench.add(prompt(2), max_tokens=10)
    bench.step()
    bench.add(prompt(5, 100), num_prompt_logprobs=1)
    plan, _ = bench.step()
    assert lengths(plan) == {0: 1, 1: 1}
    bench.run()
    assert bench.tokens_of(1) == expected(prompt(5, 100), 4)


def test_without_chunked_prefill_a_scored_prompt_is_computed_whole() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16), enable_chunked_prefill=False)
    bench.add(prompt(15), num_prompt_logprobs=1)
    plan, _ = bench.step()
    assert lengths(plan) == {0: 15}


def test_prompt_logprobs_are_whole_when_the_prompt_is_preempted_half_way() -> None:
    info = fake_info(num_blocks=8, max_num_batched_tokens=5, max_model_len=28)
    bench = Bench(info)
    bench.add(prompt(7), max_tokens=20)
    ids = prompt(16, 100)
    while len(bench.tokens_of(0)) < 5:
        bench.step()
    bench.add(ids, max_tokens=2, num_prompt_logprobs=1)
    bench.run()
    assert bench.timelines[1].num_preemptions == 1
    assert bench.received[1].prompt_logprobs == [[fake_logprobs(token_id, 1, VOCAB) for token_id in ids[1:]]]


def test_missing_prompt_logprobs_are_a_bug_of_the_device_that_is_noticed() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=6))
    bench.add(prompt(15), num_prompt_logprobs=0)
    bench.must_plan()
    bench.apply_output(StepOutput(step_id=0, token_ids=[]))
    bench.must_plan()
    scored = {0: [fake_logprobs(1, 0, VOCAB)]}
    with pytest.raises(InvariantError, match="lacks prompt logprobs before 3"):
        bench.scheduler.apply(StepOutput(step_id=1, token_ids=[], prompt_logprobs=scored), 0.0)


# Preemption


def _pressed(policy: str = "fcfs", *, async_scheduling: bool = True) -> Bench:
    """Two sequences of up to 5 blocks each in a pool of 7."""
    return Bench(fake_info(num_blocks=8, max_model_len=28), policy=policy, async_scheduling=async_scheduling)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_preempted_sequence_gets_the_same_tokens_as_if_it_were_not(async_scheduling: bool) -> None:
    bench = _pressed(async_scheduling=async_scheduling)
    prompts = [prompt(7), prompt(7, 100)]
    for ids in prompts:
        bench.add(ids, max_tokens=13)
    bench.run()
    assert (bench.timelines[0].num_preemptions, bench.timelines[1].num_preemptions) == (0, 1)
    assert bench.statistics().num_preemptions == 1
    assert [bench.tokens_of(i) for i in (0, 1)] == [expected(ids, 13) for ids in prompts]


def test_the_worst_priority_is_preempted_though_it_arrived_first() -> None:
    bench = _pressed("priority")
    bench.add(prompt(7), max_tokens=13, priority=5)
    bench.add(prompt(7, 100), max_tokens=13, priority=1)
    bench.run()
    assert (bench.timelines[0].num_preemptions, bench.timelines[1].num_preemptions) == (1, 0)


def _run_until_preempted(bench: Bench, sequence_id: int) -> None:
    """Go on, one step ahead, up to the plan that preempts the sequence."""
    while True:
        planned = bench.plan()
        if bench.timelines[sequence_id].num_preemptions:
            return
        if planned is None or len(bench.in_flight) == 2:
            bench.apply()


def test_tokens_in_flight_of_a_preempted_sequence_are_kept() -> None:
    bench = _pressed()
    for ids in (prompt(7), prompt(7, 100)):
        bench.add(ids, max_tokens=13)
    _run_until_preempted(bench, 1)
    known = len(bench.tokens_of(1))
    assert bench.statistics().num_waiting == 0, "a step in flight still mentions it"
    while bench.in_flight:
        bench.apply()
    assert len(bench.tokens_of(1)) > known
    assert bench.statistics().num_waiting == 1
    bench.run()
    assert bench.tokens_of(1) == expected(prompt(7, 100), 13)


def test_a_preempted_sequence_comes_back_before_those_that_arrived_later() -> None:
    bench = _pressed()
    for ids in (prompt(7), prompt(7, 100)):
        bench.add(ids, max_tokens=13)
    while bench.timelines[1].num_preemptions == 0:
        bench.step()
    bench.add(prompt(3, 200), max_tokens=1)
    bench.run()
    assert _last_token(bench, 2) >= _last_token(bench, 0)
    resumed = bench.timelines[1]
    assert resumed.first_token_s is not None
    assert bench.timelines[2].first_scheduled_s is not None
    assert bench.tokens_of(1) == expected(prompt(7, 100), 13)


def _last_token(bench: Bench, sequence_id: int) -> float:
    last_token_s = bench.timelines[sequence_id].last_token_s
    assert last_token_s is not None
    return last_token_s


def test_no_more_is_preempted_while_blocks_are_about_to_come_back() -> None:
    bench = Bench(fake_info(num_blocks=7))
    for i in range(3):
        bench.add(prompt(7, 100 * i), max_tokens=4)
    bench.run()
    assert [bench.timelines[i].num_preemptions for i in range(3)] == [0, 0, 1]


def test_nothing_is_preempted_when_a_sequence_in_flight_is_about_to_end() -> None:
    bench = Bench(fake_info(num_blocks=5))
    bench.add(prompt(7), max_tokens=2)
    bench.add(prompt(7, 100), max_tokens=5)
    bench.run()
    assert bench.statistics().num_preemptions == 0


def test_a_prompt_beside_others_leaves_some_blocks_free_and_one_alone_may_take_all() -> None:
    info = fake_info(num_blocks=301, block_len=1, max_model_len=400, max_num_batched_tokens=400)
    bench = Bench(info)
    bench.add(prompt(299), max_tokens=1)
    bench.run()
    first = bench.add(prompt(100, 100), max_tokens=3)
    second = bench.add(prompt(198, 300), max_tokens=1)
    bench.run()
    first_ended, second_began = bench.timelines[first].last_token_s, bench.timelines[second].first_scheduled_s
    assert first_ended is not None
    assert second_began == first_ended
    assert bench.statistics().num_preemptions == 0


def test_an_abort_of_a_preempted_sequence_in_flight_leaves_nothing_behind() -> None:
    bench = _pressed()
    for ids in (prompt(7), prompt(7, 100)):
        bench.add(ids, max_tokens=13)
    _run_until_preempted(bench, 1)
    assert bench.abort(1)
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(7), 13)


# Failed steps


def test_sequences_of_a_failed_step_go_on_from_their_known_tokens_and_others_wait_for_them() -> None:
    bench = Bench(fake_info(num_slots=2))
    for first in (0, 50, 90):
        bench.add(prompt(5, first), max_tokens=4)
    bench.step()
    bench.must_plan()
    bench.must_plan()
    assert bench.fail() == []
    assert bench.statistics().num_running == 2, "step 2 still mentions them"
    assert bench.plan() is None, "suspects are tried with nothing else in flight"
    assert bench.apply() == [], "its tokens came from garbage"
    plans = [bench.must_plan()]
    assert [bench.sequence_ids(plan) for plan in plans] == [{0}]
    bench.apply()
    plan, _ = bench.step()
    assert bench.sequence_ids(plan) == {1}
    bench.run()
    for sequence_id, first in enumerate((0, 50, 90)):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, first), 4)
    statistics = bench.statistics()
    assert (statistics.num_failed_steps, statistics.num_retried_steps) == (1, 2)
    assert (statistics.num_replayed_sequences, statistics.num_failed_sequences) == (2, 0)
    assert statistics.num_preemptions == 0


def test_blocks_of_a_failed_step_are_not_found_and_earlier_ones_are() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=8))
    bench.add(prompt(17))
    bench.step()
    bench.must_plan()
    bench.fail()
    plan, _ = bench.step()
    assert plan.sequences[0].start == 8
    bench.add(prompt(17), max_tokens=2)
    bench.run()
    assert bench.tokens_of(1) == expected(prompt(17), 2)


def test_a_block_that_a_failed_decode_step_should_have_completed_is_not_found() -> None:
    bench = Bench(async_scheduling=False)
    bench.add(prompt(6), max_tokens=9)
    bench.step()
    bench.step()
    tokens = bench.tokens_of(0)
    plan = bench.must_plan()
    assert plan.sequences[0].start == 7, "the last position of the second block"
    bench.abort(0)
    bench.fail()
    bench.add([*prompt(6), *tokens, 9, 9], max_tokens=3)
    bench.run()
    assert bench.timelines[1].num_cached_tokens == 4
    assert bench.tokens_of(1) == expected([*prompt(6), *tokens, 9, 9], 3)


def test_a_sequence_that_read_blocks_of_a_failed_step_computes_again() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=9))
    bench.add(prompt(9), max_tokens=3)
    bench.must_plan()
    reader = bench.add([*prompt(8), 70, 71, 72, 73, 74], max_tokens=3)
    plan = bench.must_plan()
    assert [sequence[1:3] for sequence in plan.sequences] == [(9, 1), (8, 5)], "it reads what step 0 writes"
    bench.fail()
    assert bench.apply() == [], "its token came from garbage"
    bench.run()
    assert bench.received[reader].finish_reason is FinishReason.LENGTH
    assert bench.tokens_of(reader) == expected([*prompt(8), 70, 71, 72, 73, 74], 3)
    assert bench.tokens_of(0) == expected(prompt(9), 3)


def test_an_aborted_sequence_in_a_failed_step_gets_no_error() -> None:
    bench = Bench()
    bench.add(prompt(5))
    bench.must_plan()
    bench.abort(0)
    assert bench.fail() == []
    bench.check_nothing_leaked()


# Admission


@pytest.mark.parametrize(
    ("prompt_len", "max_output_len", "message", "param"),
    [
        (32, 1, "has 32 tokens; the model's context of 32", "prompt"),
        (400, 1, "has 400 tokens; the model's context of 32", "prompt"),
        (30, 3, "has 30 tokens, max_tokens is 3, 33 together; the model's context holds 32", "max_tokens"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_the_numbers(
    prompt_len: int, max_output_len: int, message: str, param: str
) -> None:
    bench = Bench(fake_info(max_model_len=32))
    bench.scheduler.limits.check(31, 1)
    with pytest.raises(PromptTooLong, match=message) as info:
        bench.scheduler.limits.check(prompt_len, max_output_len)
    assert info.value.param == param


@pytest.mark.parametrize(
    ("prompt_len", "max_output_len", "message", "param"),
    [
        (20, 1, "has 20 tokens; the KV cache of 20 tokens", "prompt"),
        (400, 1, "has 400 tokens; the KV cache of 20 tokens", "prompt"),
        (15, 6, "has 15 tokens, max_tokens is 6, 21 together; the KV cache holds 20", "max_tokens"),
    ],
)
def test_what_exceeds_the_pool_is_refused_with_the_numbers(
    prompt_len: int, max_output_len: int, message: str, param: str
) -> None:
    bench = Bench(fake_info(num_blocks=6, max_model_len=100))
    assert bench.scheduler.limits.max_len == 20
    with pytest.raises(PromptTooLong, match=message) as info:
        bench.scheduler.limits.check(prompt_len, max_output_len)
    assert info.value.param == param


@pytest.mark.parametrize(
    ("len_is_of", "holder"),
    [("option", "the context that --max-model-len allows here"), ("kv_cache", "the KV cache")],
)
def test_a_context_that_was_cut_is_not_called_the_models(
    len_is_of: Literal["option", "kv_cache"], holder: str
) -> None:
    limits = Bench(replace(fake_info(max_model_len=32), len_is_of=len_is_of)).scheduler.limits
    with pytest.raises(PromptTooLong, match=f"has 32 tokens; {holder} of 32 tokens must hold"):
        limits.check(32, 1)
    with pytest.raises(PromptTooLong, match=f"33 together; {holder} holds 32"):
        limits.check(30, 3)


def test_a_sequence_as_long_as_the_whole_pool_is_served() -> None:
    bench = Bench(fake_info(num_blocks=6, max_model_len=100))
    bench.add(prompt(15), max_tokens=5)
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(15), 5)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest) as info:
        Bench().scheduler.limits.check(0, 1)
    assert info.value.param == "prompt"


def test_adding_the_same_sequence_twice_is_a_bug() -> None:
    bench = Bench()
    bench.add(prompt(3))
    with pytest.raises(InvariantError, match="added twice"):
        bench.scheduler.add(bench.tokenized[0], RequestTimeline(arrived_s=0.0))


# Accounts


def test_the_timeline_tells_when_a_sequence_was_scheduled_and_got_tokens() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=4))
    bench.add(prompt(6), max_tokens=3)
    bench.run()
    timeline = bench.timelines[0]
    assert (timeline.first_scheduled_s, timeline.first_token_s, timeline.last_token_s) == (0.0, 2.0, 4.0)
    assert timeline.num_output_tokens == 3


def test_statistics_tell_what_runs_waits_and_is_held() -> None:
    bench = Bench(fake_info(num_slots=1, num_blocks=11))
    bench.add(prompt(9), max_tokens=1)
    bench.add(prompt(3, 50), max_tokens=1)
    bench.must_plan()
    statistics = bench.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.num_unapplied_steps) == (1, 1, 1)
    assert (statistics.num_blocks, statistics.num_blocks_used, statistics.num_blocks_cached) == (10, 3, 0)
    bench.apply()
    statistics = bench.statistics()
    assert (statistics.num_running, statistics.num_blocks_used, statistics.num_blocks_cached) == (0, 0, 2)


def test_an_idle_scheduler_plans_nothing() -> None:
    bench = Bench()
    assert not bench.has_work
    assert bench.plan() is None
    bench.add(prompt(3), max_tokens=1)
    assert bench.has_work
    bench.run()
    assert not bench.has_work
    assert bench.plan() is None


def test_waiting_without_hope_is_noticed() -> None:
    bench = Bench()
    bench.add(prompt(3))
    bench.scheduler._live.free_slots.clear()
    with pytest.raises(InvariantError, match="1 sequences wait, 0 decode, 0 prefill, no step is in flight"):
        bench.scheduler.plan(0.0)


def test_check_notices_a_slot_that_is_lost_or_given_out_twice() -> None:
    bench = Bench()
    bench.add(prompt(3))
    bench.must_plan()
    bench.scheduler._live.free_slots.append(0)
    with pytest.raises(InvariantError, match="every slot is free or held once"):
        bench.scheduler.check()


def test_the_device_gets_a_copy_of_the_tokens_so_that_it_may_read_it_while_the_host_appends() -> None:
    bench = Bench()
    bench.add(prompt(3))
    plan, _ = bench.step()
    assert plan.admitted[0].token_ids == array("i", prompt(3))


def test_a_burst_of_short_prompts_is_admitted_over_several_plans() -> None:
    bench = Bench(fake_info(num_slots=2 * MAX_ADMITTED, num_blocks=500, max_num_batched_tokens=1000))
    for i in range(2 * MAX_ADMITTED):
        bench.add([i, i])
    assert len(bench.must_plan().admitted) == MAX_ADMITTED
    plan = bench.must_plan()
    assert len(plan.admitted) == MAX_ADMITTED
    assert len(plan.sequences) == 2 * MAX_ADMITTED, "those that run go on beside"


def test_blocks_that_streams_fill_together_become_findable_over_several_plans_and_soon() -> None:
    num_streams, block_len = 3 * LEAST_REGISTERED, 16
    info = fake_info(num_slots=num_streams, num_blocks=500, block_len=block_len, max_num_batched_tokens=1000)
    bench = Bench(info)
    for i in range(num_streams):
        bench.add([i] * (block_len // 2), max_tokens=2 * block_len)
    states = list(bench.scheduler._live.sequences.values())
    per_plan = []
    num_registered = 0
    while any(len(state.token_ids) < 2 * block_len for state in states):
        bench.step()
        now = sum(state.num_registered_blocks for state in states)
        per_plan.append(now - num_registered)
        num_registered = now
        assert all(state.num_registered_blocks >= (len(state.token_ids) - 8) // block_len for state in states)
    assert num_registered >= num_streams
    assert max(per_plan) == LEAST_REGISTERED


def test_blocks_become_findable_as_fast_as_many_streams_fill_them() -> None:
    num_streams, block_len = 8 * LEAST_REGISTERED, 4
    info = fake_info(num_slots=num_streams, num_blocks=4000, block_len=block_len, max_num_batched_tokens=1000)
    bench = Bench(info)
    for i in range(num_streams):
        bench.add([i], max_tokens=60)
    states = list(bench.scheduler._live.sequences.values())
    for _ in range(50):
        bench.step()
        assert all(state.num_registered_blocks >= len(state.token_ids) // block_len - 1 for state in states)


def test_blocks_yet_to_become_findable_do_when_their_sequence_ends() -> None:
    bench = Bench(fake_info(num_slots=64, num_blocks=500, block_len=4, max_num_batched_tokens=1000))
    for i in range(2 * LEAST_REGISTERED):
        bench.add([i, i], max_tokens=4)
    bench.run()
    assert not bench.scheduler._live.unregistered
    # Of each the block of two tokens of its prompt and two of its own.
    assert bench.statistics().num_blocks_cached == 2 * LEAST_REGISTERED


def test_sequences_that_got_a_token_and_nothing_else_are_named_beside_the_deltas() -> None:
    bench = Bench(async_scheduling=False)
    first, second = bench.add([1, 2], max_tokens=4), bench.add([3, 4, 5], max_tokens=2)
    seen = []
    for _ in range(4):
        bench.must_plan()
        output = bench.runner.run(bench.in_flight.popleft())
        given = bench.scheduler.apply(output, 1.0)
        plain = [state.sequence_id for state in given.sequences]
        others = [delta.sequence_id for delta in given.deltas]
        seen.append((plain, others))
        told = dict(zip(plain, given.token_ids, strict=True))
        told |= {delta.sequence_id: delta.token_ids[0] for delta in given.deltas}
        assert [told[each] for each in (first, second) if each in told] == list(output.token_ids)
    # The first token brings counts, the last the end.
    assert seen == [([], [first, second]), ([first], [second]), ([first], []), ([], [first])]
