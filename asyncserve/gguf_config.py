"""A GGUF file's metadata in the spelling of Hugging Face's config.json.

Takes a `GGUFHeader`, gives plain dictionaries. Architectures whose name is not known here keep their GGUF
name, so that the registry of models can say what it does not support. Reads no tensor.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

from asyncserve.gguf_file import GGUFHeader

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "granite": ("GraniteForCausalLM", "granite"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
"""GGUF's architecture to Hugging Face's class and model type. Mistral and SmolLM2 files say `llama`."""

_INTEGERS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_GEMMA3_ATTENTION_SCALES = {62: 168}
"""Number of layers to `query_pre_attn_scalar`, where that is not the head's size; no field says so."""

_TOKENIZER_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_END_KEYS = ("eos", "eot", "eom")


def gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Translate the metadata to the keys of config.json; what the file does not say is left out.

    A size that differs between layers comes as a list, which the models that expect one number refuse.
    RoPE scaling comes as `rope_scaling` with `rope_type` `linear` or `yarn`. Llama 3's is None here: the file
    holds its result, one factor per frequency, as a tensor among the weights (`rope_freqs.weight`).
    """
    metadata = header.metadata
    name = str(metadata.get("general.architecture", ""))
    values = {
        key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")
    }
    architecture, model_type = ARCHITECTURES.get(name, (name, name))
    if name == "llama" and values.get("expert_count", 0) > 0:
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for key, ours in _INTEGERS.items():
        if key in values:
            config[ours] = _scalar(values[key])
    config["num_key_value_heads"] = _scalar(
        values.get("attention.head_count_kv", values.get("attention.head_count", 0))
    )
    head_dim = _scalar(values.get("attention.key_length"))
    if head_dim is None and _are_numbers(config.get("hidden_size"), config.get("num_attention_heads")):
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    if head_dim is not None:
        config["head_dim"] = head_dim
        rotary_dim = _scalar(values.get("rope.dimension_count", head_dim))
        if rotary_dim != head_dim and _are_numbers(rotary_dim, head_dim):
            config["partial_rotary_factor"] = rotary_dim / head_dim
    epsilon = values.get("attention.layer_norm_rms_epsilon")
    if epsilon is not None:
        config["rms_norm_eps"] = shortest_decimal(epsilon)
    embedding = header.tensors.get("token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    config["vocab_size"] = embedding.shape[0] if embedding else values.get("vocab_size", len(tokens))
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    config["rope_theta"] = shortest_decimal(values.get("rope.freq_base", 10000.0))
    config["rope_scaling"] = _rope_scaling(values)
    if name == "gemma3":
        _complete_gemma3(config, values)
    for key, ours in _TOKENIZER_IDS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[ours] = token_id
    return config


def _complete_gemma3(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add what the family has in common, and a file need not say."""
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["query_pre_attn_scalar"] = _GEMMA3_ATTENTION_SCALES.get(
        config.get("num_hidden_layers", 0), config.get("head_dim", 256)
    )
    config["rope_local_base_freq"] = shortest_decimal(values.get("rope.freq_base_swa", 10000.0))
    # A number of layers of which the last one sees everything; or for each layer whether it does not.
    pattern = values.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, int):
        config["sliding_window_pattern"] = pattern
    else:
        config["layer_types"] = [
            "sliding_attention" if is_local else "full_attention" for is_local in pattern
        ]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in values:
            config[key] = shortest_decimal(values[key])


def gguf_generation_config(header: GGUFHeader) -> dict[str, Any]:
    """Return `eos_token_id`, the list of tokens that the file says end an answer or a turn; maybe empty."""
    ids = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS]
    found = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return {"eos_token_id": found} if found else {}


def shortest_decimal(value: float) -> float:
    """Return the number that was meant by a float32: 9.999999747378752e-06 is 1e-05."""
    single = struct.pack("<f", value)
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == single:
            return candidate
    return value


def _scalar(value: Any) -> Any:
    """Return a per-layer list as one number if all layers agree, else as a list."""
    if value is None or isinstance(value, int | float):
        return value
    layers = list(value)
    return layers[0] if len(set(layers)) == 1 else layers


def _are_numbers(*values: Any) -> bool:
    """Say whether each is one number, and not 0, rather than a list by layer or nothing."""
    return all(isinstance(value, int | float) and value != 0 for value in values)


def _rope_scaling(values: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "none" if "rope.scale_linear" not in values else "linear")
    factor = shortest_decimal(values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0)))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    original_len = values.get("rope.scaling.original_context_length")
    if original_len is not None:
        scaling["original_max_position_embeddings"] = original_len
    if kind == "yarn":
        for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f"rope.scaling.{key}" in values:
                scaling[ours] = shortest_decimal(values[f"rope.scaling.{key}"])
        if "rope.scaling.attn_factor" in values:
            # In the file a multiple of YaRN's own magnitude; in config.json the magnitude itself.
            magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            scaling["attention_factor"] = values["rope.scaling.attn_factor"] * magnitude
    return scaling
