import pytest
import torch
import torch.nn.functional as F

from asyncserve.gpu.layers.loading import finish_layers
from asyncserve.gpu.layers.mlp import Gate, GatedMLP, gelu_mul, silu_mul
from asyncserve.gpu.layers.norm import RMSNorm
from asyncserve.gpu.models.gpt_oss import clamped_gate
from tests.gpu.kernels.machine import DEVICE, random


def test_it_adds_down_of_silu_of_gate_times_up_of_the_normalized_rows() -> None:
    mlp, norm = GatedMLP(6, 10, bias=True, dtype=torch.float32), RMSNorm(6, eps=1e-5, dtype=torch.float32)
    for module in (mlp, norm):
        for parameter in module.parameters():
            parameter.data.uniform_(-1, 1)
    norm.finish_loading()
    weight, bias, down = mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, mlp.down_proj.weight
    assert weight is not None
    assert bias is not None
    assert down is not None
    hidden = torch.randn(4, 6)
    x = F.rms_norm(hidden, (6,), norm.weight, 1e-5)
    gate, up = F.linear(x, weight[:10], bias[:10]), F.linear(x, weight[10:], bias[10:])
    expected = hidden + F.linear(gate * torch.sigmoid(gate) * up, down, mlp.down_proj.bias)
    mlp.forward(hidden, norm)
    torch.testing.assert_close(hidden, expected)


def test_what_is_added_may_be_normalized_first() -> None:
    mlp = GatedMLP(6, 10, bias=False, dtype=torch.float32, gate=gelu_mul)
    norm, output_norm = (RMSNorm(6, eps=1e-5, dtype=torch.float32) for _ in range(2))
    for module in (mlp, norm, output_norm):
        for parameter in module.parameters():
            parameter.data.uniform_(-1, 1)
    norm.finish_loading()
    output_norm.finish_loading()
    hidden, added = torch.randn(4, 6), torch.zeros(4, 6)
    expected = hidden + F.rms_norm(
        mlp.down_proj.forward(gelu_mul(mlp.gate_up_proj.forward(hidden, norm=norm))),
        (6,),
        output_norm.weight,
        1e-5,
    )
    added += hidden
    mlp.forward(added, norm, output_norm=output_norm)
    torch.testing.assert_close(added, expected)


@pytest.mark.parametrize("gate", [silu_mul, gelu_mul, clamped_gate(alpha=1.7, limit=1.0)])
@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_with_the_kernels_it_gives_what_it_gives_without(num_tokens: int, gate: Gate) -> None:
    pytest.importorskip("triton")
    results = []
    for fused in (False, True):
        mlp, norm = (
            GatedMLP(48, 40, bias=True, dtype=torch.float16, gate=gate),
            RMSNorm(48, eps=1e-5, dtype=torch.float16),
        )
        for module in (mlp.to(DEVICE), norm.to(DEVICE)):
            for seed, parameter in enumerate(module.parameters()):
                parameter.data.copy_(random(*parameter.shape, dtype=torch.float16, seed=seed, scale=0.3))
            finish_layers(module, fused=fused)
        hidden = random(num_tokens, 48, dtype=torch.float16, seed=9)
        mlp.forward(hidden, norm)
        results.append(hidden)
    assert not torch.equal(results[0], random(num_tokens, 48, dtype=torch.float16, seed=9))
    torch.testing.assert_close(results[1], results[0], atol=4e-3, rtol=4e-3)
