import pytest
import torch
import torch.nn.functional as F

from asyncserve.gpu.layers import norm as composition
from tests.gpu.kernels.machine import DEVICE, DTYPES, MARKS, ON_GPU, ROUNDING, assert_near, random

pytest.importorskip("triton")
from asyncserve.gpu.kernels.rms_norm import rms_norm

pytestmark = MARKS
SHAPES = [(1, 1), (3, 33), (2, 576), (1, 896), (3, 1024), (2, 3072), (1, 4096)]
if ON_GPU:
    SHAPES = [(1, 1), (3, 33), (8192, 576), (256, 896), (2047, 1024), (65, 3072), (8192, 4096), (7, 16384)]


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_a_row_is_normalized_in_float32_and_rounded_once(
    num_tokens: int, size: int, dtype: torch.dtype
) -> None:
    hidden, weight = random(num_tokens, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    before = hidden.clone()
    result = rms_norm(hidden, weight, eps=1e-5)
    assert result.shape == hidden.shape
    assert result.dtype == dtype
    expected = exact(hidden, weight, 1e-5)
    assert_near(result, expected, ROUNDING[dtype] * expected.abs())
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_to_a_residual_it_is_rounded_before_and_after_as_the_layer_has_it(dtype: torch.dtype) -> None:
    hidden, residual = random(3, 80, dtype=dtype), random(3, 80, dtype=dtype, seed=2)
    layer = composition.RMSNorm(80, eps=1e-6, dtype=torch.float32).to(DEVICE)
    layer.weight.data.copy_(random(80, dtype=torch.float32, seed=1))
    results = []
    for fused in (False, True):
        layer.kernel = None
        layer.finish_loading(fused=fused)
        summed = residual.clone()
        assert layer.forward(hidden, residual=summed) is summed
        results.append(summed)
    torch.testing.assert_close(results[1], results[0], atol=2 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype])
    if dtype == torch.float16:  # the interpreter cuts bfloat16 instead of rounding it
        assert (results[1] != results[0]).float().mean() < 0.05
    exact_sum = residual.double() + exact(hidden, layer.weight.data, 1e-6)
    torch.testing.assert_close(
        results[0].double(), exact_sum, atol=4 * ROUNDING[dtype], rtol=4 * ROUNDING[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_composition_it_stands_for(dtype: torch.dtype) -> None:
    hidden, weight = random(5, 576, dtype=dtype), random(576, dtype=dtype, seed=1)
    layer = composition.RMSNorm(576, eps=1e-6, dtype=dtype).to(DEVICE)
    layer.weight.data.copy_(weight)
    layer.finish_loading()
    expected = layer.forward(hidden)
    result = rms_norm(hidden, weight, eps=1e-6)
    torch.testing.assert_close(result, expected, rtol=2 * ROUNDING[dtype], atol=1e-7)


@pytest.mark.parametrize("scale", [1e-4, 1e4])  # the first is far below eps
def test_eps_counts_where_the_row_is_small(scale: float) -> None:
    hidden, weight = random(2, 576, dtype=torch.float32, scale=scale), torch.ones(576, device=DEVICE)
    expected = exact(hidden, weight, 1e-5)
    assert_near(rms_norm(hidden, weight, eps=1e-5), expected, 4e-6 * expected.abs())


def test_large_rows_do_not_overflow_and_rows_of_zeros_stay_zeros() -> None:
    hidden = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    hidden[0] = 1e18
    result = rms_norm(hidden, torch.ones(64, dtype=torch.bfloat16, device=DEVICE), eps=1e-5)
    torch.testing.assert_close(result[0], torch.ones_like(result[0]), rtol=2**-7, atol=0)
    assert not result[1].any()


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    hidden, weight = random(3, 96, dtype=torch.float32), random(96, dtype=torch.float32, seed=1)
    alone = rms_norm(hidden, weight, eps=1e-5)
    hidden[1, 5] = torch.nan
    result = rms_norm(hidden, weight, eps=1e-5)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], alone[::2])


def test_rows_may_be_parts_of_wider_rows() -> None:
    wide, weight = random(4, 100, dtype=torch.float32), random(48, dtype=torch.float32, seed=1)
    result = rms_norm(wide[:, 20:68], weight, eps=1e-5)
    assert result.is_contiguous()
    expected = exact(wide[:, 20:68], weight, 1e-5)
    assert_near(result, expected, 4e-6 * expected.abs())


@pytest.mark.skipif(not ON_GPU, reason="takes 4 GiB")
def test_rows_far_apart_are_found() -> None:
    storage = torch.zeros(2**31 + 640, dtype=torch.bfloat16, device=DEVICE)
    hidden = storage.as_strided((2, 64), (2**31 + 512, 1))
    hidden[1] = 3.0
    result = rms_norm(hidden, torch.ones(64, dtype=torch.bfloat16, device=DEVICE), eps=1e-5)
    assert not result[0].any()
    assert (result[1] == 1.0).all()
