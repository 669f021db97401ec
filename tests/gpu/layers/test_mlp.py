import torch
import torch.nn.functional as F

from asyncserve.gpu.layers.mlp import GatedMLP


def test_it_is_down_of_silu_of_gate_times_up() -> None:
    mlp = GatedMLP(6, 10, bias=True, dtype=torch.float32)
    for parameter in mlp.parameters():
        parameter.data.uniform_(-1, 1)
    weight, bias, down = mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, mlp.down_proj.weight
    assert weight is not None
    assert bias is not None
    assert down is not None
    x = torch.randn(4, 6)
    gate, up = F.linear(x, weight[:10], bias[:10]), F.linear(x, weight[10:], bias[10:])
    expected = F.linear(gate * torch.sigmoid(gate) * up, down, mlp.down_proj.bias)
    torch.testing.assert_close(mlp.forward(x), expected)
