import pytest
import torch
import torch.nn.functional as F

from asyncserve.gpu.layers.linear import Linear, SmallProduct, pack_weight, packed_linear
from asyncserve.gpu.layers.norm import RMSNorm
from tests.gpu.kernels.machine import DEVICE, random

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def filled(
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device | None = None,
    seed: int = 0,
) -> Linear:
    layer = Linear(in_features, out_features, bias=bias, dtype=dtype).to(device)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 2 - 1)
    return layer


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (37, 51), (16, 1)])
def test_a_finished_layer_gives_what_the_plain_product_gives(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype
) -> None:
    layer = filled(in_features, out_features, bias=bias, dtype=dtype)
    inputs = [torch.randn(rows, in_features).to(dtype) for rows in (1, 2, 7, 33)]
    weight, offset = layer.weight, layer.bias
    assert weight is not None
    expected = [x.float() @ weight.float().T + (0.0 if offset is None else offset.float()) for x in inputs]
    plain = [layer.forward(x) for x in inputs]
    layer.finish_loading()
    for x, before, exact in zip(inputs, plain, expected, strict=True):
        after = layer.forward(x)
        assert after.dtype == before.dtype == dtype
        torch.testing.assert_close(after.float(), exact, atol=TOLERANCES[dtype] * 4, rtol=TOLERANCES[dtype])
        torch.testing.assert_close(before.float(), exact, atol=TOLERANCES[dtype] * 4, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_input_is_normalized_and_the_product_added_to_the_residual_in_place(
    bias: bool, is_finished: bool
) -> None:
    layer, norm = filled(24, 40, bias=bias, dtype=torch.float32), RMSNorm(24, eps=1e-2, dtype=torch.float32)
    norm.weight.data.uniform_(-1, 1)
    norm.finish_loading()
    x, residual = torch.randn(3, 24), torch.randn(3, 40)
    assert layer.weight is not None
    normed = F.rms_norm(x, (24,), norm.weight, 1e-2)
    expected = residual + F.linear(normed, layer.weight, layer.bias)
    before = x.clone()
    if is_finished:
        layer.finish_loading()
    assert layer.forward(x, norm=norm, residual=residual) is residual
    torch.testing.assert_close(residual, expected)
    assert torch.equal(x, before)


def test_packing_frees_the_plain_weight_and_keeps_the_bias() -> None:
    layer = filled(8, 12, bias=True, dtype=torch.float32)
    layer.finish_loading()
    if layer.packed is None:
        pytest.skip("this build of torch packs no weights")
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_a_dtype_that_cannot_be_packed_stays_plain_and_right() -> None:
    layer = filled(8, 12, bias=False, dtype=torch.float64)
    layer.finish_loading()
    assert layer.packed is None
    assert layer.weight is not None
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(layer.forward(x), x @ layer.weight.T)


def test_packing_leaves_the_given_weight_alone() -> None:
    weight = torch.randn(24, 16)
    before = weight.clone()
    packed = pack_weight(weight)
    if packed is None:
        pytest.skip("this build of torch packs no weights")
    weight.zero_()
    x = torch.randn(2, 16)
    torch.testing.assert_close(packed_linear(x, packed, None), x @ before.T)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 17, 64, 65])
def test_with_the_kernel_a_layer_gives_what_it_gives_without(num_tokens: int, bias: bool) -> None:
    pytest.importorskip("triton")
    plain, fused = (filled(48, 40, bias=bias, dtype=torch.float16, device=DEVICE, seed=1) for _ in range(2))
    plain.finish_loading()
    fused.finish_loading(fused=True)
    norm = RMSNorm(48, eps=1e-5, dtype=torch.float16).to(DEVICE)
    norm.weight.data.copy_(random(48, dtype=torch.float16, seed=4))
    norm.finish_loading()
    x = random(num_tokens, 48, dtype=torch.float16, seed=2)
    residual = random(num_tokens, 40, dtype=torch.float16, seed=3)
    expected = [
        plain.forward(x),
        plain.forward(x, norm=norm),
        plain.forward(x, norm=norm, residual=residual.clone()),
    ]
    sum_of_both = residual.clone()
    results = [
        fused.forward(x),
        fused.forward(x, norm=norm),
        fused.forward(x, norm=norm, residual=sum_of_both),
    ]
    assert results[2] is sum_of_both
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=2e-2, rtol=4e-3)


def test_kernels_take_few_tokens_and_leave_the_norm_of_large_ones_to_its_own() -> None:
    pytest.importorskip("triton")
    product = SmallProduct(torch.zeros(8, 4096, dtype=torch.float16, device=DEVICE), None)
    assert product.takes(torch.empty(64, 4096, dtype=torch.float16, device=DEVICE))
    assert not product.takes(torch.empty(65, 4096, dtype=torch.float16, device=DEVICE))
    norm, seen = RMSNorm(4096, eps=1e-5, dtype=torch.float16).to(DEVICE), []
    norm.weight.data.fill_(1.0)

    def normalize(x: torch.Tensor, *, residual: torch.Tensor | None) -> torch.Tensor:
        assert residual is None
        seen.append(x.shape[0])
        return x

    norm.kernel = normalize
    for num_tokens in (1, 16):
        product.run(torch.zeros(num_tokens, 4096, dtype=torch.float16, device=DEVICE), norm)
    assert seen == [16]
