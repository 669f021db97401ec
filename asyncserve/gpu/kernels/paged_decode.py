"""Decode attention over a paged KV cache: one query token a row, reading every K and V once.

A program takes one row, one KV head and one split of the row's positions. The query heads that share the KV
head fill the M side of the products; a tile of positions gathers its pages by the block table, so its length
has nothing to do with the page's. Several splits of a row leave partial results, which a second kernel joins;
one split writes the output itself. Launches depend on the number of rows alone, lengths are read on the
device and splits without positions leave at once, so that a CUDA graph can hold a decode step.
Plain torch beside it: `gpu/attention/reference.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.paging import LOG2_E, product_dtype, softcapped

_MAX_SPLITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the work is cut.

    Args:
        tile_len: Positions at once, a power of two of at least 16.
        num_warps: Of a program.
        num_stages: Tiles in flight, the one being computed included.
        num_programs: Programs at which splitting rows further gains nothing; a few times what the device
            runs at once, so that rows of unequal length even out.
    """

    tile_len: int
    num_warps: int
    num_stages: int
    num_programs: int


def decode_config(*, head_dim: int, dtype: torch.dtype, num_sms: int) -> DecodeConfig:
    """Return the way that suits a device of `num_sms` multiprocessors.

    Args:
        head_dim: Elements per head.
        dtype: Of queries and cache, the wider one.
        num_sms: Multiprocessors of the device.
    """
    # Measured on an H200 for bfloat16 heads of 128, in docs/decisions/0006: 8 KiB of K and as much of V per
    # program and stage is within 2.5 % of the best way found at 1, 8, 64 and 256 rows.
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    tile_len = max(16, min(128, 8 * 1024 // row_bytes))
    return DecodeConfig(tile_len=tile_len, num_warps=2, num_stages=3, num_programs=4 * num_sms)


def count_splits(num_rows: int, num_kv_heads: int, config: DecodeConfig) -> int:
    """Return into how many splits each row is cut; a power of two, so that few numbers occur."""
    wanted = config.num_programs // max(1, num_rows * num_kv_heads)
    return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def new_scratch(
    *, num_heads: int, num_kv_heads: int, head_dim: int, config: DecodeConfig, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the partial results of any number of rows.

    Rows are only split while all programs together are at most `config.num_programs`, hence the bound.

    Returns:
        Outputs `[num, head_dim] float32` and log-sum-exp `[num] float32`, for `paged_decode`.
    """
    num_partials = triton.cdiv(config.num_programs, num_kv_heads) * num_heads
    partials = torch.empty(num_partials, head_dim, dtype=torch.float32, device=device)
    return partials, torch.empty(num_partials, dtype=torch.float32, device=device)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    scratch: tuple[torch.Tensor, torch.Tensor],
    config: DecodeConfig,
    window_len: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend with one query token a row.

    Args:
        q: `[num_rows, num_heads, head_dim]`; rows and heads at any distance, elements side by side.
        keys: `[num_blocks, num_kv_heads, block_len, head_dim]`, contiguous.
        values: As `keys`.
        block_table: `[≥ num_rows, max_blocks] int32`, rows at any distance.
        seq_lens: `[≥ num_rows] int32`, the query token included; a row of length 0 gets zeros.
        out: `[≥ num_rows, num_heads, head_dim]`, contiguous; the first `num_rows` are written.
        scale: Factor on the scores.
        scratch: Of `new_scratch`; nobody else may use it until the kernels have run.
        config: How the work is cut.
        window_len: Positions a query sees, itself included; None for all.
        softcap: A score s becomes softcap * tanh(s / softcap); None leaves it.
        sinks: `[num_heads] float32`, a score of each head that takes probability and gives no value.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_len = keys.shape[1:3]
    group_len = num_heads // num_kv_heads
    num_splits = count_splits(num_rows, num_kv_heads, config)
    partials, logsumexps = scratch
    _decode_kernel[(num_kv_heads, num_rows, num_splits)](
        q,
        keys,
        values,
        block_table,
        seq_lens,
        out,
        partials,
        logsumexps,
        sinks,
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        num_splits,
        KV_HEADS=num_kv_heads,
        GROUP_LEN=group_len,
        HEAD_DIM=head_dim,
        BLOCK_LEN=block_len,
        WINDOW_LEN=window_len or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        PADDED_GROUP=max(16, triton.next_power_of_2(group_len)),
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
        TILE_LEN=config.tile_len,
        DOT_DTYPE=product_dtype(q.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        _join_splits_kernel[(num_heads, num_rows)](
            partials,
            logsumexps,
            out,
            num_splits,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            MAX_SPLITS=_MAX_SPLITS,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _decode_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    logsumexp_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WINDOW_LEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_LEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    in_group = tl.arange(0, PADDED_GROUP)
    is_head = in_group < GROUP_LEN
    heads = kv_head * GROUP_LEN + in_group
    out_heads = row * (KV_HEADS * GROUP_LEN) + heads
    elements = tl.arange(0, PADDED_DIM)
    is_element = elements < HEAD_DIM

    seq_len = tl.load(seq_lens_ptr + row)
    begin = seq_len * 0
    if WINDOW_LEN > 0:
        # Rounded down to a tile, so the tiles of a row lie on its pages.
        begin = tl.maximum(seq_len - WINDOW_LEN, 0) // TILE_LEN * TILE_LEN
    split_len = tl.cdiv(tl.cdiv(seq_len - begin, TILE_LEN), num_splits) * TILE_LEN
    first = begin + split * split_len
    end = tl.minimum(seq_len, first + split_len)
    if (split > 0) & (first >= seq_len):
        tl.store(logsumexp_ptr + out_heads * num_splits + split, -float("inf"), mask=is_head)
        return

    q_at = q_ptr + row * q_row_stride + heads[:, None] * q_head_stride + elements[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & is_element[None, :], other=0.0)
    highest = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - decided at compile time, the other at run time
        if split == 0:
            highest = tl.load(sink_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    weighted = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)

    row_table_ptr = table_ptr + row * table_stride
    # A row of length 0 has no page; what it loads of its table is not used.
    last_page = tl.maximum(seq_len - 1, 0) // BLOCK_LEN
    tile = tl.arange(0, TILE_LEN)
    # Positions behind the end are taken to lie in the last page: every block is one of the sequence's own, so
    # no load of K or V needs a mask. What lies there is finite (see `kv_cache.py`) and its score is masked.
    blocks = tl.load(row_table_ptr + tl.minimum((first + tile) // BLOCK_LEN, last_page))
    for start in range(first, end, TILE_LEN):
        positions = start + tile
        cells = (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_LEN + positions % BLOCK_LEN
        # A tile early: a load that waits for another would not be in flight several tiles ahead.
        blocks = tl.load(row_table_ptr + tl.minimum((positions + TILE_LEN) // BLOCK_LEN, last_page))
        at = cells[:, None] * HEAD_DIM + elements[None, :]
        if PADDED_DIM == HEAD_DIM:
            k = tl.load(key_ptr + at)
            v = tl.load(value_ptr + at)
        else:
            k = tl.load(key_ptr + at, mask=is_element[None, :], other=0.0)
            v = tl.load(value_ptr + at, mask=is_element[None, :], other=0.0)
        dots = tl.dot(q.to(DOT_DTYPE), tl.trans(k.to(q.dtype).to(DOT_DTYPE)), input_precision="ieee")
        scores = dots * scale_log2
        if HAS_SOFTCAP:
            scores = softcapped(scores, softcap_log2)
        is_seen = positions < seq_len
        if WINDOW_LEN > 0:
            is_seen = is_seen & (positions >= seq_len - WINDOW_LEN)
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        # Each tile has a position that is seen, so this is finite.
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weights = weights.to(q.dtype).to(DOT_DTYPE)
        weighted = tl.dot(weights, v.to(q.dtype).to(DOT_DTYPE), weighted, input_precision="ieee")
        highest = higher

    mask = is_head[:, None] & is_element[None, :]
    # Nothing was seen only by a row of length 0.
    is_empty = total == 0.0
    safe_total = tl.where(is_empty, 1.0, total)
    attended = weighted / safe_total[:, None]
    if num_splits == 1:
        out_at = out_ptr + out_heads[:, None] * HEAD_DIM + elements[None, :]
        tl.store(out_at, attended.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        partials = out_heads * num_splits + split
        tl.store(partial_ptr + partials[:, None] * HEAD_DIM + elements[None, :], attended, mask=mask)
        logsumexp = tl.where(is_empty, -float("inf"), highest + tl.log2(safe_total))
        tl.store(logsumexp_ptr + partials, logsumexp, mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def _join_splits_kernel(
    partial_ptr: tl.tensor,
    logsumexp_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> None:
    out_head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    splits = tl.arange(0, MAX_SPLITS)
    partials = out_head * num_splits + splits
    logsumexp = tl.load(logsumexp_ptr + partials, mask=splits < num_splits, other=-float("inf"))
    has_any = logsumexp > -float("inf")
    highest = tl.max(logsumexp, 0)
    weights = tl.exp2(logsumexp - tl.where(highest > -float("inf"), highest, 0.0))
    total = tl.sum(weights, 0)
    elements = tl.arange(0, PADDED_DIM)
    is_element = elements < HEAD_DIM
    attended = tl.load(
        partial_ptr + partials[:, None] * HEAD_DIM + elements[None, :],
        mask=has_any[:, None] & is_element[None, :],
        other=0.0,
    )
    joined = tl.sum(attended * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + out_head * HEAD_DIM + elements, joined.to(out_ptr.dtype.element_ty), mask=is_element)
