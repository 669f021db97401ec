from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncserve.errors import InvariantError
from asyncserve.loop.kv_pool import KVBlockPool


def test_the_null_block_is_never_given_out() -> None:
    pool = KVBlockPool(4, 1)
    assert sorted(pool.allocate(3, 0)) == [1, 2, 3]
    with pytest.raises(InvariantError, match="1 blocks asked of a pool with 0 free"):
        pool.allocate(1, 0)


def test_a_pool_with_only_the_null_block_is_refused() -> None:
    with pytest.raises(InvariantError):
        KVBlockPool(1, 1)


def test_tail_blocks_of_a_released_sequence_are_evicted_first() -> None:
    pool = KVBlockPool(4, 1)
    table = pool.allocate(3, 0)
    for block_id, digest in zip(table, (b"a", b"b", b"c"), strict=True):
        pool.register(block_id, digest)
    pool.release(table)
    assert pool.allocate(3, 0) == list(reversed(table))


def test_the_sequence_released_first_is_evicted_first() -> None:
    pool = KVBlockPool(3, 1)
    (older,), (newer,) = pool.allocate(1, 0), pool.allocate(1, 0)
    pool.register(older, b"older")
    pool.register(newer, b"newer")
    pool.release([older])
    pool.release([newer])
    assert pool.allocate(1, 0) == [older]
    assert pool.find(b"older", 0) is None
    assert pool.find(b"newer", 0) == newer


def test_blocks_without_reusable_content_are_evicted_before_cached_ones() -> None:
    pool = KVBlockPool(3, 1)
    (cached,), (plain,) = pool.allocate(1, 0), pool.allocate(1, 0)
    pool.register(cached, b"x")
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1, 0) == [plain]


def test_a_reused_block_is_evicted_as_if_released_anew() -> None:
    pool = KVBlockPool(3, 1)
    (first,), (second,) = pool.allocate(1, 0), pool.allocate(1, 0)
    pool.register(first, b"1")
    pool.register(second, b"2")
    pool.release([first])
    pool.release([second])
    pool.acquire(first)
    pool.release([first])
    assert pool.allocate(1, 0) == [second]


def test_a_block_held_twice_is_free_after_two_releases() -> None:
    pool = KVBlockPool(2, 1)
    (block_id,) = pool.allocate(1, 0)
    pool.acquire(block_id)
    pool.release([block_id])
    assert not pool.is_free(block_id)
    pool.release([block_id])
    assert pool.is_free(block_id)
    with pytest.raises(InvariantError, match="nobody holds it"):
        pool.release([block_id])


def test_the_first_block_with_a_content_stays_the_one_found() -> None:
    pool = KVBlockPool(3, 1)
    first, second = pool.allocate(2, 0)
    pool.register(first, b"x")
    pool.register(second, b"x")
    assert pool.find(b"x", 0) == first
    pool.unregister(second)
    assert pool.find(b"x", 0) == first
    pool.unregister(first)
    assert pool.find(b"x", 0) is None


def test_check_notices_a_table_that_disagrees_with_the_reference_counts() -> None:
    pool = KVBlockPool(3, 1)
    (block_id,) = pool.allocate(1, 0)
    pool.check([[block_id]])
    with pytest.raises(InvariantError, match="has 1 references, tables hold 2"):
        pool.check([[block_id], [block_id]])
    with pytest.raises(InvariantError, match="has 1 references, tables hold 0"):
        pool.check([])
    with pytest.raises(InvariantError, match="null block"):
        pool.check([[block_id, 0]])


def _break_link(pool: KVBlockPool) -> None:
    pool._next[1] = 1


def _count_free_wrongly(pool: KVBlockPool) -> None:
    pool._num_free += 1


def _count_cached_wrongly(pool: KVBlockPool) -> None:
    pool._num_cached[0] += 1


def _link_a_held_block(pool: KVBlockPool) -> None:
    (block_id,) = pool.allocate(1, 0)
    pool._link(block_id, pool._previous[0], 0)


def _index_another_block(pool: KVBlockPool) -> None:
    pool._index[0][b"x"] = 3


def _index_too_much(pool: KVBlockPool) -> None:
    pool._index[0][b"y"] = 3


def _lose_a_block(pool: KVBlockPool) -> None:
    pool._unlink(4)


@pytest.mark.parametrize(
    ("damage", "tables", "message"),
    [
        (_break_link, [[]], "free list is broken"),
        (_count_free_wrongly, [[]], "free list holds 4 blocks, 5 were counted"),
        (_count_cached_wrongly, [[]], "1 free blocks are cached, 2 were counted"),
        (_link_a_held_block, [[4]], "the free list holds a block that somebody holds"),
        (_index_another_block, [[]], "the index does not lead to block"),
        (_index_too_much, [[]], "2 index entries for 1 registered blocks"),
        (_lose_a_block, [[]], "3 free [+] 0 held blocks of 4"),
    ],
)
def test_check_notices_damage(
    damage: Callable[[KVBlockPool], None], tables: list[list[int]], message: str
) -> None:
    pool = KVBlockPool(5, 1)
    (block_id,) = pool.allocate(1, 0)
    pool.register(block_id, b"x")
    pool.release([block_id])
    pool.check([])
    for other in range(2, 5):
        pool.acquire(other)
        pool.release([other])
    damage(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check(tables)


def test_only_held_blocks_are_registered() -> None:
    pool = KVBlockPool(2, 1)
    with pytest.raises(InvariantError, match="block 1 is registered and nobody holds it"):
        pool.register(1, b"x")


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool against a model that keeps the free list in an ordered dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVBlockPool(7, 1)
        self.free: OrderedDict[int, None] = OrderedDict((block_id, None) for block_id in range(1, 7))
        self.digests: dict[int, bytes] = {}
        self.tables: list[list[int]] = []
        self.num_digests = 0

    @rule(num_blocks=st.integers(1, 3))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            return
        expected = [self.free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in expected:
            self.digests.pop(block_id, None)
        assert self.pool.allocate(num_blocks, 0) == expected
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register_and_release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        for block_id in table:
            if block_id not in self.digests and data.draw(st.booleans()):
                self.num_digests += 1
                self.digests[block_id] = str(self.num_digests).encode()
                self.pool.register(block_id, self.digests[block_id])
        self.pool.release(table)
        held = {block_id for other in self.tables for block_id in other}
        for block_id in reversed(table):
            if block_id not in held:
                self.free[block_id] = None
                if block_id not in self.digests:
                    self.free.move_to_end(block_id, last=False)

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def reuse(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.digests)))
        assert self.pool.find(self.digests[block_id], 0) == block_id
        self.pool.acquire(block_id)
        self.free.pop(block_id, None)
        self.tables.append([block_id])

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.digests)))
        self.pool.unregister(block_id)
        assert self.pool.find(self.digests.pop(block_id), 0) is None

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.free.keys() & self.digests.keys())


PoolAgainstModel.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
TestPoolAgainstModel = PoolAgainstModel.TestCase
