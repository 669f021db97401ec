"""What `small_linear` and `tiled_linear` both promise, and what is each one's own."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.kernels.machine import DEVICE, DTYPES, MARKS, ON_GPU, ROUNDING, assert_near, random

pytest.importorskip("triton")
from asyncserve.gpu.kernels import small_linear as small
from asyncserve.gpu.kernels import tiled_linear as tiled
from asyncserve.gpu.kernels.small_linear import SmallLinearConfig, small_linear, small_linear_config
from asyncserve.gpu.kernels.tiled_linear import TiledLinearConfig, tiled_linear, tiled_linear_config

pytestmark = MARKS
# (in_features, out_features): rows that fill tiles and rows that do not, more features than a tile and fewer.
SHAPES = [(64, 40), (96, 17), (80, 3)]
SMALL = {
    "small": None,
    "a row a warp": SmallLinearConfig(rows=4, tile_len=128, num_warps=4),
    "warps share rows": SmallLinearConfig(rows=2, tile_len=512, num_warps=4, warps_per_row=2),
}
TILED = {
    "tiled": None,
    "shared": TiledLinearConfig(rows=16, tile_len=16, num_warps=4, num_stages=2, num_splits=2),
    "more share than there are tiles": TiledLinearConfig(
        rows=16, tile_len=64, num_warps=4, num_stages=2, num_splits=4
    ),
}
# Tokens come first only where they fill the hardware's side.
TOKENS_FIRST = TiledLinearConfig(
    rows=16, tile_len=32, num_warps=4, num_stages=3, num_splits=2, has_tokens_first=True
)
SMALL_TOKENS, TILED_TOKENS = (1, 2, 8), (2, 13, 33)
OUT = 19
"""Rows of a weight that fill no tile."""
if ON_GPU:
    OUT = 40
    SMALL_TOKENS, TILED_TOKENS = (1, 2, 5, 8), (2, 8, 13, 16, 17, 32, 33, 64)
    SHAPES += [(576, 960), (1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (8960, 1536)]
    TILED |= {
        "wide": TiledLinearConfig(rows=64, tile_len=128, num_warps=4, num_stages=5),
        "wide and shared": TiledLinearConfig(rows=128, tile_len=64, num_warps=8, num_stages=3, num_splits=4),
    }
WAYS = {**SMALL, **TILED, "tokens first": TOKENS_FIRST}
CASES = [(way, num_tokens) for way in SMALL for num_tokens in SMALL_TOKENS]
CASES += [(way, num_tokens) for way in TILED for num_tokens in TILED_TOKENS]
CASES += [("tokens first", 33), ("tokens first", 64)]
# (way, tokens, has a bias): a few of all.
FEW = [
    ("small", 1, False),
    ("small", 5, True),
    ("a row a warp", 1, True),
    ("warps share rows", 5, False),
    ("tiled", 5, True),
    ("tiled", 33, False),
    ("shared", 20, True),
    ("more share than there are tiles", 17, False),
    ("tokens first", 40, True),
]


def multiplier(way: str) -> Callable[..., torch.Tensor]:
    if way in SMALL:
        return functools.partial(small_linear, config=SMALL[way])
    # More counters than the ways that are chosen need: there are ways of fewer rows here.
    arrived = torch.zeros(4 * tiled.MOST_SHARED, dtype=torch.int32, device=DEVICE)

    def multiply(x: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
        result = tiled_linear(x, weight, arrived=arrived, config=WAYS[way], **options)
        assert not arrived.any(), "what is counted in one launch is not left for the next"
        return result

    return multiply


def skip_unless_served(way: str, num_tokens: int, in_features: int, dtype: torch.dtype) -> None:
    if num_tokens > 1 and dtype.itemsize > 2:
        pytest.skip("one token only")
    if way in SMALL and num_tokens > 1:
        config = SMALL[way]
        if in_features > (2048 if config is None else config.tile_len):
            pytest.skip("shorter rows only")


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def bound(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far a product may be off: its rounding, and float32's in the sum."""
    x, weight = x.double(), weight.double()
    return ROUNDING[dtype] * (x @ weight.T).abs() + 4e-7 * (x.abs() @ weight.abs().T)


@pytest.mark.parametrize(("way", "num_tokens"), CASES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_it_multiplies_every_token_by_every_row(
    in_features: int, out_features: int, num_tokens: int, way: str
) -> None:
    skip_unless_served(way, num_tokens, in_features, torch.bfloat16)
    x = random(num_tokens, in_features, dtype=torch.bfloat16)
    weight = random(out_features, in_features, dtype=torch.bfloat16, seed=1)
    before = x.clone()
    result = multiplier(way)(x, weight)
    assert result.shape == (num_tokens, out_features)
    assert result.dtype == torch.bfloat16
    assert_near(result, x.double() @ weight.double().T, bound(x, weight, torch.bfloat16))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", SMALL)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_input_is_normalized_and_rounded_first(num_tokens: int, way: str, dtype: torch.dtype) -> None:
    skip_unless_served(way, num_tokens, 96, dtype)
    x, weight = random(num_tokens, 96, dtype=dtype, scale=3.0), random(OUT, 96, dtype=dtype, seed=1)
    gain = random(96, dtype=dtype, seed=2)
    result = small_linear(x, weight, norm_weight=gain, eps=1e-2, config=SMALL[way])
    normed = F.rms_norm(x.double(), (96,), gain.double(), 1e-2)
    # A rounding of x that falls the other way moves a sum by that much.
    wide = ROUNDING[dtype] * (normed.abs() @ weight.double().abs().T) * (1.0 if ON_GPU else 1.5)
    assert_near(result, normed @ weight.double().T, wide + bound(normed, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("way", "num_tokens", "has_bias"), FEW)
def test_the_product_and_its_bias_are_added_to_the_residual_in_place(
    has_bias: bool, num_tokens: int, way: str, dtype: torch.dtype
) -> None:
    skip_unless_served(way, num_tokens, 96, dtype)
    x, weight = random(num_tokens, 96, dtype=dtype), random(OUT, 96, dtype=dtype, seed=1)
    bias = random(OUT, dtype=dtype, seed=2, scale=9.0) if has_bias else None
    residual = random(num_tokens, OUT, dtype=dtype, seed=3, scale=4.0)
    product = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    expected = residual.double() + product
    assert multiplier(way)(x, weight, bias=bias, residual=residual) is residual
    rounding = ROUNDING[dtype] * (product.abs() + expected.abs())
    assert_near(residual, expected, rounding + bound(x, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("way", "num_tokens", "has_bias"), FEW)
def test_a_gate_multiplies_silu_of_the_first_rows_with_the_others(
    has_bias: bool, num_tokens: int, way: str, dtype: torch.dtype
) -> None:
    skip_unless_served(way, num_tokens, 64, dtype)
    x, weight = random(num_tokens, 64, dtype=dtype), random(2 * 23, 64, dtype=dtype, seed=1, scale=0.125)
    bias = random(2 * 23, dtype=dtype, seed=2) if has_bias else None
    result = multiplier(way)(x, weight, bias=bias, is_gated=True)
    assert result.shape == (num_tokens, 23)
    gate_up = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(
        result.double(), silu_mul(gate_up), rtol=12 * ROUNDING[dtype], atol=12 * ROUNDING[dtype]
    )


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_gate_and_the_norm_of_its_input_go_together(num_tokens: int) -> None:
    x, gain = random(num_tokens, 64, dtype=torch.float16, scale=3.0), random(64, dtype=torch.float16, seed=3)
    weight = random(2 * 23, 64, dtype=torch.float16, seed=1, scale=0.125)
    result = small_linear(x, weight, norm_weight=gain, eps=1e-5, is_gated=True)
    normed = F.rms_norm(x.double(), (64,), gain.double(), 1e-5)
    torch.testing.assert_close(
        result.double(), silu_mul(normed @ weight.double().T), rtol=12 * 2**-11, atol=12 * 2**-11
    )


@pytest.mark.parametrize(("way", "num_tokens", "has_bias"), FEW)
def test_it_rounds_where_the_composition_does(way: str, num_tokens: int, has_bias: bool) -> None:
    """Values that were not rounded in between would differ from it in a quarter of the elements."""
    multiply = multiplier(way)
    x = random(num_tokens, 64, dtype=torch.float16)
    weight = random(2 * 128, 64, dtype=torch.float16, seed=1)
    bias = random(2 * 128, dtype=torch.float16, seed=2) if has_bias else None
    gate_up = (x.float() @ weight.float().T + (0.0 if bias is None else bias.float())).half()
    differ = multiply(x, weight, bias=bias, is_gated=True) != silu_mul(gate_up)
    assert differ.float().mean() < 0.02
    residual = random(num_tokens, 2 * 128, dtype=torch.float16, seed=3)
    expected = residual + gate_up
    assert (multiply(x, weight, bias=bias, residual=residual) != expected).float().mean() < 0.02


@pytest.mark.parametrize(
    ("way", "num_tokens"), [("small", 8), ("tiled", 16), ("shared", 16), ("tokens first", 64)]
)
def test_a_token_gets_the_same_whatever_its_neighbours_are(way: str, num_tokens: int) -> None:
    multiply = multiplier(way)
    x = random(num_tokens, 96, dtype=torch.float16)
    weight = random(40, 96, dtype=torch.float16, seed=1)
    together = multiply(x, weight)
    x[3] = torch.nan
    again = multiply(x, weight)
    assert again[3].isnan().all()
    again[3] = together[3]
    assert torch.equal(again, together)
    fewer = num_tokens // 2 + 1
    assert torch.equal(multiply(x[:fewer].nan_to_num(), weight)[4:], together[4:fewer])


@pytest.mark.parametrize(("way", "num_tokens"), [("small", 1), ("small", 3), ("tiled", 3), ("shared", 20)])
def test_rows_may_be_parts_of_wider_rows_and_only_theirs_are_written(way: str, num_tokens: int) -> None:
    wide, weight = random(num_tokens, 104, dtype=torch.float16), random(24, 64, dtype=torch.float16, seed=1)
    target = torch.zeros(num_tokens + 2, 50, dtype=torch.float16, device=DEVICE)
    out = target[1:-1, 20:44]
    assert multiplier(way)(wide[:, 24:88], weight, out=out) is out
    expected = wide[:, 24:88].double() @ weight.double().T
    assert_near(out, expected, bound(wide[:, 24:88], weight, torch.float16))
    out.zero_()
    assert not target.any()


def test_small_ones_serve_one_token_of_any_dtype_and_a_few_of_sixteen_bits() -> None:
    assert small.takes(1, 14336, 152064, torch.float32)
    assert not small.takes(2, 1024, 1024, torch.float32)
    assert small.takes(8, 1024, 1024, torch.bfloat16)
    assert not small.takes(9, 1024, 1024, torch.bfloat16)


def test_small_ones_leave_several_tokens_with_long_or_many_rows_to_others() -> None:
    assert small.takes(8, 2048, 16384, torch.bfloat16)
    assert not small.takes(2, 2056, 1024, torch.bfloat16)
    assert not small.takes(2, 1024, 152064, torch.bfloat16)


def test_the_norm_of_a_long_row_is_left_to_its_own_kernel() -> None:
    assert small.takes_norm(1, 16384)
    assert small.takes_norm(8, 2048)
    assert not small.takes_norm(1, 16392)


def test_tiled_ones_serve_what_bulk_copies_can_carry() -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    weight = tensor(32, 64)
    assert tiled.takes(tensor(64, 64), weight)
    assert not tiled.takes(tensor(65, 64), weight)
    assert not tiled.takes(tensor(4, 64, dtype=torch.float32), weight)
    assert not tiled.takes(tensor(4, 68), tensor(32, 68))
    assert tiled.takes(tensor(4, 80)[:, 8:72], weight)
    assert not tiled.takes(tensor(4, 80)[:, 4:68], weight)
    assert not tiled.takes(tensor(4, 68)[:, :64], weight)
    assert not tiled.takes(tensor(4, 64), tensor(33 * 64)[4 : 4 + 32 * 64].view(32, 64))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("in_features", [8, 576, 1024, 2048, 3072, 4096, 8960, 14336])
@pytest.mark.parametrize("out_features", [64, 1024, 6144, 152064])
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_what_is_chosen_of_small_ones_fits_the_registers(
    num_tokens: int, out_features: int, in_features: int, is_gated: bool
) -> None:
    if not small.takes(num_tokens, in_features, out_features, torch.bfloat16):
        pytest.skip("not served")
    config = small_linear_config(num_tokens, in_features, out_features, is_gated=is_gated, itemsize=2)
    if num_tokens == 1:
        # Of x and of the norm's weight a thread holds what its warps share, of the weight its part. One way
        # that was chosen held 512: it spilled, and a step of llama-3.1-8b took 57 ms instead of 4.
        num_x = config.tile_len // (32 * config.warps_per_row)
        num_weights = (1 + is_gated) * config.rows * config.tile_len // (32 * config.num_warps)
        assert 2 * num_x + num_weights <= 192
    else:
        assert config.tile_len >= in_features
        assert config.tile_len // config.num_warps >= 16


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("in_features", [8, 576, 3072, 4096, 14336])
@pytest.mark.parametrize("out_features", [3, 64, 1024, 4096, 14336, 152064])
@pytest.mark.parametrize("num_tokens", [2, 16, 17, 33, 64])
def test_what_is_chosen_of_tiled_ones_fits_the_device(
    num_tokens: int, out_features: int, in_features: int, is_gated: bool, shared_kib: int
) -> None:
    config = tiled_linear_config(
        num_tokens, in_features, out_features, is_gated=is_gated, shared_bytes=shared_kib * 1024
    )
    tokens = next(tokens for tokens in (16, 32, 64) if tokens >= num_tokens)
    tile_bytes = 2 * config.tile_len * ((1 + is_gated) * config.rows + tokens)
    assert config.num_stages >= 2
    assert config.num_stages * tile_bytes <= shared_kib * 1024
    # Whoever shares rows has some columns, and there is a counter for it.
    assert (config.num_splits - 1) * 768 < in_features
    assert config.num_splits == 1 or -(-out_features // config.rows) <= tiled.MOST_SHARED
    # A product wants 64 of its first side.
    assert tokens == 64 or not config.has_tokens_first
