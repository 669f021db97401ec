"""The prefix cache as sequences see it: digests of their blocks, which are found, which become findable.

`PrefixCache` computes the chained digests of a sequence's full blocks, finds the longest prefix that is
cached in every KV group, and registers in the pool what planned steps fill. Takes sequences, changes their
digests and what is registered of them, logs it to `CacheLog`. Knows neither who holds a block nor when one is
given out: that is the pool's; nor what a prefix must consist of: that is the managers'.
"""

from collections.abc import Iterable, Sequence

from asyncserve.kv_spec import NULL_BLOCK, SlidingWindow
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.kv_managers import Find, FullAttentionManager
from asyncserve.loop.kv_pool import KVBlockPool
from asyncserve.loop.sequence import SequenceState
from asyncserve.token_path import block_digest, extend_digests, root_digest

_LEAST_HASHED = 64
"""Aligned blocks of a prompt that are hashed at once: 0.2 ms."""


class PrefixCache:
    """Finds and registers the blocks of sequences.

    Args:
        managers: Of all KV groups.
        pool: What they share.
        block_len: Positions of a digest.
        align_len: Matches are a multiple of it.
        is_enabled: Otherwise nothing is found or registered.
        hash_seed: Of the digests.
        cache_log: Is told what becomes findable; None: nobody wants to know.

    Attributes:
        block_len: As given.
        is_enabled: As given.
    """

    def __init__(
        self,
        managers: Sequence[FullAttentionManager],
        pool: KVBlockPool,
        *,
        block_len: int,
        align_len: int,
        is_enabled: bool,
        hash_seed: str,
        cache_log: CacheLog | None,
    ) -> None:
        self._managers = managers
        self._pool = pool
        self.block_len = block_len
        self._align_len = align_len
        self.is_enabled = is_enabled
        self._root_digest = root_digest(hash_seed)
        self._cache_log = cache_log

    def hash_blocks(self, sequence: SequenceState, num_blocks: int) -> None:
        """Compute the digests of the sequence's first `num_blocks` times `block_len` tokens, all known."""
        digests = sequence.block_digests
        if len(digests) >= num_blocks:
            return
        token_ids, block_len = sequence.token_ids, self.block_len
        if not digests:
            cache_salt = sequence.tokenized.request.cache_salt
            digests.append(block_digest(self._root_digest, token_ids[:block_len], cache_salt))
        extend_digests(digests, token_ids, num_blocks, block_len)

    def reusable_blocks(self, sequence: SequenceState) -> int:
        """Return how many times `block_len` leading tokens the cache could spare if all were there.

        At least one token is left to compute, because the next one is sampled from its logits. Prompt
        tokens to be scored are computed, not looked up.
        """
        if not self.is_enabled or sequence.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self.block_len

    def fills_next(self, other: SequenceState, sequence: SequenceState) -> bool:
        """Return whether the block that another sequence fills next is one of this sequence's own prefix.

        It must know that many tokens. Digests are computed in doubled steps, as far as both are alike.
        """
        num_blocks = other.num_registered_blocks + 1
        if num_blocks * self.block_len > len(other.token_ids):
            return False
        self.hash_blocks(other, num_blocks)
        num_alike = 0
        while num_alike < num_blocks:
            num_alike = min(num_blocks, max(1, 2 * num_alike, len(sequence.block_digests)))
            self.hash_blocks(sequence, num_alike)
            if sequence.block_digests[num_alike - 1] != other.block_digests[num_alike - 1]:
                return False
        return True

    def match(self, sequence: SequenceState, find: Find) -> list[list[int]]:
        """Return, per group, the table of the longest prefix that is found in all of them.

        Null blocks stand in it for those that are not needed, negative numbers for blocks on the host. All
        groups' matches are equally long, counted in positions.
        """
        max_blocks = self.reusable_blocks(sequence)
        matches: list[list[int]] = [[] for _ in self._managers]
        if max_blocks == 0:
            return matches
        max_len = self._hash_while_found(sequence, max_blocks, find) * self.block_len
        # A group that finds less shortens the hit for all; until none does. Full attention comes first to
        # its end: each prefix of a match is one. That of a window may be none, so it looks again.
        is_shorter = True
        while is_shorter:
            is_shorter = False
            for manager in self._managers:
                match = matches[manager.group_id]
                if len(match) * manager.block_len != max_len:
                    match = matches[manager.group_id] = manager.match(sequence.block_digests, max_len, find)
                if len(match) * manager.block_len < max_len:
                    max_len = len(match) * manager.block_len
                    is_shorter = True
        return matches

    def _hash_while_found(self, sequence: SequenceState, max_blocks: int, find: Find) -> int:
        """Compute the digests that `match` may need, and return of how many blocks.

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
            if len(manager.match(sequence.block_digests, hashed_len, find)) * manager.block_len < hashed_len:
                return num_blocks
            num_blocks *= 2
        self.hash_blocks(sequence, max_blocks)
        return max_blocks

    def register(self, sequence: SequenceState) -> None:
        """Make the sequence's full blocks findable, as far as planned steps fill them with known tokens."""
        if not self.is_enabled:
            return
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_len
        num_registered = sequence.num_registered_blocks
        if num_full <= num_registered:
            return
        self.hash_blocks(sequence, num_full)
        for manager in self._managers:
            step = manager.digests_per_block
            self.register_blocks(manager, sequence, range(num_registered // step, num_full // step))
        sequence.num_registered_blocks = num_full

    def register_blocks(
        self, manager: FullAttentionManager, sequence: SequenceState, block_idxs: Iterable[int]
    ) -> None:
        """Make blocks of a sequence's table findable, whose content is known; null blocks are passed over.

        So are blocks before them that were not, since others had the same content, if those are gone now: a
        match would end there, and whoever is told of a block drops it if its parent is unknown. What a row
        with bad logits had forgotten may come back so: by a row that shares it and whose logits are good.
        """
        register, step = self._pool.register, manager.digests_per_block
        block_ids, digests = sequence.block_table.block_ids[manager.group_id], sequence.block_digests
        find, group_id = self._pool.find, manager.group_id
        block_idxs = list(block_idxs)
        first = block_idxs[0] if block_idxs else 0
        while (
            first and block_ids[first - 1] != NULL_BLOCK and find(digests[first * step - 1], group_id) is None
        ):
            first -= 1
            block_idxs.insert(0, first)
        new: list[int] = []
        for block_idx in block_idxs:
            block_id = block_ids[block_idx]
            if block_id != NULL_BLOCK and register(block_id, digests[(block_idx + 1) * step - 1]):
                new.append(block_idx)
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
