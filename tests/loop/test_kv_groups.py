import random
from array import array
from dataclasses import replace

import pytest

from asyncserve.cache_events import BlocksRemoved, BlocksStored, CacheEvent
from asyncserve.errors import ConfigError
from asyncserve.kv_spec import FullAttention, KVGroup, SlidingWindow
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.kv_groups import KVAllocator
from asyncserve.loop.sequence import SequenceState
from asyncserve.observer import RequestTimeline
from asyncserve.request import Request, SamplingParams, TokenizedRequest, TokensPrompt


def group(group_id: int, num_blocks: int, block_len: int = 4) -> KVGroup:
    spec = FullAttention(block_len=block_len, num_kv_heads=1, head_dim=1, dtype="float32")
    return KVGroup(group_id=group_id, spec=spec, layer_ids=(group_id,), num_blocks=num_blocks)


def window_group(group_id: int, num_blocks: int, window_len: int | None, block_len: int = 4) -> KVGroup:
    """Return a group with a window, or, without a length, one without."""
    full = group(group_id, num_blocks, block_len)
    if window_len is None:
        return full
    spec = SlidingWindow(
        block_len=block_len, num_kv_heads=1, head_dim=1, dtype="float32", window_len=window_len
    )
    return replace(full, spec=spec)


def sequence_of(
    prompt: list[int], *, num_groups: int = 1, salt: str | None = None, num_prompt_logprobs: int | None = None
) -> SequenceState:
    request = Request(
        request_id="r",
        prompt=TokensPrompt(token_ids=prompt),
        sampling=SamplingParams(num_prompt_logprobs=num_prompt_logprobs),
        arrival_s=0.0,
        cache_salt=salt,
    )
    tokenized = TokenizedRequest(
        request=request,
        sequence_id=0,
        index=0,
        prompt_token_ids=array("i", prompt),
        max_output_len=8,
        stop_token_ids=frozenset(),
        seed=0,
    )
    return SequenceState(tokenized, RequestTimeline(arrived_s=0.0), (0, 0), num_groups)


def compute(allocator: KVAllocator, sequence: SequenceState) -> None:
    """Take blocks, and count every known token as computed."""
    assert allocator.take(sequence, allocator.match_prefix(sequence), 0)
    sequence.num_computed_tokens = len(sequence.token_ids)
    allocator.prefix_cache.register(sequence)


def test_a_match_leaves_at_least_one_token_to_compute() -> None:
    allocator = KVAllocator([group(0, 10)], enable_prefix_caching=True, chunk_len=64)
    compute(allocator, sequence_of(list(range(8))))
    assert len(allocator.match_prefix(sequence_of(list(range(8))))[0]) == 1
    assert len(allocator.match_prefix(sequence_of(list(range(9))))[0]) == 2


def test_a_match_ends_at_the_first_block_that_differs() -> None:
    allocator = KVAllocator([group(0, 10)], enable_prefix_caching=True, chunk_len=64)
    compute(allocator, sequence_of(list(range(12))))
    changed = [*range(4), 99, *range(5, 13)]
    assert len(allocator.match_prefix(sequence_of(changed))[0]) == 1


def test_a_copy_of_blocks_that_are_gone_becomes_findable_with_what_follows_it() -> None:
    told: list[CacheEvent] = []
    log = CacheLog(told.extend)
    allocator = KVAllocator([group(0, 12)], enable_prefix_caching=True, chunk_len=64, cache_log=log)
    first, second = sequence_of(list(range(9))), sequence_of(list(range(9)))
    for sequence in (first, second):  # both are computed before either can be found
        assert allocator.take(sequence, allocator.match_prefix(sequence), 0)
    for sequence in (first, second):
        sequence.num_computed_tokens = 9
        allocator.prefix_cache.register(sequence)
    allocator.release(first)
    allocator.pool.allocate(allocator.pool.num_free, 0)
    second.token_ids.extend([50, 51, 52])
    second.num_computed_tokens = 12
    allocator.prefix_cache.register(second)
    found = allocator.match_prefix(sequence_of([*second.token_ids, 99]))
    assert tuple(found) == second.block_table.block_ids
    log.flush()
    kinds = [type(event) for event in told]
    assert kinds == [BlocksStored, BlocksRemoved, BlocksStored]
    assert isinstance(told[2], BlocksStored)
    assert (told[2].parent, len(told[2].digests)) == (None, 3)


def test_sequences_with_different_salts_share_nothing() -> None:
    allocator = KVAllocator([group(0, 20)], enable_prefix_caching=True, chunk_len=64)
    compute(allocator, sequence_of(list(range(9)), salt="a"))
    assert allocator.match_prefix(sequence_of(list(range(9)), salt="a"))[0] != []
    assert allocator.match_prefix(sequence_of(list(range(9)), salt="b"))[0] == []
    assert allocator.match_prefix(sequence_of(list(range(9))))[0] == []


def test_prompt_tokens_to_be_scored_are_not_looked_up() -> None:
    allocator = KVAllocator([group(0, 20)], enable_prefix_caching=True, chunk_len=64)
    compute(allocator, sequence_of(list(range(9)), num_prompt_logprobs=1))
    assert allocator.match_prefix(sequence_of(list(range(9)), num_prompt_logprobs=1))[0] == []
    assert len(allocator.match_prefix(sequence_of(list(range(9))))[0]) == 2, "they are registered"


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    allocator = KVAllocator([group(0, 20)], enable_prefix_caching=False, chunk_len=64)
    sequence = sequence_of(list(range(9)))
    compute(allocator, sequence)
    allocator.release(sequence)
    assert allocator.match_prefix(sequence_of(list(range(9))))[0] == []
    assert allocator.num_cached == 0


def test_what_is_cached_in_one_group_only_is_no_match() -> None:
    allocator = KVAllocator([group(0, 10), group(1, 10)], enable_prefix_caching=True, chunk_len=64)
    first = sequence_of(list(range(9)), num_groups=2)
    compute(allocator, first)
    second_block = first.block_table.block_ids[1][1]
    allocator.release(first)
    again = sequence_of(list(range(9)), num_groups=2)
    assert [len(match) for match in allocator.match_prefix(again)] == [2, 2]
    allocator.pool.unregister(second_block)
    assert [len(match) for match in allocator.match_prefix(again)] == [1, 1]


def test_the_same_tokens_are_a_block_in_each_group() -> None:
    allocator = KVAllocator([group(0, 10), group(1, 10)], enable_prefix_caching=True, chunk_len=64)
    first = sequence_of(list(range(9)), num_groups=2)
    compute(allocator, first)
    matches = allocator.match_prefix(sequence_of(list(range(9)), num_groups=2))
    assert matches == [block_ids[:2] for block_ids in first.block_table.block_ids]
    assert not set(matches[0]) & set(matches[1])
    assert [allocator.pool.num_used_by(group_id) for group_id in (0, 1)] == [3, 3]
    allocator.release(first)
    assert [allocator.pool.num_cached_of(group_id) for group_id in (0, 1)] == [2, 2]


def test_any_block_serves_any_group() -> None:
    allocator = KVAllocator([group(0, 9), group(1, 9)], enable_prefix_caching=True, chunk_len=64)
    first = sequence_of(list(range(12)), num_groups=2)
    compute(allocator, first)
    held = set(first.block_table.block_ids[0])
    allocator.release(first)
    second = sequence_of(list(range(100, 116)), num_groups=2)
    compute(allocator, second)
    assert held & set(second.block_table.block_ids[1])
    allocator.check([second])


def test_taking_more_than_the_pool_has_changes_nothing() -> None:
    allocator = KVAllocator([group(0, 6), group(1, 6)], enable_prefix_caching=True, chunk_len=64)
    sequence = sequence_of(list(range(12)), num_groups=2)
    assert not allocator.take(sequence, allocator.match_prefix(sequence), 0)
    assert sequence.block_table.block_ids == ([], [])
    assert allocator.num_used == 0


def test_spare_blocks_and_revived_cached_blocks_count_as_needed() -> None:
    allocator = KVAllocator([group(0, 4)], enable_prefix_caching=True, chunk_len=64)
    first = sequence_of(list(range(9)))
    compute(allocator, first)
    allocator.release(first)
    again = sequence_of(list(range(9)))
    matches = allocator.match_prefix(again)
    assert len(matches[0]) == 2
    assert not allocator.take(again, matches, 1)
    assert allocator.take(again, matches, 0)
    allocator.check([again])


def test_extending_an_empty_pool_changes_nothing() -> None:
    allocator = KVAllocator([group(0, 4), group(1, 4)], enable_prefix_caching=True, chunk_len=64)
    sequence = sequence_of([1], num_groups=2)
    compute(allocator, sequence)
    assert allocator.extend(sequence) is None
    assert [len(block_ids) for block_ids in sequence.block_table.block_ids] == [1, 1]


def test_released_blocks_are_found_again_with_the_outputs_they_hold() -> None:
    allocator = KVAllocator([group(0, 10)], enable_prefix_caching=True, chunk_len=64)
    sequence = sequence_of([1, 2, 3])
    compute(allocator, sequence)
    sequence.token_ids.extend([4, 5])
    allocator.extend(sequence)
    sequence.num_computed_tokens = 4
    allocator.release(sequence)
    assert len(allocator.match_prefix(sequence_of([1, 2, 3, 4, 5]))[0]) == 1


def test_a_block_with_a_token_not_yet_computed_is_not_found() -> None:
    allocator = KVAllocator([group(0, 10)], enable_prefix_caching=True, chunk_len=64)
    sequence = sequence_of([1, 2, 3])
    compute(allocator, sequence)
    sequence.token_ids.append(4)
    allocator.release(sequence)
    assert allocator.match_prefix(sequence_of([1, 2, 3, 4, 5]))[0] == []


def test_a_block_with_a_token_not_yet_known_is_not_registered() -> None:
    allocator = KVAllocator([group(0, 10)], enable_prefix_caching=True, chunk_len=64)
    sequence = sequence_of([1, 2, 3])
    compute(allocator, sequence)
    sequence.num_computed_tokens = 4
    allocator.release(sequence)
    assert allocator.num_cached == 0
    assert sequence.block_digests == []


def test_invalid_blocks_are_not_found_and_earlier_ones_are() -> None:
    allocator = KVAllocator([group(0, 10)], enable_prefix_caching=True, chunk_len=64)
    sequence = sequence_of(list(range(12)))
    compute(allocator, sequence)
    invalid = allocator.invalidate(sequence, 4, 0)
    assert invalid == set(sequence.block_table.block_ids[0][1:])
    sharing = sequence_of(list(range(13)))
    assert len(allocator.match_prefix(sharing)[0]) == 1
    compute(allocator, sharing)
    assert not allocator.holds_any(sharing, invalid, 0)
    assert allocator.holds_any(sequence, invalid, 0)


def test_groups_that_do_not_share_a_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[4, 8\]"):
        KVAllocator([group(0, 4), group(1, 8)], enable_prefix_caching=True, chunk_len=64)
    with pytest.raises(ConfigError):
        KVAllocator([], enable_prefix_caching=True, chunk_len=64)


@pytest.mark.parametrize("seed", range(40))
def test_a_match_is_the_longest_prefix_of_which_each_group_has_what_it_needs(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [2 * rng.choice([1, 1, 2, 3]) for _ in range(3)]
    windows = [None, rng.choice([None, 1, 2, 5, 9]), rng.choice([1, 2, 3, 8, 30])]
    groups = [
        window_group(group_id, 200, window_len, block_len)
        for group_id, (window_len, block_len) in enumerate(zip(windows, sizes, strict=True))
    ]
    rng.shuffle(groups)
    groups = [replace(each, group_id=group_id) for group_id, each in enumerate(groups)]
    allocator = KVAllocator(groups, enable_prefix_caching=True, chunk_len=64)
    tokens = list(range(49))
    first = sequence_of(tokens, num_groups=3)
    compute(allocator, first)
    for each in groups:
        for block_id in first.block_table.block_ids[each.group_id]:
            if block_id and rng.random() < 0.1:
                allocator.pool.unregister(block_id)

    def is_cached(group: KVGroup, block_idx: int) -> bool:
        digest = first.block_digests[(block_idx + 1) * group.spec.block_len // allocator.block_len - 1]
        return allocator.pool.find(digest, group.group_id) is not None

    def is_match(length: int) -> bool:
        return all(
            length % each.spec.block_len == 0
            and all(
                is_cached(each, block_idx)
                for block_idx in range(each.spec.num_unseen(length), length // each.spec.block_len)
            )
            for each in groups
        )

    longest = max(length for length in range(49) if is_match(length))
    again = sequence_of(tokens, num_groups=3)
    matches = allocator.match_prefix(again)
    assert allocator.matched_len(again, matches) == longest
    for each, match in zip(groups, matches, strict=True):
        assert len(match) * each.spec.block_len == longest
        num_null = each.spec.num_unseen(longest)
        assert match == [0] * num_null + first.block_table.block_ids[each.group_id][num_null : len(match)]
    assert allocator.take(again, matches, 0)
    allocator.check([first, again])


@pytest.mark.parametrize("seed", range(12))
def test_a_row_inherits_all_full_blocks_of_another_however_its_own_are_mixed_with_them(seed: int) -> None:
    # As of rows that came back: some computed what the other shares with the cache, wherever that lies.
    rng = random.Random(seed)
    num_full = rng.choice([3, 64, 65, 150])
    allocator = KVAllocator([group(0, 700)], enable_prefix_caching=False, chunk_len=999)
    rows = [sequence_of(list(range(4 * num_full + 2))) for _ in range(2)]
    for row in rows:
        compute(allocator, row)
    own, other = (row.block_table.block_ids[0] for row in rows)
    for idx in rng.sample(range(num_full), rng.randint(0, num_full)):
        allocator.pool.share([own[idx]])
        allocator.pool.release([other[idx]])
        other[idx] = own[idx]
    partial = other[num_full]
    expected = own[:num_full]
    allocator.inherit(rows, [0, 0], 4 * num_full + 2)
    assert other == [*expected, partial]
    allocator.check(rows)


@pytest.mark.parametrize("parents", [[0, 0], [1, 1], [1, 0]])
def test_rows_that_have_let_go_of_unequally_much_inherit_what_is_still_seen(parents: list[int]) -> None:
    allocator = KVAllocator([window_group(0, 100, 5)], enable_prefix_caching=False, chunk_len=999)
    rows = [sequence_of(list(range(30))) for _ in range(2)]
    for row in rows:
        compute(allocator, row)
    allocator.drop_unseen(rows[1])  # the other has computed the last tokens in one go
    before = [row.block_table.block_ids[0][:] for row in rows]
    assert before[0][0] != 0 == before[1][0]
    allocator.inherit(rows, parents, 30)
    num_unseen = (30 - 5 + 1) // 4
    for row, parent, own in zip(rows, parents, before, strict=True):
        assert row.block_table.block_ids[0] == [0] * num_unseen + before[parent][num_unseen:7] + own[7:]
    allocator.check(rows)
