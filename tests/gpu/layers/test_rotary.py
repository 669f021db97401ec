from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from asyncserve.errors import CheckpointError
from asyncserve.gpu.layers.rotary import (
    Rotary,
    read_rope_parameters,
    rope_frequencies,
    rope_of_layer_type,
    rotate,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2},
    "yarn_untruncated": {"rope_type": "yarn", "factor": 8.0, "truncate": False},
    "yarn_mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn_attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_transformers(name: str, theta: float) -> None:
    scaling = SCALINGS[name] | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=dict(scaling)
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, torch.device("cpu"))
    own = read_rope_parameters({"rope_parameters": scaling, "max_position_embeddings": 131072})
    frequencies, own_magnitude = rope_frequencies(own, head_dim=128)
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0)
    assert own_magnitude == pytest.approx(magnitude)


def test_rotation_equals_transformers() -> None:
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=3, rope_parameters=SCALINGS["yarn"] | {"rope_theta": 1e4}
    )
    positions = torch.tensor([0, 1, 7, 4000, 130000])
    heads = torch.randn(5, 4, 32)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rotary = Rotary(config.to_dict(), head_dim=32)
    result = rotate(heads.clone(), rotary.forward(positions))
    torch.testing.assert_close(result, expected[0].transpose(0, 1), atol=1e-6, rtol=1e-5)


def test_bfloat16_heads_are_rotated_in_float32() -> None:
    rotary = Rotary({"rope_theta": 10000.0}, head_dim=64)
    rotation = rotary.forward(torch.arange(100, 105))
    heads = torch.randn(5, 3, 64).bfloat16()
    before = heads.clone()
    result = rotate(heads, rotation)
    assert torch.equal(heads, before)
    assert torch.equal(result, rotate(heads.float(), rotation).bfloat16())


def test_only_the_given_heads_are_rotated() -> None:
    rotation = Rotary({}, head_dim=8).forward(torch.tensor([5, 6]))
    fused = torch.randn(2, 5, 8)
    before = fused.clone()
    rotated = rotate(fused[:, :3], rotation)
    assert torch.equal(fused[:, 3:], before[:, 3:])
    assert not torch.equal(rotated, before[:, :3])


def test_both_spellings_are_read() -> None:
    older = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}
    frequencies = [rope_frequencies(read_rope_parameters(config), head_dim=8)[0] for config in (older, newer)]
    assert torch.equal(*frequencies)
    assert frequencies[0][0] == 0.5


@pytest.mark.parametrize(
    "config", [{}, {"rope_scaling": None}, {"rope_parameters": None, "rope_theta": None}]
)
def test_nothing_said_means_base_ten_thousand(config: dict[str, Any]) -> None:
    frequencies, magnitude = rope_frequencies(read_rope_parameters(config), head_dim=4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.01]))
    assert magnitude == 1.0


def test_factors_of_a_gguf_file_divide_the_unscaled_frequencies() -> None:
    rotary = Rotary({"rope_theta": 100.0, "rope_scaling": LLAMA3}, head_dim=4)
    kept = torch.zeros(2)
    passed = list(rotary.take_factors([("a", kept), ("rope_freqs.weight", torch.tensor([1.0, 5.0]))]))
    assert [name for name, _ in passed] == ["a"]
    torch.testing.assert_close(rotary.frequencies, torch.tensor([-1.0, -0.02, 1.0, 0.02]))


def test_factors_for_another_head_size_are_refused() -> None:
    rotary = Rotary({}, head_dim=4)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has shape \(3,\), expected \(2,\)"):
        list(rotary.take_factors([("rope_freqs.weight", torch.ones(3))]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not supported; supported: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' lacks 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    ],
)
def test_what_cannot_be_rotated_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Rotary(config, head_dim=8)


def test_it_survives_birth_on_the_meta_device() -> None:
    with torch.device("meta"):
        rotary = Rotary({"rope_scaling": LLAMA3}, head_dim=8)
    rotary.to_empty(device="cpu")
    rotary.finish_loading(torch.device("cpu"))
    assert torch.equal(rotary.frequencies, Rotary({"rope_scaling": LLAMA3}, head_dim=8).frequencies)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": "x"}, "RoPE parameters are 'x'"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ],
)
def test_parameters_of_the_wrong_kind_are_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope_parameters(config)


BOTH = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
    "sliding_attention": {"rope_theta": 3.0},
}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": BOTH},
        {
            "rope_theta": 5.0,
            "rope_local_base_freq": 3.0,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        {
            "rope_local_base_freq": 3.0,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
        },
    ],
)
def test_a_type_of_layer_has_its_own_base_and_full_attention_the_scaling(config: dict[str, Any]) -> None:
    whole, local = (
        read_rope_parameters(rope_of_layer_type(config, layer_type))
        for layer_type in ("full_attention", "sliding_attention")
    )
    assert (whole["rope_type"], whole["factor"], whole["rope_theta"]) == ("linear", 2.0, 5.0)
    assert (local["rope_type"], local["rope_theta"]) == ("default", 3.0)


@pytest.mark.parametrize("parameters", ["x", {"full_attention": 3}])
def test_rope_parameters_of_a_type_must_be_an_object(parameters: object) -> None:
    with pytest.raises(CheckpointError, match="must be an object"):
        rope_of_layer_type({"rope_parameters": parameters}, "full_attention")
