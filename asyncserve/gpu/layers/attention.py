"""Multi-head attention as a layer: project, normalize (if the model does), rotate, attend, project back.

The attending itself is the backend's. On a GPU one kernel (`gpu/kernels/rotary.py`) normalizes, rotates and
writes k and v into the cache, or the backend's own where it takes the projection as it is; elsewhere torch's
own kernels do, which are also their reference.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import nn

from asyncserve.gpu.attention.interface import AttentionLayer, Projected, StepAttention
from asyncserve.gpu.layers.linear import Linear
from asyncserve.gpu.layers.norm import RMSNorm, rms_norm, rms_norm_floor, rms_norm_gain
from asyncserve.gpu.layers.rotary import Rotation, rotate


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        layer_id: Index of the layer in the model.
        hidden_size: Elements of a hidden state.
        num_heads: Query heads.
        num_kv_heads: K and V heads.
        head_dim: Elements per head.
        qkv_bias: Whether the q, k and v projections have biases.
        output_bias: Whether the output projection has one.
        window_len: As in `AttentionLayer`.
        qk_norm_eps: Epsilon of the RMSNorms on each head of q and of k; None: there are none.
        dtype: Of weights and activations.
        scale: Factor on the scores; None: `head_dim ** -0.5`.
        softcap: As in `AttentionLayer`.
        has_sinks: Whether each query head has a sink, a weight of the checkpoint.
        norm_dtype: Of the weights of q's and k's norms; None: `dtype`.
    """

    def __init__(
        self,
        *,
        layer_id: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
        window_len: int | None,
        qk_norm_eps: float | None,
        dtype: torch.dtype,
        scale: float | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        norm_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = AttentionLayer(
            layer_id=layer_id,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window_len=window_len,
            softcap=softcap,
        )
        self.sinks = (
            nn.Parameter(torch.empty(num_heads, dtype=dtype), requires_grad=False) if has_sinks else None
        )
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self.qk_and_v = (q_size + kv_size, kv_size)
        self.q_and_k = (num_heads, num_kv_heads)
        self.q_k_v = (num_heads, num_kv_heads, num_kv_heads)
        self.qkv_proj = Linear(
            hidden_size,
            q_size + 2 * kv_size,
            bias=qkv_bias,
            dtype=dtype,
            stacked={"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
        )
        self.o_proj = Linear(q_size, hidden_size, bias=output_bias, dtype=dtype)
        self.qk_norm_eps = qk_norm_eps
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, eps=qk_norm_eps, dtype=norm_dtype or dtype)
            self.k_norm = RMSNorm(head_dim, eps=qk_norm_eps, dtype=norm_dtype or dtype)
        # gain `[num_heads + num_kv_heads, head_dim]` and floor: both norms at once.
        self.qk_norm: tuple[torch.Tensor, torch.Tensor] | None = None
        self.kernel: Callable[..., None] | None = None
        self.kernel_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None

    def finish_loading(self, *, fused: bool = False) -> None:
        """Take the kernel, or put the norms' weights side by side so that one pass serves q and k."""
        num_heads, num_kv_heads = self.q_and_k
        if self.sinks is not None:
            self.layer = dataclasses.replace(self.layer, sinks=self.sinks.data.float())
        if fused:
            from asyncserve.gpu.kernels import rotary as kernels

            norm = None
            if self.qk_norm_eps is not None:
                norm = kernels.QKNorm(self.q_norm.weight.data, self.k_norm.weight.data, self.qk_norm_eps)
            self.kernel = functools.partial(kernels.rotate_and_write, num_heads=num_heads, qk_norm=norm)
            self.kernel_norm = norm
            return
        if self.qk_norm_eps is None:
            return
        weight = torch.cat(
            (self.q_norm.weight.expand(num_heads, -1), self.k_norm.weight.expand(num_kv_heads, -1))
        )
        self.qk_norm = (rms_norm_gain(weight), rms_norm_floor(weight, self.qk_norm_eps))

    def forward(
        self,
        hidden: torch.Tensor,
        norm: RMSNorm,
        rotation: Rotation,
        attention: StepAttention,
        *,
        output_norm: RMSNorm | None = None,
    ) -> None:
        """Add to `hidden` in place what attention makes of its normalized rows.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            norm: Normalizes what the layer reads.
            rotation: Of the step.
            attention: Of the step.
            output_norm: Normalizes what is added; None: it is added as it is.
        """
        layer = self.layer
        qkv = self.qkv_proj.forward(hidden, norm=norm)
        if self.kernel is not None:
            attended = attention.run_projected(layer, Projected(qkv, *rotation, self.kernel_norm))
            if attended is None:
                self.kernel(qkv, *rotation, *attention.cache_of(layer))
                heads = qkv.view(-1, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
                attended = attention.attend(layer, *heads.split_with_sizes(self.q_k_v, 1))
            self.o_proj.forward(attended, output_norm=output_norm, residual=hidden)
            return
        qk, v = qkv.split_with_sizes(self.qk_and_v, 1)
        qk = qk.view(-1, layer.num_heads + layer.num_kv_heads, layer.head_dim)
        v = v.view(-1, layer.num_kv_heads, layer.head_dim)
        if self.qk_norm is not None:
            qk = rms_norm(qk, *self.qk_norm)
        q, k = rotate(qk, rotation).split_with_sizes(self.q_and_k, 1)
        self.o_proj.forward(attention.run(layer, q, k, v), output_norm=output_norm, residual=hidden)
