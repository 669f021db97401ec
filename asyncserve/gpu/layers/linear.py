"""Matrix products with weights that are packed once for the CPU.

A `Linear` holds one matrix, or several of the checkpoint's stacked into one so that one product serves them
all. On a CPU oneDNN keeps a weight in blocks of its own and multiplies about twice as fast (bf16, one row)
to four times as fast (fp32) as the plain product does; the packed copy replaces the parameter. Knows nothing
of tensor parallelism or quantization.
"""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """`y = x Wᵀ + b`.

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

    def finish_loading(self) -> None:
        """Replace the weight by its packed form where that is possible, which frees the original."""
        assert self.weight is not None, "a layer is finished once"
        self.packed = pack_weight(self.weight)
        if self.packed is not None:
            self.packed_bias = None if self.bias is None else self.bias.data
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, in_features]` → `[num_tokens, out_features]`."""
        if self.packed is not None:
            return packed_linear(x, self.packed, self.packed_bias)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


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
