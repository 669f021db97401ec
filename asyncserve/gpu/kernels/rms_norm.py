"""RMSNorm in one kernel.

A program takes one row and holds all of it, so it is read once. Rounds where the composition of torch's own
kernels in `layers/norm.py` does: the result once at the end, and again when it is added to a residual; all
between is float32. The weight is loaded while the kernel before still runs.
"""

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

_ELEMENTS_PER_WARP = 256
"""Eight a thread: one load of 16 bytes in the dtypes of two."""

_MOST_WARPS = 16


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    num_warps: int | None = None,
) -> torch.Tensor:
    """Return the normalized rows, or add them to a residual.

    Args:
        hidden: `[num_tokens, size]`, rows contiguous in themselves; not changed.
        weight: `[size]`, contiguous.
        eps: Added to the mean square.
        residual: `[num_tokens, size]`, contiguous, in the dtype of `hidden`, changed in place; None: there is
            none.
        num_warps: Of a program; None: as suits the size.

    Returns:
        The residual, or a new contiguous tensor of the shape and dtype of `hidden`.
    """
    num_tokens, size = hidden.shape
    out = residual
    if out is None:
        out = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    block_len = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        hidden,
        hidden.stride(0),
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK_LEN=block_len,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps or max(1, min(block_len // _ELEMENTS_PER_WARP, _MOST_WARPS)),
        **launch_options(),
    )
    return out


@triton.jit
def _rms_norm(
    hidden_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK_LEN)
    exists = element < SIZE
    weight = tl.load(weight_ptr + element, mask=exists, other=0.0).to(tl.float32)
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    hidden = tl.load(hidden_ptr + row * hidden_stride + element, mask=exists, other=0.0)
    x = hidden.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    normalized = (x * inverse * weight).to(hidden.dtype)
    out_ptrs = out_ptr + row * SIZE + element
    if HAS_RESIDUAL:
        residual = tl.load(out_ptrs, mask=exists, other=0.0)
        normalized = (residual.to(tl.float32) + normalized.to(tl.float32)).to(hidden.dtype)
    tl.store(out_ptrs, normalized, mask=exists)
