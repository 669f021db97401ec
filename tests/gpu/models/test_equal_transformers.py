"""Tiny random models must give transformers' own logits, however the prompt is cut into steps."""

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from asyncserve.kv_spec import FullAttention, SlidingWindow
from tests.gpu.models.paged import PagedRun, build_model

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}
GEMMA3 = SIZES | {"tie_word_embeddings": True, "head_dim": 12, "sliding_window": 6, "pad_token_id": 0}
GPT_OSS = SIZES | {
    "head_dim": 10,
    "sliding_window": 6,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
}
# transformers before 5.19 computes with its defaults, whatever a configuration says.
READS_SWIGLU = hasattr(GptOssConfig(), "swiglu_limit")
SWIGLU = {"swiglu_limit": 0.5, "swiglu_alpha": 1.1} if READS_SWIGLU else {}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama_head_dim": LlamaConfig(**SIZES, head_dim=10),
    "llama_all_heads_have_kv": LlamaConfig(**SIZES | {"num_key_value_heads": None}),
    "llama_biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_tied": LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "llama_theta": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 300.0}),
    "llama_llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama_yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama_linear": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
    ),
    "llama_dynamic": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    ),
    "mistral_no_window": MistralConfig(**SIZES, sliding_window=None),
    "mistral_window": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2_windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "qwen3_biases_windows": Qwen3Config(
        **SIZES,
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
    ),
    "gemma3": Gemma3TextConfig(
        **GEMMA3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma3_capped_untied": Gemma3TextConfig(
        **GEMMA3 | {"tie_word_embeddings": False, "attention_bias": True},
        sliding_window_pattern=2,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gpt_oss": GptOssConfig(**GPT_OSS, rope_parameters=YARN | {"truncate": False}),
    "gpt_oss_plain": GptOssConfig(
        **GPT_OSS,
        attention_bias=False,
        **SWIGLU,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
}
PROMPT = torch.randint(0, SIZES["vocab_size"], (23,), generator=torch.Generator().manual_seed(3)).tolist()
OTHER = torch.randint(0, SIZES["vocab_size"], (11,), generator=torch.Generator().manual_seed(4)).tolist()


def reference_model(config: PreTrainedConfig) -> transformers.PreTrainedModel:
    """Make a random model in which no weight has its neutral value (norms of one, biases of zero)."""
    torch.manual_seed(0)
    model: transformers.PreTrainedModel
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        # Its eager attention caps scores and has sinks; the others' defaults do not.
        config,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases of experts have a dimension more.
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def config_dict(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def reference_logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    # Gemma 3's attention takes the cap of its configuration, but is not given it.
    cap = getattr(model.config, "attn_logit_softcapping", None)
    options = {} if cap is None else {"softcap": cap}
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False, **options).logits[0]
    assert logits.std() > 0.3, "logits too even to tell right from wrong"
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_in_whole_and_chunked_prefill_decode_and_mixed_batches(name: str) -> None:
    reference = reference_model(CONFIGS[name])
    model = build_model(config_dict(reference), reference.state_dict().items())
    expected = reference_logits(reference, PROMPT)
    expected_other = reference_logits(reference, OTHER)

    whole = PagedRun(model).step({0: PROMPT})[0]
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)

    run = PagedRun(model, num_sequences=2)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in (
        {0: PROMPT[:7]},  # a first chunk
        {0: PROMPT[7:12], 1: OTHER[:6]},  # a later chunk beside another prompt
        {0: PROMPT[12:18], 1: OTHER[6:7]},  # a chunk beside a decode
        {0: PROMPT[18:19], 1: OTHER[7:8]},  # decodes of different lengths
        {1: OTHER[8:9]},
        {0: PROMPT[19:23], 1: OTHER[9:11]},
    ):
        for sequence, logits in run.step(step).items():
            seen[sequence].append(logits)
    torch.testing.assert_close(torch.cat(seen[0]), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.cat(seen[1]), expected_other, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama_llama3", "llama_yarn", "llama_linear", "qwen2_windows"])
def test_the_older_rope_spelling_gives_the_same_logits(name: str) -> None:
    reference = reference_model(CONFIGS[name])
    config = config_dict(reference)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope["type"] == "default" else rope
    model = build_model(config, reference.state_dict().items())
    torch.testing.assert_close(
        PagedRun(model).step({0: PROMPT})[0], reference_logits(reference, PROMPT), atol=TOLERANCE, rtol=0
    )


def test_windows_are_read_from_max_window_layers_when_layer_types_are_absent() -> None:
    reference = reference_model(CONFIGS["qwen2_windows"])
    config = config_dict(reference)
    del config["layer_types"]
    model = build_model(config, reference.state_dict().items())
    torch.testing.assert_close(
        PagedRun(model).step({0: PROMPT})[0], reference_logits(reference, PROMPT), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("spelling", ["older", "counted", "sees images", "sees images, older"])
def test_other_spellings_of_gemma_3_give_the_same_logits(spelling: str) -> None:
    reference = reference_model(CONFIGS["gemma3"])
    config, weights = config_dict(reference), reference.state_dict()
    if spelling == "older":
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    elif spelling == "counted":
        reference = reference_model(
            Gemma3TextConfig(**GEMMA3, sliding_window_pattern=2, query_pre_attn_scalar=24)
        )
        config, weights = config_dict(reference), reference.state_dict()
        assert config.pop("layer_types") == ["sliding_attention", "full_attention", "sliding_attention"]
        # The bases that the family has unless told otherwise.
        del config["rope_parameters"]
        config["sliding_window_pattern"] = 2
    else:
        config["architectures"] = ["Gemma3ForConditionalGeneration"]
        if spelling == "sees images":
            weights = {
                name.replace("model.", "model.language_model."): tensor for name, tensor in weights.items()
            }
            weights["model.vision_tower.vision_model.post_layernorm.weight"] = torch.zeros(3)
        else:
            weights = {f"language_model.{name}": tensor for name, tensor in weights.items()}
            weights["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.zeros(3)
    model = build_model(config, weights.items())
    torch.testing.assert_close(
        PagedRun(model).step({0: PROMPT})[0], reference_logits(reference, PROMPT), atol=TOLERANCE, rtol=0
    )


def test_gpt_oss_without_rope_parameters_and_layer_types_has_the_familys() -> None:
    reference = reference_model(GptOssConfig(**GPT_OSS))
    config = config_dict(reference)
    assert config.pop("rope_parameters")["rope_type"] == "yarn"
    assert config.pop("layer_types")[:2] == ["sliding_attention", "full_attention"]
    model = build_model(config, reference.state_dict().items())
    torch.testing.assert_close(
        PagedRun(model).step({0: PROMPT})[0], reference_logits(reference, PROMPT), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_local_layers_keep_their_window_alone(name: str) -> None:
    reference = reference_model(CONFIGS[name])
    specs = build_model(config_dict(reference), reference.state_dict().items()).kv_specs(
        block_len=4, dtype="float32"
    )
    sizes = {"block_len": 4, "num_kv_heads": 2, "head_dim": CONFIGS[name].head_dim, "dtype": "float32"}
    nearby, everywhere = SlidingWindow(**sizes, window_len=6), FullAttention(**sizes)
    assert specs == (nearby, everywhere, nearby)


@pytest.mark.parametrize("name", ["llama_biases", "mistral_window", "qwen2", "qwen3", "gemma3", "gpt_oss"])
def test_bfloat16_stays_near_float32(name: str) -> None:
    reference = reference_model(CONFIGS[name])
    model = build_model(config_dict(reference), reference.state_dict().items(), dtype=torch.bfloat16)
    expected = reference_logits(reference, PROMPT)
    logits = PagedRun(model, dtype="bfloat16").step({0: PROMPT})[0]
    assert logits.dtype == torch.bfloat16
    # Rounding alone: three layers of it move logits by a few percent of their spread, an error by all of it.
    assert (logits - expected).std() < 0.1 * expected.std()
