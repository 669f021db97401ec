"""The gated feed-forward network: down(silu(gate(x)) * up(x))."""

import torch
import torch.nn.functional as F
from torch import nn

from asyncserve.gpu.layers.linear import Linear


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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]` → a new tensor of the same shape."""
        gate, up = self.gate_up_proj.forward(hidden).chunk(2, -1)
        return self.down_proj.forward(F.silu(gate).mul_(up))
