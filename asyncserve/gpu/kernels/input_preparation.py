"""A step's inputs, made on the device from what the host sends of it and the rows that persist there.

The host sends one array of int32, whose fields have room for the rows of the launch
(`field_offsets`): per row its slot, its length and where its tokens begin, the rows that sample, and per KV
group the blocks its table does not have yet. One program a row appends these blocks to the persistent table,
copies what the row needs of it to the step's own compact table, and makes its tokens' ids, positions and
cache slots; the row's number is also that of the sampling row it fills in. A last program fills the tokens
behind the last row's, so nothing depends on a number the host would have to know: a CUDA graph can hold it.
Plain numpy beside it: `build_batch` in `gpu/batch.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

HEADER_LEN = 8
"""Rows, tokens, sampling rows, the row of the ring of results that the step writes, leading rows of one
token; the rest keeps the fields aligned."""


class FieldOffsets(NamedTuple):
    """Where the fields of the packed array begin, in elements, each at 16 bytes: kernels are compiled for it.

    Args:
        stride: Elements that a field has room for, at least one more than there are rows.
        slots: `[num_rows]`.
        seq_lens: `[num_rows]`; 0 for padding.
        query_start: `[num_rows + 1]`; padding begins where the tokens end.
        sample_rows: `[num_rows]`, numbers of the rows that sample.
        groups: per KV group: `[num_rows]`, how many blocks the device's table of the row has already, then, a
            stride further, `[num_rows + 1]`, where in the packed array the row's new ones stand.
        blocks: The new blocks of all rows and groups.
    """

    stride: int
    slots: int
    seq_lens: int
    query_start: int
    sample_rows: int
    groups: tuple[int, ...]
    blocks: int


def field_offsets(num_rows: int, num_groups: int) -> FieldOffsets:
    """Return the layout for a launch with room for `num_rows` rows."""
    stride = num_rows // 4 * 4 + 4
    fields = [HEADER_LEN + field * stride for field in range(5 + 2 * num_groups)]
    slots, seq_lens, query_start, sample_rows = fields[:4]
    return FieldOffsets(
        stride=stride,
        slots=slots,
        seq_lens=seq_lens,
        query_start=query_start,
        sample_rows=sample_rows,
        groups=tuple(fields[4:-1:2]),
        blocks=fields[-1],
    )


@dataclass(slots=True, kw_only=True)
class PreparedInputs:
    """What the kernel made; shapes and meanings as in `Batch` and `SampleRows`, padding included."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    sample_tokens: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    write_back: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]


def prepare_inputs(
    packed: torch.Tensor,
    history: torch.Tensor,
    tables: Sequence[torch.Tensor],
    *,
    num_rows: int,
    num_tokens: int,
    history_width: int,
    block_lens: Sequence[int],
) -> PreparedInputs:
    """Launch the preparation of a step.

    Args:
        packed: `[≥ blocks] int32`, as `field_offsets` lays it out.
        history: `[num_slots * history_width + 1] int32`, the tokens of every slot.
        tables: per KV group `[num_slots, max_blocks] int32`, contiguous; new blocks are written.
        num_rows: Rows there is room for.
        num_tokens: Tokens there is room for.
        history_width: Tokens a slot has room for.
        block_lens: per KV group, positions per block.
    """
    device = packed.device
    offsets = field_offsets(num_rows, len(tables))
    input_ids = torch.empty(num_tokens, dtype=torch.int32, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    # Not views of one tensor: where they begin would depend on the number of rows, and kernels are compiled
    # for the alignment of what they are given.
    sample_tokens, sample_positions, write_back = (
        torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(3)
    )
    sample_slots = torch.empty(num_rows, dtype=torch.int32, device=device)
    slot_mapping = []
    compact_tables = []
    for group_id, (table, block_len) in enumerate(zip(tables, block_lens, strict=True)):
        mapping = torch.empty(num_tokens, dtype=torch.int64, device=device)
        compact = torch.empty((num_rows, table.shape[1]), dtype=torch.int32, device=device)
        slot_mapping.append(mapping)
        compact_tables.append(compact)
        _prepare_rows[(num_rows + 1,)](
            packed,
            history,
            table,
            input_ids,
            positions,
            sample_tokens,
            sample_positions,
            write_back,
            sample_slots,
            mapping,
            compact,
            num_rows,
            num_tokens,
            history_width,
            history.shape[0] - 1,
            table.shape[1],
            offsets.stride,
            offsets.groups[group_id],
            IS_FIRST=group_id == 0,
            BLOCK_LEN=block_len,
            HEADER_LEN=HEADER_LEN,
            TILE_LEN=512,
            num_warps=4,
            **launch_options(),
        )
    return PreparedInputs(
        input_ids=input_ids,
        positions=positions,
        sample_tokens=sample_tokens,
        sample_slots=sample_slots,
        sample_positions=sample_positions,
        write_back=write_back,
        slot_mapping=tuple(slot_mapping),
        block_tables=tuple(compact_tables),
    )


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "history_width",
        "history_end",
        "max_blocks",
        "stride",
        "group_offset",
    ]
)
def _prepare_rows(
    packed_ptr: tl.tensor,
    history_ptr: tl.tensor,
    table_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    sample_tokens_ptr: tl.tensor,
    sample_positions_ptr: tl.tensor,
    write_back_ptr: tl.tensor,
    sample_slots_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    compact_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    history_width: tl.tensor,
    history_end: tl.tensor,
    max_blocks: tl.tensor,
    stride: tl.tensor,
    group_offset: tl.tensor,
    IS_FIRST: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    HEADER_LEN: tl.constexpr,
    TILE_LEN: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    tile = tl.arange(0, TILE_LEN)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    num_live = tl.load(packed_ptr)

    if row >= num_rows:
        # Tokens of nobody: their K and V are not written, and what is computed of them is not looked at.
        for first in range(tl.load(packed_ptr + 1), num_tokens, TILE_LEN):
            token = first + tile
            exists = token < num_tokens
            if IS_FIRST:
                tl.store(input_ids_ptr + token, tl.zeros([TILE_LEN], tl.int32), mask=exists)
                tl.store(positions_ptr + token, tl.zeros([TILE_LEN], tl.int64), mask=exists)
            tl.store(slot_mapping_ptr + token, tl.full([TILE_LEN], -1, tl.int64), mask=exists)
        return

    if IS_FIRST:
        # The sampling row of this number.
        sample_slot = row * 0 - 1
        sample_token = row.to(tl.int64) * 0
        sample_position = row.to(tl.int64) * 0
        write_back = sample_position + history_end
        if row < tl.load(packed_ptr + 2):
            sampled = tl.load(packed_ptr + HEADER_LEN + 3 * stride + row)
            sample_slot = tl.load(packed_ptr + HEADER_LEN + sampled)
            sample_position = tl.load(packed_ptr + HEADER_LEN + stride + sampled).to(tl.int64)
            sample_token = (tl.load(packed_ptr + HEADER_LEN + 2 * stride + sampled + 1) - 1).to(tl.int64)
            write_back = sample_slot.to(tl.int64) * history_width + sample_position
        tl.store(sample_slots_ptr + row, sample_slot)
        tl.store(sample_tokens_ptr + row, sample_token)
        tl.store(sample_positions_ptr + row, sample_position)
        tl.store(write_back_ptr + row, write_back)

    if row >= num_live:
        return
    slot = tl.load(packed_ptr + HEADER_LEN + row).to(tl.int64)
    seq_len = tl.load(packed_ptr + HEADER_LEN + stride + row)
    query_begin = tl.load(packed_ptr + HEADER_LEN + 2 * stride + row)
    query_len = tl.load(packed_ptr + HEADER_LEN + 2 * stride + row + 1) - query_begin
    num_held = tl.load(packed_ptr + group_offset + row)
    new_begin = tl.load(packed_ptr + group_offset + stride + row)
    num_new = tl.load(packed_ptr + group_offset + stride + row + 1) - new_begin
    row_table_ptr = table_ptr + slot * max_blocks
    new_ptr = packed_ptr + new_begin - num_held

    # A block the table has not yet is taken from the packed array, so that nothing just stored is read.
    for first in range(0, tl.maximum(tl.cdiv(seq_len, BLOCK_LEN), num_held + num_new), TILE_LEN):
        index = first + tile
        is_new = (index >= num_held) & (index < num_held + num_new)
        held = tl.load(row_table_ptr + index, mask=index < num_held, other=0)
        block = tl.load(new_ptr + index, mask=is_new, other=0)
        tl.store(row_table_ptr + index, block, mask=is_new)
        tl.store(
            compact_ptr + row.to(tl.int64) * max_blocks + index,
            tl.where(is_new, block, held),
            mask=index < num_held + num_new,
        )

    for first in range(0, query_len, TILE_LEN):
        query = first + tile
        exists = query < query_len
        position = seq_len - query_len + query
        index = position // BLOCK_LEN
        is_new = index >= num_held
        held = tl.load(row_table_ptr + index, mask=exists & (index < num_held), other=0)
        block = tl.load(new_ptr + index, mask=exists & is_new, other=0)
        block = tl.where(is_new, block, held).to(tl.int64)
        token = query_begin + query
        tl.store(slot_mapping_ptr + token, block * BLOCK_LEN + position % BLOCK_LEN, mask=exists)
        if IS_FIRST:
            known = tl.load(history_ptr + slot * history_width + position, mask=exists, other=0)
            tl.store(input_ids_ptr + token, known, mask=exists)
            tl.store(positions_ptr + token, position.to(tl.int64), mask=exists)
