"""Prefill attention over a paged KV cache: rows of several query tokens, at any position of their sequences.

The step's own K and V are in the cache already, so a cached beginning, an earlier chunk and the chunk itself
are read alike, by the block table. A program takes one KV head and a tile of one row's queries; the query
heads that share the KV head stand beside each other in the M side of the products. It runs over the positions
before the tile without a mask, and with one over those at the edge of the window and at the diagonal.
Which row a program serves it finds itself from `query_start`: the host sends nothing, and a CUDA graph can
hold a step whose rows are of any length.
Plain torch beside it: `gpu/attention/reference.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from asyncserve.gpu.kernels.paging import (
    LOG2_E,
    as_factors,
    load_blocks,
    load_tile,
    product_dtype,
    softcapped,
)

_ROWS_AT_ONCE = 256
"""Whose beginnings a program looks at together: 1 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How the work is cut.

    Args:
        tile_rows: Queries times the heads of a group at once, a power of two of at least 16.
        tile_len: Positions at once, a power of two of at least 16.
        num_warps: Of a program.
        num_stages: Tiles of positions in flight, the one being computed included.
    """

    tile_rows: int
    tile_len: int
    num_warps: int
    num_stages: int


def prefill_config(*, head_dim: int, dtype: torch.dtype, shared_bytes: int) -> PrefillConfig:
    """Return the way that suits heads and device.

    Args:
        head_dim: Elements per head.
        dtype: Of queries and cache, the wider one.
        shared_bytes: Shared memory that a program may have on the device.
    """
    padded_dim: int = triton.next_power_of_2(head_dim)
    if dtype.itemsize > 2:
        # No tensor cores: what fits registers and shared memory.
        tile_len = 32 if padded_dim <= 128 else 16
        return PrefillConfig(tile_rows=32, tile_len=tile_len, num_warps=4, num_stages=2)
    # On an H200, heads of 128: the quickest of nine ways for one prompt of 1,024 tokens and for 16 of 512,
    # within 3 % of the quickest for one of 8,192. It takes 80 KiB; smaller devices have 99 or 163.
    config = PrefillConfig(tile_rows=64, tile_len=64, num_warps=4, num_stages=2)
    num_rows = config.tile_rows + 2 * config.tile_len * config.num_stages
    if num_rows * padded_dim * dtype.itemsize <= shared_bytes and padded_dim <= 128:
        return config
    return PrefillConfig(tile_rows=64, tile_len=32, num_warps=4, num_stages=2)


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    first_row: int | torch.Tensor,
    num_rows: int,
    first_token: int = 0,
    config: PrefillConfig,
    skips_single: bool = False,
    window_len: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attend for the rows `first_row … first_row + num_rows - 1` of a step.

    A row without tokens is left alone. Tokens behind those of the last row are not written.

    Args:
        q: `[num_tokens, num_heads, head_dim]` of all rows; tokens and heads at any distance, elements side
            by side.
        keys: `[num_blocks, num_kv_heads, block_len, head_dim]`, contiguous; the step's own are in it.
        values: As `keys`.
        block_table: `[all rows, max_blocks] int32`, rows at any distance.
        seq_lens: `[all rows] int32`, tokens of the sequence once the step is done.
        query_start: `[all rows + 1] int32`, where each row's tokens begin.
        out: `[num_tokens, num_heads, head_dim]`, contiguous; written from `first_token` on.
        scale: Factor on the scores.
        first_row: First row to serve; on the device, `[1] int32`, if the host does not know.
        num_rows: How many at most; fewer, if they are the last.
        first_token: Where their tokens begin; if the host does not know, any token before.
        config: How the work is cut.
        skips_single: Leave rows of one token alone: `paged_decode` serves them.
        window_len: Positions a query sees, itself included; None for all.
        softcap: A score s becomes softcap * tanh(s / softcap); None leaves it.
        sinks: `[num_heads] float32`, a score of each head that takes probability and gives no value.
        scales: What K and V of an 8-bit cache are multiplied by, `[num_kv_heads] float32` each; None for 1.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_len = keys.shape[1:3]
    group_len = num_heads // num_kv_heads
    tile_rows = max(config.tile_rows, triton.next_power_of_2(group_len))
    tile_queries = tile_rows // group_len
    # Each row has at most one tile more than its share of whole ones.
    num_tiles = (num_tokens - first_token) // tile_queries + num_rows
    _prefill_kernel[(num_kv_heads, num_tiles)](
        q,
        keys,
        values,
        block_table,
        seq_lens,
        query_start,
        out,
        sinks,
        *((None, None) if scales is None else scales),
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        block_table.shape[1] - 1,
        first_row,
        num_rows,
        seq_lens.shape[0],
        KV_HEADS=num_kv_heads,
        GROUP_LEN=group_len,
        HEAD_DIM=head_dim,
        BLOCK_LEN=block_len,
        WINDOW_LEN=window_len or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=scales is not None,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        TILE_ROWS=tile_rows,
        TILE_QUERIES=tile_queries,
        TILE_LEN=config.tile_len,
        DOT_DTYPE=product_dtype(q.dtype, keys.dtype),
        IS_FIRST_ON_DEVICE=isinstance(first_row, torch.Tensor),
        LEAST_QUERIES=2 if skips_single else 1,
        ROWS_AT_ONCE=_ROWS_AT_ONCE,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(),
    )


@triton.jit(
    do_not_specialize=["table_stride", "last_column", "first_row", "num_rows", "num_all_rows"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_start_ptr"],
)
def _prefill_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    last_column: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    num_all_rows: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WINDOW_LEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_LEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    IS_FIRST_ON_DEVICE: tl.constexpr,
    LEAST_QUERIES: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    # A row's last tiles see the most positions: they begin first, so that none is left alone at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    if IS_FIRST_ON_DEVICE:
        first_row = tl.load(first_row)
    num_rows = tl.minimum(num_rows, num_all_rows - first_row)
    if num_rows <= 0:
        return
    # Row i (of the served ones) owns the tiles from (its first token) // TILE_QUERIES + i on.
    base = tl.load(query_start_ptr + first_row)
    num_before = num_rows * 0
    for first in range(0, num_rows, ROWS_AT_ONCE):
        served = first + tl.arange(0, ROWS_AT_ONCE)
        exists = served < num_rows
        begins = tl.load(query_start_ptr + first_row + served, mask=exists, other=0)
        is_before = exists & ((begins - base) // TILE_QUERIES + served <= tile)
        num_before += tl.sum(is_before.to(tl.int32), 0)
    low = num_before - 1
    row = first_row + low
    query_begin = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_begin
    seq_len = tl.load(seq_lens_ptr + row)
    first_query = (tile - (query_begin - base) // TILE_QUERIES - low) * TILE_QUERIES
    if (first_query >= query_len) | (query_len < LEAST_QUERIES):
        return

    if HAS_SCALES:
        # A factor on the scores as the other is; V's is one on the output.
        scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head)
    start = seq_len - query_len
    tile_rows = tl.arange(0, TILE_ROWS)
    queries = first_query + tile_rows // GROUP_LEN
    heads = kv_head * GROUP_LEN + tile_rows % GROUP_LEN
    is_row = (queries < query_len) & (tile_rows < TILE_QUERIES * GROUP_LEN)
    tokens = (query_begin + queries).to(tl.int64)
    elements = tl.arange(0, PADDED_DIM)
    is_element = elements < HEAD_DIM
    mask = is_row[:, None] & is_element[None, :]
    q_at = q_ptr + (tokens * q_token_stride + heads * q_head_stride)[:, None] + elements[None, :]
    q = as_factors(tl.load(q_at, mask=mask, other=0.0), DOT_DTYPE)

    highest = tl.full([TILE_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:
        highest = tl.load(sink_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    weighted = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)

    # All queries of the tile see [whole_begin, whole_end); some see what is between that and begin and end.
    first_position = start + first_query
    last_position = tl.minimum(first_position + TILE_QUERIES, seq_len) - 1
    end = last_position + 1
    whole_end = (first_position + 1) // TILE_LEN * TILE_LEN
    begin = seq_len * 0
    whole_begin = begin
    if WINDOW_LEN > 0:
        begin = tl.maximum(first_position - WINDOW_LEN + 1, 0) // TILE_LEN * TILE_LEN
        whole_begin = tl.cdiv(tl.maximum(last_position - WINDOW_LEN + 1, 0), TILE_LEN) * TILE_LEN
        whole_begin = tl.minimum(whole_begin, whole_end)
    row_table_ptr = table_ptr + row.to(tl.int64) * table_stride
    positions = start + queries
    if WINDOW_LEN > 0:
        highest, total, weighted = _attend(
            highest, total, weighted, q, positions, begin, whole_begin,
            key_ptr, value_ptr, row_table_ptr, last_column, kv_head, scale_log2, softcap_log2,
            KV_HEADS, HEAD_DIM, BLOCK_LEN, WINDOW_LEN, HAS_SOFTCAP, PADDED_DIM, TILE_LEN, DOT_DTYPE, True,
        )  # fmt: skip
    highest, total, weighted = _attend(
        highest, total, weighted, q, positions, whole_begin, whole_end,
        key_ptr, value_ptr, row_table_ptr, last_column, kv_head, scale_log2, softcap_log2,
        KV_HEADS, HEAD_DIM, BLOCK_LEN, WINDOW_LEN, HAS_SOFTCAP, PADDED_DIM, TILE_LEN, DOT_DTYPE, False,
    )  # fmt: skip
    highest, total, weighted = _attend(
        highest, total, weighted, q, positions, whole_end, end,
        key_ptr, value_ptr, row_table_ptr, last_column, kv_head, scale_log2, softcap_log2,
        KV_HEADS, HEAD_DIM, BLOCK_LEN, WINDOW_LEN, HAS_SOFTCAP, PADDED_DIM, TILE_LEN, DOT_DTYPE, True,
    )  # fmt: skip

    # Zero only in rows that stand for no query.
    attended = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_SCALES:
        attended = attended * tl.load(v_scale_ptr + kv_head)
    out_at = (tokens * (KV_HEADS * GROUP_LEN) + heads) * HEAD_DIM
    tl.store(out_ptr + out_at[:, None] + elements[None, :], attended.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    highest: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    q: tl.tensor,
    query_positions: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    last_column: tl.tensor,
    kv_head: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WINDOW_LEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_LEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Go on over the positions `begin … end - 1`, with a mask or without."""
    tile = tl.arange(0, TILE_LEN)
    first_seen = begin
    if WINDOW_LEN > 0:
        first_seen = tl.min(query_positions, 0) - WINDOW_LEN + 1
    blocks = load_blocks(table_ptr, begin + tile, last_column, BLOCK_LEN)
    for first in range(begin, end, TILE_LEN):
        positions = first + tile
        # What lies behind the tile's last query, or before all its windows, is masked below, too: a zero is
        # not a score.
        k, v = load_tile(
            key_ptr, value_ptr, blocks, positions, end, kv_head,
            KV_HEADS, HEAD_DIM, BLOCK_LEN, PADDED_DIM, IS_MASKED, first_seen, WINDOW_LEN > 0,
        )  # fmt: skip
        blocks = load_blocks(table_ptr, positions + TILE_LEN, last_column, BLOCK_LEN)
        dots = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
        scores = dots * scale_log2
        if HAS_SOFTCAP:
            scores = softcapped(scores, softcap_log2)
        if IS_MASKED:
            is_seen = positions[None, :] <= query_positions[:, None]
            if WINDOW_LEN > 0:
                is_seen = is_seen & (positions[None, :] > query_positions[:, None] - WINDOW_LEN)
            scores = tl.where(is_seen, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = higher
        if IS_MASKED:
            # A query may have seen nothing yet.
            base = tl.where(higher > -float("inf"), higher, 0.0)
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), weighted, input_precision="ieee")
        highest = higher
    return highest, total, weighted
