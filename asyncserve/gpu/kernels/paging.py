"""What the paged attention kernels share: loads of pages, casts, capped scores, logarithms, dtypes, memory.

Scores are kept in base 2, so that softmax is exp2: a scale, a cap and a sink are multiplied by log2(e). The
cache is `[num_blocks, num_kv_heads, block_len, head_dim]`; a *cell* is one position of one of its heads,
`(block * num_kv_heads + head) * block_len + offset`, in int64, because a cache can have over 2**31 elements.
Nothing is loaded of positions that no query of a program sees: what an earlier owner left there is not known
to be finite.
"""

import functools

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def load_blocks(
    table_ptr: tl.tensor,
    positions: tl.tensor,
    last_column: tl.tensor,
    BLOCK_LEN: tl.constexpr,
    mask: tl.tensor | None = None,
    known: tl.tensor | None = None,
) -> tl.tensor:
    """Return the blocks in which a row's positions lie; behind the end of its table, the last one's.

    Kernels ask for them a tile before they load the tile itself: a load that waits for another would not be
    in flight several tiles ahead. (Two tiles before, and Triton would have nothing in flight at all: what a
    loop carries may be one iteration old.)

    Args:
        table_ptr: The row's blocks, int32.
        positions: `[len] int32`.
        last_column: Of the table.
        BLOCK_LEN: Positions per block.
        mask: Whether to load them; None: yes.
        known: What they are, else.
    """
    return tl.load(table_ptr + tl.minimum(positions // BLOCK_LEN, last_column), mask=mask, other=known)


@triton.jit
def load_tile(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    blocks: tl.tensor,
    positions: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_END: tl.constexpr,
    first: tl.tensor | None = None,
    HAS_FIRST: tl.constexpr = False,
) -> tuple[tl.tensor, tl.tensor]:
    """Return K and V of some positions, `[len, PADDED_DIM]` each; zeros where there is nothing.

    Args:
        key_ptr: The cache's K.
        value_ptr: The cache's V.
        blocks: `[len] int32`, of `load_blocks`.
        positions: `[len] int32`.
        end: Positions from here on are not loaded, if HAS_END; they may be in blocks of anybody.
        kv_head: Which head.
        KV_HEADS: How many a block has.
        HEAD_DIM: Elements per head.
        BLOCK_LEN: Positions per block.
        PADDED_DIM: The power of two from HEAD_DIM on.
        HAS_END: Whether some position may lie behind the end.
        first: Positions before it are not loaded, if HAS_FIRST (and HAS_END); a window has passed them, and
            they may be in blocks of anybody.
        HAS_FIRST: Whether some position may lie before it.
    """
    elements = tl.arange(0, PADDED_DIM)
    cells = (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_LEN + positions % BLOCK_LEN
    at = cells[:, None] * HEAD_DIM + elements[None, :]
    if HAS_END:
        mask = (positions < end)[:, None]
        if HAS_FIRST:
            mask = mask & (positions >= first)[:, None]
        if PADDED_DIM != HEAD_DIM:
            mask = mask & (elements < HEAD_DIM)[None, :]
        k = tl.load(key_ptr + at, mask=mask, other=0.0)
        v = tl.load(value_ptr + at, mask=mask, other=0.0)
    elif PADDED_DIM != HEAD_DIM:
        mask = (elements < HEAD_DIM)[None, :]
        k = tl.load(key_ptr + at, mask=mask, other=0.0)
        v = tl.load(value_ptr + at, mask=mask, other=0.0)
    else:
        k = tl.load(key_ptr + at)
        v = tl.load(value_ptr + at)
    return k, v


@triton.jit
def as_cached(
    x: tl.tensor, scales: tl.tensor, dtype: tl.constexpr, LARGEST: tl.constexpr, HAS_SCALES: tl.constexpr
) -> tl.tensor:
    """Return K or V as the cache holds them.

    Args:
        x: What is to be written.
        scales: What the cache's values are multiplied by when they are read, broadcast to `x`; anything if
            there are none.
        dtype: Of the cache.
        LARGEST: Of `largest_cached`.
        HAS_SCALES: Whether there are scales.
    """
    if LARGEST > 0:
        # A cast to 8 bits does not saturate everywhere. NaN must stay: it tells of a broken row.
        x = x.to(tl.float32)
        if HAS_SCALES:
            x = tl.div_rn(x, scales)
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


def largest_cached(dtype: torch.dtype) -> float:
    """Return the magnitude that values are cut to before they are cast; 0 if they are cast as they are."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


@triton.jit
def as_factors(q: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return queries in the dtype of products, see `product_dtype`; cut to its range. NaN stays."""
    if q.dtype == tl.bfloat16 and tl.float16 == DTYPE:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return q.to(DTYPE)


@triton.jit
def softcapped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return cap * tanh(scores / cap)."""
    # tanh(x) = sign(x) * (1 - e) / (1 + e) with e = exp(-2|x|), which cannot overflow.
    ratio = scores / cap
    small = tl.exp2(tl.abs(ratio) * -2.8853900817779268)
    capped = cap * (1.0 - small) / (1.0 + small)
    return tl.where(ratio < 0, -capped, capped)


IS_INTERPRETED = not isinstance(softcapped, triton.JITFunction)
"""Whether kernels run in Triton's interpreter, which takes tensors of a CPU."""


def product_dtype(dtype: torch.dtype, cached: torch.dtype | None = None) -> tl.dtype:
    """Return the dtype in which matrix products take their operands.

    Args:
        dtype: Of the activations.
        cached: Of the cache, if one of the operands comes from there.
    """
    if cached is not None and cached.itemsize == 1 and dtype.itemsize == 2:
        # Which holds every value of 8 bits, and is one instruction away; bfloat16 is five.
        return tl.float16
    if IS_INTERPRETED and dtype == torch.bfloat16:
        # The interpreter keeps bfloat16 as bits, and its tl.dot would multiply those.
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that one program may have on the device of a tensor (it has an index)."""
    if IS_INTERPRETED:
        return 2**30
    properties: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"]
