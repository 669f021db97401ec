"""An activation of one half of a row times the other half, in one kernel: SiLU, or GELU by its tanh form.

Rounds where `act(gate) * up` of torch's own kernels does: the activation is computed in float32 and rounded to
the activations' dtype, and so is the product.
"""

import torch
import triton
import triton.language as tl

from asyncserve.gpu.kernels.dependent_launch import launch_options, let_next_begin, wait_for_previous

DEFAULT_TILE = (1024, 4)
"""Elements and warps of a program: eight elements a thread, loads of 16 bytes in the dtypes of two."""


def silu_mul(gate_up: torch.Tensor, *, tile: tuple[int, int] = DEFAULT_TILE) -> torch.Tensor:
    """Multiply SiLU of the gates by what they let pass.

    Args:
        gate_up: `[num_tokens, 2 * size]`, gates first, rows contiguous in themselves.
        tile: As `DEFAULT_TILE`.

    Returns:
        `silu(gate) * up`, a new contiguous `[num_tokens, size]`.
    """
    return _launch(gate_up, is_gelu=False, tile=tile)


def gelu_mul(gate_up: torch.Tensor, *, tile: tuple[int, int] = DEFAULT_TILE) -> torch.Tensor:
    """Multiply GELU of the gates by what they let pass; as `silu_mul`."""
    return _launch(gate_up, is_gelu=True, tile=tile)


def _launch(gate_up: torch.Tensor, *, is_gelu: bool, tile: tuple[int, int]) -> torch.Tensor:
    block_len, num_warps = tile
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, triton.cdiv(size, block_len))
    _gated_mul[grid](
        gate_up,
        gate_up.stride(0),
        out,
        SIZE=size,
        BLOCK_LEN=block_len,
        IS_GELU=is_gelu,
        num_warps=num_warps,
        **launch_options(),
    )
    return out


@triton.jit
def _gated_mul(
    gate_up_ptr: tl.tensor,
    gate_up_stride: tl.tensor,
    out_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    IS_GELU: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK_LEN + tl.arange(0, BLOCK_LEN)
    exists = element < SIZE
    gate_ptrs = gate_up_ptr + row * gate_up_stride + element
    wait_for_previous(USE_PDL)
    let_next_begin(USE_PDL)
    gate = tl.load(gate_ptrs, mask=exists, other=0.0)
    up = tl.load(gate_ptrs + SIZE, mask=exists, other=0.0)
    x = gate.to(tl.float32)
    exponent = -x
    if IS_GELU:
        # (1 + tanh(a)) / 2 is the logistic function of 2a; a = sqrt(2 / pi) * (x + 0.044715 x³).
        exponent = -1.5957691216057308 * (x + 0.044715 * x * x * x)
    activated = (x / (1.0 + tl.exp(exponent))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + element, (activated * up.to(tl.float32)).to(gate.dtype), mask=exists)
