import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.kernels.machine import DEVICE, DTYPES, MARKS, ON_GPU, ROUNDING, assert_near, random

pytest.importorskip("triton")
from asyncserve.gpu.kernels.small_linear import (
    MOST_TOKENS,
    SmallLinearConfig,
    small_linear,
    small_linear_config,
    takes,
    takes_norm,
)

pytestmark = MARKS
# (in_features, out_features): rows that fill tiles and rows that do not, more features than a tile and fewer.
SHAPES = [(64, 40), (96, 17), (80, 3)]
WAYS = {
    "chosen": None,
    "a row a warp": SmallLinearConfig(rows=4, tile_len=128, num_warps=4),
    "warps share rows": SmallLinearConfig(rows=2, tile_len=512, num_warps=4, warps_per_row=2),
    "tiles of columns": SmallLinearConfig(rows=16, tile_len=32, num_warps=2, num_stages=2),
}
TOKENS = [1, 2, 8, 13, 16]
TOKENS_AND_BIAS = [(1, False), (5, True)]
OUT = 19
"""Rows of a weight that fill no tile."""
if ON_GPU:
    TOKENS_AND_BIAS += [(1, True), (5, False)]
    OUT = 40
    SHAPES += [(576, 960), (1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (8960, 1536)]
    ASKED = SmallLinearConfig(rows=16, tile_len=512, num_warps=8, num_stages=3, prefetch_len=64)
    WAYS |= {"asked for ahead": ASKED, "few asked for": dataclasses.replace(ASKED, rows=2)}


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def bound(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far a product may be off: its rounding, and float32's in the sum."""
    x, weight = x.double(), weight.double()
    return ROUNDING[dtype] * (x @ weight.T).abs() + 4e-7 * (x.abs() @ weight.abs().T)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_it_multiplies_every_token_by_every_row(
    in_features: int, out_features: int, num_tokens: int, way: str
) -> None:
    x = random(num_tokens, in_features, dtype=torch.bfloat16)
    weight = random(out_features, in_features, dtype=torch.bfloat16, seed=1)
    before = x.clone()
    result = small_linear(x, weight, config=WAYS[way])
    assert result.shape == (num_tokens, out_features)
    assert result.dtype == torch.bfloat16
    assert_near(result, x.double() @ weight.double().T, bound(x, weight, torch.bfloat16))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_input_is_normalized_and_rounded_first(num_tokens: int, way: str, dtype: torch.dtype) -> None:
    if not takes(num_tokens, 64, OUT, dtype):
        pytest.skip("not served")
    x, weight = random(num_tokens, 96, dtype=dtype, scale=3.0), random(OUT, 96, dtype=dtype, seed=1)
    gain = random(96, dtype=dtype, seed=2)
    result = small_linear(x, weight, norm_weight=gain, eps=1e-2, config=WAYS[way])
    normed = F.rms_norm(x.double(), (96,), gain.double(), 1e-2)
    # A rounding of x that falls the other way moves a sum by that much.
    wide = ROUNDING[dtype] * (normed.abs() @ weight.double().abs().T) * (1.0 if ON_GPU else 1.5)
    assert_near(result, normed @ weight.double().T, wide + bound(normed, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_tokens", "has_bias"), TOKENS_AND_BIAS)
def test_the_product_and_its_bias_are_added_to_the_residual_in_place(
    has_bias: bool, num_tokens: int, way: str, dtype: torch.dtype
) -> None:
    if not takes(num_tokens, 64, OUT, dtype):
        pytest.skip("not served")
    x, weight = random(num_tokens, 96, dtype=dtype), random(OUT, 96, dtype=dtype, seed=1)
    bias = random(OUT, dtype=dtype, seed=2, scale=9.0) if has_bias else None
    residual = random(num_tokens, OUT, dtype=dtype, seed=3, scale=4.0)
    product = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    expected = residual.double() + product
    assert small_linear(x, weight, bias=bias, residual=residual, config=WAYS[way]) is residual
    rounding = ROUNDING[dtype] * (product.abs() + expected.abs())
    assert_near(residual, expected, rounding + bound(x, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_tokens", "has_bias"), TOKENS_AND_BIAS)
def test_a_gate_multiplies_silu_of_the_first_rows_with_the_others(
    has_bias: bool, num_tokens: int, way: str, dtype: torch.dtype
) -> None:
    if not takes(num_tokens, 64, OUT, dtype):
        pytest.skip("not served")
    x, weight = random(num_tokens, 64, dtype=dtype), random(2 * 23, 64, dtype=dtype, seed=1, scale=0.125)
    bias = random(2 * 23, dtype=dtype, seed=2) if has_bias else None
    gain = random(64, dtype=dtype, seed=3)
    result = small_linear(x, weight, bias=bias, norm_weight=gain, eps=1e-5, is_gated=True, config=WAYS[way])
    assert result.shape == (num_tokens, 23)
    normed = F.rms_norm(x.double(), (64,), gain.double(), 1e-5)
    gate_up = normed @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(
        result.double(), silu_mul(gate_up), rtol=12 * ROUNDING[dtype], atol=12 * ROUNDING[dtype]
    )


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_it_rounds_where_the_composition_does(num_tokens: int) -> None:
    """Values that were not rounded in between would differ from it in a quarter of the elements."""
    x = random(num_tokens, 64, dtype=torch.float16)
    weight = random(2 * 128, 64, dtype=torch.float16, seed=1)
    gate_up = (x.float() @ weight.float().T).half()
    differ = small_linear(x, weight, is_gated=True) != silu_mul(gate_up)
    assert differ.float().mean() < 0.02
    residual = random(num_tokens, 2 * 128, dtype=torch.float16, seed=3)
    expected = residual + gate_up
    assert (small_linear(x, weight, residual=residual) != expected).float().mean() < 0.02


@pytest.mark.parametrize("way", ["chosen", "tiles of columns"])
def test_a_token_gets_the_same_whatever_its_neighbours_are(way: str) -> None:
    x = random(16, 96, dtype=torch.float16)
    weight = random(40, 96, dtype=torch.float16, seed=1)
    together = small_linear(x, weight, config=WAYS[way])
    x[3] = torch.nan
    again = small_linear(x, weight, config=WAYS[way])
    assert again[3].isnan().all()
    again[3] = together[3]
    assert torch.equal(again, together)
    assert torch.equal(small_linear(x[:2], weight, config=WAYS[way]), together[:2])


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_rows_may_be_parts_of_wider_rows_and_only_theirs_are_written(num_tokens: int) -> None:
    wide, weight = random(num_tokens, 100, dtype=torch.float16), random(24, 64, dtype=torch.float16, seed=1)
    target = torch.zeros(num_tokens + 2, 50, dtype=torch.float16, device=DEVICE)
    out = target[1:-1, 20:44]
    assert small_linear(wide[:, 20:84], weight, out=out) is out
    expected = wide[:, 20:84].double() @ weight.double().T
    assert_near(out, expected, bound(wide[:, 20:84], weight, torch.float16))
    out.zero_()
    assert not target.any()


def test_it_serves_one_token_of_any_dtype_and_a_few_of_sixteen_bits() -> None:
    assert takes(1, 1024, 1024, torch.float32)
    assert not takes(2, 1024, 1024, torch.float32)
    assert takes(MOST_TOKENS, 1024, 1024, torch.bfloat16)
    assert not takes(MOST_TOKENS + 1, 1024, 1024, torch.bfloat16)


def test_of_long_rows_it_takes_fewer_tokens() -> None:
    assert takes(1, 14336, 4096, torch.bfloat16)
    assert takes(8, 4096, 4096, torch.bfloat16)
    assert not takes(9, 4096, 4096, torch.bfloat16)


def test_several_tokens_with_very_many_short_rows_are_left_to_cublas() -> None:
    assert takes(1, 1024, 151936, torch.bfloat16)
    assert not takes(2, 1024, 151936, torch.bfloat16)
    assert takes(8, 1024, 65536, torch.bfloat16)
    assert takes(8, 4096, 128256, torch.bfloat16)


def test_the_norm_is_left_to_its_own_kernel_where_x_is_large() -> None:
    assert takes_norm(1, 8192)
    assert takes_norm(16, 1024)
    assert not takes_norm(16, 4096)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("in_features", [8, 576, 1024, 2048, 3072, 4096, 8960, 14336])
@pytest.mark.parametrize("out_features", [64, 1024, 6144, 152064])
@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_what_is_chosen_keeps_the_rules(
    num_tokens: int, out_features: int, in_features: int, is_gated: bool
) -> None:
    config = small_linear_config(num_tokens, in_features, out_features, is_gated=is_gated, itemsize=2)
    if num_tokens == 1:
        # Of x and of the norm's weight a thread holds what its warps share, of the weight its part. One way
        # that was chosen held 512: it spilled, and a step of llama-3.1-8b took 57 ms instead of 4.
        num_x = config.tile_len // (32 * config.warps_per_row)
        num_weights = (1 + is_gated) * config.rows * config.tile_len // (32 * config.num_warps)
        assert 2 * num_x + num_weights <= 192
    if num_tokens > 1:
        assert config.tile_len // config.num_warps >= 16
    assert config.prefetch_len <= in_features
    assert config.prefetch_len % 8 == 0
