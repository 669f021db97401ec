"""Rotary positions in two kernels: a step's cosines and sines, and all an attention layer does with them.

The second takes a layer's fused projection and, in one launch, normalizes each head of q and k where the
model does, rotates them where they stand, and writes k and v into the paged cache. A program takes a tile of
heads of one token; which of q, k and v a head is, is a mask. Rounds where the composition in `layers/` does:
after the norm, after the rotation, and to the cache's dtype. Padding (slot -1) is not written to the cache.
The norms' weights are loaded while the kernel before still runs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous
from asyncserve.gpu.kernels.paging import as_cached, largest_cached

_PAIRS_PER_WARP = 256
"""Eight a thread: in both halves of a head one load of 16 bytes, in the dtypes of two."""

_ANGLES = 512


class QKNorm(NamedTuple):
    """RMSNorm on each head of q and of k.

    Args:
        q_weight: `[head_dim]`.
        k_weight: `[head_dim]`.
        eps: Added to the mean squares.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def make_rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every token's angles, each `[num_tokens, 1, head_dim] float32`.

    Args:
        positions: `[num_tokens] int64`.
        frequencies: `[head_dim] float32`, radians per position.
        magnitude: Factor on cosines and sines.
    """
    num_tokens, head_dim = positions.shape[0], frequencies.shape[0]
    cos, sin = torch.empty(
        (2, num_tokens, 1, head_dim), dtype=torch.float32, device=positions.device
    ).unbind()
    num_angles = num_tokens * head_dim
    grid = (triton.cdiv(num_angles, _ANGLES),)
    _make_rotation[grid](
        positions,
        frequencies,
        cos,
        sin,
        magnitude,
        num_angles,
        HEAD_DIM=head_dim,
        BLOCK_LEN=_ANGLES,
        **launch_options(),
    )
    return cos, sin


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    num_heads: int,
    qk_norm: QKNorm | None,
    tile: tuple[int, int] | None = None,
) -> None:
    """Normalize and rotate q and k in place, and write k and v into the cache.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, rows contiguous in themselves: the
            heads of q, those of k, those of v. q and k are changed.
        cos: `[num_tokens, 1, head_dim] float32`, contiguous, both halves equal.
        sin: As `cos`, its first half negated.
        keys: `[num_blocks, num_kv_heads, block_len, head_dim]`, contiguous; written at the tokens' slots.
        values: As `keys`.
        slot_mapping: `[num_tokens] int64`, `block_id * block_len + offset`, or -1: not written to the cache.
        scales: What K and V of an 8-bit cache are multiplied by when they are read, `[num_kv_heads] float32`
            each; None for 1.
        num_heads: Heads of q.
        qk_norm: None: the heads are not normalized.
        tile: Heads and warps of a program, powers of two; None: one warp, with the heads that suit it.
    """
    num_kv_heads, block_len, head_dim = keys.shape[1:]
    block_pairs = triton.next_power_of_2(head_dim // 2)
    # The same for every number of tokens, so that no step of a new size has to wait for a compiler.
    block_heads, num_warps = tile or (max(1, _PAIRS_PER_WARP // block_pairs), 1)
    grid = (qkv.shape[0], triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))
    _rotate_and_write[grid](
        qkv,
        qkv.stride(0),
        cos,
        sin,
        keys,
        values,
        slot_mapping,
        *((None, None) if scales is None else scales),
        qkv if qk_norm is None else qk_norm.q_weight,
        qkv if qk_norm is None else qk_norm.k_weight,
        0.0 if qk_norm is None else qk_norm.eps,
        HAS_NORM=qk_norm is not None,
        HAS_SCALES=scales is not None,
        LARGEST=largest_cached(keys.dtype),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        CACHE_BLOCK_LEN=block_len,
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=block_pairs,
        num_warps=num_warps,
        **launch_options(),
    )


@triton.jit
def rotated_heads(
    x: tl.tensor,
    swapped: tl.tensor,
    gain: tl.tensor,
    swapped_gain: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Normalize, if asked, and rotate whole heads, rounding as `rotate_and_write` does.

    Args:
        x: `[num, from HEAD_DIM on]`, zeros behind it.
        swapped: As `x`, its halves in each other's place.
        gain: Weights of the norm, broadcast to `x`; anything if there is none.
        swapped_gain: As `gain`, for `swapped`.
        cos: Broadcast to `x`.
        sin: As `cos`, negated in the first half.
        eps: Of the norm.
        HAS_NORM: Whether there is one.
        HEAD_DIM: Elements per head.
    """
    wide = x.to(tl.float32)
    other = swapped.to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
        wide = (wide * inverse * gain.to(tl.float32)).to(x.dtype).to(tl.float32)
        other = (other * inverse * swapped_gain.to(tl.float32)).to(x.dtype).to(tl.float32)
    return (wide * cos + other * sin).to(x.dtype)


@triton.jit(do_not_specialize=["num_angles"])
def _make_rotation(
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    magnitude: tl.tensor,
    num_angles: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    element = tl.program_id(0) * BLOCK_LEN + tl.arange(0, BLOCK_LEN)
    exists = element < num_angles
    frequency = tl.load(frequencies_ptr + element % HEAD_DIM, mask=exists, other=0.0)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    position = tl.load(positions_ptr + element // HEAD_DIM, mask=exists, other=0)
    angle = position.to(tl.float32) * frequency
    tl.store(cos_ptr + element, tl.cos(angle) * magnitude, mask=exists)
    tl.store(sin_ptr + element, tl.sin(angle) * magnitude, mask=exists)


@triton.jit
def _rotate_and_write(
    qkv_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK_LEN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    END_OF_K: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_PAIRS)
    in_head = pair < HALF
    exists = (head < END_OF_K + NUM_KV_HEADS)[:, None] & in_head[None, :]
    is_rotated = exists & (head < END_OF_K)[:, None]
    if HAS_NORM:
        q_first = tl.load(q_weight_ptr + pair, mask=in_head, other=0.0)[None, :]
        k_first = tl.load(k_weight_ptr + pair, mask=in_head, other=0.0)[None, :]
        q_second = tl.load(q_weight_ptr + HALF + pair, mask=in_head, other=0.0)[None, :]
        k_second = tl.load(k_weight_ptr + HALF + pair, mask=in_head, other=0.0)[None, :]
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)

    slot = tl.load(slots_ptr + token)
    # Elements `pair` and `pair + HALF` of a head are turned together.
    first_ptrs = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM + pair[None, :]
    first = tl.load(first_ptrs, mask=exists, other=0.0)
    second = tl.load(first_ptrs + HALF, mask=exists, other=0.0)
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if HAS_NORM:
        is_q = (head < NUM_HEADS)[:, None]
        inverse = tl.rsqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None]
        x = x * inverse * tl.where(is_q, q_first, k_first).to(tl.float32)  # type: ignore[possibly-undefined]
        y = y * inverse * tl.where(is_q, q_second, k_second).to(tl.float32)  # type: ignore[possibly-undefined]
        x = x.to(first.dtype).to(tl.float32)
        y = y.to(first.dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * HEAD_DIM + pair, mask=in_head, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HEAD_DIM + HALF + pair, mask=in_head, other=0.0)[None, :]
    first_rotated = (x * cos - y * sin).to(first.dtype)
    second_rotated = (y * cos + x * sin).to(first.dtype)
    tl.store(first_ptrs, first_rotated, mask=is_rotated)
    tl.store(first_ptrs + HALF, second_rotated, mask=is_rotated)

    if slot >= 0:
        is_key = is_rotated & (head >= NUM_HEADS)[:, None]
        is_value = exists & (head >= END_OF_K)[:, None]
        kv_head = tl.where(head < END_OF_K, head - NUM_HEADS, head - END_OF_K)
        block = slot // CACHE_BLOCK_LEN
        row = (block * NUM_KV_HEADS + kv_head) * CACHE_BLOCK_LEN + slot % CACHE_BLOCK_LEN
        place = row[:, None] * HEAD_DIM + pair[None, :]
        k_scale = place
        v_scale = place
        if HAS_SCALES:
            is_k = (head >= NUM_HEADS) & (head < END_OF_K)
            is_v = (head >= END_OF_K) & (head < END_OF_K + NUM_KV_HEADS)
            k_scale = tl.load(k_scale_ptr + kv_head, mask=is_k, other=1.0)[:, None]
            v_scale = tl.load(v_scale_ptr + kv_head, mask=is_v, other=1.0)[:, None]
        dtype: tl.constexpr = keys_ptr.dtype.element_ty
        first_k = as_cached(first_rotated, k_scale, dtype, LARGEST, HAS_SCALES)
        second_k = as_cached(second_rotated, k_scale, dtype, LARGEST, HAS_SCALES)
        tl.store(keys_ptr + place, first_k, mask=is_key)
        tl.store(keys_ptr + place + HALF, second_k, mask=is_key)
        tl.store(values_ptr + place, as_cached(first, v_scale, dtype, LARGEST, HAS_SCALES), mask=is_value)
        tl.store(
            values_ptr + place + HALF, as_cached(second, v_scale, dtype, LARGEST, HAS_SCALES), mask=is_value
        )
