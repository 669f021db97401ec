"""The blocks of the KV cache: who holds each, which one is given out next, what each contains.

Takes and gives block ids; a block is an index into the device's tensors, whose content it never sees. Any
block serves any KV group; which one it served last is noted with it. Does not know sequences or tokens.
Invariants (`check`):

* block 0, the null block, is never given out; every other block is free or held: `ref_count` 0 or more;
* the free list holds exactly the blocks with `ref_count` 0, in eviction order, and every operation on it is
  O(1);
* a block's digest, if it has one, leads to that block in the index of its group, and the index holds nothing
  else: the same tokens are one block in each group. A block keeps its digest when it becomes free, until it
  is given out anew: that is the prefix cache;
* used and cached blocks are counted for each group.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from asyncserve.errors import InvariantError
from asyncserve.kv_spec import NULL_BLOCK
from asyncserve.loop.cache_log import CacheLog

_RING = NULL_BLOCK
"""The null block closes the ring of free blocks: its next is evicted first, its previous last."""


class KVBlockPool:
    """Gives out and takes back the blocks that all groups share.

    What is known of a block stands in arrays by its id, not in an object of its own: a large pool has
    millions, and is made anew, on the loop's thread, when a device was lost.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        *,
        note_evicted: Callable[[int, bytes, int], object] | None = None,
        cache_log: CacheLog | None = None,
    ) -> None:
        """Make a pool of `num_blocks` blocks, the null block included.

        `note_evicted` is called with a cached block that is being given out anew, its digest and its group;
        `cache_log`, if there is one, is told of blocks that cannot be found any more.
        """
        if num_blocks < 2:
            raise InvariantError(f"a pool of {num_blocks} blocks has none to give out")
        self._note_evicted = note_evicted
        self._cache_log = cache_log
        self._num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._group_ids = array("H", [0]) * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        # Links of the free list, of no meaning while a block is held.
        ids = list(range(num_blocks))
        self._next = ids[1:] + ids[:1]
        self._previous = ids[-1:] + ids[:-1]
        self._index: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._num_free = num_blocks - 1
        self._num_used = [0] * num_groups
        self._num_cached = [0] * num_groups
        self._num_saved = 0

    @property
    def num_usable(self) -> int:
        """Blocks that can be given out at all."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be reused."""
        return sum(self._num_cached)

    @property
    def num_saved(self) -> int:
        """Blocks that there would have to be more if nobody shared any."""
        return self._num_saved

    def num_used_by(self, group_id: int) -> int:
        """Return how many blocks are held for a group."""
        return self._num_used[group_id]

    def num_cached_of(self, group_id: int) -> int:
        """Return how many free blocks have content that a group can still reuse."""
        return self._num_cached[group_id]

    def allocate(self, num_blocks: int, group_id: int) -> list[int]:
        """Give out blocks in eviction order, each held once; their old content is forgotten."""
        if num_blocks > self._num_free:
            raise InvariantError(f"{num_blocks} blocks asked of a pool with {self._num_free} free")
        block_ids = []
        digests, group_ids, ref_counts = self._digests, self._group_ids, self._ref_counts
        following, previous = self._next, self._previous
        for _ in range(num_blocks):
            block_id = following[_RING]
            after = following[_RING] = following[block_id]
            previous[after] = _RING
            digest = digests[block_id]
            if digest is not None:
                self._num_cached[group_ids[block_id]] -= 1
                if self._note_evicted is not None:
                    self._note_evicted(block_id, digest, group_ids[block_id])
                self._forget(block_id, digest)
            ref_counts[block_id] = 1
            group_ids[block_id] = group_id
            block_ids.append(block_id)
        self._num_free -= num_blocks
        self._num_used[group_id] += num_blocks
        return block_ids

    def find(self, digest: bytes, group_id: int) -> int | None:
        """Return the block with this content in a group, held or free, or None."""
        return self._index[group_id].get(digest)

    def group_of(self, block_id: int) -> int:
        """Return the group that the block serves, or served last."""
        return self._group_ids[block_id]

    def is_free(self, block_id: int) -> bool:
        """Return whether nobody holds the block."""
        return self._ref_counts[block_id] == 0

    def is_shared(self, block_id: int) -> bool:
        """Return whether the block is held more than once."""
        return self._ref_counts[block_id] > 1

    def acquire(self, block_id: int) -> None:
        """Hold a block once more, for its content."""
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
            self._num_used[self._group_ids[block_id]] += 1
        else:
            self._num_saved += 1
        self._ref_counts[block_id] += 1

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks, each held by somebody already, once more."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_counts[block_id] += 1
        self._num_saved += len(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one hold of each block that a sequence has in one group, listed from its beginning on.

        The end becomes free first, hence is evicted first: a prefix is of use without its continuation, not
        the other way round. Blocks without reusable content go to the front of the queue.
        """
        if not block_ids:
            return
        ref_counts, digests = self._ref_counts, self._digests
        following, previous = self._next, self._previous
        group_id = self._group_ids[block_ids[0]]
        last = previous[_RING]
        num_freed = num_cached = 0
        # Sequences that end together have thousands of blocks: links are made here, not by calls.
        for block_id in reversed(block_ids):
            ref_count = ref_counts[block_id]
            if ref_count <= 0:
                previous[_RING], following[last] = last, _RING
                raise InvariantError(f"block {block_id} is released and nobody holds it")
            ref_counts[block_id] = ref_count - 1
            if ref_count > 1:
                self._num_saved -= 1
                continue
            num_freed += 1
            if digests[block_id] is not None:
                previous[block_id] = last
                following[last] = block_id
                last = block_id
                num_cached += 1
            else:
                if last == _RING:
                    last = block_id
                self._link(block_id, _RING, following[_RING])
        following[last] = _RING
        previous[_RING] = last
        self._num_free += num_cached
        self._num_used[group_id] -= num_freed
        self._num_cached[group_id] += num_cached

    def register(self, block_id: int, digest: bytes) -> bool:
        """Note the content of a held block; the first block with that content stays the one found.

        Returns:
            Whether it is found from now on, and no block of that content was before.
        """
        if self._ref_counts[block_id] == 0:
            raise InvariantError(f"block {block_id} is registered and nobody holds it")
        index = self._index[self._group_ids[block_id]]
        if self._digests[block_id] is None and index.setdefault(digest, block_id) == block_id:
            self._digests[block_id] = digest
            return True
        return False

    def unregister(self, block_id: int) -> None:
        """Forget the content of a block: it is not what its digest says."""
        digest = self._digests[block_id]
        if digest is not None:
            self._forget(block_id, digest)
            if self._ref_counts[block_id] == 0:
                self._num_cached[self._group_ids[block_id]] -= 1

    def check(self, held_by_tables: Iterable[Sequence[int]]) -> None:
        """Verify the invariants against the block tables of everyone who holds blocks.

        Raises:
            InvariantError: One does not hold.
        """
        expected: dict[int, int] = {}
        for table in held_by_tables:
            for block_id in table:
                expected[block_id] = expected.get(block_id, 0) + 1
        self._check_blocks(expected)
        free: list[int] = []
        block_id = self._next[_RING]
        while block_id != _RING:
            if self._previous[self._next[block_id]] != block_id or len(free) > self._num_blocks:
                raise InvariantError(f"free list is broken at block {block_id}")
            free.append(block_id)
            block_id = self._next[block_id]
        if len(free) != self._num_free:
            raise InvariantError(f"free list holds {len(free)} blocks, {self._num_free} were counted")
        if any(self._ref_counts[block_id] for block_id in free):
            raise InvariantError("the free list holds a block that somebody holds")
        for group_id, num_counted in enumerate(self._num_cached):
            num_cached = sum(
                self._digests[block_id] is not None and self._group_ids[block_id] == group_id
                for block_id in free
            )
            if num_cached != num_counted:
                raise InvariantError(f"{num_cached} free blocks are cached, {num_counted} were counted")
        for group_id, num_counted in enumerate(self._num_used):
            num_used = sum(self._group_ids[block_id] == group_id for block_id in expected)
            if num_used != num_counted:
                raise InvariantError(
                    f"{num_used} blocks are held for group {group_id}, {num_counted} were counted"
                )
        num_saved = sum(expected.values()) - len(expected)
        if num_saved != self._num_saved:
            raise InvariantError(f"{num_saved} blocks are saved by sharing, {self._num_saved} were counted")
        if len(free) + len(expected) != self.num_usable:
            raise InvariantError(f"{len(free)} free + {len(expected)} held blocks of {self.num_usable}")

    def _check_blocks(self, expected: Mapping[int, int]) -> None:
        if NULL_BLOCK in expected:
            raise InvariantError("a block table holds the null block")
        num_registered = 0
        for block_id, (ref_count, digest) in enumerate(zip(self._ref_counts, self._digests, strict=True)):
            if ref_count != expected.get(block_id, 0):
                raise InvariantError(
                    f"block {block_id} has {ref_count} references, tables hold {expected.get(block_id, 0)}"
                )
            if digest is not None:
                num_registered += 1
                if self._index[self._group_ids[block_id]].get(digest) != block_id:
                    raise InvariantError(f"the index does not lead to block {block_id}")
        num_entries = sum(map(len, self._index))
        if num_registered != num_entries:
            raise InvariantError(f"{num_entries} index entries for {num_registered} registered blocks")

    def _forget(self, block_id: int, digest: bytes) -> None:
        """Take a block's digest from it and from the index."""
        group_id = self._group_ids[block_id]
        del self._index[group_id][digest]
        self._digests[block_id] = None
        if self._cache_log is not None:
            self._cache_log.removed(group_id, digest)

    def _link(self, block_id: int, previous: int, following: int) -> None:
        self._previous[block_id], self._next[block_id] = previous, following
        self._next[previous] = self._previous[following] = block_id
        self._num_free += 1
        if self._digests[block_id] is not None:
            self._num_cached[self._group_ids[block_id]] += 1

    def _unlink(self, block_id: int) -> None:
        previous, following = self._previous[block_id], self._next[block_id]
        self._next[previous] = following
        self._previous[following] = previous
        self._num_free -= 1
        if self._digests[block_id] is not None:
            self._num_cached[self._group_ids[block_id]] -= 1
