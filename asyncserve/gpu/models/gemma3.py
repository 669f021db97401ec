"""Gemma 3, text only: local layers with a sliding window between global ones, each kind with its own RoPE.

A sublayer's output is normalized, too, before it is added; q and k are normalized head by head; the gate is
GELU; embeddings are scaled by the root of the hidden size. RMSNorms multiply by 1 + w of the checkpoint's w:
their parameters here hold 1 + w, in float32, so that small w lose nothing.
Source: arXiv 2503.19786; parameter names as in transformers `modeling_gemma3.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from asyncserve.errors import CheckpointError
from asyncserve.gpu.attention.interface import StepAttention
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.layers.attention import Attention
from asyncserve.gpu.layers.embedding import Embedding, OutputHead
from asyncserve.gpu.layers.loading import fill_parameters, finish_layers
from asyncserve.gpu.layers.mlp import GatedMLP, gelu_mul
from asyncserve.gpu.layers.norm import RMSNorm
from asyncserve.gpu.layers.rotary import Rotary, Rotation, rope_of_layer_type
from asyncserve.gpu.models.dimensions import (
    Dimensions,
    read_dimensions,
    stated_context_len,
    window_specs,
    windows_of_types,
)
from asyncserve.kv_spec import KVSpec

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
"""What Hugging Face's configurations leave out: those of the larger models state little."""

_DEFAULT_CONTEXT_LEN = 131072

_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
"""Tensors of a checkpoint that sees images, too, by their beginning."""


class Gemma3Layer(nn.Module):
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
        self.is_local = window_len is not None
        self.input_layernorm = _norm(sizes)
        self.self_attn = Attention(
            layer_id=layer_id,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            qkv_bias=bool(config.get("attention_bias", False)),
            output_bias=bool(config.get("attention_bias", False)),
            window_len=window_len,
            qk_norm_eps=sizes.norm_eps,
            norm_dtype=torch.float32,
            dtype=dtype,
            scale=float(config["query_pre_attn_scalar"]) ** -0.5,
            softcap=config.get("attn_logit_softcapping"),
        )
        self.post_attention_layernorm = _norm(sizes)
        self.pre_feedforward_layernorm = _norm(sizes)
        self.mlp = GatedMLP(
            sizes.hidden_size, sizes.intermediate_size, bias=False, dtype=dtype, gate=gelu_mul
        )
        self.post_feedforward_layernorm = _norm(sizes)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, attention: StepAttention) -> None:
        """Add to `hidden` in place what attention and the feed-forward network contribute.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            rotation: Of the step, for layers of this one's kind.
            attention: Of the step.
        """
        self.self_attn.forward(
            hidden, self.input_layernorm, rotation, attention, output_norm=self.post_attention_layernorm
        )
        self.mlp.forward(hidden, self.pre_feedforward_layernorm, output_norm=self.post_feedforward_layernorm)


class Gemma3ForCausalLM(nn.Module):
    """The whole model; the methods are those of `Model`."""

    @staticmethod
    def context_len(config: Mapping[str, Any]) -> int:
        """Return the length that the configuration states: it is the stretched one, whatever the scaling."""
        return stated_context_len(config, default=_DEFAULT_CONTEXT_LEN)

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype) -> None:
        super().__init__()
        config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
        if config.get("use_bidirectional_attention"):
            raise CheckpointError(
                "use_bidirectional_attention is not supported: it is for embeddings, not text"
            )
        sizes = read_dimensions(config, activation="gelu_pytorch_tanh")
        self.sizes = sizes
        self.windows = _windows(config, num_layers=sizes.num_layers)
        self.vocab_size = sizes.vocab_size
        self.embed_tokens = Embedding(
            sizes.vocab_size, sizes.hidden_size, dtype=dtype, scale=sizes.hidden_size**0.5
        )
        self.rotary_global, self.rotary_local = (
            Rotary(rope_of_layer_type(config, layer_type), head_dim=sizes.head_dim)
            for layer_type in ("full_attention", "sliding_attention")
        )
        self.layers = nn.ModuleList(
            Gemma3Layer(config, sizes, layer_id=layer_id, window_len=window_len, dtype=dtype)
            for layer_id, window_len in enumerate(self.windows)
        )
        self.norm = _norm(sizes)
        self.lm_head = OutputHead(
            sizes.vocab_size,
            sizes.hidden_size,
            dtype=dtype,
            tied_to=self.embed_tokens if sizes.tied else None,
            softcap=config.get("final_logit_softcapping"),
        )

    def kv_specs(self, *, block_len: int, dtype: str) -> tuple[KVSpec, ...]:
        """Return what each layer keeps, by layer index."""
        return window_specs(self.sizes, self.windows, block_len=block_len, dtype=dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter; see `Model.load_weights`."""
        ignored = ("lm_head.weight",) if self.sizes.tied else ()
        fill_parameters(self, _text_weights(weights), ignored=ignored)

    def finish_loading(self) -> None:
        """Prepare what follows from the weights; see `Model.finish_loading`."""
        finish_layers(self)

    def forward(self, batch: Batch, attention: StepAttention) -> torch.Tensor:
        """Run all layers; returns `[num_tokens, hidden_size]` after the final norm."""
        hidden = self.embed_tokens.forward(batch.input_ids)
        everywhere = self.rotary_global.forward(batch.positions)
        nearby = self.rotary_local.forward(batch.positions)
        for layer in self.layers:
            layer.forward(hidden, nearby if layer.is_local else everywhere, attention)
        return self.norm.forward(hidden)

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the output matrix; see `Model.logits`."""
        return self.lm_head.forward(hidden, out=out)


def _norm(sizes: Dimensions) -> RMSNorm:
    return RMSNorm(sizes.hidden_size, eps=sizes.norm_eps, dtype=torch.float32)


def _windows(config: Mapping[str, Any], *, num_layers: int) -> tuple[int | None, ...]:
    layer_types = config.get("layer_types")
    if layer_types is None:
        pattern = int(config.get("_sliding_window_pattern") or config["sliding_window_pattern"])
        layer_types = [
            "sliding_attention" if (layer_id + 1) % pattern else "full_attention"
            for layer_id in range(num_layers)
        ]
    return windows_of_types(layer_types, config["sliding_window"], num_layers=num_layers)


def _text_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass the text model's tensors on, under the names that it has alone, norms as 1 + w."""
    for name, tensor in weights:
        # `model.language_model.` or, in older files, `language_model.model.` and `language_model.lm_head.`.
        own_name = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        if own_name.startswith(_OTHER_PARTS):
            continue
        yield own_name, tensor.float() + 1.0 if own_name.endswith("norm.weight") else tensor
