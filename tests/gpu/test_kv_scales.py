import pytest
import torch

from asyncserve.errors import CheckpointError
from asyncserve.gpu.kv_scales import KVScales, StatedScales, widened

ATTENTION = "layers.3.self_attn"


def scales_of(*tensors: tuple[str, float | list[float]], num_kv_heads: int = 2) -> KVScales | None:
    stated = StatedScales()
    for name, value in tensors:
        assert stated.take(f"{ATTENTION}.{name}", torch.tensor(value)), name
    return stated.of_layers({ATTENTION: num_kv_heads}).get(ATTENTION)


def values(scales: KVScales | None) -> list[list[float]]:
    assert scales is not None
    assert all(scale.dtype == torch.float32 for scale in scales)
    return [scale.tolist() for scale in scales]


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_every_spelling_of_the_field_is_read(names: tuple[str, str]) -> None:
    assert values(scales_of((names[0], 0.5), (names[1], [0.25]))) == [[0.5, 0.5], [0.25, 0.25]]


@pytest.mark.parametrize("name", ["kv_scale", "attn.kv_scale", "k_scale", "v_scale"])
def test_one_scale_alone_is_for_both(name: str) -> None:
    assert values(scales_of((name, 3.0))) == [[3.0, 3.0], [3.0, 3.0]]


def test_a_scale_for_each_head_keeps_its_head() -> None:
    assert values(scales_of(("k_scale", [1.0, 2.0]), ("v_scale", 4.0))) == [[1.0, 2.0], [4.0, 4.0]]


def test_scales_of_queries_and_probabilities_are_let_go() -> None:
    for name in ("q_scale", "prob_scale", "attn.q_scale", "q_proj.output_scale", "prob_output_scale"):
        assert scales_of((name, 3.0)) is None


@pytest.mark.parametrize(
    "name",
    [
        f"{ATTENTION}.k_proj.weight",
        f"{ATTENTION}.k_proj.input_scale",
        f"{ATTENTION}.k_proj.weight_scale",
        f"{ATTENTION}.o_proj.output_scale",
        f"{ATTENTION}.k_zero_point",
        "layers.3.mlp.k_scale",
    ],
)
def test_what_is_none_is_left(name: str) -> None:
    assert not StatedScales().take(name, torch.tensor(1.0))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [1.0, 0.0]])
def test_a_scale_that_cannot_be_one_is_refused_by_name(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.k_scale' holds"):
        scales_of(("k_scale", value))


def test_scales_of_another_number_of_heads_and_of_no_layer_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"has 3 scales .* each of its 2 KV heads"):
        scales_of(("k_scale", [1.0, 1.0, 1.0]))
    stated = StatedScales()
    stated.take(f"{ATTENTION}.k_scale", torch.tensor(1.0))
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn', which the model lacks"):
        stated.of_layers({"layers.2.self_attn": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_every_value_is_widened_as_torch_does(held: torch.dtype, dtype: torch.dtype) -> None:
    every = torch.arange(2 ** (8 * held.itemsize)).to(torch.uint16).view(torch.uint8)
    if held.itemsize == 1:
        every = torch.arange(256).to(torch.uint8)
    found, expected = widened(every.view(held), dtype), every.view(held).to(dtype)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), expected.isnan())
    has_sign = ~expected.isnan()
    assert torch.equal(found[has_sign], expected[has_sign])
    assert torch.equal(found.signbit()[has_sign], expected.signbit()[has_sign])
