"""Blocks for sequences, in all KV groups at once.

`KVAllocator` answers the scheduler: how much of a sequence is cached, take its blocks, extend, let go of what
a window has passed, release. It asks one manager per group; a manager knows what its kind of layer needs of
the past. All take from one pool: what is given to one group is given to all or to none. Changes a sequence's
block table and digests, nothing else of it.

A table of window layers begins with null blocks where the window has passed. Its sequence holds at most the
blocks of a window and a chunk: those that are passed when a chunk is planned are given back, and as many are
put at the table's end, in one go, so that a prompt once admitted never lacks blocks. Blocks are given back
when a step is planned, though steps in flight still read them: the device runs steps in order, so whoever
gets them writes them later. They stay findable as any other free block.

With a host tier, what the pool evicts is stored there and found there, and so are the blocks of preempted
sequences: `take` gives a sequence new blocks that its plan loads. Until then a table names a host block by
its negative number.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from asyncserve.errors import ConfigError, InvariantError
from asyncserve.kv_spec import FullAttention, KVGroup, RecurrentState, SlidingWindow, longest_held
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.host_tier import BlockToSwap, HostTier
from asyncserve.loop.kv_pool import KVBlockPool
from asyncserve.loop.prefix_hash import block_digest, root_digest
from asyncserve.loop.sequence import SequenceState
from asyncserve.observer import KVGroupStatistics
from asyncserve.step import BlockCopy, BlockTransfer, StepPlan

_LEAST_HASHED = 64
"""Aligned blocks of a prompt that are hashed at once: 0.1 ms."""

NULL_BLOCK = 0
"""Stands in a table where a sequence holds nothing."""


class FullAttentionManager:
    """Blocks of one group of full-attention layers: every position is kept to the end.

    Args:
        group_id: The group.
        spec: What its layers keep.
        find: Returns where the block of a digest in a group is, or None.
        digest_len: Positions of one digest; a block has one or several.
        align_len: Matches are a multiple of it, which is one of the block's length.
    """

    __slots__ = ("align_len", "block_len", "digests_per_block", "find", "group_id", "spec")

    spec: FullAttention | RecurrentState

    def __init__(
        self,
        group_id: int,
        spec: FullAttention | RecurrentState,
        find: Callable[[bytes, int], int | None],
        *,
        digest_len: int,
        align_len: int,
    ) -> None:
        self.group_id = group_id
        self.spec = spec
        self.block_len = spec.block_len
        self.digests_per_block = spec.block_len // digest_len
        self.find = find
        self.align_len = align_len

    def match(self, digests: Sequence[bytes], max_len: int) -> list[int]:
        """Return the table of the longest cached prefix of at most `max_len` positions."""
        find, group_id, step = self.find, self.group_id, self.digests_per_block
        block_ids: list[int] = []
        for digest in digests[step - 1 : max_len // self.block_len * step : step]:
            block_id = find(digest, group_id)
            if block_id is None:
                break
            block_ids.append(block_id)
        aligned_len = len(block_ids) * self.block_len // self.align_len * self.align_len
        return block_ids[: aligned_len // self.block_len]

    def table_len(self, start: int, num_tokens: int, chunk_len: int) -> int:
        """Return how long a table is when a sequence begins to compute at `start`.

        Args:
            start: Position.
            num_tokens: Known ones, for which blocks are taken now, as far as they are needed at once.
            chunk_len: Most positions that a step computes.
        """
        return self.spec.blocks_for(num_tokens)


class SlidingWindowManager(FullAttentionManager):
    """Blocks of one group of window layers: those that the window has passed are given back."""

    __slots__ = ()

    spec: SlidingWindow

    def match(self, digests: Sequence[bytes], max_len: int) -> list[int]:
        """Return the table of the longest prefix of which the window's blocks are cached."""
        find, group_id, step = self.find, self.group_id, self.digests_per_block
        blocks_per_align = self.align_len // self.block_len
        num_blocks = max_len // self.align_len * blocks_per_align
        while num_blocks:
            first = self.spec.num_unseen(num_blocks * self.block_len)
            found: list[int] = []
            for block_idx in range(num_blocks - 1, first - 1, -1):
                block_id = find(digests[(block_idx + 1) * step - 1], group_id)
                if block_id is None:
                    # Only prefixes that end before this block do without it.
                    num_blocks = block_idx // blocks_per_align * blocks_per_align
                    break
                found.append(block_id)
            else:
                return [NULL_BLOCK] * first + found[::-1]
        return []

    def table_len(self, start: int, num_tokens: int, chunk_len: int) -> int:
        """Return how long a table is that holds the blocks of a window and a chunk; see the base."""
        first = self.spec.num_unseen(start)
        most_held = self.spec.most_held(num_tokens, chunk_len)
        return min(self.spec.blocks_for(num_tokens), first + most_held)


class RecurrentStateManager(FullAttentionManager):
    """Blocks of one group of recurrent layers: one run per sequence, of no use to another one."""

    __slots__ = ()

    def match(self, digests: Sequence[bytes], max_len: int) -> list[int]:
        """Return nothing: a state of the end of a prefix is overwritten by the next token's."""
        return []


class KVAllocator:
    """Gives and takes the blocks of sequences.

    Args:
        groups: With the size of their common pool.
        enable_prefix_caching: Register full blocks, and find them.
        chunk_len: Most positions that a step computes of one sequence.
        max_unapplied: Steps that may be in flight.
        host_tier: Keeps what the pool evicts, and preempted sequences; None for no such thing.
        hash_seed: Of the digests.
        cache_log: Is told what becomes of the prefix cache; None: nobody wants to know.

    Attributes:
        block_len: Positions of a digest: every group's block length is a multiple of it.
        enable_prefix_caching: As given; false if some layers keep a state, of which no prefix is kept.

    Raises:
        ConfigError: No group, or groups that do not share a pool.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        enable_prefix_caching: bool,
        chunk_len: int,
        max_unapplied: int = 2,
        host_tier: HostTier | None = None,
        hash_seed: str = "0",
        cache_log: CacheLog | None = None,
    ) -> None:
        sizes = {group.num_blocks for group in groups}
        if len(sizes) != 1:
            raise ConfigError(f"KV groups share one pool, but they speak of {sorted(sizes)} blocks")
        (num_blocks,) = sizes
        self.num_groups = len(groups)
        self._root_digest = root_digest(hash_seed)
        self._cache_log = cache_log
        self._host_tier = host_tier
        self.pool = KVBlockPool(
            num_blocks,
            len(groups),
            note_evicted=None if host_tier is None else host_tier.keep_evicted,
            cache_log=cache_log,
        )
        block_lens = [
            group.spec.block_len for group in groups if not isinstance(group.spec, RecurrentState)
        ] or [1]
        self.block_len = math.gcd(*block_lens)
        self._align_len = math.lcm(*block_lens)
        self._chunk_len = chunk_len
        self._max_unapplied = max_unapplied
        self._groups = tuple(groups)
        self._managers = tuple(
            _manager_class(group)(
                group.group_id,
                group.spec,
                self.pool.find if host_tier is None else self._find,
                digest_len=self.block_len,
                align_len=self._align_len,
            )
            for group in groups
        )
        self._window_managers = tuple(
            manager for manager in self._managers if isinstance(manager, SlidingWindowManager)
        )
        self._growing_managers = tuple(
            manager for manager in self._managers if not isinstance(manager, RecurrentStateManager)
        )
        self.enable_prefix_caching = enable_prefix_caching and self._growing_managers == self._managers
        self.num_window_blocks_freed = 0

    @property
    def capacity_len(self) -> int:
        """Positions of the longest sequence that fits when it is alone."""
        return longest_held(self._groups, self.pool.num_usable, self._chunk_len)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state."""
        return self._growing_managers != self._managers

    @property
    def num_usable(self) -> int:
        """Blocks that can be held, all groups together."""
        return self.pool.num_usable

    @property
    def num_used(self) -> int:
        """Blocks held by a sequence."""
        return self.pool.num_usable - self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be reused."""
        return self.pool.num_cached

    @property
    def num_saved(self) -> int:
        """Blocks that would be held beyond those that are, if sequences shared none."""
        return self.pool.num_saved

    @property
    def has_free_blocks(self) -> bool:
        """Whether there is a free block."""
        return self.pool.num_free > 0

    def hash_blocks(self, sequence: SequenceState, num_blocks: int) -> None:
        """Compute the digests of the sequence's first `num_blocks` times `block_len` tokens, all known."""
        digests = sequence.block_digests
        if len(digests) >= num_blocks:
            return
        token_ids, block_len = sequence.token_ids, self.block_len
        if not digests:
            cache_salt = sequence.tokenized.request.cache_salt
            digests.append(block_digest(self._root_digest, token_ids[:block_len], cache_salt))
        parent = digests[-1]
        for start in range(len(digests) * block_len, num_blocks * block_len, block_len):
            parent = block_digest(parent, token_ids[start : start + block_len])
            digests.append(parent)

    def reusable_blocks(self, sequence: SequenceState) -> int:
        """Return how many times `block_len` leading tokens the cache could spare if all were there.

        At least one token is left to compute, because the next one is sampled from its logits. Prompt
        tokens to be scored are computed, not looked up.
        """
        if not self.enable_prefix_caching or sequence.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self.block_len

    def match_prefix(self, sequence: SequenceState) -> list[list[int]]:
        """Return, per group, the table of the longest prefix that is cached in all of them.

        Null blocks stand in it for those that are not needed, negative numbers for blocks on the host. All
        groups' matches are equally long, counted in positions. Of a swapped sequence: its own table.
        """
        if self._host_tier is not None:
            swapped = self._host_tier.swapped(sequence.sequence_id)
            if swapped is not None:
                return [
                    [
                        NULL_BLOCK if block is None else self._place(block.host_block, block.digest, group_id)
                        for block in table
                    ]
                    for group_id, table in enumerate(swapped.tables)
                ]
        max_blocks = self.reusable_blocks(sequence)
        matches: list[list[int]] = [[] for _ in self._managers]
        if max_blocks == 0:
            return matches
        max_len = self._hash_while_found(sequence, max_blocks) * self.block_len
        # A group that finds less shortens the hit for all; until none does. Full attention comes first to
        # its end: each prefix of a match is one. That of a window may be none, so it looks again.
        is_shorter = True
        while is_shorter:
            is_shorter = False
            for manager in self._managers:
                match = matches[manager.group_id]
                if len(match) * manager.block_len != max_len:
                    match = matches[manager.group_id] = manager.match(sequence.block_digests, max_len)
                if len(match) * manager.block_len < max_len:
                    max_len = len(match) * manager.block_len
                    is_shorter = True
        return matches

    def _hash_while_found(self, sequence: SequenceState, max_blocks: int) -> int:
        """Compute the digests that `match_prefix` may need, and return of how many blocks.

        Behind a block that full attention lacks there is no match: of a long prompt that nobody has asked
        before, most is hashed when it is computed, chunk by chunk, and not when it comes.
        """
        for manager in self._managers:
            if type(manager) is FullAttentionManager:
                break
        else:
            self.hash_blocks(sequence, max_blocks)
            return max_blocks
        num_blocks = _LEAST_HASHED * self._align_len // self.block_len
        while num_blocks < max_blocks:
            self.hash_blocks(sequence, num_blocks)
            hashed_len = num_blocks * self.block_len
            if len(manager.match(sequence.block_digests, hashed_len)) * manager.block_len < hashed_len:
                return num_blocks
            num_blocks *= 2
        self.hash_blocks(sequence, max_blocks)
        return max_blocks

    def matched_len(self, sequence: SequenceState, matches: Sequence[list[int]]) -> int:
        """Return how many positions of a sequence the matches of all groups hold."""
        if self._host_tier is not None:
            swapped = self._host_tier.swapped(sequence.sequence_id)
            if swapped is not None:
                return swapped.num_tokens
        return len(matches[0]) * self._managers[0].block_len if matches[0] else 0

    def take(self, sequence: SequenceState, matches: Sequence[list[int]], num_spare: int) -> bool:
        """Take cached blocks, and new ones for all the sequence's other known tokens.

        For window layers, only those of a window and a chunk: `advance` changes them for later ones.

        Args:
            matches: What `match_prefix` gave.
            num_spare: Blocks that must stay free.

        Returns:
            False if there are too few; then nothing has changed.
        """
        pool = self.pool
        num_tokens, start = len(sequence.token_ids), self.matched_len(sequence, matches)
        needed = num_spare
        table_lens = []
        for manager, match in zip(self._managers, matches, strict=True):
            table_len = manager.table_len(start, num_tokens, self._chunk_len)
            table_lens.append(table_len)
            needed += table_len - len(match)
            needed += sum(
                block_id < 0 or (block_id != NULL_BLOCK and pool.is_free(block_id)) for block_id in match
            )
        if needed > pool.num_free:
            return False
        table = sequence.block_table
        # First hold what was found, so that it is not given out as new.
        for manager, match in zip(self._managers, matches, strict=True):
            num_unseen = manager.spec.num_unseen(start)
            for block_id in match[num_unseen:]:
                if block_id > 0:
                    pool.acquire(block_id)
            table.block_ids[manager.group_id].extend(match)
            table.num_null[manager.group_id] = num_unseen
        if self._host_tier is not None:
            self._load(sequence, start, self._host_tier)
        for manager, table_len in zip(self._managers, table_lens, strict=True):
            block_ids = table.block_ids[manager.group_id]
            block_ids.extend(pool.allocate(table_len - len(block_ids), manager.group_id))
        self._note_covered(sequence)
        sequence.num_registered_blocks = start // self.block_len
        sequence.num_computed_tokens = start
        return True

    def fork(self, leader: SequenceState, branch: SequenceState, num_spare: int) -> list[BlockCopy] | None:
        """Let a branch begin with all that is computed of the leader, whose known tokens it has.

        It shares the leader's full blocks, as far as it sees them, and has its own in place of those that are
        written on, unless it is certain to write nothing.

        Args:
            num_spare: Blocks that must stay free.

        Returns:
            What is to be copied once the leader's tokens are computed; None, and no change, for lack of
            blocks.
        """
        num_tokens = leader.num_computed_tokens
        writes = len(branch.token_ids) + 1 < branch.max_len
        num_own = [
            manager.spec.blocks_for(num_tokens) - num_tokens // manager.block_len if writes else 0
            for manager in self._managers
        ]
        if any(num_own) and sum(num_own) + num_spare > self.pool.num_free:
            return None
        copies: list[BlockCopy] = []
        table = branch.block_table
        for manager, num in zip(self._managers, num_own, strict=True):
            group_id = manager.group_id
            block_ids = leader.block_table.block_ids[group_id]
            num_null = manager.spec.num_unseen(num_tokens)
            num_shared = len(block_ids) - num
            self.pool.share(block_ids[num_null:num_shared])
            own = self.pool.allocate(num, group_id)
            copies += map(BlockCopy, block_ids[num_shared:], own)
            table.block_ids[group_id].extend([NULL_BLOCK] * num_null + block_ids[num_null:num_shared] + own)
            table.num_null[group_id] = num_null
        self._note_covered(branch)
        branch.block_digests = leader.block_digests[:]
        branch.num_registered_blocks = leader.num_registered_blocks
        branch.num_computed_tokens = num_tokens
        return copies

    def fork_cost(self, num_tokens: int) -> int:
        """Return how many blocks a branch that writes has for itself, of so many computed tokens."""
        return sum(
            manager.spec.blocks_for(num_tokens) - num_tokens // manager.block_len
            for manager in self._managers
        )

    def inherit(self, rows: Sequence[SequenceState], parents: Sequence[int], num_tokens: int) -> None:
        """Let rows of a beam search hold the full blocks of others in place of their own, all at once.

        The device has done so already. A block that no row holds any more is free.

        Args:
            rows: All of them; they have computed equally many tokens, and hold as many blocks.
            parents: Which row's blocks each takes.
            num_tokens: Those computed by the step that has chosen so.
        """
        moved = [
            (row, rows[parent]) for row, parent in zip(rows, parents, strict=True) if row is not rows[parent]
        ]
        for manager in self._managers:
            group_id, num_full = manager.group_id, num_tokens // manager.block_len
            changes = []
            for row, parent in moved:
                own, taken = row.block_table.block_ids[group_id], parent.block_table.block_ids[group_id]
                first = _first_difference(own, taken, num_full)
                changes.append((own, first, taken[first:num_full]))
            for _, _, block_ids in changes:
                self.pool.share(block_ids)
            for own, first, block_ids in changes:
                self.pool.release(own[first:num_full])
                own[first:num_full] = block_ids
        num_digests = num_tokens // self.block_len
        known = [
            (parent.block_digests[:num_digests], parent.num_registered_blocks, parent.block_table.dropped[:])
            for _, parent in moved
        ]
        for (row, _), (digests, num_registered, dropped) in zip(moved, known, strict=True):
            row.block_digests = digests
            row.num_registered_blocks = num_registered
            row.block_table.dropped = sorted({*row.block_table.dropped, *dropped})

    def advance(self, sequence: SequenceState) -> list[list[int]] | None:
        """Let go of what the sequence's windows have passed, before its next chunk is planned.

        As many blocks are put at the ends of these tables, as far as known tokens go: they cover any chunk.

        Returns:
            The new blocks by group; None, and none are added, if there are too few: what was given back is
            shared with another sequence.
        """
        if not self._window_managers:
            return []
        new_ids: list[list[int]] = [[] for _ in self._managers]
        tables = sequence.block_table.block_ids
        num_new = []
        for manager in self._window_managers:
            self._drop(manager, sequence)
            table_len = manager.table_len(
                sequence.num_computed_tokens, len(sequence.token_ids), self._chunk_len
            )
            num_new.append(max(0, table_len - len(tables[manager.group_id])))
        if sum(num_new) > self.pool.num_free:
            return None
        for manager, num in zip(self._window_managers, num_new, strict=True):
            new_ids[manager.group_id] = self.pool.allocate(num, manager.group_id)
            tables[manager.group_id].extend(new_ids[manager.group_id])
        self._note_covered(sequence)
        return new_ids

    def drop_unseen(self, sequence: SequenceState) -> None:
        """Let go of what the sequence's windows have passed at the next position to compute.

        For a sequence that is covered as far as its tokens are known.
        """
        for manager in self._window_managers:
            self._drop(manager, sequence)

    def extend(self, sequence: SequenceState) -> list[list[int]] | None:
        """Cover one position more: a block in each group that does not.

        Returns:
            The new blocks by group; None, and no change, if there are too few.
        """
        table = sequence.block_table
        growing = self._growing_managers
        if self.num_groups > 1:
            growing = tuple(
                manager
                for manager in growing
                if len(table.block_ids[manager.group_id]) * manager.block_len <= table.covered_len
            )
        if len(growing) > self.pool.num_free:
            return None
        new_ids: list[list[int]] = [[] for _ in self._managers]
        for manager in growing:
            new_ids[manager.group_id] = self.pool.allocate(1, manager.group_id)
            table.block_ids[manager.group_id].extend(new_ids[manager.group_id])
        self._note_covered(sequence)
        return new_ids

    def extend_cost(self, sequence: SequenceState) -> int:
        """Return how many blocks `extend` would add."""
        table = sequence.block_table
        return sum(
            len(table.block_ids[manager.group_id]) * manager.block_len <= table.covered_len
            for manager in self._growing_managers
        )

    def most_taken(self, num_tokens: int) -> int:
        """Return the most blocks that `take` needs for a sequence of so many known tokens."""
        return sum(manager.spec.most_held(num_tokens, self._chunk_len) for manager in self._managers)

    def register(self, sequence: SequenceState) -> None:
        """Make the sequence's full blocks findable, as far as planned steps fill them with known tokens."""
        if not self.enable_prefix_caching:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_len
        num_registered = sequence.num_registered_blocks
        if num_full <= num_registered:
            return
        self.hash_blocks(sequence, num_full)
        for manager in self._managers:
            step = manager.digests_per_block
            self._register(manager, sequence, range(num_registered // step, num_full // step))
        sequence.num_registered_blocks = num_full

    def _register(
        self, manager: FullAttentionManager, sequence: SequenceState, block_idxs: Iterable[int]
    ) -> None:
        """Make blocks of a sequence's table findable, whose content is known; null blocks are passed over."""
        register, step = self.pool.register, manager.digests_per_block
        block_ids, digests = sequence.block_table.block_ids[manager.group_id], sequence.block_digests
        new = [
            block_idx
            for block_idx in block_idxs
            if block_ids[block_idx] != NULL_BLOCK
            and register(block_ids[block_idx], digests[(block_idx + 1) * step - 1])
        ]
        if new and self._cache_log is not None:
            self._log_stored(self._cache_log, manager, sequence, new)

    def _log_stored(
        self,
        cache_log: CacheLog,
        manager: FullAttentionManager,
        sequence: SequenceState,
        block_idxs: Sequence[int],
    ) -> None:
        """Log blocks of a sequence that have become findable, runs of consecutive ones together."""
        step, block_len, digests = manager.digests_per_block, manager.block_len, sequence.block_digests
        window_len = manager.spec.window_len if isinstance(manager.spec, SlidingWindow) else None
        begin = 0
        for end in range(1, len(block_idxs) + 1):
            if end < len(block_idxs) and block_idxs[end] == block_idxs[end - 1] + 1:
                continue
            first, last = block_idxs[begin], block_idxs[end - 1] + 1
            begin = end
            cache_log.stored(
                manager.group_id,
                block_len=block_len,
                window_len=window_len,
                parent=digests[first * step - 1] if first else None,
                digests=digests[(first + 1) * step - 1 : last * step : step],
                token_ids=sequence.token_ids[first * block_len : last * block_len],
                cache_salt=None if first else sequence.tokenized.request.cache_salt,
            )

    def invalidate(self, sequence: SequenceState, start: int, step_id: int) -> set[int]:
        """Make the sequence's blocks from position `start` on unfindable: what they hold is wrong.

        Args:
            sequence: Whose tokens were to be computed.
            start: Position.
            step_id: The step that went wrong.

        Returns:
            Those blocks, and those that the sequence let go of since that step was planned.
        """
        table = sequence.block_table
        if self._host_tier is not None:
            for manager in self._managers:
                step = manager.digests_per_block
                for digest in sequence.block_digests[(start // manager.block_len + 1) * step - 1 :: step]:
                    self._host_tier.forget(digest, manager.group_id)
        invalid = {block_id for dropped_after, block_id in table.dropped if dropped_after >= step_id}
        for manager in self._managers:
            block_ids = table.block_ids[manager.group_id]
            first = start // manager.block_len
            num_null = table.num_null[manager.group_id]
            for block_id in block_ids[max(first, num_null) :]:
                self.pool.unregister(block_id)
                invalid.add(block_id)
            # What it has let go of is found as others find it.
            step = manager.digests_per_block
            for digest in sequence.block_digests[(first + 1) * step - 1 : num_null * step : step]:
                found = self.pool.find(digest, manager.group_id)
                if found is not None:
                    self.pool.unregister(found)
                    invalid.add(found)
        return invalid

    def holds_any(self, sequence: SequenceState, blocks: set[int], step_id: int) -> bool:
        """Return whether one of `blocks` is in the sequence's tables, or was since `step_id` was planned."""
        table = sequence.block_table
        return any(block_id in blocks for block_ids in table.block_ids for block_id in block_ids) or any(
            block_id in blocks for dropped_after, block_id in table.dropped if dropped_after >= step_id
        )

    def release(self, sequence: SequenceState) -> None:
        """Give back every block; those that are full stay findable until they are given out anew."""
        if sequence.blocks_are_valid:
            self.register(sequence)
        table = sequence.block_table
        for block_ids, num_null in zip(table.block_ids, table.num_null, strict=True):
            self.pool.release(block_ids[num_null:] if num_null else block_ids)

    def group_statistics(self, sequences: Sequence[SequenceState]) -> list[KVGroupStatistics]:
        """Return what each group has of the pool, given the sequences that hold a slot."""
        groups = []
        for manager in self._managers:
            group_id, block_len = manager.group_id, manager.block_len
            num_used = self.pool.num_used_by(group_id)
            num_slots = num_unused = 0
            if manager in self._growing_managers:
                num_slots = num_used * block_len
                num_unused = self._num_unused(manager, sequences)
            groups.append(
                KVGroupStatistics(
                    group_id=group_id,
                    num_blocks_used=num_used,
                    num_blocks_cached=self.pool.num_cached_of(group_id),
                    num_slots=num_slots,
                    num_slots_unused=num_unused,
                )
            )
        return groups

    def _num_unused(self, manager: FullAttentionManager, sequences: Sequence[SequenceState]) -> int:
        """Return how many slots of a group's blocks lie behind the end of all sequences that hold them."""
        group_id, block_len, pool = manager.group_id, manager.block_len, self.pool
        num_unused = 0
        # Branches that write nothing share a partial block, and sequences that were set back share others.
        shared: dict[int, int] = {}
        for sequence in sequences:
            table = sequence.block_table
            block_ids = table.block_ids[group_id]
            num_tokens = max(sequence.num_computed_tokens, table.num_null[group_id] * block_len)
            num_behind = len(block_ids) * block_len - num_tokens
            if num_behind <= 0:
                continue
            num_unused += num_behind
            for idx in range(num_tokens // block_len, len(block_ids)) if pool.num_saved else ():
                if pool.is_shared(block_ids[idx]):
                    num = min(block_len, (idx + 1) * block_len - num_tokens)
                    num_unused -= num
                    shared[block_ids[idx]] = min(num, shared.get(block_ids[idx], num))
        for sequence in sequences if shared else ():
            num_full = sequence.num_computed_tokens // block_len
            for block_id in sequence.block_table.block_ids[group_id][:num_full]:
                shared.pop(block_id, None)
        return num_unused + sum(shared.values())

    # The host tier

    def swap_out(self, sequence: SequenceState) -> None:
        """Keep the blocks of a preempted sequence on the host, if there is room and that is worth it.

        It gives them back next, and no step in flight mentions it. Rows of a beam search share their blocks
        and are computed again together.
        """
        num_tokens = sequence.num_computed_tokens
        if (
            self._host_tier is None
            or sequence.rows
            or not sequence.blocks_are_valid
            or not 0 < num_tokens < len(sequence.token_ids)
        ):
            return
        self.register(sequence)
        tables: list[list[BlockToSwap | None]] = []
        for manager in self._managers:
            num_full = num_tokens // manager.block_len if self.enable_prefix_caching else 0
            num_unseen, step = manager.spec.num_unseen(num_tokens), manager.digests_per_block
            block_ids = sequence.block_table.block_ids[manager.group_id]
            tables.append([None] * num_unseen)
            for idx in range(num_unseen, manager.spec.blocks_for(num_tokens)):
                digest = sequence.block_digests[(idx + 1) * step - 1] if idx < num_full else None
                tables[-1].append(BlockToSwap(block_ids[idx], digest))
        self._host_tier.swap_out(sequence.sequence_id, tables, num_tokens)

    def drop_swapped(self, sequence: SequenceState) -> None:
        """Give up what the host keeps of a sequence, if anything."""
        if self._host_tier is not None:
            self._host_tier.drop(sequence.sequence_id)

    def note_step(self, plan: StepPlan, num_decodes: int, device_s: float) -> None:
        """Note how long a step took: it tells what computing a sequence again would take."""
        if self._host_tier is not None:
            self._host_tier.note_step(plan.num_tokens, num_decodes, device_s)

    def take_transfers(self) -> tuple[tuple[BlockTransfer, ...], tuple[BlockTransfer, ...]]:
        """Return the stores and the loads of the plan that is made now."""
        return ((), ()) if self._host_tier is None else self._host_tier.take_transfers()

    def lose_transfers(self, plans: Iterable[StepPlan]) -> set[int]:
        """Forget what a failed step and those behind it were to move; return the blocks they were to load."""
        if self._host_tier is None:
            return set()
        lost = self._host_tier.lose_transfers(plans)
        for block_id in lost:
            self.pool.unregister(block_id)
        return lost

    def _find(self, digest: bytes, group_id: int) -> int | None:
        """Return the block with this content in a group, the negative of one on the host, or None."""
        block_id = self.pool.find(digest, group_id)
        if block_id is None and self._host_tier is not None:
            host_block = self._host_tier.find(digest, group_id)
            return None if host_block is None else -host_block
        return block_id

    def _place(self, host_block: int, digest: bytes | None, group_id: int) -> int:
        """Return where a swapped block is best taken from: from the device, if it is still there."""
        block_id = None if digest is None else self.pool.find(digest, group_id)
        return -host_block if block_id is None else block_id

    def _load(self, sequence: SequenceState, start: int, host_tier: HostTier) -> None:
        """Give new blocks to a sequence for those of its tables that are on the host."""
        tables = sequence.block_table.block_ids
        num_found = 0
        # First hold them all: a block that is given out may let another be stored.
        for manager in self._managers:
            host_blocks = [-block_id for block_id in tables[manager.group_id] if block_id < 0]
            num_found = max(num_found, len(host_blocks) * manager.block_len)
            for host_block in host_blocks:
                host_tier.hold(host_block)
        if self.enable_prefix_caching and host_tier.swapped(sequence.sequence_id) is None:
            num_looked_up = len(sequence.token_ids) - start + num_found
            host_tier.note_lookup(num_looked_up, num_found)
        for manager in self._managers:
            table = tables[manager.group_id]
            full: list[int] = []
            for idx, block_id in enumerate(table):
                if block_id < 0:
                    (table[idx],) = self.pool.allocate(1, manager.group_id)
                    host_tier.load(-block_id, table[idx])
                    if (idx + 1) * manager.block_len <= start:
                        full.append(idx)
            if self.enable_prefix_caching:
                self._register(manager, sequence, full)
        host_tier.drop(sequence.sequence_id)

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Verify the pool against the tables of the sequences that hold a slot.

        Raises:
            InvariantError: An invariant does not hold.
        """
        held: list[list[int]] = []
        for sequence in sequences:
            table = sequence.block_table
            for manager in self._managers:
                block_ids = table.block_ids[manager.group_id]
                num_null = table.num_null[manager.group_id]
                held.append(block_ids[num_null:])
                if any(block_id != NULL_BLOCK for block_id in block_ids[:num_null]):
                    raise InvariantError(f"a table of group {manager.group_id} holds what it let go of")
                # One that was set back, and will be released, has let go of what it was to see.
                last = manager.spec.num_unseen(sequence.num_computed_tokens)
                if num_null > last and sequence.blocks_are_valid:
                    raise InvariantError(f"a table of group {manager.group_id} lacks what is still seen")
                if any(self.pool.group_of(block_id) != manager.group_id for block_id in held[-1]):
                    raise InvariantError(f"a block of group {manager.group_id} is known as another group's")
                if len(held[-1]) > manager.spec.most_held(
                    len(block_ids) * manager.block_len, self._chunk_len
                ):
                    raise InvariantError(f"a table of group {manager.group_id} holds more than it needs")
        self.pool.check(held)
        if self._host_tier is not None:
            self._host_tier.check()

    def _drop(self, manager: SlidingWindowManager, sequence: SequenceState) -> int:
        """Let go of what a window has passed; return how many blocks that was."""
        table = sequence.block_table
        group_id = manager.group_id
        block_ids = table.block_ids[group_id]
        num_null = table.num_null[group_id]
        end = manager.spec.num_unseen(sequence.num_computed_tokens)
        if end <= num_null:
            return 0
        dropped = block_ids[num_null:end]
        self.pool.release(dropped)
        block_ids[num_null:end] = [NULL_BLOCK] * len(dropped)
        table.num_null[group_id] = end
        # Steps that are not in flight any more went well.
        last_step_id = sequence.last_step_id
        oldest = last_step_id - self._max_unapplied
        if table.dropped and table.dropped[0][0] < oldest:
            table.dropped = [each for each in table.dropped if each[0] >= oldest]
        table.dropped += [(last_step_id, block_id) for block_id in dropped]
        self.num_window_blocks_freed += len(dropped)
        return len(dropped)

    def _note_covered(self, sequence: SequenceState) -> None:
        table = sequence.block_table
        if self.num_groups == 1:
            table.covered_len = len(table.block_ids[0]) * self._managers[0].block_len
            return
        table.covered_len = min(
            len(block_ids) * manager.block_len
            for manager, block_ids in zip(self._managers, table.block_ids, strict=True)
        )


def _first_difference(own: list[int], taken: list[int], num_blocks: int) -> int:
    """Return where the tables of two rows part; none of their blocks are the same behind that."""
    return bisect_left(range(num_blocks), True, key=lambda idx: own[idx] != taken[idx])


def _manager_class(group: KVGroup) -> type[FullAttentionManager]:
    if isinstance(group.spec, RecurrentState):
        return RecurrentStateManager
    return SlidingWindowManager if isinstance(group.spec, SlidingWindow) else FullAttentionManager
