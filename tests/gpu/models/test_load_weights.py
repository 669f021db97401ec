"""What a model says about a checkpoint that does not fit it, and what it keeps in the cache."""

from typing import Any

import pytest
import torch

from asyncserve.errors import CheckpointError, UnsupportedModel
from asyncserve.gpu.layers.attention import Attention
from asyncserve.gpu.models.llama import LlamaForCausalLM
from asyncserve.gpu.models.registry import MODELS, load_model_class
from asyncserve.kv_spec import FullAttention
from tests.gpu.models.paged import build_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def weights(config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens.weight": (24, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (24, 16),
    }
    for layer_id in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer_id}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (16,),
            f"{prefix}.post_attention_layernorm.weight": (16,),
            f"{prefix}.self_attn.q_proj.weight": (16, 16),
            f"{prefix}.self_attn.k_proj.weight": (8, 16),
            f"{prefix}.self_attn.v_proj.weight": (8, 16),
            f"{prefix}.self_attn.o_proj.weight": (16, 16),
            f"{prefix}.mlp.gate_proj.weight": (20, 16),
            f"{prefix}.mlp.up_proj.weight": (20, 16),
            f"{prefix}.mlp.down_proj.weight": (16, 20),
        }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    tensors = weights()
    del tensors[name]
    with pytest.raises(CheckpointError, match=rf"lacks {name.removeprefix('model.')}$"):
        build_model(CONFIG, tensors.items())


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(CheckpointError, match="and 16 more"):
        build_model(CONFIG, [])


def test_an_unknown_tensor_is_named() -> None:
    tensors = weights() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias.*no place"):
        build_model(CONFIG, tensors.items())


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    tensors = weights() | {"model.layers.0.self_attn.v_proj.weight": torch.zeros(9, 16)}
    with pytest.raises(CheckpointError, match=r"v_proj\.weight' has shape \(9, 16\).*expected \(8, 16\)"):
        build_model(CONFIG, tensors.items())


def test_stored_rope_frequencies_are_ignored() -> None:
    build_model(
        CONFIG, (weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}).items()
    )


def test_an_output_matrix_beside_a_tied_embedding_is_ignored() -> None:
    tensors = weights()
    model = build_model({**CONFIG, "tie_word_embeddings": True}, tensors.items())
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(model.logits(hidden), hidden @ tensors["model.embed_tokens.weight"].T)


def test_every_layer_keeps_k_and_v_of_its_own_size() -> None:
    specs = build_model(CONFIG, weights().items()).kv_specs(block_len=8, dtype="bfloat16")
    assert specs == (FullAttention(block_len=8, num_kv_heads=2, head_dim=4, dtype="bfloat16"),) * 2


@pytest.mark.parametrize("architecture", MODELS)
def test_vocab_size_is_the_number_of_logits(architecture: str) -> None:
    config = {**CONFIG, "architectures": [architecture], "num_hidden_layers": 1, "head_dim": 4}
    config["num_local_experts"] = 1
    with torch.device("meta"):
        model = load_model_class(architecture)(config, dtype=torch.float32)
        assert model.logits(torch.empty(2, 16)).shape == (2, model.vocab_size)


@pytest.mark.parametrize("experts", [{}, {"num_local_experts": 32}])
def test_a_mixture_of_experts_is_refused(experts: dict[str, int]) -> None:
    with pytest.raises(UnsupportedModel, match=r"with (128|32) experts' is not supported.*with 1 expert"):
        build_model({**CONFIG, "architectures": ["GptOssForCausalLM"], **experts}, [])


def test_attention_that_looks_ahead_is_refused() -> None:
    config = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        build_model(config, [])


@pytest.mark.parametrize(
    ("config", "window_len"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 7}, 7),
        ({"model_type": "llama"}, None),
    ],
)
def test_mistral_has_a_window_unless_told_otherwise(config: dict[str, Any], window_len: int | None) -> None:
    model = build_model({**CONFIG, **config}, weights().items())
    assert isinstance(model, LlamaForCausalLM)
    windows = [module.layer.window_len for module in model.modules() if isinstance(module, Attention)]
    assert windows == [window_len] * 2
