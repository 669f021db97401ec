"""Matrix products with weights that are packed once for the CPU.

A `Linear` holds one matrix, or several of the checkpoint's stacked into one so that one product serves them
all. The norm of its input and the residual it is added to belong to the call, because on a GPU they are part
of a product of few tokens (`gpu/kernels/small_linear.py`, `gpu/kernels/tiled_linear.py`). On a CPU oneDNN
keeps a weight in blocks of its own and multiplies about twice as fast (bf16, one row) to four times as fast
(fp32) as the plain product does; the packed copy replaces the parameter. Knows nothing of tensor
parallelism or quantization.
"""

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from asyncserve.gpu.layers.norm import RMSNorm


class Linear(nn.Module):
    """`y = norm(x) Wᵀ + b`, by itself or added to a residual.

    Args:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        bias: Whether there is one.
        dtype: Of weight, bias and activations.
        stacked: The checkpoint's matrices that make up the weight, name → rows, top to bottom; their names
            replace the last part of this module's own. None: the module's own name is the checkpoint's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        stacked: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        assert stacked is None or sum(stacked.values()) == out_features
        self.stacked = stacked
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        )
        # Plain attributes: a look-up in nn.Module's dictionaries costs as much as a small kernel's launch.
        self.packed: torch.Tensor | None = None
        self.packed_bias: torch.Tensor | None = None
        # `[in_features, out_features]`, the weight seen the other way; where a product can be added to one.
        self.transposed: torch.Tensor | None = None
        self.kernel: SmallProduct | None = None

    def finish_loading(self, *, fused: bool = False) -> None:
        """Take the kernel, or replace the weight by its packed form where that is possible."""
        assert self.weight is not None, "a layer is finished once"
        if fused:
            self.kernel = SmallProduct(self.weight.data, None if self.bias is None else self.bias.data)
            if self.bias is None:
                self.transposed = self.weight.data.t()
            return
        self.packed = pack_weight(self.weight)
        if self.packed is not None:
            self.packed_bias = None if self.bias is None else self.bias.data
            self.weight = None

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        output_norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply.

        Args:
            x: `[num_tokens, in_features]`; not changed.
            norm: Normalizes `x` first; None: it is taken as it is.
            output_norm: Normalizes the product, before it is added to a residual; None: it stays as it is.
            residual: `[num_tokens, out_features]`, the product is added to it in place; None: there is none.

        Returns:
            The residual, or a new tensor `[num_tokens, out_features]`.
        """
        if output_norm is not None:
            return output_norm.forward(self.forward(x, norm=norm), residual=residual)
        if self.kernel is not None and self.kernel.takes(x):
            return self.kernel.run(x, norm, residual)
        if norm is not None:
            x = norm.forward(x)
        if self.packed is not None:
            product = packed_linear(x, self.packed, self.packed_bias)
        elif residual is not None and self.transposed is not None:
            return residual.addmm_(x, self.transposed)
        else:
            assert self.weight is not None
            product = F.linear(x, self.weight, self.bias)
        if residual is None:
            return product
        residual += product
        return residual


class SmallProduct:
    """The kernels for few tokens, with a weight. Made only where Triton may be imported.

    Args:
        weight: `[out_features, in_features]`, contiguous.
        bias: `[out_features]`; None: there is none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        from asyncserve.gpu.kernels import small_linear, tiled_linear

        self._weight = weight
        self._small, self._tiled = small_linear, tiled_linear
        self._multiply_small: Callable[..., torch.Tensor] = functools.partial(
            small_linear.small_linear, weight=weight, bias=bias
        )
        arrived = torch.zeros(tiled_linear.MOST_SHARED, dtype=torch.int32, device=weight.device)
        self._multiply_tiled: Callable[..., torch.Tensor] = functools.partial(
            tiled_linear.tiled_linear, weight=weight, bias=bias, arrived=arrived
        )

    def takes(self, x: torch.Tensor) -> bool:
        """Whether one of them serves these rows."""
        return self._is_small(x) or self._tiled.takes(x, self._weight)

    def _is_small(self, x: torch.Tensor) -> bool:
        return self._small.takes(x.shape[0], x.shape[1], self._weight.shape[0], x.dtype)

    def run(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply; see `tiled_linear`."""
        is_small = self._is_small(x)
        if norm is not None and is_small and self._small.takes_norm(*x.shape):
            return self._multiply_small(
                x, norm_weight=norm.weight.data, eps=norm.eps, residual=residual, is_gated=is_gated, out=out
            )
        if norm is not None:
            x = norm.forward(x)
        multiply = self._multiply_small if is_small else self._multiply_tiled
        return multiply(x, residual=residual, is_gated=is_gated, out=out)


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a weight in oneDNN's layout for `packed_linear`; None where plain products must do.

    Args:
        weight: `[out_features, in_features]`; not changed.
    """
    if weight.device.type != "cpu" or not _can_pack(weight.dtype):
        return None
    return _reorder(weight)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by a packed weight: `[rows, in_features]` → `[rows, out_features]`."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return result


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    # The op takes a hint of the batch size. Left out it is right for every size; 1 makes fp32 products of
    # more rows up to twice as slow.
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach())
    return packed


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and processor pack such weights: tried on a small one, as the ops are private."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.linspace(-1, 1, 48 * 32).sin().view(48, 32).to(dtype)
    x = torch.linspace(-1, 1, 3 * 32).cos().view(3, 32).to(dtype)
    try:
        result = packed_linear(x, _reorder(weight), None)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(result.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
