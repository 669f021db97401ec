"""What each kind of layer needs of the past: one manager per KV group.

A manager says which blocks that are found make a prefix for its layers, and how long a table is when a
sequence begins to compute. It takes digests and lengths, gives tables and counts. Knows no sequence and takes
no blocks: `KVAllocator` does, for all groups at once.
"""

from collections.abc import Callable, Sequence

from asyncserve.kv_spec import NULL_BLOCK, FullAttention, KVGroup, RecurrentState, SlidingWindow

Find = Callable[[bytes, int], int | None]
"""Returns where the block of a digest in a group is, or None."""


class FullAttentionManager:
    """Blocks of one group of full-attention layers: every position is kept to the end.

    Args:
        group_id: The group.
        spec: What its layers keep.
        digest_len: Positions of one digest; a block has one or several.
        align_len: Matches are a multiple of it, which is one of the block's length.
    """

    __slots__ = ("align_len", "block_len", "digests_per_block", "group_id", "spec")

    spec: FullAttention | RecurrentState

    def __init__(
        self,
        group_id: int,
        spec: FullAttention | RecurrentState,
        *,
        digest_len: int,
        align_len: int,
    ) -> None:
        self.group_id = group_id
        self.spec = spec
        self.block_len = spec.block_len
        self.digests_per_block = spec.block_len // digest_len
        self.align_len = align_len

    def match(self, digests: Sequence[bytes], max_len: int, find: Find) -> list[int]:
        """Return the table of the longest cached prefix of at most `max_len` positions."""
        group_id, step = self.group_id, self.digests_per_block
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

    def num_partial(self, num_tokens: int) -> int:
        """Return how many blocks of so many tokens the next one may write: those not full; a state, all."""
        return self.spec.blocks_for(num_tokens) - num_tokens // self.block_len


class SlidingWindowManager(FullAttentionManager):
    """Blocks of one group of window layers: those that the window has passed are given back."""

    __slots__ = ()

    spec: SlidingWindow

    def match(self, digests: Sequence[bytes], max_len: int, find: Find) -> list[int]:
        """Return the table of the longest prefix of which the window's blocks are cached."""
        group_id, step = self.group_id, self.digests_per_block
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

    def match(self, digests: Sequence[bytes], max_len: int, find: Find) -> list[int]:
        """Return nothing: a state of the end of a prefix is overwritten by the next token's."""
        return []


def manager_class(group: KVGroup) -> type[FullAttentionManager]:
    """Return the kind of manager that a group's layers need."""
    if isinstance(group.spec, RecurrentState):
        return RecurrentStateManager
    return SlidingWindowManager if isinstance(group.spec, SlidingWindow) else FullAttentionManager
