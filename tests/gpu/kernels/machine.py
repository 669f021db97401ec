"""Where kernels are tested: for real on a GPU, else in Triton's interpreter, on small shapes.

The interpreter cuts bfloat16 off where a GPU rounds it, so there it is half as exact; float16 is rounded, and
its tests hold the places of rounding. Of a cast to 8 bits it loses what is carried into the exponent, cuts
subnormals off and makes a number of NaN: only what 8 bits can hold as it is comes out right.
"""

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

MARKS = [pytest.mark.gpu] if ON_GPU else []
"""For `pytestmark`: with a GPU these are tests that need one."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]

ROUNDING = {
    torch.float32: 2e-6,  # a few units in the last place: approximate roots and exponentials
    torch.bfloat16: 2**-8 if ON_GPU else 2**-7,
    torch.float16: 2**-11,
}
"""Largest relative error of one rounding of a value computed in float32, by the dtype it is rounded to."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return the same normally distributed values on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def assert_near(result: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """Hold a result against float64: no element further away than `bound`, a float32 detail aside."""
    error = (result.double() - exact).abs()
    allowed = bound * 1.05 + 1e-7
    worst = (error - allowed).argmax()
    assert bool((error <= allowed).all()), (
        f"element {int(worst)} is off by {error.flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g}"
    )
