import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asyncserve.gpu.layers.norm import RMSNorm, rms_norm, rms_norm_floor, rms_norm_gain


def norm(weight: torch.Tensor, *, eps: float) -> RMSNorm:
    layer = RMSNorm(weight.shape[-1], eps=eps, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    layer.finish_loading()
    return layer


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])  # the first is far below eps
@pytest.mark.parametrize("size", [1, 33, 576])
def test_float32_equals_transformers(size: int, scale: float) -> None:
    weight = torch.randn(size)
    reference = LlamaRMSNorm(size, eps=1e-5)
    reference.weight.data.copy_(weight)
    x = torch.randn(5, size) * scale
    torch.testing.assert_close(norm(weight, eps=1e-5).forward(x), reference(x).detach(), atol=1e-6, rtol=2e-6)


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    weight, x = torch.randn(576).bfloat16(), torch.randn(9, 576).bfloat16()
    exact = F.rms_norm(x.double(), (576,), weight.double(), 1e-5)
    result = norm(weight, eps=1e-5).forward(x)
    assert result.dtype == torch.bfloat16
    # Half a unit in the last of bfloat16's 8 bits, and no more.
    torch.testing.assert_close(result.double(), exact, atol=1e-6, rtol=2**-8)


def test_a_large_bfloat16_row_does_not_overflow() -> None:
    x = torch.full((1, 64), 1e18).bfloat16()
    result = norm(torch.ones(64).bfloat16(), eps=1e-5).forward(x)
    torch.testing.assert_close(result, torch.ones(1, 64).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_not_changed(dtype: torch.dtype) -> None:
    x = torch.randn(3, 16).to(dtype)
    before = x.clone()
    norm(torch.randn(16).to(dtype), eps=1e-6).forward(x)
    assert torch.equal(x, before)


def test_heads_may_have_weights_of_their_own() -> None:
    weight, x = torch.randn(4, 8), torch.randn(5, 4, 8)
    result = rms_norm(x, rms_norm_gain(weight), rms_norm_floor(weight, 1e-5))
    torch.testing.assert_close(result, F.rms_norm(x, (8,), None, 1e-5) * weight)
