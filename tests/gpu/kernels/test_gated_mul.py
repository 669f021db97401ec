from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from asyncserve.gpu.layers import mlp as composition
from tests.gpu.kernels.machine import DEVICE, DTYPES, MARKS, ON_GPU, ROUNDING, assert_near, random

pytest.importorskip("triton")
from asyncserve.gpu.kernels import gated_mul
from asyncserve.gpu.kernels.gated_mul import gelu_mul, silu_mul

pytestmark = MARKS
SHAPES = [(1, 1), (3, 80), (2, 1024), (1, 1536), (2, 3072), (1, 4864)]
if ON_GPU:
    SHAPES = [(1, 1), (33, 33), (8192, 1536), (2047, 3072), (65, 4864), (1, 14336), (256, 14336)]


def exact(gate_up: torch.Tensor, *, is_gelu: bool = False) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_it_is_the_activation_of_the_first_half_times_the_second(
    num_tokens: int, size: int, dtype: torch.dtype, is_gelu: bool
) -> None:
    gate_up = random(num_tokens, 2 * size, dtype=dtype, scale=2.0)
    before = gate_up.clone()
    result = gelu_mul(gate_up) if is_gelu else silu_mul(gate_up)
    assert result.shape == (num_tokens, size)
    assert result.dtype == dtype
    expected = exact(gate_up, is_gelu=is_gelu)
    # Rounded twice: after the activation and after the product. Tiny float16 values have fewer digits, of the
    # activation as of the product, and GELU's cubic exponent loses a few of float32's.
    half_step = 2.0**-25 if dtype == torch.float16 else 0.0
    rounding = 2.01 * ROUNDING[dtype] + (4e-6 if is_gelu else 0.0)
    up = gate_up.double().chunk(2, -1)[1]
    assert_near(result, expected, rounding * expected.abs() + half_step * (1 + up.abs()))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_it_rounds_where_the_composition_does(name: str) -> None:
    """A product of two unrounded values would differ from it in a quarter of the elements."""
    gate_up = random(4, 2048, dtype=torch.float16)
    differ = getattr(gated_mul, name)(gate_up) != getattr(composition, name)(gate_up)
    assert differ.float().mean() < 0.02


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("multiply", [silu_mul, gelu_mul])
def test_large_gates_pass_or_vanish_and_nothing_overflows(
    multiply: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    gates = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE)
    result = multiply(torch.cat((gates, torch.full_like(gates, 2.0)), -1))
    torch.testing.assert_close(result, torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4]], device=DEVICE))


def test_a_value_that_is_not_finite_stays_where_it_is() -> None:
    gate_up = random(2, 64, dtype=torch.float32)
    alone = silu_mul(gate_up)
    gate_up[0, 3] = torch.nan
    result = silu_mul(gate_up)
    assert result[0, 3].isnan()
    result[0, 3] = alone[0, 3]
    assert torch.equal(result, alone)


def test_rows_may_be_parts_of_wider_rows() -> None:
    wide = random(3, 50, dtype=torch.float32)
    torch.testing.assert_close(silu_mul(wide[:, 5:45]), exact(wide[:, 5:45]).float())


@pytest.mark.skipif(not ON_GPU, reason="takes 4 GiB")
def test_rows_far_apart_are_found() -> None:
    storage = torch.zeros(2**31 + 640, dtype=torch.bfloat16, device=DEVICE)
    gate_up = storage.as_strided((2, 64), (2**31 + 512, 1))
    gate_up[1] = 30.0
    result = silu_mul(gate_up)
    assert not result[0].any()
    assert (result[1] == 900.0).all()
