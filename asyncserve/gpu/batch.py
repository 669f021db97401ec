"""The tensors of one step.

Dimension names used in every docstring of `gpu`:
`num_tokens` (positions computed this step), `num_rows` (sequences in the step), `num_samples` (rows that
sample), `num_slots`, `num_blocks`, `block_len`, `max_blocks` (longest block table of the step),
`num_heads`, `num_kv_heads`, `head_dim`, `hidden`, `vocab`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from asyncserve.gpu.block_tables import BlockTable
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Int64Array, Staging
from asyncserve.step import StepPlan


@dataclass(slots=True, kw_only=True)
class SampleRows:
    """The rows that sample. Padding stands behind them.

    Args:
        slots: `[num_samples] int32`; -1 for padding.
        positions: `[num_samples] int64`, absolute position that the row's next token will take.
        write_back: `[num_samples] int64`, where in `SlotTable.history` the token goes; for padding the cell
            that belongs to nobody.
        result_row: `[1] int32`, the row of the ring of results that the step writes; None if its results are
            copied out instead.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    write_back: torch.Tensor
    result_row: torch.Tensor | None


@dataclass(slots=True, kw_only=True)
class Padded:
    """What a batch with room for more than the step's rows says of them, as in a captured graph.

    Rows that are not there have no tokens and a `seq_lens` of 0; the tokens behind the last row's have slot
    -1. The host knows no lengths, so what is launched follows from shapes and from this.

    Args:
        num_long_rows: Most rows behind the leading ones of one token.
        first_long_row: `[1] int32`, the first of them.
    """

    num_long_rows: int
    first_long_row: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step, ready for the model. Rows stand in plan order: decode steps first, then prefill chunks.

    A branch is a row without tokens: it samples from the last token before it.

    Args:
        input_ids: `[num_tokens] int32`, rows concatenated.
        positions: `[num_tokens] int64`, absolute position of each token.
        query_start: `[num_rows + 1] int32`, where each row's tokens begin; the last entry is `num_tokens`, or
            of a padded batch where its padding begins. For attention kernels that take all rows at once.
        seq_lens: `[num_rows] int32`, tokens of the sequence once this step is done.
        slot_mapping: per KV group `[num_tokens] int64`, `block_id * block_len + offset` where each token's K
            and V are written; -1 for padding.
        block_tables: per KV group `[num_rows, max_blocks] int32`. Behind the blocks of its `seq_lens` a row
            shows those it holds for later tokens; then the null block 0 if the table was made on the host,
            anything if on the device, where it is as wide as the longest sequence there can be.
        sample_tokens: `[num_samples] int64`, index into `num_tokens` of each sampling row's last token.
        sample_rows: Where these rows' tokens come to stand.
        query_lens_host: per row, tokens computed this step (as `query_start`, on the host); empty
            if the batch is padded.
        seq_lens_host: per row, as `seq_lens`, or empty.
        num_decode_rows: How many leading rows compute a single token; of a padded batch the host does not
            know, and it is all of them.
        padded: None if the batch has just the step's rows. Otherwise the two tuples of the host are empty.
        is_decode: Whether each row is one token, and reads nothing that the step computes of another row.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]
    sample_tokens: torch.Tensor
    sample_rows: SampleRows
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    num_decode_rows: int
    padded: Padded | None = None
    is_decode: bool = False

    @property
    def num_tokens(self) -> int:
        """Positions computed this step."""
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        """Sequences in the step, padding included."""
        return self.seq_lens.shape[0]


class PlanRows(NamedTuple):
    """A plan's sequences as arrays, in its order.

    Args:
        slots: `[num_rows]`.
        starts: `[num_rows]`, first position computed.
        query_lens: `[num_rows]`, positions computed.
        seq_lens: `[num_rows]`, tokens of each once the step is done.
        sample_rows: `[num_samples]`, numbers of the rows that sample.
        num_decode_rows: How many leading rows compute a single token.
        is_decode: As in `Batch`. A sequence that begins may share a block that the same step fills.
    """

    slots: Int64Array
    starts: Int64Array
    query_lens: Int64Array
    seq_lens: Int64Array
    sample_rows: Int64Array
    num_decode_rows: int
    is_decode: bool


def plan_rows(plan: StepPlan) -> PlanRows:
    """Read the sequences of a plan, at least one."""
    rows = plan.rows
    num_rows = len(rows)
    slots, starts, query_lens = (
        np.array(column, np.int64) for column in (rows.slots, rows.starts, rows.lens)
    )
    samples = np.array(rows.samples, np.bool_)
    is_long = query_lens != 1
    has_long = bool(is_long.any())
    return PlanRows(
        slots=slots,
        starts=starts,
        query_lens=query_lens,
        seq_lens=starts + query_lens,
        sample_rows=samples.nonzero()[0],
        num_decode_rows=int(is_long.argmax()) if has_long else num_rows,
        is_decode=not has_long and not plan.admitted,
    )


def build_batch(
    rows: PlanRows, slots: SlotTable, block_tables: Sequence[BlockTable], staging: Staging
) -> Batch:
    """Make the step's tensors from the plan's rows and the persistent ones.

    The index arithmetic is done on the host in numpy, whose calls cost a fifth of torch's at these sizes.

    Args:
        rows: Of the plan, whose admissions and block appends are already applied.
        slots: Where input ids are gathered from.
        block_tables: One per KV group.
        staging: Takes everything to the device in one copy.

    Raises:
        InvariantError: A block table does not cover its row.
    """
    row_slots, starts, query_lens, seq_lens, sample_rows, num_decode_rows, is_decode = rows
    num_rows = len(row_slots)
    query_start = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start[1:])
    num_tokens = int(query_start[-1])
    if num_decode_rows == num_rows:
        token_slots, positions = row_slots, starts
    else:
        token_slots = np.repeat(row_slots, query_lens)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], query_lens)
    sample_slots = row_slots[sample_rows]
    uploads = staging.upload(
        [
            slots.flat_indices(token_slots, positions),
            positions,
            query_start.astype(np.int32),
            seq_lens.astype(np.int32),
            query_start[1:][sample_rows] - 1,  # of a branch, that of the row it stands behind
            sample_slots.astype(np.int32),
            seq_lens[sample_rows],
            slots.flat_indices(sample_slots, seq_lens[sample_rows]),
            *(table.slot_mapping(token_slots, positions) for table in block_tables),
            *(table.rows(row_slots, seq_lens) for table in block_tables),
        ]
    )
    mapped = 8 + len(block_tables)
    return Batch(
        input_ids=slots.gather(uploads[0]),
        positions=uploads[1],
        query_start=uploads[2],
        seq_lens=uploads[3],
        slot_mapping=tuple(uploads[8:mapped]),
        block_tables=tuple(uploads[mapped:]),
        sample_tokens=uploads[4],
        sample_rows=SampleRows(
            slots=uploads[5], positions=uploads[6], write_back=uploads[7], result_row=None
        ),
        query_lens_host=tuple(query_lens.tolist()),
        seq_lens_host=tuple(seq_lens.tolist()),
        num_decode_rows=num_decode_rows,
        is_decode=is_decode,
    )
