"""Blocks for sequences, in all KV groups at once.

`KVAllocator` answers the scheduler: how much of a sequence is cached, take its blocks, extend, let go of what
a window has passed, release. It asks one manager per group (`kv_managers`) what its layers need of the past,
and its `PrefixCache` what of it is cached. All take from one pool: what is given to one group is given to all
or to none. Changes a sequence's block table and digests, nothing else of it.

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
from collections.abc import Iterable, Sequence

from asyncserve.errors import ConfigError, InvariantError
from asyncserve.kv_spec import NULL_BLOCK, KVGroup, RecurrentState, longest_held
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.host_tier import BlockToSwap, HostTier
from asyncserve.loop.kv_managers import (
    FullAttentionManager,
    RecurrentStateManager,
    SlidingWindowManager,
    manager_class,
)
from asyncserve.loop.kv_pool import KVBlockPool
from asyncserve.loop.prefix_cache import PrefixCache
from asyncserve.loop.sequence import SequenceState
from asyncserve.observer import KVGroupStatistics
from asyncserve.step import BlockCopy, BlockTransfer, StepPlan

_COMPARED_BLOCKS = 64
"""Of two tables, at once: slices are compared many times faster than elements."""


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
        host_tier: As given.
        prefix_cache: Finds and registers blocks; disabled if some layers keep a state, of which no prefix is
            kept.

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
        self.host_tier = host_tier
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
        align_len = math.lcm(*block_lens)
        self._chunk_len = chunk_len
        self._max_unapplied = max_unapplied
        self._groups = tuple(groups)
        self._managers = tuple(
            manager_class(group)(
                group.group_id,
                group.spec,
                digest_len=self.block_len,
                align_len=align_len,
            )
            for group in groups
        )
        self._window_managers = tuple(
            manager for manager in self._managers if isinstance(manager, SlidingWindowManager)
        )
        self._growing_managers = tuple(
            manager for manager in self._managers if not isinstance(manager, RecurrentStateManager)
        )
        self.prefix_cache = PrefixCache(
            self._managers,
            self.pool,
            block_len=self.block_len,
            align_len=align_len,
            is_enabled=enable_prefix_caching and not self.keeps_states,
            hash_seed=hash_seed,
            cache_log=cache_log,
        )
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
    def has_windows(self) -> bool:
        """Whether some layers let go of blocks while their sequence runs."""
        return bool(self._window_managers)

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

    def match_prefix(self, sequence: SequenceState) -> list[list[int]]:
        """Return, per group, the table of the longest prefix that is cached in all of them.

        Null blocks stand in it for those that are not needed, negative numbers for blocks on the host, where
        loading them takes less than computing their tokens. All groups' matches are equally long, counted in
        positions. Of a swapped sequence: its own table.
        """
        if self.host_tier is not None:
            swapped = self.host_tier.swapped(sequence.sequence_id)
            if swapped is not None:
                return [
                    [
                        NULL_BLOCK if block is None else self._place(block.host_block, block.digest, group_id)
                        for block in table
                    ]
                    for group_id, table in enumerate(swapped.tables)
                ]
        if self.host_tier is None:
            return self.prefix_cache.match(sequence, self.pool.find)
        matches = self.prefix_cache.match(sequence, self._find)
        num_on_host = sum(block_id < 0 for match in matches for block_id in match)
        if num_on_host:
            cached = self.prefix_cache.match(sequence, self.pool.find)
            num_gained = self.matched_len(sequence, matches) - self.matched_len(sequence, cached)
            if not self.host_tier.prefers_load(num_on_host, num_gained):
                return cached
        return matches

    def matched_len(self, sequence: SequenceState, matches: Sequence[list[int]]) -> int:
        """Return how many positions of a sequence the matches of all groups hold."""
        if self.host_tier is not None:
            swapped = self.host_tier.swapped(sequence.sequence_id)
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
        if self.host_tier is not None:
            self._load(sequence, start, self.host_tier)
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
        num_own = [manager.num_partial(num_tokens) if writes else 0 for manager in self._managers]
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
        return sum(manager.num_partial(num_tokens) for manager in self._managers)

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
        # Rows that came back with unequal parts cached have let go of unequally much.
        for row in rows:
            self.drop_unseen(row)
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
        pool = self.pool
        if len(growing) > pool.num_free:
            return None
        new_ids: list[list[int]] = [[]] * self.num_groups
        for manager in growing:
            group_id = manager.group_id
            new_ids[group_id] = block_ids = pool.allocate(1, group_id)
            table.block_ids[group_id].extend(block_ids)
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
        if self.host_tier is not None:
            for manager in self._managers:
                step = manager.digests_per_block
                for digest in sequence.block_digests[(start // manager.block_len + 1) * step - 1 :: step]:
                    self.host_tier.forget(digest, manager.group_id)
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
            self.prefix_cache.register(sequence)
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

        It gives them back next, and no step in flight mentions it.
        """
        num_tokens = sequence.num_computed_tokens
        if (
            self.host_tier is None
            or not sequence.blocks_are_valid
            or not 0 < num_tokens < len(sequence.token_ids)
        ):
            return
        self.prefix_cache.register(sequence)
        tables: list[list[BlockToSwap | None]] = []
        for manager in self._managers:
            num_full = num_tokens // manager.block_len if self.prefix_cache.is_enabled else 0
            num_unseen, step = manager.spec.num_unseen(num_tokens), manager.digests_per_block
            block_ids = sequence.block_table.block_ids[manager.group_id]
            tables.append([None] * num_unseen)
            for idx in range(num_unseen, manager.spec.blocks_for(num_tokens)):
                digest = sequence.block_digests[(idx + 1) * step - 1] if idx < num_full else None
                tables[-1].append(BlockToSwap(block_ids[idx], digest))
        self.host_tier.swap_out(sequence.sequence_id, tables, num_tokens)

    def drop_swapped(self, sequence: SequenceState) -> None:
        """Give up what the host keeps of a sequence, if anything."""
        if self.host_tier is not None:
            self.host_tier.drop(sequence.sequence_id)

    def note_step(self, plan: StepPlan, num_decodes: int, device_s: float) -> None:
        """Note how long a step took: it tells what computing a sequence again would take."""
        if self.host_tier is not None:
            self.host_tier.note_step(plan.num_tokens, num_decodes, device_s)

    def take_transfers(self) -> tuple[tuple[BlockTransfer, ...], tuple[BlockTransfer, ...]]:
        """Return the stores and the loads of the plan that is made now."""
        return ((), ()) if self.host_tier is None else self.host_tier.take_transfers()

    def lose_transfers(self, plans: Iterable[StepPlan]) -> set[int]:
        """Forget what a failed step and those behind it were to move; return the blocks they were to load."""
        if self.host_tier is None:
            return set()
        lost = self.host_tier.lose_transfers(plans)
        for block_id in lost:
            self.pool.unregister(block_id)
        return lost

    def _find(self, digest: bytes, group_id: int) -> int | None:
        """Return the block with this content in a group, the negative of one on the host, or None."""
        block_id = self.pool.find(digest, group_id)
        if block_id is None and self.host_tier is not None:
            host_block = self.host_tier.find(digest, group_id)
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
        if self.prefix_cache.is_enabled and host_tier.swapped(sequence.sequence_id) is None:
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
            if self.prefix_cache.is_enabled:
                self.prefix_cache.register_blocks(manager, sequence, full)
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
        if self.host_tier is not None:
            self.host_tier.check()

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
        else:
            table.covered_len = min(
                len(block_ids) * manager.block_len
                for manager, block_ids in zip(self._managers, table.block_ids, strict=True)
            )
        sequence.plain_until = min(table.covered_len, sequence.max_len - 1)


def _first_difference(own: list[int], taken: list[int], num_blocks: int) -> int:
    """Return where the first blocks of two tables part; behind that some may be the same again.

    Rows that came back may have copies of their own of what was not cached, and share what was behind it.
    """
    for begin in range(0, num_blocks, _COMPARED_BLOCKS):
        end = min(begin + _COMPARED_BLOCKS, num_blocks)
        if own[begin:end] != taken[begin:end]:
            return next(idx for idx in range(begin, end) if own[idx] != taken[idx])
    return num_blocks
