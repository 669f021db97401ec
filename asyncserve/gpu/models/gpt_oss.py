"""GPT-OSS with one expert: attention with sinks, every other layer local, biases, YaRN, a clamped gate.

The published models choose among many experts for each token, which is not served yet and refused by name.
With one expert the router has no choice: its weight is 1, and the expert is a feed-forward network like any
other. What the checkpoint holds as `[experts, in, 2 * out]`, gates and values in turn, is turned round here.
Source: arXiv 2508.10925; parameter names as in transformers `modeling_gpt_oss.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from asyncserve.errors import UnsupportedModel
from asyncserve.gpu.attention.interface import StepAttention
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.layers.attention import Attention
from asyncserve.gpu.layers.embedding import Embedding, OutputHead
from asyncserve.gpu.layers.loading import fill_parameters, finish_layers
from asyncserve.gpu.layers.mlp import Gate, GatedMLP
from asyncserve.gpu.layers.norm import RMSNorm
from asyncserve.gpu.layers.rotary import Rotary, Rotation
from asyncserve.gpu.models.dimensions import (
    Dimensions,
    context_len,
    read_dimensions,
    window_specs,
    windows_of_types,
)
from asyncserve.kv_spec import KVSpec

_DEFAULT_THETA = 150_000.0
_DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": _DEFAULT_THETA,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssLayer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        config: Mapping[str, Any],
        sizes: Dimensions,
        *,
        layer_id: int,
        window_len: int | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        has_bias = bool(config.get("attention_bias", True))
        self.input_layernorm = RMSNorm(sizes.hidden_size, eps=sizes.norm_eps, dtype=dtype)
        self.self_attn = Attention(
            layer_id=layer_id,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            qkv_bias=has_bias,
            output_bias=has_bias,
            window_len=window_len,
            qk_norm_eps=None,
            dtype=dtype,
            has_sinks=True,
        )
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, eps=sizes.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(
            sizes.hidden_size,
            sizes.intermediate_size,
            bias=True,
            dtype=dtype,
            gate=clamped_gate(
                alpha=float(config.get("swiglu_alpha", 1.702)), limit=float(config.get("swiglu_limit", 7.0))
            ),
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation, attention: StepAttention) -> None:
        """Add to `hidden` in place what attention and the feed-forward network contribute.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            rotation: Of the step.
            attention: Of the step.
        """
        self.self_attn.forward(hidden, self.input_layernorm, rotation, attention)
        self.mlp.forward(hidden, self.post_attention_layernorm)


class GptOssForCausalLM(nn.Module):
    """The whole model; the methods are those of `Model`."""

    context_len = staticmethod(context_len)

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype) -> None:
        super().__init__()
        num_experts = config.get("num_local_experts", config.get("num_experts", 128))
        if num_experts != 1:
            # A mixture of experts.
            raise UnsupportedModel(
                f"GptOssForCausalLM with {num_experts} experts", known=["GptOssForCausalLM with 1 expert"]
            )
        sizes = read_dimensions({"rms_norm_eps": 1e-5, **config}, head_dim=64, num_kv_heads=8)
        self.sizes = sizes
        self.windows = _windows(config, num_layers=sizes.num_layers)
        self.vocab_size = sizes.vocab_size
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size, dtype=dtype)
        self.rotary = Rotary(_with_rope(config), head_dim=sizes.head_dim)
        self.layers = nn.ModuleList(
            GptOssLayer(config, sizes, layer_id=layer_id, window_len=window_len, dtype=dtype)
            for layer_id, window_len in enumerate(self.windows)
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
        fill_parameters(self, _dense_weights(weights), ignored=ignored)

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


def clamped_gate(*, alpha: float, limit: float) -> Gate:
    """Return the gate `(up + 1) * gate * sigmoid(alpha * gate)` of clamped values.

    Args:
        alpha: Steepness of the sigmoid.
        limit: Gates are at most this, values lie in `[-limit, limit]`.
    """

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        gates, values = gate_up.chunk(2, -1)
        gates = gates.clamp(max=limit)
        return values.clamp(-limit, limit).add_(1.0).mul_(gates * torch.sigmoid(gates * alpha))

    return gate


def _windows(config: Mapping[str, Any], *, num_layers: int) -> tuple[int | None, ...]:
    layer_types = config.get("layer_types")
    if layer_types is None:
        layer_types = [
            ("sliding_attention", "full_attention")[layer_id % 2] for layer_id in range(num_layers)
        ]
    return windows_of_types(layer_types, config.get("sliding_window", 128), num_layers=num_layers)


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration with the RoPE that transformers gives one that states none, or no base."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        return {**config, "rope_parameters": {**_DEFAULT_ROPE, "rope_theta": _theta(config)}}
    return {**config, "rope_theta": _theta(config)}


def _theta(config: Mapping[str, Any]) -> Any:
    stated = config.get("rope_theta")
    return _DEFAULT_THETA if stated is None else stated


def _dense_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on, the only expert's as those of a feed-forward network; the router's have no use."""
    for name, tensor in weights:
        prefix, is_expert, part = name.partition(".mlp.experts.")
        if ".mlp.router." in name:
            continue
        if not is_expert:
            yield name, tensor
            continue
        matrix = part.removesuffix("_bias")
        kind = "bias" if part.endswith("_bias") else "weight"
        only = tensor[0] if kind == "bias" else tensor[0].T
        if matrix == "gate_up_proj":
            yield f"{prefix}.mlp.gate_proj.{kind}", only[0::2]
            yield f"{prefix}.mlp.up_proj.{kind}", only[1::2]
        else:
            yield f"{prefix}.mlp.{matrix}.{kind}", only
