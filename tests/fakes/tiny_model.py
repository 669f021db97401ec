"""Tiny random models: a Hugging Face folder written in the test, so that nothing is downloaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def tiny_llama_config(**overrides: Any) -> dict[str, Any]:
    """Return constructor arguments of a 2-layer LlamaConfig: 4 query heads over 2 KV heads of 16."""
    return {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # Wider than the library's 0.02, so that greedy choices are far from ties.
        "initializer_range": 0.2,
        **overrides,
    }


def tiny_llama_folder(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write `config.json` and `model.safetensors` (fp32) of a random Llama into `folder` and return it.

    Args:
        folder: Created if it does not exist.
        seed: Of the weights.
        overrides: LlamaConfig fields to change.
    """
    from transformers import LlamaConfig

    return tiny_folder(folder, LlamaConfig(**tiny_llama_config(**overrides)), seed=seed)


def tiny_folder(folder: Path, config: "PreTrainedConfig", *, seed: int = 0) -> Path:
    """Write `config.json` and `model.safetensors` (fp32) of a random model into `folder` and return it.

    Args:
        folder: Created if it does not exist.
        config: Of the model.
        seed: Of the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder
