"""The gated feed-forward network: down(act(gate(x)) * up(x)), where act is SiLU or what a model has instead."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from asyncserve.gpu.layers.linear import Linear
from asyncserve.gpu.layers.norm import RMSNorm

Gate = Callable[[torch.Tensor], torch.Tensor]


class GatedMLP(nn.Module):
    """Feed-forward with a gate (SwiGLU, GeGLU).

    Args:
        hidden_size: Elements of a hidden state.
        intermediate_size: Elements between the projections.
        bias: Whether the projections have biases.
        dtype: Of weights and activations.
        gate: `[num_tokens, 2 * intermediate_size]`, gates first → `[num_tokens, intermediate_size]`. `silu_mul`
            and `gelu_mul` have kernels.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        gate: Gate | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate or silu_mul
        self.gate_up_proj = Linear(
            hidden_size,
            2 * intermediate_size,
            bias=bias,
            dtype=dtype,
            stacked={"gate_proj": intermediate_size, "up_proj": intermediate_size},
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype)
        self.kernel: Gate | None = None
        # A product of few tokens goes through SiLU itself.
        self.is_gated_in_product = self.gate is silu_mul

    def finish_loading(self, *, fused: bool = False) -> None:
        """Take the kernel in place of the gate, if it has one."""
        if fused and self.gate in (silu_mul, gelu_mul):
            from asyncserve.gpu.kernels import gated_mul as kernels

            self.kernel = kernels.silu_mul if self.gate is silu_mul else kernels.gelu_mul

    def forward(self, hidden: torch.Tensor, norm: RMSNorm, *, output_norm: RMSNorm | None = None) -> None:
        """Add to `hidden` in place what the network makes of its normalized rows.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            norm: Normalizes what the network reads.
            output_norm: Normalizes what is added; None: it is added as it is.
        """
        projection = self.gate_up_proj
        if self.is_gated_in_product and projection.kernel is not None and projection.kernel.takes(hidden):
            gated = projection.kernel.run(hidden, norm, is_gated=True)
        else:
            gate_up = projection.forward(hidden, norm=norm)
            gated = self.gate(gate_up) if self.kernel is None else self.kernel(gate_up)
        self.down_proj.forward(gated, output_norm=output_norm, residual=hidden)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, 2 * size]`, gates first → `silu(gate) * up`, `[num_tokens, size]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, 2 * size]`, gates first → `gelu(gate) * up`, `[num_tokens, size]`; GELU by its tanh form."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)
