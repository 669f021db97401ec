"""RMSNorm in one kernel, which adds the residual on its way.

A program takes one row and holds all of it, so it is read once. Rounds where the composition of torch's own
kernels in `layers/norm.py` does: the sum of the residual to the activations' dtype, the result once at the
end; all between is float32.
"""

import torch
import triton
import triton.language as tl

_ELEMENTS_PER_WARP = 256
"""Eight a thread: one load of 16 bytes in the dtypes of two."""

_MOST_WARPS = 16


def rms_norm(
    hidden: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    eps: float,
    num_warps: int | None = None,
) -> torch.Tensor:
    """Add `update` to `hidden` in place, if there is one, and return the normalized rows.

    Args:
        hidden: `[num_tokens, size]`, rows contiguous in themselves; changed if there is an update.
        update: As `hidden`, of its dtype.
        weight: `[size]`, contiguous.
        eps: Added to the mean square.
        num_warps: Of a program; None: as suits the size.

    Returns:
        A new contiguous tensor of the shape and dtype of `hidden`.
    """
    num_tokens, size = hidden.shape
    out = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    block_len = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        hidden,
        hidden.stride(0),
        hidden if update is None else update,
        0 if update is None else update.stride(0),
        weight,
        out,
        eps,
        HAS_UPDATE=update is not None,
        SIZE=size,
        BLOCK_LEN=block_len,
        num_warps=num_warps or max(1, min(block_len // _ELEMENTS_PER_WARP, _MOST_WARPS)),
    )
    return out


@triton.jit
def _rms_norm(
    hidden_ptr: tl.tensor,
    hidden_stride: tl.tensor,
    update_ptr: tl.tensor,
    update_stride: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    HAS_UPDATE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK_LEN)
    exists = element < SIZE
    hidden = tl.load(hidden_ptr + row * hidden_stride + element, mask=exists, other=0.0)
    x = hidden.to(tl.float32)
    if HAS_UPDATE:
        update = tl.load(update_ptr + row * update_stride + element, mask=exists, other=0.0)
        total = (x + update.to(tl.float32)).to(hidden.dtype)
        tl.store(hidden_ptr + row * hidden_stride + element, total, mask=exists)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + element, mask=exists, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + element, (x * inverse * weight).to(hidden.dtype), mask=exists)
