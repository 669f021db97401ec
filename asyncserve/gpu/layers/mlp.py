"""The gated feed-forward network: down(silu(gate(x)) * up(x))."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from asyncserve.gpu.layers.linear import Linear
from asyncserve.gpu.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """Feed-forward with a SiLU gate (SwiGLU).

    Args:
        hidden_size: Elements of a hidden state.
        intermediate_size: Elements between the projections.
        bias: Whether the projections have biases.
        dtype: Of weights and activations.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size,
            2 * intermediate_size,
            bias=bias,
            dtype=dtype,
            stacked={"gate_proj": intermediate_size, "up_proj": intermediate_size},
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype)
        self.kernel: Callable[[torch.Tensor], torch.Tensor] | None = None

    def finish_loading(self, *, fused: bool = False) -> None:
        """Take the kernel in place of `silu_mul`."""
        if fused:
            from asyncserve.gpu.kernels import silu_mul as kernels

            self.kernel = kernels.silu_mul

    def forward(self, hidden: torch.Tensor, norm: RMSNorm) -> None:
        """Add to `hidden` in place what the network makes of its normalized rows.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            norm: Normalizes what the network reads.
        """
        projection = self.gate_up_proj
        if projection.kernel is not None and projection.kernel.takes(hidden):
            gated = projection.kernel.run(hidden, norm, is_gated=True)
        else:
            gate_up = projection.forward(hidden, norm=norm)
            gated = silu_mul(gate_up) if self.kernel is None else self.kernel(gate_up)
        self.down_proj.forward(gated, residual=hidden)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, 2 * size]`, gates first → `silu(gate) * up`, `[num_tokens, size]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
