"""Block tables of the running sequences, one table per KV group, and the slot mapping made from them.

Takes the plan's appends, gives the step's rows: whole, or what of them the device's own copy of the tables
lacks. The tables are kept on the host. Changed only by `runner`, in plan order: by the plan, and where the
device has no tables of its own by what beam searches choose. Knows no reference counts: that is
`loop/kv_pool.py`.
"""

from collections.abc import Sequence

import numpy as np

from asyncserve.errors import InvariantError
from asyncserve.gpu.staging import Int32Array, Int64Array
from asyncserve.kv_spec import NULL_BLOCK
from asyncserve.step import BlockAppend, ScheduledSequence


class BlockTable:
    """The tables of one KV group.

    Args:
        group_id: The group.
        num_slots: Rows.
        max_model_len: Most tokens of a sequence.
        block_len: Positions per block.
        num_blocks: Blocks in the pool, the null block included.
    """

    def __init__(
        self, *, group_id: int, num_slots: int, max_model_len: int, block_len: int, num_blocks: int
    ) -> None:
        self.group_id = group_id
        self.block_len = block_len
        self.num_blocks = num_blocks
        # One position more than the longest sequence: a scheduler may hold the block for the token after.
        self.max_blocks = -(-(max_model_len + 1) // block_len)
        self._table = np.zeros((num_slots, self.max_blocks), dtype=np.int32)
        self._lens = np.zeros(num_slots, dtype=np.int64)
        self._sent = np.zeros(num_slots, dtype=np.int64)
        self._first_unclean: dict[int, int] = {}

    def append(self, append: BlockAppend) -> None:
        """Add blocks to the end of a slot's table; those that begin it may be the null block.

        Raises:
            InvariantError: A block id is outside the pool or the table overflows.
        """
        slot = append.slot
        block_ids = append.block_ids
        if not block_ids:
            return
        begin = int(self._lens[slot])
        end = begin + len(block_ids)
        if end > self.max_blocks:
            raise InvariantError(f"slot {slot} gets {end} blocks; a table holds {self.max_blocks}")
        num_null = 0
        if not begin:
            num_null = next((idx for idx, each in enumerate(block_ids) if each != NULL_BLOCK), end)
        if min(block_ids[num_null:], default=1) <= NULL_BLOCK or max(block_ids) >= self.num_blocks:
            raise InvariantError(
                f"slot {slot} gets blocks {block_ids}; the pool has 1 … {self.num_blocks - 1}"
            )
        self._table[slot, begin:end] = block_ids
        self._lens[slot] = end
        self._first_unclean.setdefault(slot, begin)

    def release(self, slot: int) -> None:
        """Empty a slot's table."""
        self._table[slot, : self._lens[slot]] = NULL_BLOCK
        self._lens[slot] = 0
        self._sent[slot] = 0
        self._first_unclean.pop(slot, None)

    def take_unclean(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        """Return new blocks of the step's rows whose tail the step leaves unwritten; each block once.

        They may hold what an earlier owner left, non-finite numbers included, at positions that attention
        masks but still multiplies by zero.
        """
        unclean: list[int] = []
        if not self._first_unclean:
            return unclean
        for slot, start, num_tokens, _ in sequences:
            first = self._first_unclean.pop(slot, None)
            # What a branch begins with is another's, or becomes a copy of it whole.
            if first is not None and num_tokens:
                first = max(first, (start + num_tokens) // self.block_len)
                unclean.extend(self._table[slot, first : self._lens[slot]].tolist())
        return unclean

    def rows(self, slots: Int64Array, seq_lens: Int64Array) -> Int32Array:
        """Return the tables of the step's rows.

        Args:
            slots: `[num_rows]`.
            seq_lens: `[num_rows]`, tokens of each row once the step is done.

        Returns:
            `[num_rows, max_blocks]`, as wide as the longest row needs. Behind the blocks of its length a
            shorter row shows those it holds for later tokens, then the null block: no position there is
            to be attended.

        Raises:
            InvariantError: A table does not cover its row's length.
        """
        num_blocks = -(-seq_lens // self.block_len)
        if (num_blocks > self._lens[slots]).any():
            raise InvariantError(f"a table of group {self.group_id} is shorter than its sequence")
        return self._table[slots, : num_blocks.max()]

    def unsent(self, slots: Int64Array, seq_lens: Int64Array) -> tuple[Int64Array, Int64Array, Int32Array]:
        """Return what the device's tables of the step's rows lack; `mark_sent` when it is on its way.

        Args:
            slots: `[num_rows]`.
            seq_lens: `[num_rows]`, tokens of each row once the step is done.

        Returns:
            Per row how many blocks the device has and how many it lacks, `[num_rows]` each, and the lacking
            ones, row after row.

        Raises:
            InvariantError: A table does not cover its row's length.
        """
        lens = self._lens[slots]
        if (lens * self.block_len < seq_lens).any():
            raise InvariantError(f"a table of group {self.group_id} is shorter than its sequence")
        sent = self._sent[slots]
        counts = lens - sent
        total = int(counts.sum())
        if not total:
            return sent, counts, np.empty(0, np.int32)
        first = sent - (np.cumsum(counts) - counts)
        return (
            sent,
            counts,
            self._table[np.repeat(slots, counts), np.arange(total) + np.repeat(first, counts)],
        )

    def mark_sent(self, slots: Int64Array) -> None:
        """Take note that the device's tables of these rows are complete."""
        self._sent[slots] = self._lens[slots]

    def inherit(
        self, slots: Int64Array, parents: Int64Array, lens: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Let rows hold the full blocks of others in place of their own, all at once.

        Args:
            slots: `[num]`, the rows, distinct.
            parents: `[num]`, slot of the row whose blocks each takes.
            lens: `[num]`, positions computed of both.

        Returns:
            The blocks, `[num_partial]` each, whose content it takes and that it takes it with, of the rows
            whose last block is not full.
        """
        full = lens // self.block_len
        width = int(full.max()) + 1
        taken, own = self._table[parents, :width], self._table[slots, :width]
        is_full = np.arange(width) < full[:, None]
        self._table[slots, :width] = np.where(is_full, taken, own)
        is_partial = full * self.block_len < lens
        rows, columns = is_partial.nonzero()[0], full[is_partial]
        return taken[rows, columns].astype(np.int64), own[rows, columns].astype(np.int64)

    def slot_mapping(self, slots: Int64Array, positions: Int64Array) -> Int64Array:
        """Return `block_id * block_len + offset` of each (slot, position), `[num]`."""
        block_idx = positions // self.block_len
        # block_id * block_len + position - block_idx * block_len, with one product fewer.
        return (self._table[slots, block_idx] - block_idx) * self.block_len + positions
