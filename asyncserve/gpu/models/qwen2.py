"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k and v, and windows in the upper layers if asked for.

Source: arXiv 2407.10671; parameter names as in transformers `modeling_qwen2.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from asyncserve.gpu.attention.interface import StepAttention
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.layers.attention import Attention
from asyncserve.gpu.layers.embedding import Embedding, OutputHead
from asyncserve.gpu.layers.loading import fill_parameters, finish_layers
from asyncserve.gpu.layers.mlp import GatedMLP
from asyncserve.gpu.layers.norm import RMSNorm
from asyncserve.gpu.layers.rotary import Rotary, Rotation
from asyncserve.gpu.models.dimensions import (
    Dimensions,
    context_len,
    layer_windows,
    read_dimensions,
    window_specs,
)
from asyncserve.kv_spec import KVSpec


class Qwen2Layer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        sizes: Dimensions,
        *,
        layer_id: int,
        window_len: int | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, eps=sizes.norm_eps, dtype=dtype)
        self.self_attn = Attention(
            layer_id=layer_id,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            qkv_bias=True,
            output_bias=False,
            window_len=window_len,
            qk_norm_eps=None,
            dtype=dtype,
        )
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, eps=sizes.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(sizes.hidden_size, sizes.intermediate_size, bias=False, dtype=dtype)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, attention: StepAttention) -> None:
        """Add to `hidden` in place what attention and the feed-forward network contribute.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            rotation: Of the step.
            attention: Of the step.
        """
        self.self_attn.forward(hidden, self.input_layernorm, rotation, attention)
        self.mlp.forward(hidden, self.post_attention_layernorm)


class Qwen2ForCausalLM(nn.Module):
    """The whole model; the methods are those of `Model`."""

    context_len = staticmethod(context_len)

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = read_dimensions(config, num_kv_heads=32)
        windows = layer_windows(config, num_layers=sizes.num_layers)
        self.sizes = sizes
        self.windows = windows
        self.vocab_size = sizes.vocab_size
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size, dtype=dtype)
        self.rotary = Rotary(config, head_dim=sizes.head_dim)
        self.layers = nn.ModuleList(
            Qwen2Layer(sizes, layer_id=layer_id, window_len=window_len, dtype=dtype)
            for layer_id, window_len in enumerate(windows)
        )
        self.norm = RMSNorm(sizes.hidden_size, eps=sizes.norm_eps, dtype=dtype)
        self.lm_head = OutputHead(
            sizes.vocab_size,
            sizes.hidden_size,
            dtype=dtype,
            tied_to=self.embed_tokens if sizes.tied else None,
        )

    def kv_specs(self, *, block_len: int, dtype: str) -> tuple[KVSpec, ...]:
        """Return what each layer keeps, by layer index."""
        return window_specs(self.sizes, self.windows, block_len=block_len, dtype=dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter; see `Model.load_weights`."""
        ignored = ("lm_head.weight",) if self.sizes.tied else ()
        fill_parameters(self, self.rotary.take_factors(weights), ignored=ignored)

    def finish_loading(self) -> None:
        """Prepare what follows from the weights; see `Model.finish_loading`."""
        finish_layers(self)

    def forward(self, batch: Batch, attention: StepAttention) -> torch.Tensor:
        """Run all layers; returns `[num_tokens, hidden_size]` after the final norm."""
        hidden = self.embed_tokens.forward(batch.input_ids)
        rotation = self.rotary.forward(batch.positions)
        for layer in self.layers:
            layer.forward(hidden, rotation, attention)
        return self.norm.forward(hidden)

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the output matrix; see `Model.logits`."""
        return self.lm_head.forward(hidden, out=out)
