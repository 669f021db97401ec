import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncserve.checkpoint import open_checkpoint
from asyncserve.errors import CheckpointError, UnsupportedModel
from asyncserve.gguf_config import gguf_config, gguf_generation_config, shortest_decimal
from asyncserve.gguf_file import read_gguf_header
from asyncserve.gpu.startup import start_runner
from tests.fakes.demo_model import demo_model_path
from tests.fakes.gguf_files import write_gguf

_SIZES = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 160,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def _config(
    path: Path,
    architecture: str,
    *,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    values = {**_SIZES, **{key.replace("__", "."): value for key, value in more.items()}}
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    file = write_gguf(path / "m.gguf", architecture=architecture, metadata=metadata, tensors=tensors)
    return gguf_config(read_gguf_header(file))


def test_the_demo_model_has_the_values_of_its_config_json() -> None:
    header = read_gguf_header(demo_model_path())
    assert gguf_config(header) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-05,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert gguf_generation_config(header) == {"eos_token_id": [2]}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
        ("some-new-one", "some-new-one"),
    ],
)
def test_architectures_get_their_class_and_unknown_ones_stay_readable(
    tmp_path: Path, architecture: str, name: str
) -> None:
    assert _config(tmp_path, architecture)["architectures"] == [name]


def test_a_mixture_of_experts_is_not_taken_for_a_dense_llama(tmp_path: Path) -> None:
    assert _config(tmp_path, "llama", expert_count=8)["architectures"] == ["MixtralForCausalLM"]


def test_head_dim_is_the_files_even_if_heads_do_not_fill_the_hidden_size(tmp_path: Path) -> None:
    assert _config(tmp_path, "qwen3", attention__key_length=128)["head_dim"] == 128


def test_head_dim_without_key_length_is_hidden_size_over_heads(tmp_path: Path) -> None:
    assert _config(tmp_path, "llama")["head_dim"] == 8


def test_a_partly_rotated_head_is_told(tmp_path: Path) -> None:
    assert _config(tmp_path, "llama", rope__dimension_count=4)["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in _config(tmp_path, "llama", rope__dimension_count=8)


def test_vocab_size_is_the_embeddings_and_the_output_is_tied_only_without_its_own(tmp_path: Path) -> None:
    tied = {"token_embd.weight": (70, 64)}
    config = _config(tmp_path, "llama", tensors=tied, vocab_size=32)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (70, True)
    untied = _config(tmp_path, "llama", tensors={**tied, "output.weight": (70, 64)})
    assert untied["tie_word_embeddings"] is False


def test_biases_are_found_among_the_tensors(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (8, 64), "blk.0.attn_q.bias": (64,)}
    config = _config(tmp_path, "llama", tensors=tensors)
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)


def test_equal_values_per_layer_become_one(tmp_path: Path) -> None:
    assert _config(tmp_path, "llama", attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    assert _config(tmp_path, "llama", attention__head_count_kv=[2, 4])["num_key_value_heads"] == [2, 4]


def test_sizes_that_differ_between_layers_stay_lists_and_nothing_is_derived_from_them(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "deci",
        attention__head_count=[8, 0],
        attention__head_count_kv=[2, 0],
        feed_forward_length=[160, 80],
    )
    assert config["architectures"] == ["deci"]
    assert (config["num_attention_heads"], config["intermediate_size"]) == ([8, 0], [160, 80])
    assert "head_dim" not in config
    lists = _config(tmp_path, "llama", attention__key_length=[8, 16], rope__dimension_count=[8, 16])
    assert lists["head_dim"] == [8, 16]
    assert "partial_rotary_factor" not in lists


@pytest.mark.parametrize(
    ("architecture", "error", "message"),
    [
        ("deci", UnsupportedModel, "deci"),
        ("llama", CheckpointError, r"num_attention_heads is \[8, 4\], expected a positive integer"),
    ],
)
def test_a_model_whose_layers_differ_is_refused_clearly(
    tmp_path: Path, architecture: str, error: type[Exception], message: str
) -> None:
    sizes = {**_SIZES, "attention.head_count": [8, 4]}
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()}
    file = write_gguf(tmp_path / "m.gguf", architecture=architecture, metadata=metadata)
    checkpoint = open_checkpoint(str(file))
    with pytest.raises(error, match=message):
        start_runner(checkpoint, device="cpu", num_threads=1)


def test_kv_heads_default_to_heads(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count": 8, "llama.embedding_length": 64}
    file = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    assert gguf_config(read_gguf_header(file))["num_key_value_heads"] == 8


def test_linear_scaling_of_one_is_none(tmp_path: Path) -> None:
    assert _config(tmp_path, "llama")["rope_scaling"] is None
    scaled = _config(tmp_path, "llama", rope__scaling__type="linear", rope__scaling__factor=1.0)
    assert scaled["rope_scaling"] is None


def test_linear_scaling_is_read_in_both_of_its_spellings(tmp_path: Path) -> None:
    expected = {"rope_type": "linear", "factor": 4.0}
    new = _config(tmp_path, "llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert new["rope_scaling"] == expected
    assert _config(tmp_path, "llama", rope__scale_linear=4.0)["rope_scaling"] == expected


def test_yarn_comes_with_its_parameters_and_the_magnitude_config_json_means(tmp_path: Path) -> None:
    scaling = _config(
        tmp_path,
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32768,
        rope__scaling__yarn_beta_fast=32.0,
        rope__scaling__attn_factor=0.5,
    )["rope_scaling"]
    magnitude = scaling.pop("attention_factor")
    assert magnitude == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0))
    assert scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 32.0,
    }


def test_every_token_that_the_file_says_ends_an_answer_is_an_eos(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.eom_token_id": 2,
    }
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert gguf_generation_config(header) == {"eos_token_id": [2, 9]}
    bare = read_gguf_header(write_gguf(tmp_path / "n.gguf"))
    assert gguf_generation_config(bare) == {}


def test_gemma_3_has_what_the_family_has_in_common_and_a_file_need_not_say(tmp_path: Path) -> None:
    config = _config(
        tmp_path, "gemma3", attention__key_length=32, attention__sliding_window=512, rope__freq_base=1e6
    )
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    assert {key: config[key] for key in expected} == expected
    assert "final_logit_softcapping" not in config


def test_gemma_3_has_what_its_file_says(tmp_path: Path) -> None:
    config = _config(
        tmp_path,
        "gemma3",
        block_count=62,
        attention__sliding_window_pattern=[True, False],
        rope__freq_base_swa=5000.0,
        final_logit_softcapping=30.0,
    )
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["rope_local_base_freq"], config["final_logit_softcapping"]) == (5000.0, 30.0)
    # The one size whose scores are scaled by hidden size over heads.
    assert config["query_pre_attn_scalar"] == 168
    assert _config(tmp_path, "gemma3", attention__sliding_window_pattern=2)["sliding_window_pattern"] == 2


@pytest.mark.parametrize("value", [1e-5, 1e-6, 0.1, 500000.0, 32.0, 1234.5])
def test_float32_noise_is_removed(value: float) -> None:
    assert shortest_decimal(float(np.float32(value))) == pytest.approx(value, rel=1e-9)
    assert np.float32(shortest_decimal(float(np.float32(value)))) == np.float32(value)
