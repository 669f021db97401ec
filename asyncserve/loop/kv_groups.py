"""Blocks for sequences, in all KV groups at once.

`KVAllocator` answers the scheduler: how much of a sequence is cached, take its blocks, extend, release. It
asks one manager per group; a manager knows what its kind of layer needs of the past and owns the group's
pool. What is given to one group is given to all or to none. Changes a sequence's block table and digests,
nothing else of it.
"""

from collections.abc import Iterable, Sequence

from asyncserve.errors import ConfigError
from asyncserve.kv_spec import KVGroup
from asyncserve.loop.kv_pool import KVBlockPool
from asyncserve.loop.prefix_hash import block_digest, root_digest
from asyncserve.loop.sequence import SequenceState
from asyncserve.step import BlockCopy


class FullAttentionManager:
    """Blocks of one group of full-attention layers: every position is kept to the end."""

    __slots__ = ("block_len", "group_id", "pool")

    def __init__(self, group: KVGroup) -> None:
        self.group_id = group.group_id
        self.block_len = group.spec.block_len
        self.pool = KVBlockPool(group.num_blocks)

    @property
    def capacity_len(self) -> int:
        """Positions the whole pool holds."""
        return self.pool.num_usable * self.block_len

    def match(self, digests: Sequence[bytes], max_blocks: int) -> list[int]:
        """Return the cached blocks of the longest known prefix, at most `max_blocks`."""
        find = self.pool.find
        block_ids: list[int] = []
        for digest in digests[:max_blocks]:
            block_id = find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_missing(self, num_held: int, num_tokens: int) -> int:
        """Return how many blocks a table of `num_held` lacks to cover `num_tokens` positions."""
        return -(-num_tokens // self.block_len) - num_held


class KVAllocator:
    """Gives and takes the blocks of sequences.

    Args:
        groups: With their pool sizes; all of one block length.
        enable_prefix_caching: Register full blocks, and find them.

    Raises:
        ConfigError: No group, or groups of different block lengths.
    """

    def __init__(self, groups: Sequence[KVGroup], *, enable_prefix_caching: bool) -> None:
        block_lens = {group.spec.block_len for group in groups}
        if len(block_lens) != 1:
            raise ConfigError(f"KV groups need one common block length, got {sorted(block_lens)}")
        (self.block_len,) = block_lens
        self.num_groups = len(groups)
        self._managers = tuple(FullAttentionManager(group) for group in groups)
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def capacity_len(self) -> int:
        """Positions of the longest sequence that fits when it is alone."""
        return min(manager.capacity_len for manager in self._managers)

    @property
    def num_usable(self) -> int:
        """Blocks that can be held, all groups together."""
        return sum(manager.pool.num_usable for manager in self._managers)

    @property
    def num_used(self) -> int:
        """Blocks held by a sequence."""
        return sum(manager.pool.num_usable - manager.pool.num_free for manager in self._managers)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be reused."""
        return sum(manager.pool.num_cached for manager in self._managers)

    @property
    def num_saved(self) -> int:
        """Blocks that would be held beyond those that are, if sequences shared none."""
        return sum(manager.pool.num_saved for manager in self._managers)

    @property
    def has_free_blocks(self) -> bool:
        """Whether every group has a free block."""
        return all(manager.pool.num_free for manager in self._managers)

    def hash_blocks(self, sequence: SequenceState, num_blocks: int) -> None:
        """Compute the digests of the sequence's first `num_blocks` blocks, all of known tokens."""
        digests = sequence.block_digests
        if len(digests) >= num_blocks:
            return
        parent = digests[-1] if digests else root_digest(sequence.tokenized.request.cache_salt)
        token_ids, block_len = sequence.token_ids, self.block_len
        for start in range(len(digests) * block_len, num_blocks * block_len, block_len):
            parent = block_digest(parent, token_ids[start : start + block_len])
            digests.append(parent)

    def reusable_blocks(self, sequence: SequenceState) -> int:
        """Return how many leading blocks the sequence could take from the cache if all were there.

        At least one token is left to compute, because the next one is sampled from its logits. Prompt
        tokens to be scored are computed, not looked up.
        """
        if not self.enable_prefix_caching or sequence.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self.block_len

    def match_prefix(self, sequence: SequenceState) -> list[list[int]]:
        """Return, per group, the cached blocks the sequence can start with: the same number in each."""
        max_blocks = self.reusable_blocks(sequence)
        self.hash_blocks(sequence, max_blocks)
        matches: list[list[int]] = []
        for manager in self._managers:
            matches.append(manager.match(sequence.block_digests, max_blocks))
            max_blocks = len(matches[-1])
        return [match[:max_blocks] for match in matches]

    def take(self, sequence: SequenceState, matches: Sequence[list[int]], num_spare: int) -> bool:
        """Take cached blocks, and new ones for all the sequence's other known tokens.

        Args:
            matches: What `match_prefix` gave.
            num_spare: Blocks of each group that must stay free.

        Returns:
            False if there are too few; then nothing has changed.
        """
        num_tokens = len(sequence.token_ids)
        for manager, match in zip(self._managers, matches, strict=True):
            pool = manager.pool
            num_revived = sum(map(pool.is_free, match))
            needed = manager.num_missing(len(match), num_tokens) + num_revived
            if needed + num_spare > pool.num_free:
                return False
        table = sequence.block_table
        for manager, match in zip(self._managers, matches, strict=True):
            # First hold what was found, so that it is not given out as new.
            for block_id in match:
                manager.pool.acquire(block_id)
            block_ids = table.block_ids[manager.group_id]
            block_ids.extend(match)
            block_ids.extend(manager.pool.allocate(manager.num_missing(len(match), num_tokens)))
        table.covered_len = len(table.block_ids[0]) * self.block_len
        sequence.num_registered_blocks = len(matches[0])
        sequence.num_computed_tokens = len(matches[0]) * self.block_len
        return True

    def fork(self, leader: SequenceState, branch: SequenceState, num_spare: int) -> list[BlockCopy] | None:
        """Let a branch begin with all that is computed of the leader, whose known tokens it has.

        It shares the leader's full blocks and has its own in place of the one that is not full, unless it is
        certain to write nothing.

        Args:
            num_spare: Blocks of each group that must stay free.

        Returns:
            What is to be copied once the leader's tokens are computed; None, and no change, for lack of
            blocks.
        """
        num_full, rest_len = divmod(leader.num_computed_tokens, self.block_len)
        writes = len(branch.token_ids) + 1 < branch.max_len
        num_own = int(rest_len > 0 and writes)
        if any(num_own and manager.pool.num_free < num_own + num_spare for manager in self._managers):
            return None
        copies = []
        for manager in self._managers:
            block_ids = leader.block_table.block_ids[manager.group_id]
            shared = block_ids[:num_full] if writes else block_ids
            manager.pool.share(shared)
            own = manager.pool.allocate(num_own)
            copies += [BlockCopy(block_ids[num_full], block_id) for block_id in own]
            branch.block_table.block_ids[manager.group_id].extend(shared + own)
        branch.block_table.covered_len = leader.block_table.covered_len
        branch.block_digests = leader.block_digests[:]
        branch.num_registered_blocks = leader.num_registered_blocks
        branch.num_computed_tokens = leader.num_computed_tokens
        return copies

    def extend(self, sequence: SequenceState) -> list[int] | None:
        """Add one block in every group and return their ids by group; None, and no change, without any."""
        if not self.has_free_blocks:
            return None
        new_ids = []
        table = sequence.block_table
        for manager in self._managers:
            (block_id,) = manager.pool.allocate(1)
            table.block_ids[manager.group_id].append(block_id)
            new_ids.append(block_id)
        table.covered_len += self.block_len
        return new_ids

    def register(self, sequence: SequenceState) -> None:
        """Make the sequence's full blocks findable, as far as planned steps fill them with known tokens."""
        if not self.enable_prefix_caching:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_len
        if num_full <= sequence.num_registered_blocks:
            return
        self.hash_blocks(sequence, num_full)
        for manager in self._managers:
            block_ids = sequence.block_table.block_ids[manager.group_id]
            for block_idx in range(sequence.num_registered_blocks, num_full):
                manager.pool.register(block_ids[block_idx], sequence.block_digests[block_idx])
        sequence.num_registered_blocks = num_full

    def invalidate(self, sequence: SequenceState, start: int) -> set[tuple[int, int]]:
        """Make the sequence's blocks from position `start` on unfindable: what they hold is wrong.

        Returns:
            Those blocks, as (group_id, block_id).
        """
        invalid = set()
        for manager in self._managers:
            for block_id in sequence.block_table.block_ids[manager.group_id][start // self.block_len :]:
                manager.pool.unregister(block_id)
                invalid.add((manager.group_id, block_id))
        return invalid

    def holds_any(self, sequence: SequenceState, blocks: set[tuple[int, int]]) -> bool:
        """Return whether one of `blocks`, given as (group_id, block_id), is in the sequence's tables."""
        return any(
            (group_id, block_id) in blocks
            for group_id, block_ids in enumerate(sequence.block_table.block_ids)
            for block_id in block_ids
        )

    def release(self, sequence: SequenceState) -> None:
        """Give back every block; those that are full stay findable until they are given out anew."""
        if sequence.blocks_are_valid:
            self.register(sequence)
        for manager in self._managers:
            manager.pool.release(sequence.block_table.block_ids[manager.group_id])

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Verify every pool against the tables of the sequences that hold a slot.

        Raises:
            InvariantError: An invariant does not hold.
        """
        holders = list(sequences)
        for manager in self._managers:
            manager.pool.check(sequence.block_table.block_ids[manager.group_id] for sequence in holders)
