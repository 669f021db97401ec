"""Decode attention over a paged KV cache: one query token a row, reading every K and V once.

A program takes one row, one KV head and one split of the row's positions: every so many tiles one, so that
where its first tile is does not depend on the row's length. The query heads that share the KV head fill the M
side of the products; a tile gathers its pages by the block table, so its length has nothing to do with the
page's. Splits of a row leave partial results, and the one that comes last joins them; one split alone writes
the output itself. Launches depend on the number of rows alone, lengths are read on the device and splits
without positions leave at once, so that a CUDA graph can hold a step.

It serves heads that are rotated and in the cache, or takes a layer's fused projection and does that, too:
each program rotates its query heads, and the last split of a row writes the new K, rotated, and the new V,
and attends to both from its registers. Nothing is read of the cache that the launch itself writes.
Plain torch beside it: `gpu/attention/reference.py`, and for the rotation `gpu/layers/rotary.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from asyncserve.gpu.kernels.paging import (
    LOG2_E,
    as_cached,
    as_factors,
    largest_cached,
    load_blocks,
    load_tile,
    product_dtype,
    softcapped,
)
from asyncserve.gpu.kernels.rotary import QKNorm, rotated_heads

_MOST_JOINED = 8 * 1024
_MOST_JOINED_PER_WARP = 4 * 1024
"""Values of partial results loaded at once, 32 KiB: as many as a multiprocessor has in flight of one program.
They take half a thread's registers at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the work is cut.

    Args:
        tile_len: Positions at once, a power of two of at least 16.
        num_warps: Of a program.
        num_stages: Tiles in flight, the one being computed included.
        num_programs: Programs at which splitting rows further gains nothing; a few times what the device
            runs at once, so that rows of unequal length even out.
        most_splits: Into how many a row is cut at most: who joins them reads all their results alone.
    """

    tile_len: int
    num_warps: int
    num_stages: int
    num_programs: int
    most_splits: int = 32


class HeadRotation(NamedTuple):
    """What is to be done to a projection's heads before attention, and where its K and V go.

    Args:
        cos: `[num_tokens, 1, head_dim] float32`, contiguous.
        sin: As `cos`, its first half negated.
        slot_mapping: `[num_tokens] int64`, `block_id * block_len + offset`, or -1: not written to the cache.
        qk_norm: None: the heads are not normalized.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    qk_norm: QKNorm | None


class Scratch(NamedTuple):
    """What splits of a row leave for the one that joins them.

    Args:
        partials: `[num, head_dim] float32`, outputs.
        logsumexps: `[num] float32`.
        arrived: `[num] int32`, how many splits of a row and KV head are done; zeros between launches.
    """

    partials: torch.Tensor
    logsumexps: torch.Tensor
    arrived: torch.Tensor


def decode_config(*, head_dim: int, dtype: torch.dtype, cached: torch.dtype, num_sms: int) -> DecodeConfig:
    """Return the way that suits a device of `num_sms` multiprocessors.

    Args:
        head_dim: Elements per head.
        dtype: Of the queries.
        cached: Of the cache.
        num_sms: Multiprocessors of the device.
    """
    # Measured on an H200 for heads of 128: 8 KiB of K and as much of V per program and stage is the quickest
    # way found at 8, 64 and 256 rows of 1,024 positions, and within 20 % of it at one. Those of 8 bits become
    # twice as many in registers.
    padded_dim = triton.next_power_of_2(head_dim)
    wider = max(dtype.itemsize, cached.itemsize)
    tile_len = max(
        16, min(128, 8 * 1024 // (padded_dim * cached.itemsize), 16 * 1024 // (padded_dim * wider))
    )
    return DecodeConfig(tile_len=tile_len, num_warps=2, num_stages=3, num_programs=2 * num_sms)


def count_splits(num_rows: int, num_kv_heads: int, config: DecodeConfig) -> int:
    """Return into how many splits each row is cut."""
    wanted = config.num_programs // max(1, num_rows * num_kv_heads)
    return max(1, min(config.most_splits, wanted))


def new_scratch(
    *, num_heads: int, num_kv_heads: int, head_dim: int, config: DecodeConfig, device: torch.device
) -> Scratch:
    """Return memory for the partial results of any number of rows.

    Rows are only split while all programs together are at most `config.num_programs`, hence the bound.
    """
    num_partials = config.num_programs * (num_heads // num_kv_heads)
    return Scratch(
        partials=torch.empty(num_partials, head_dim, dtype=torch.float32, device=device),
        logsumexps=torch.empty(num_partials, dtype=torch.float32, device=device),
        arrived=torch.zeros(config.num_programs, dtype=torch.int32, device=device),
    )


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    scratch: Scratch,
    config: DecodeConfig,
    num_rows: int | None = None,
    query_start: torch.Tensor | None = None,
    rotation: HeadRotation | None = None,
    window_len: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attend with one query token a row.

    Args:
        q: `[num_tokens, num_heads, head_dim]`; tokens and heads at any distance, elements side by side. With
            `rotation` it is the projection, `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: the heads
            of q, those of k, those of v, side by side. It is not changed.
        keys: `[num_blocks, num_kv_heads, block_len, head_dim]`, contiguous.
        values: As `keys`.
        block_table: `[≥ num_rows, max_blocks] int32`, rows at any distance.
        seq_lens: `[≥ num_rows] int32`, the query token included; a row of length 0 gets zeros.
        out: `[≥ num_tokens, num_heads, head_dim]`, contiguous; where a served row's token is, it is written.
        scale: Factor on the scores.
        scratch: Of `new_scratch`; nobody else may use it until the kernel has run.
        config: How the work is cut.
        num_rows: How many to serve; None for as many as `q` has tokens.
        query_start: `[≥ num_rows + 1] int32`, where each row's tokens begin; rows that do not have exactly
            one are left alone. None: token i is the one of row i.
        rotation: Normalize and rotate q and k, and write k and v at their slot, which is the row's last
            position; no row may read what another one writes. None: that is done.
        window_len: Positions a query sees, itself included; None for all.
        softcap: A score s becomes softcap * tanh(s / softcap); None leaves it.
        sinks: `[num_heads] float32`, a score of each head that takes probability and gives no value.
        scales: What K and V of an 8-bit cache are multiplied by, `[num_kv_heads] float32` each; None for 1.
    """
    num_heads, head_dim = out.shape[1:]
    num_rows = q.shape[0] if num_rows is None else num_rows
    num_kv_heads, block_len = keys.shape[1:3]
    group_len = num_heads // num_kv_heads
    num_splits = count_splits(num_rows, num_kv_heads, config)
    norm = None if rotation is None else rotation.qk_norm
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    joined_heads = triton.next_power_of_2(group_len)
    most_joined = min(_MOST_JOINED, _MOST_JOINED_PER_WARP * config.num_warps)
    join_len = min(config.most_splits, max(1, most_joined // (joined_heads * padded_dim)))
    _decode_kernel[(num_kv_heads, num_rows, num_splits)](
        q,
        keys,
        values,
        block_table,
        seq_lens,
        seq_lens if query_start is None else query_start,
        out,
        *scratch,
        sinks,
        *((None, None) if scales is None else scales),
        *((None, None, None) if rotation is None else rotation[:3]),
        *((None, None, 0.0) if norm is None else norm),
        scale * LOG2_E,
        (softcap or 0.0) * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        block_table.shape[1] - 1,
        num_splits,
        KV_HEADS=num_kv_heads,
        GROUP_LEN=group_len,
        HEAD_DIM=head_dim,
        BLOCK_LEN=block_len,
        WINDOW_LEN=window_len or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=scales is not None,
        LARGEST=largest_cached(keys.dtype),
        HAS_QUERY_START=query_start is not None,
        ROTATES=rotation is not None,
        HAS_NORM=norm is not None,
        PADDED_GROUP=max(16, joined_heads),
        PADDED_DIM=padded_dim,
        TILE_LEN=config.tile_len,
        DOT_DTYPE=product_dtype(q.dtype, keys.dtype),
        JOINED_HEADS=joined_heads,
        JOIN_LEN=1 << (join_len.bit_length() - 1),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(),
    )


@triton.jit(
    do_not_specialize=["table_stride", "last_column", "num_splits"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_start_ptr"],
)
def _decode_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    logsumexp_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    eps: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    last_column: tl.tensor,
    num_splits: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    WINDOW_LEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_QUERY_START: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_LEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    JOINED_HEADS: tl.constexpr,
    JOIN_LEN: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    tile = tl.arange(0, TILE_LEN)
    step = num_splits * TILE_LEN
    elements = tl.arange(0, PADDED_DIM)

    # Lengths, tables and angles are the step's: the kernel launched just before writes none of them.
    seq_len = tl.load(seq_lens_ptr + row)
    token = row
    is_idle = False
    if HAS_QUERY_START:
        token = tl.load(query_start_ptr + row).to(tl.int64)
        is_idle = tl.load(query_start_ptr + row + 1) - token != 1
    k_scale = seq_len
    v_scale = seq_len
    if HAS_SCALES:
        k_scale = tl.load(k_scale_ptr + kv_head)
        v_scale = tl.load(v_scale_ptr + kv_head)
        # K's is a factor on the scores as the other is, V's one on the output.
        scale_log2 = scale_log2 * k_scale
    # What is read of the cache.
    begin = seq_len * 0
    end = seq_len
    if ROTATES:
        end = seq_len - 1
        if WINDOW_LEN == 1:
            end = begin
    if WINDOW_LEN > 0:
        # Rounded down to a tile, so the tiles of a row lie on its pages.
        begin = tl.maximum(seq_len - WINDOW_LEN, 0) // TILE_LEN * TILE_LEN
        positions = begin + split * TILE_LEN + tile
    else:
        # Does not wait for the length; behind the end a table shows blocks that are not loaded.
        positions = split * TILE_LEN + tile
    row_table = table_ptr + row * table_stride
    blocks = load_blocks(row_table, positions, last_column, BLOCK_LEN)
    second_blocks = load_blocks(row_table, positions + step, last_column, BLOCK_LEN)
    # `[JOINED_HEADS, PADDED_DIM]`: cosines and weights take their place beside every head, so that no thread
    # needs what another one loaded.
    abreast = tl.arange(0, JOINED_HEADS)[:, None]
    element = elements[None, :] + abreast * 0
    swapped = tl.where(element < HALF, element + HALF, element - HALF)
    exists = element < HEAD_DIM
    cos = element
    sin = element
    slot = token
    q_gain = element
    q_swapped_gain = element
    k_gain = element
    k_swapped_gain = element
    if ROTATES:
        cos = tl.load(cos_ptr + token * HEAD_DIM + element, mask=exists, other=0.0)
        sin = tl.load(sin_ptr + token * HEAD_DIM + element, mask=exists, other=0.0)
        slot = tl.load(slots_ptr + token)
        if HAS_NORM:
            q_gain = tl.load(q_weight_ptr + element, mask=exists, other=0.0)
            q_swapped_gain = tl.load(q_weight_ptr + swapped, mask=exists, other=0.0)
            k_gain = tl.load(k_weight_ptr + element, mask=exists, other=0.0)
            k_swapped_gain = tl.load(k_weight_ptr + swapped, mask=exists, other=0.0)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)

    num_tiles = tl.cdiv(tl.maximum(end - begin, 0), TILE_LEN)
    # A row of length 0 is one split, too: its zeros are written.
    num_used = tl.maximum(tl.minimum(num_tiles, num_splits), 1)
    if is_idle | (split >= num_used):
        return

    in_group = tl.arange(0, PADDED_GROUP)
    is_head = in_group < GROUP_LEN
    heads = kv_head * GROUP_LEN + in_group
    is_element = elements < HEAD_DIM
    mask = is_head[:, None] & is_element[None, :]
    token_ptr = q_ptr + token * q_token_stride
    is_last = (split == num_used - 1) & (seq_len > 0)
    new_v = abreast
    new_score = abreast
    if ROTATES:
        q_at = token_ptr + (kv_head * GROUP_LEN + abreast) * HEAD_DIM
        k_at = token_ptr + (KV_HEADS * GROUP_LEN + kv_head) * HEAD_DIM
        v_at = k_at + KV_HEADS * HEAD_DIM
        is_rotated = exists & (abreast < GROUP_LEN)
        q = tl.load(q_at + element, mask=is_rotated, other=0.0)
        q_swapped = tl.load(q_at + swapped, mask=is_rotated, other=0.0)
        new_k = tl.load(k_at + element, mask=exists, other=0.0)
        new_k_swapped = tl.load(k_at + swapped, mask=exists, other=0.0)
        new_v = tl.load(v_at + element, mask=exists, other=0.0)
        new_v = as_cached(new_v, v_scale, value_ptr.dtype.element_ty, LARGEST, HAS_SCALES)
        q = rotated_heads(q, q_swapped, q_gain, q_swapped_gain, cos, sin, eps, HAS_NORM, HEAD_DIM)
        new_k = rotated_heads(new_k, new_k_swapped, k_gain, k_swapped_gain, cos, sin, eps, HAS_NORM, HEAD_DIM)
        new_k = as_cached(new_k, k_scale, key_ptr.dtype.element_ty, LARGEST, HAS_SCALES)
        new_score = tl.sum(q.to(tl.float32) * new_k.to(q.dtype).to(tl.float32), 1)
        if is_last & (slot >= 0):
            cell = (slot // BLOCK_LEN * KV_HEADS + kv_head) * BLOCK_LEN + slot % BLOCK_LEN
            is_first = exists & (abreast == 0)
            tl.store(key_ptr + cell * HEAD_DIM + element, new_k, mask=is_first)
            tl.store(value_ptr + cell * HEAD_DIM + element, new_v, mask=is_first)
        # Heads are repeated until the product has enough rows; of these the first ones count.
        repeated = tl.broadcast_to(q[None, :, :], (PADDED_GROUP // JOINED_HEADS, JOINED_HEADS, PADDED_DIM))
        q = tl.reshape(repeated, (PADDED_GROUP, PADDED_DIM))
    else:
        q_at = token_ptr + heads[:, None] * q_head_stride + elements[None, :]
        q = tl.load(q_at, mask=mask, other=0.0)
    highest = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - decided at compile time, the other at run time
        if split == 0:
            highest = tl.load(sink_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    weighted = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)

    factors = as_factors(q, DOT_DTYPE)
    for number in range(tl.cdiv(num_tiles - split, num_splits)):
        k, v = load_tile(
            key_ptr, value_ptr, blocks, positions, end, kv_head,
            KV_HEADS, HEAD_DIM, BLOCK_LEN, PADDED_DIM, True, seq_len - WINDOW_LEN, WINDOW_LEN > 0,
        )  # fmt: skip
        # Those of the second tile are known, so that it is loaded right behind the first.
        blocks = load_blocks(row_table, positions + step, last_column, BLOCK_LEN, number > 0, second_blocks)
        dots = tl.dot(factors, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
        scores = dots * scale_log2
        if HAS_SOFTCAP:
            scores = softcapped(scores, softcap_log2)
        is_seen = positions < end
        if WINDOW_LEN > 0:
            is_seen = is_seen & (positions >= seq_len - WINDOW_LEN)
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        # Each tile has a position that is seen, so this is finite.
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), weighted, input_precision="ieee")
        highest = higher
        positions += step

    if ROTATES:  # noqa: SIM102 - decided at compile time, the other at run time
        if is_last:
            scores = tl.broadcast_to(new_score[None, :], (PADDED_GROUP // JOINED_HEADS, JOINED_HEADS))
            score = tl.reshape(scores, (PADDED_GROUP,)) * scale_log2
            if HAS_SOFTCAP:
                score = softcapped(score, softcap_log2)
            higher = tl.maximum(highest, score)
            shrink = tl.exp2(highest - higher)
            weight = tl.exp2(score - higher)
            total = total * shrink + weight
            # `[1, PADDED_DIM]`: all its rows are the same.
            wide_v = tl.max(new_v.to(q.dtype).to(tl.float32), 0)[None, :]
            weighted = weighted * shrink[:, None] + weight.to(q.dtype).to(tl.float32)[:, None] * wide_v
            highest = higher

    # Nothing was seen only by a row of length 0.
    total = tl.where(total == 0.0, 1.0, total)
    attended = weighted / total[:, None]
    if HAS_SCALES:
        attended = attended * v_scale
    out_head_ptr = out_ptr + (token * KV_HEADS + kv_head) * (GROUP_LEN * HEAD_DIM)
    if num_used == 1:
        out_at = in_group[:, None] * HEAD_DIM + elements[None, :]
        tl.store(out_head_ptr + out_at, attended.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        pair = row * KV_HEADS + kv_head
        partials = (pair * num_splits + split) * GROUP_LEN + in_group
        tl.store(partial_ptr + partials[:, None] * HEAD_DIM + elements[None, :], attended, mask=mask)
        tl.store(logsumexp_ptr + partials, highest + tl.log2(total), mask=is_head)
        # All threads have stored before one of them says so; whoever is told that all have, sees it.
        tl.debug_barrier()
        num_arrived = tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel", scope="gpu")
        if num_arrived == num_used - 1:
            tl.store(arrived_ptr + pair, 0)
            joined = _join(
                partial_ptr + pair * num_splits * (GROUP_LEN * HEAD_DIM),
                logsumexp_ptr + pair * num_splits * GROUP_LEN,
                num_used, GROUP_LEN, HEAD_DIM, JOINED_HEADS, PADDED_DIM, JOIN_LEN,
            )  # fmt: skip
            joined_heads = tl.arange(0, JOINED_HEADS)
            tl.store(
                out_head_ptr + joined_heads[:, None] * HEAD_DIM + elements[None, :],
                joined.to(out_ptr.dtype.element_ty),
                mask=(joined_heads < GROUP_LEN)[:, None] & is_element[None, :],
            )


@triton.jit
def _join(
    partial_ptr: tl.tensor,
    logsumexp_ptr: tl.tensor,
    num_used: tl.tensor,
    GROUP_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    JOINED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    JOIN_LEN: tl.constexpr,
) -> tl.tensor:
    """Return `[JOINED_HEADS, PADDED_DIM] float32`: what the splits of one row and KV head left, as one."""
    heads = tl.arange(0, JOINED_HEADS)
    elements = tl.arange(0, PADDED_DIM)
    highest = tl.full([JOINED_HEADS], -float("inf"), tl.float32)
    total = tl.zeros([JOINED_HEADS], tl.float32)
    joined = tl.zeros([JOINED_HEADS, PADDED_DIM], tl.float32)
    for first in range(0, num_used, JOIN_LEN):
        splits = first + tl.arange(0, JOIN_LEN)
        partials = splits[:, None] * GROUP_LEN + heads[None, :]
        exists = (splits < num_used)[:, None] & (heads < GROUP_LEN)[None, :]
        # Not from the L1 cache: other multiprocessors wrote them, perhaps where this one read before.
        logsumexps = tl.load(logsumexp_ptr + partials, mask=exists, other=-float("inf"), cache_modifier=".cg")
        attended = tl.load(
            partial_ptr + partials[:, :, None] * HEAD_DIM + elements[None, None, :],
            mask=exists[:, :, None] & (elements < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(highest, tl.max(logsumexps, 0))
        # Nothing stands for a head that pads.
        base = tl.where(higher > -float("inf"), higher, 0.0)
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(logsumexps - base[None, :])
        total = total * shrink + tl.sum(weights, 0)
        joined = joined * shrink[:, None] + tl.sum(attended * weights[:, :, None], 0)
        highest = higher
    return joined / tl.where(total == 0.0, 1.0, total)[:, None]
