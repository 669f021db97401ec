"""Beam searches in the scheduler: rows that move as one, whatever happens, and find what they should."""

import dataclasses
import math
from typing import Any

import pytest

from asyncserve.errors import InvalidRequest, StepOutOfMemory
from asyncserve.kv_spec import FullAttention, KVSpec, RecurrentState, SlidingWindow
from asyncserve.loop.beam_search import Hypothesis
from asyncserve.request import FinishReason
from asyncserve.step import BAD_LOGITS, BeamCandidate
from tests.fakes.executor import fake_continuation, fake_info
from tests.loop.beams import searched as searched_in
from tests.loop.scheduling import Bench

VOCAB = 60
STOPS = frozenset({3, 17})


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % VOCAB for i in range(length)]


def info(**options: Any) -> Any:
    return fake_info(**{"vocab_size": VOCAB, "num_blocks": 120, **options})


def searched(
    prompt_token_ids: list[int], width: int, max_tokens: int, stops: frozenset[int] = STOPS
) -> list[Hypothesis]:
    return searched_in(prompt_token_ids, width, max_tokens, stops, VOCAB)


def add_search(
    bench: Bench, width: int, prompt_token_ids: list[int], *, max_tokens: int, **more: Any
) -> list[int]:
    more = {"stop_token_ids": STOPS, **more}
    return bench.add_family(
        width, prompt_token_ids, max_tokens=max_tokens, n=width, use_beam_search=True, temperature=0.0, **more
    )


def assert_found(bench: Bench, ids: list[int], found: list[Hypothesis]) -> None:
    assert [bench.tokens_of(each) for each in ids] == [list(each.token_ids) for each in found]
    assert [bench.received[each].finish_reason for each in ids] == [
        FinishReason.LENGTH if each.stop_token_id is None else FinishReason.STOP for each in found
    ]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(("prompt_len", "budget"), [(1, 32), (10, 32), (8, 32), (9, 32), (22, 6)])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_search_finds_what_the_pure_one_finds(
    width: int, prompt_len: int, budget: int, enable_prefix_caching: bool, async_scheduling: bool
) -> None:
    bench = Bench(
        info(max_num_batched_tokens=budget),
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
    )
    ids = add_search(bench, width, prompt(prompt_len), max_tokens=14)
    plans = bench.run()
    assert_found(bench, ids, searched(prompt(prompt_len), width, 14))
    num_prompt = sum(s.num_tokens for plan in plans for s in plan.sequences if s.start < prompt_len)
    assert num_prompt == prompt_len
    cached = [bench.timelines[each].num_cached_tokens for each in ids]
    assert cached == [0] + [prompt_len] * (width - 1)


def test_a_search_with_tokens_for_one_step_copies_nothing() -> None:
    bench = Bench(info())
    ids = add_search(bench, 3, prompt(10), max_tokens=1)
    bench.run()
    assert_found(bench, ids, searched(prompt(10), 3, 1))
    assert bench.statistics().num_copied_blocks == 0


def test_blocks_that_no_row_holds_any_more_are_free_at_once() -> None:
    bench = Bench(info(), async_scheduling=False, enable_prefix_caching=False)
    add_search(bench, 4, prompt(8), max_tokens=40, stop_token_ids=frozenset())
    most = 0
    for _ in range(40):
        bench.step()
        most = max(most, bench.statistics().num_blocks_used)
        held = {
            block
            for beams in bench.scheduler._live.searches
            for row in beams.rows
            for block in row.block_table.block_ids[0]
        }
        assert bench.statistics().num_blocks_used == len(held)
    assert most < 4 * 12, "rows share what they have in common"
    bench.check_nothing_leaked()


def test_searches_run_beside_each_other_and_beside_plain_sequences() -> None:
    bench = Bench(info(num_slots=12))
    bench.add(prompt(6, 30), max_tokens=20)
    first = add_search(bench, 4, prompt(10), max_tokens=14)
    bench.add(prompt(7, 40), max_tokens=9)
    second = add_search(bench, 3, prompt(13, 20), max_tokens=9)
    bench.run()
    assert_found(bench, first, searched(prompt(10), 4, 14))
    assert_found(bench, second, searched(prompt(13, 20), 3, 9))
    assert bench.tokens_of(0) == fake_continuation(prompt(6, 30), 20, VOCAB)
    assert bench.tokens_of(5) == fake_continuation(prompt(7, 40), 9, VOCAB)


def test_a_search_waits_until_all_its_rows_find_slots_and_lets_nobody_pass() -> None:
    bench = Bench(info(num_slots=4))
    bench.add(prompt(6, 30), max_tokens=12)
    ids = add_search(bench, 4, prompt(10), max_tokens=6)
    bench.add(prompt(5, 50), max_tokens=2)
    bench.run()
    assert_found(bench, ids, searched(prompt(10), 4, 6))
    assert bench.timelines[5].first_token_s > bench.timelines[0].last_token_s  # type: ignore[operator]


FULL = FullAttention(block_len=4, num_kv_heads=1, head_dim=1, dtype="float32")
WINDOW = SlidingWindow(block_len=4, num_kv_heads=1, head_dim=1, dtype="float32", window_len=6)


@pytest.mark.parametrize("specs", [(FULL, FULL), (FULL, WINDOW), (WINDOW,)])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_rows_inherit_in_every_group(async_scheduling: bool, specs: tuple[KVSpec, ...]) -> None:
    bench = Bench(info(specs=specs, max_num_batched_tokens=7), async_scheduling=async_scheduling)
    ids = add_search(bench, 4, prompt(18), max_tokens=25, stop_token_ids=frozenset())
    bench.run()
    assert_found(bench, ids, searched(prompt(18), 4, 25, frozenset()))


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("specs", "num_blocks"), [((FULL, WINDOW), 44), ((WINDOW,), 24)])
def test_what_windows_pass_in_the_step_that_writes_it_is_nobody_elses_before(
    specs: tuple[KVSpec, ...], num_blocks: int, width: int, enable_prefix_caching: bool
) -> None:
    # Searches begin, and come back, with all they know computed in the step that samples, and the next
    # sequence of that step finds no blocks but those that they could give back. Held by `PlanRules`.
    bench = Bench(
        info(specs=specs, num_blocks=num_blocks, max_model_len=64, max_num_batched_tokens=96),
        enable_prefix_caching=enable_prefix_caching,
    )
    searches = [
        add_search(bench, width, prompt(24, 9 * i), max_tokens=14, stop_token_ids=frozenset())
        for i in range(4)
    ]
    plain = bench.add(prompt(24, 50), max_tokens=10)
    bench.run()
    for i, ids in enumerate(searches):
        assert_found(bench, ids, searched(prompt(24, 9 * i), width, 14, frozenset()))
    assert bench.tokens_of(plain) == fake_continuation(prompt(24, 50), 10, VOCAB)


def test_a_search_that_could_never_run_is_refused() -> None:
    limits = Bench(info(num_slots=8, num_blocks=41, max_num_batched_tokens=6)).scheduler.limits
    limits.check_search(6, 10, 14)
    with pytest.raises(InvalidRequest, match="7 rows is asked for; this server computes at most 6"):
        limits.check_search(7, 10, 2)
    with pytest.raises(
        InvalidRequest, match=r"6 rows of 25 tokens may need 42 blocks of the KV cache, .* 40"
    ):
        limits.check_search(6, 10, 15)
    state = RecurrentState(state_bytes=64, page_bytes=32)
    with pytest.raises(InvalidRequest, match="layers that keep a state"):
        Bench(info(specs=(FULL, state))).scheduler.limits.check_search(2, 10, 14)


# Interruptions


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [26, 30])
def test_preempted_searches_go_on_with_their_rows(
    num_blocks: int, enable_prefix_caching: bool, async_scheduling: bool
) -> None:
    bench = Bench(
        info(num_slots=12, num_blocks=num_blocks, max_model_len=32),
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
    )
    bench.add(prompt(6, 30), max_tokens=24)
    bench.add(prompt(9, 33), max_tokens=22)
    ids = [
        add_search(bench, 3, prompt(9 + i, 10 * i), max_tokens=20, stop_token_ids=frozenset())
        for i in range(2)
    ]
    bench.run()
    assert bench.statistics().num_preemptions > 0
    for i in range(2):
        assert_found(bench, ids[i], searched(prompt(9 + i, 10 * i), 3, 20, frozenset()))


def test_a_search_whose_blocks_others_took_before_it_samples_goes_back_whole() -> None:
    # It enters with 11 blocks free but for two; before its prompt ends, two others have taken two more.
    bench = Bench(info(num_blocks=12, max_model_len=28, max_num_batched_tokens=8))
    for i in range(2):
        bench.add(prompt(3, 20 * i), max_tokens=9)
    bench.step()
    ids = add_search(bench, 4, prompt(22, 7), max_tokens=2)
    bench.run()
    assert bench.timelines[ids[0]].num_preemptions == bench.timelines[ids[3]].num_preemptions == 1
    assert_found(bench, ids, searched(prompt(22, 7), 4, 2))
    assert [bench.tokens_of(i) for i in range(2)] == [
        fake_continuation(prompt(3, 20 * i), 9, VOCAB) for i in range(2)
    ]


def test_a_search_does_not_enter_before_there_are_blocks_for_all_its_rows() -> None:
    bench = Bench(info(num_blocks=8, max_model_len=16))
    bench.add(prompt(9, 20), max_tokens=4)
    ids = add_search(bench, 4, prompt(6), max_tokens=2)
    bench.run()
    assert bench.statistics().num_preemptions == 0
    assert_found(bench, ids, searched(prompt(6), 4, 2))


def under_way(num_steps: int) -> tuple[Bench, list[int]]:
    """Return a search of three rows after so many plans, and its sequences."""
    bench = Bench(info(max_num_batched_tokens=5))
    ids = add_search(bench, 3, prompt(11), max_tokens=12)
    for _ in range(num_steps):
        bench.plan()
        if len(bench.in_flight) == 2:
            bench.apply()
    return bench, ids


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("num_steps", range(9))
def test_a_search_paused_at_any_time_goes_on_as_one(num_steps: int, row: int) -> None:
    bench, ids = under_way(num_steps)
    assert bench.scheduler.pause(ids[row])
    assert not bench.scheduler.pause(ids[1])
    bench.scheduler.check()
    while bench.in_flight:
        bench.apply()
    assert bench.plan() is None
    assert bench.statistics().num_blocks_used == 0
    assert bench.statistics().num_paused == 3
    assert bench.scheduler.resume(ids[row])
    assert not bench.scheduler.resume(ids[1])
    bench.run()
    assert_found(bench, ids, searched(prompt(11), 3, 12))


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("num_steps", range(9))
def test_an_aborted_search_leaves_nothing(num_steps: int, row: int) -> None:
    bench, ids = under_way(num_steps)
    assert bench.abort(ids[row])
    assert not any(bench.abort(each) for each in ids)
    bench.run()
    assert all(bench.tokens_of(each) == [] for each in ids)


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_steps_of_a_search_that_fail_are_computed_again(num_steps: int) -> None:
    bench = Bench(info(max_num_batched_tokens=8))
    bench.add(prompt(4, 40), max_tokens=10)
    ids = add_search(bench, 3, prompt(11), max_tokens=12)
    for _ in range(num_steps):
        if bench.plan() is None or len(bench.in_flight) == 2:
            bench.apply()
    if not bench.in_flight:
        bench.must_plan()
    bench.fail()
    bench.run()
    assert_found(bench, ids, searched(prompt(11), 3, 12))
    assert bench.tokens_of(0) == fake_continuation(prompt(4, 40), 10, VOCAB)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("position", [2, 10, 14])
def test_a_search_whose_steps_fail_ends_alone_and_whole(position: int, row: int) -> None:
    bench = Bench(info(max_num_batched_tokens=8))
    bench.add(prompt(4, 40), max_tokens=10)
    ids = add_search(bench, 3, prompt(11), max_tokens=12, stop_token_ids=frozenset())
    bench.culprits[ids[row]] = position
    bench.run()
    assert all(bench.received[each].finish_reason is FinishReason.ERROR for each in ids)
    assert bench.tokens_of(0) == fake_continuation(prompt(4, 40), 10, VOCAB)
    assert bench.statistics().num_failed_sequences == 3


def test_rows_whose_known_tokens_cannot_be_computed_again_are_tried_as_one_search() -> None:
    bench = Bench(info(max_num_batched_tokens=5), enable_prefix_caching=False, async_scheduling=False)
    ids = add_search(bench, 3, prompt(11), max_tokens=12, stop_token_ids=frozenset())
    for _ in range(6):
        bench.step()
    bench.scheduler.pause(ids[0])
    bench.scheduler.resume(ids[0])
    while ids[0] in bench.sequence_ids(bench.must_plan()):
        bench.apply()
    bench.fail()
    bench.run()
    assert_found(bench, ids, searched(prompt(11), 3, 12, frozenset()))


def test_a_search_that_never_has_the_memory_to_sample_ends() -> None:
    bench = Bench(info(max_num_batched_tokens=16))
    ids = add_search(bench, 3, prompt(11), max_tokens=12, stop_token_ids=frozenset())
    bench.culprits[ids[0]] = 13
    for _ in range(60):
        if bench.plan() is None and bench.in_flight:
            bench.advance(StepOutOfMemory)
    assert all(bench.received[each].finish_reason is FinishReason.ERROR for each in ids)
    bench.check_nothing_leaked()


@pytest.mark.parametrize("num_steps", range(1, 10))
def test_a_lost_device_takes_no_row_of_a_search(num_steps: int) -> None:
    bench = Bench(info(max_num_batched_tokens=8))
    ids = add_search(bench, 3, prompt(11), max_tokens=12)
    for _ in range(num_steps):
        if bench.plan() is None or len(bench.in_flight) == 2:
            bench.apply()
    bench.lose_device()
    bench.run()
    assert_found(bench, ids, searched(prompt(11), 3, 12))


def test_rows_sample_together_however_small_steps_are_kept() -> None:
    bench = Bench(info(max_num_batched_tokens=64, num_slots=16))
    bench.add(prompt(40), max_tokens=3)
    bench.must_plan()
    for _ in range(3):
        bench.fail(StepOutOfMemory)
        bench.must_plan()
    ids = add_search(bench, 9, prompt(11), max_tokens=6)
    bench.run()
    assert_found(bench, ids, searched(prompt(11), 9, 6))


def test_searches_and_decode_steps_take_turns_where_a_step_does_not_hold_them_all() -> None:
    bench = Bench(info(max_num_batched_tokens=4, num_slots=12))
    plain = [bench.add(prompt(2, first), max_tokens=30) for first in (30, 40)]
    wide = add_search(bench, 4, prompt(3), max_tokens=24, stop_token_ids=frozenset())
    narrow = add_search(bench, 2, prompt(3, 20), max_tokens=24, stop_token_ids=frozenset())
    while bench.statistics().num_running < 8:
        bench.step()
    planned = [bench.sequence_ids(bench.must_plan())]
    for _ in range(11):
        bench.apply()
        planned.append(bench.sequence_ids(bench.must_plan()))
    # The wide search fills a step, the narrow one has room beside both decode steps: once in four steps each.
    for first in range(8):
        assert {*plain, *wide, *narrow} <= set().union(*planned[first : first + 4])
    bench.run()
    assert_found(bench, wide, searched(prompt(3), 4, 24, frozenset()))
    assert_found(bench, narrow, searched(prompt(3, 20), 2, 24, frozenset()))
    assert bench.tokens_of(plain[0]) == fake_continuation(prompt(2, 30), 30, VOCAB)


def test_rows_that_entered_slots_and_found_no_room_in_that_step_give_them_back() -> None:
    bench = Bench(info(block_len=1, max_num_batched_tokens=3))
    ids = add_search(bench, 2, prompt(4), max_tokens=12, stop_token_ids=frozenset())
    for _ in range(4):
        bench.step()
    bench.pause(ids[0])
    others = [bench.add(prompt(3, first), max_tokens=20) for first in (30, 40)]
    for _ in range(5):
        bench.step()
    # All that the rows know is cached but for a token each, and there is room for one.
    bench.resume(ids[0])
    assert not bench.sequence_ids(bench.must_plan()).intersection(ids)
    assert bench.statistics().num_running == 4
    bench.pause(ids[0])
    bench.apply()
    assert bench.statistics().num_running == 2
    bench.resume(ids[0])
    bench.run()
    assert_found(bench, ids, searched(prompt(4), 2, 12, frozenset()))
    assert bench.tokens_of(others[0]) == fake_continuation(prompt(3, 30), 20, VOCAB)


def test_rows_that_are_not_finite_end_with_an_error() -> None:
    bench = Bench(info(), async_scheduling=False)
    ids = add_search(bench, 3, prompt(11), max_tokens=12)
    bench.step()
    plan = bench.must_plan()
    output = bench.runner.run(bench.in_flight.popleft())
    bench.apply_output(dataclasses.replace(output, token_ids=[BAD_LOGITS] * len(plan.sequences)))
    assert all(bench.received[each].finish_reason is FinishReason.ERROR for each in ids)
    bench.check_nothing_leaked()


def test_what_a_search_has_not_found_is_missing_and_is_no_error() -> None:
    bench = Bench(info(), async_scheduling=False)
    ids = add_search(bench, 2, prompt(3), max_tokens=5)
    bench.must_plan()
    output = bench.runner.run(bench.in_flight.popleft())
    (search_id,) = output.beams
    nothing = [BeamCandidate(0, 3, -1.0), *(BeamCandidate(0, token, -math.inf) for token in range(4, 9))]
    bench.apply_output(dataclasses.replace(output, beams={search_id: nothing}))
    assert bench.tokens_of(ids[0]) == [3]
    assert bench.received[ids[0]].finish_reason is FinishReason.STOP
    assert bench.tokens_of(ids[1]) == []
    assert bench.received[ids[1]].finish_reason is FinishReason.MISSING
    bench.check_nothing_leaked()


def test_a_search_that_has_found_nothing_ends_with_an_error() -> None:
    bench = Bench(info(), async_scheduling=False)
    ids = add_search(bench, 2, prompt(3), max_tokens=5)
    bench.must_plan()
    output = bench.runner.run(bench.in_flight.popleft())
    (search_id,) = output.beams
    nothing = [BeamCandidate(0, token, -math.inf) for token in range(4, 10)]
    bench.apply_output(dataclasses.replace(output, beams={search_id: nothing}))
    assert [bench.received[each].finish_reason for each in ids] == [FinishReason.ERROR] * 2
    bench.check_nothing_leaked()


def test_what_a_failed_step_was_to_compute_is_not_found_through_rows_that_branched_off_in_it() -> None:
    # The prompt ends with a block, so the rows share all of it; its first half is computed before.
    bench = Bench(info(block_len=4, max_num_batched_tokens=4))
    asked = prompt(8)
    ids = add_search(bench, 3, asked, max_tokens=4)
    bench.step()
    bench.step()
    assert bench.must_plan().sequences[0].samples
    bench.fail()
    for each in ids:
        bench.abort(each)
    alike = bench.add([*asked, 5], max_tokens=3)
    bench.run()
    assert bench.timelines[alike].num_cached_tokens == 4
    assert bench.tokens_of(alike) == fake_continuation([*asked, 5], 3, VOCAB)


def test_a_search_that_begins_where_its_prompt_ends_keeps_what_that_step_reads_of_a_window() -> None:
    size: dict[str, Any] = {"block_len": 2, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
    specs: list[KVSpec] = [SlidingWindow(window_len=3, **size)]
    bench = Bench(info(specs=specs, num_blocks=40), enable_prefix_caching=False)
    ids = add_search(bench, 3, prompt(13), max_tokens=5)
    other = bench.add(prompt(9, 30), max_tokens=3)
    bench.run()
    assert_found(bench, ids, searched(prompt(13), 3, 5))
    assert bench.tokens_of(other) == fake_continuation(prompt(9, 30), 3, VOCAB)
