from array import array

from asyncserve.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from asyncserve.kv_spec import FullAttention, KVGroup, SlidingWindow
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.kv_groups import KVAllocator
from asyncserve.loop.prefix_cache import _LEAST_HASHED
from asyncserve.token_path import block_digest, root_digest
from tests.loop.cache_mirror import CacheMirror
from tests.loop.test_kv_groups import compute, group, sequence_of


def store(log: CacheLog, digest: bytes) -> None:
    log.stored(
        0,
        block_len=1,
        window_len=None,
        parent=None,
        digests=[digest],
        token_ids=array("i", [1]),
        cache_salt=None,
    )


def test_events_are_told_in_order_once_and_removals_in_a_row_together() -> None:
    batches: list[list[CacheEvent]] = []
    log = CacheLog(lambda events: batches.append(list(events)))
    log.flush()
    assert batches == []
    log.removed(0, b"a")
    log.removed(0, b"b")
    store(log, b"c")
    log.removed(0, b"c")
    log.removed(1, b"c")
    log.flush()
    log.flush()
    (batch,) = batches
    first, stored, *others = batch
    assert first == BlocksRemoved(0, (b"a", b"b"))
    assert isinstance(stored, BlocksStored)
    assert others == [BlocksRemoved(0, (b"c",)), BlocksRemoved(1, (b"c",))]


def test_what_was_removed_before_all_is_cleared_need_not_be_told() -> None:
    batches: list[list[CacheEvent]] = []
    log = CacheLog(lambda events: batches.append(list(events)))
    log.removed(0, b"a")
    log.cleared()
    log.removed(0, b"b")
    log.flush()
    assert batches == [[CacheCleared(), BlocksRemoved(0, (b"b",))]]


def logged(groups: list[KVGroup], **options: object) -> tuple[KVAllocator, CacheMirror]:
    mirror = CacheMirror()
    allocator = KVAllocator(
        groups,
        enable_prefix_caching=True,
        chunk_len=64,
        cache_log=mirror.log,
        **options,  # type: ignore[arg-type]
    )
    return allocator, mirror


def test_blocks_of_a_sequence_are_told_with_tokens_parent_and_salt_and_no_block_twice() -> None:
    allocator, mirror = logged([group(0, 20)])
    first = sequence_of(list(range(9)), salt="s")
    compute(allocator, first)
    mirror.check(allocator)
    (stored,) = mirror.events
    root = block_digest(root_digest("0"), array("i", range(4)), "s")
    child = block_digest(root, array("i", range(4, 8)))
    assert stored == BlocksStored(0, 4, None, None, (root, child), array("i", range(8)), "s")
    compute(allocator, sequence_of([*range(9), *range(20, 27)], salt="s"))
    mirror.check(allocator)
    assert len(mirror.events) == 2
    more = mirror.events[1]
    assert isinstance(more, BlocksStored)
    assert (more.parent, more.token_ids, more.cache_salt) == (child, array("i", [8, *range(20, 27)]), None)
    compute(allocator, sequence_of(list(range(8)), salt="s"))
    mirror.log.flush()
    assert len(mirror.events) == 2, "they are known"


def test_a_block_is_told_to_be_gone_when_it_is_given_out_anew_or_found_to_be_wrong() -> None:
    allocator, mirror = logged([group(0, 6)])
    sequence = sequence_of(list(range(12)))
    compute(allocator, sequence)
    allocator.release(sequence)
    mirror.check(allocator)
    other = sequence_of(list(range(50, 62)))
    compute(allocator, other)
    mirror.check(allocator)
    assert [type(event) for event in mirror.events] == [BlocksStored, BlocksRemoved, BlocksStored]
    allocator.invalidate(other, 4, 0)
    mirror.check(allocator)
    assert isinstance(gone := mirror.events[-1], BlocksRemoved)
    assert len(gone.digests) == 2


def test_groups_have_their_own_events_and_blocks_of_several_digests_their_last() -> None:
    window = SlidingWindow(block_len=8, num_kv_heads=1, head_dim=1, dtype="float32", window_len=8)
    groups = [group(0, 40), KVGroup(group_id=1, spec=window, layer_ids=(1,), num_blocks=40)]
    allocator, mirror = logged(groups)
    compute(allocator, sequence_of(list(range(17)), num_groups=2))
    mirror.check(allocator)
    full, windowed = mirror.events
    assert isinstance(full, BlocksStored)
    assert isinstance(windowed, BlocksStored)
    assert (full.group_id, full.block_len, full.window_len, len(full.digests)) == (0, 4, None, 4)
    assert (windowed.group_id, windowed.block_len, windowed.window_len) == (1, 8, 8)
    assert windowed.digests == full.digests[1::2]


def test_a_long_prompt_that_is_not_known_is_hashed_only_as_far_as_a_match_could_go() -> None:
    allocator, _ = logged([group(0, 2000)])
    prompt = list(range(4 * 1000 + 1))
    first = sequence_of(prompt)
    assert allocator.match_prefix(first) == [[]]
    assert len(first.block_digests) == _LEAST_HASHED
    compute(allocator, first)
    again = sequence_of(prompt)
    assert len(allocator.match_prefix(again)[0]) == 1000
    parted = sequence_of([*prompt[:1600], *[0] * 1000])
    assert len(allocator.match_prefix(parted)[0]) == 400
    assert 400 < len(parted.block_digests) < 650


def test_who_waits_for_a_prefix_is_hashed_only_as_far_as_it_is_alike() -> None:
    allocator, _ = logged([group(0, 2000)])
    prompt = list(range(4 * 1000 + 1))
    other = sequence_of(prompt)
    assert allocator.take(other, allocator.match_prefix(other), 0)
    other.num_computed_tokens = 4 * 500
    allocator.prefix_cache.register(other)
    for num_shared, fills in ((1, False), (400, False), (500, False), (501, True), (900, True)):
        sequence = sequence_of([*prompt[: 4 * num_shared], *[0] * 2001])
        assert allocator.prefix_cache.fills_next(other, sequence) is fills
        assert len(sequence.block_digests) <= 2 * num_shared
    assert len(other.block_digests) == 501
    other.num_computed_tokens = len(prompt)
    allocator.prefix_cache.register(other)
    assert not allocator.prefix_cache.fills_next(other, sequence_of([*prompt, *range(40)]))


def test_window_layers_alone_look_for_the_end_of_a_prefix_first() -> None:
    spec = SlidingWindow(block_len=4, num_kv_heads=1, head_dim=1, dtype="float32", window_len=8)
    groups = [KVGroup(group_id=0, spec=spec, layer_ids=(0,), num_blocks=2000)]
    allocator, _ = logged(groups)
    sequence = sequence_of(list(range(2001)))
    allocator.match_prefix(sequence)
    assert len(sequence.block_digests) == 500


def test_layers_of_another_block_length_hash_no_less_than_one_of_their_blocks() -> None:
    spec = FullAttention(block_len=256, num_kv_heads=1, head_dim=1, dtype="float32")
    groups = [group(0, 9000), KVGroup(group_id=1, spec=spec, layer_ids=(1,), num_blocks=9000)]
    allocator, mirror = logged(groups)
    prompt = list(range(64 * 256 * 2 + 1))
    compute(allocator, sequence_of(prompt, num_groups=2))
    mirror.check(allocator)
    tables = allocator.match_prefix(sequence_of(prompt))
    assert [len(table) for table in tables] == [64 * 128, 128]


def test_windows_of_a_model_whose_full_attention_comes_later_do_not_look_behind_what_is_hashed() -> None:
    spec = SlidingWindow(block_len=4, num_kv_heads=1, head_dim=1, dtype="float32", window_len=8)
    groups = [KVGroup(group_id=0, spec=spec, layer_ids=(0,), num_blocks=2000), group(1, 2000)]
    allocator, _ = logged(groups)
    sequence = sequence_of(list(range(4001)), num_groups=2)
    assert allocator.match_prefix(sequence) == [[], []]
    assert len(sequence.block_digests) == _LEAST_HASHED
