"""Sequences of models whose layers keep a window, or a state, beside or instead of everything."""

import random
from typing import Any

import pytest

from asyncserve.kv_spec import FullAttention, KVSpec, RecurrentState, SlidingWindow
from asyncserve.step import BAD_LOGITS, BlockAppend
from tests.fakes.executor import fake_continuation, fake_info
from tests.loop.scheduling import Bench, lengths

VOCAB = 40
SIZE: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
FULL = FullAttention(block_len=4, **SIZE)


def window(window_len: int, block_len: int = 4) -> SlidingWindow:
    return SlidingWindow(block_len=block_len, window_len=window_len, **SIZE)


def bench(*specs: KVSpec, num_blocks: int = 100, max_num_batched_tokens: int = 64, **options: Any) -> Bench:
    info = fake_info(
        specs=specs,
        num_blocks=num_blocks,
        max_model_len=200,
        vocab_size=VOCAB,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return Bench(info, **options)


def used(bench: Bench) -> list[int]:
    return [group.num_blocks_used for group in bench.statistics().kv_groups]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def appends_of(appends: tuple[BlockAppend, ...], group_id: int) -> list[int]:
    return [block_id for append in appends if append.group_id == group_id for block_id in append.block_ids]


def test_blocks_that_the_window_has_passed_are_given_back_while_the_sequence_runs() -> None:
    subject = bench(FULL, window(8))
    sequence = subject.add(prompt(3), max_tokens=100)
    most = 0
    while subject.has_work:
        while subject.plan() is not None:
            pass
        most = max(most, used(subject)[1])
        subject.advance()
    # A window of 8 and the token that sees it touch three blocks of four.
    assert most == 3
    assert subject.statistics().num_window_blocks_freed == (3 + 100 - 1 - 8) // 4
    assert subject.tokens_of(sequence) == fake_continuation(prompt(3), 100, VOCAB)
    subject.check_nothing_leaked()


def test_a_prompt_far_longer_than_the_window_takes_but_a_window_and_a_chunk() -> None:
    # 40 blocks of full attention, and five for 7 + 8 positions, wherever they begin.
    subject = bench(FULL, window(8), num_blocks=1 + 40 + 5, max_num_batched_tokens=8)
    sequence = subject.add(prompt(150), max_tokens=10)
    plans = subject.run()
    assert {num for plan in plans[:18] for num in lengths(plan).values()} == {8}
    assert subject.tokens_of(sequence) == fake_continuation(prompt(150), 10, VOCAB)
    assert subject.statistics().num_preemptions == 0


def test_the_end_of_a_prompt_gives_back_all_but_the_window() -> None:
    subject = bench(FULL, window(8))
    subject.add(prompt(60), max_tokens=10)
    subject.must_plan()
    # Positions 53 … 59 are seen by the next one: blocks 13 and 14.
    assert used(subject) == [15, 2]


def test_a_hit_needs_but_the_windows_blocks_and_brings_null_blocks_for_the_others() -> None:
    subject = bench(FULL, window(6), num_blocks=60)
    tokens = prompt(40)
    subject.add(tokens, max_tokens=1)
    subject.run()
    first = subject.add([*tokens, 1], max_tokens=3)
    plan = subject.must_plan()
    assert subject.timelines[first].num_cached_tokens == 40
    # 35 … 39: blocks 8 and 9.
    table = appends_of(plan.block_appends, 1)
    assert table[:8] == [0] * 8
    assert 0 not in table[8:]
    assert 0 not in appends_of(plan.block_appends, 0)
    subject.apply()
    subject.run()
    assert subject.tokens_of(first) == fake_continuation([*tokens, 1], 3, VOCAB)
    # Without one of the two there is no such hit, without any other there is.
    again = [*tokens, 2]
    second = subject.add(again, max_tokens=1)
    allocator, waiting = subject.scheduler._live.allocator, subject.scheduler._live.sequences[second]
    matches = allocator.match_prefix(waiting)
    for block_idx in range(8):
        found = allocator.pool.find(waiting.block_digests[block_idx], 1)
        assert found is not None
        allocator.pool.unregister(found)
    assert [len(match) for match in allocator.match_prefix(waiting)] == [10, 10]
    allocator.pool.unregister(matches[1][8])
    assert [len(match) for match in allocator.match_prefix(waiting)] == [0, 0]
    subject.run()
    assert subject.tokens_of(second) == fake_continuation(again, 1, VOCAB)


def test_hits_of_groups_with_unequal_blocks_end_where_blocks_of_all_do() -> None:
    subject = bench(FullAttention(block_len=4, **SIZE), window(9, block_len=6))
    tokens = prompt(30)
    subject.add(tokens, max_tokens=1)
    subject.run()
    second = subject.add([*tokens[:29], 1], max_tokens=4)
    subject.run()
    assert subject.timelines[second].num_cached_tokens == 24
    assert subject.tokens_of(second) == fake_continuation([*tokens[:29], 1], 4, VOCAB)


def test_who_read_a_block_of_a_failed_step_and_let_go_of_it_is_set_back_too() -> None:
    subject = bench(window(3))
    first = subject.add(prompt(16), max_tokens=5)
    subject.must_plan()
    second = subject.add([*prompt(16), *prompt(6, seed=1)], max_tokens=5)
    plan = subject.must_plan()
    assert subject.timelines[second].num_cached_tokens == 16
    (state,) = [each for each in subject.scheduler._live.decoding if each.sequence_id == second]
    assert not any(state.block_table.block_ids[0][:4]), "the hit is behind the window already"
    assert len(plan.sequences) == 2
    subject.fail()
    subject.run()
    for sequence, tokens in ((first, prompt(16)), (second, [*prompt(16), *prompt(6, seed=1)])):
        assert subject.tokens_of(sequence) == fake_continuation(tokens, 5, VOCAB)


def test_nobody_finds_what_a_failed_step_wrote_and_let_go_of() -> None:
    subject = bench(window(3))
    first = subject.add(prompt(16), max_tokens=5)
    subject.must_plan()
    subject.fail()
    assert subject.statistics().num_blocks_cached == 0
    subject.run()
    assert subject.tokens_of(first) == fake_continuation(prompt(16), 5, VOCAB)


def test_nobody_finds_what_a_sequence_with_bad_logits_let_go_of() -> None:
    subject = bench(window(3), next_token=lambda tokens, prompt_len: 1 if len(tokens) < 30 else BAD_LOGITS)
    subject.add(prompt(16), max_tokens=50)
    subject.run()
    assert subject.statistics().num_window_blocks_freed > 4
    assert subject.statistics().num_blocks_cached == 0


def test_blocks_given_back_are_reused_while_the_sequence_runs() -> None:
    # Each holds three blocks at a time of the nine that its 33 positions fill.
    subject = bench(window(4), num_blocks=1 + 6, max_num_batched_tokens=4, enable_prefix_caching=False)
    sequences = [subject.add(prompt(8, seed), max_tokens=25) for seed in range(2)]
    subject.run()
    for seed, sequence in enumerate(sequences):
        assert subject.tokens_of(sequence) == fake_continuation(prompt(8, seed), 25, VOCAB)
    assert subject.statistics().num_preemptions == 0


def test_a_prompt_that_shares_what_its_window_passes_takes_blocks_of_the_last_in_order() -> None:
    subject = bench(window(20), num_blocks=1 + 9, max_num_batched_tokens=8)
    tokens = prompt(80)
    first = subject.add(tokens[:30], max_tokens=40)
    for _ in range(5):
        subject.must_plan()
        subject.apply()
    second = subject.add(tokens, max_tokens=2)
    subject.run()
    assert subject.timelines[second].num_cached_tokens > 0
    assert subject.statistics().num_preemptions > 0
    assert subject.tokens_of(first) == fake_continuation(tokens[:30], 40, VOCAB)
    assert subject.tokens_of(second) == fake_continuation(tokens, 2, VOCAB)


@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_state_takes_one_run_of_blocks_and_serves_no_other_sequence(num_pages: int) -> None:
    state = RecurrentState(state_bytes=num_pages * 8 - 3, page_bytes=8)
    subject = bench(FULL, state)
    tokens = prompt(30)
    first = subject.add(tokens, max_tokens=20)
    second = subject.add(tokens, max_tokens=20)
    subject.must_plan()
    subject.apply()
    assert used(subject) == [16, 2 * num_pages]
    subject.run()
    third = subject.add(tokens, max_tokens=20)
    subject.run()
    statistics = subject.statistics()
    assert (statistics.prefix_cache_queries, statistics.num_blocks_cached) == (0, 0)
    for sequence in (first, second, third):
        assert subject.timelines[sequence].num_cached_tokens == 0
        assert subject.tokens_of(sequence) == fake_continuation(tokens, 20, VOCAB)


def test_allocated_slots_without_a_token_are_counted_for_each_group() -> None:
    subject = bench(FULL, window(8), RecurrentState(state_bytes=8, page_bytes=8))
    subject.add(prompt(18), max_tokens=3)
    subject.must_plan()
    full, local, state = subject.statistics().kv_groups
    assert (full.num_slots, full.num_slots_unused) == (20, 2)
    # What the window has passed, blocks 0 and 1, is not held any more.
    assert (local.num_slots, local.num_slots_unused) == (12, 2)
    assert (state.num_slots, state.num_slots_unused, state.num_blocks_used) == (0, 0, 1)
    subject.apply()
    subject.run()
    assert all(group.num_slots == group.num_slots_unused == 0 for group in subject.statistics().kv_groups)
