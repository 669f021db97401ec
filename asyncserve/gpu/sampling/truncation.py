"""Temperature, min-p, top-k and top-p: which tokens may be drawn, and with what weight.

In this order: the logits are divided by the temperature; top-k keeps the k likeliest; min-p drops what is
less likely than `min_p` times the likeliest; top-p keeps the likeliest of what is left until their share of
it reaches p. A token exactly as likely as the last one kept is kept too, so the set depends on the
logits alone and on no order among equals. Everything works on values sorted from the largest down, where
each rule keeps a beginning: a whole sorted row, or only its first `NUM_CANDIDATES` values, which
nearly always suffice; the result says where they did not. (A GPU's kernel finds the same without sorting.)
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncserve.gpu.sampling.upload import upload

NUM_CANDIDATES = 128
"""Largest logits looked at before more of a row is sorted. Text models put 0.95 of their mass on fewer."""

NUM_VALUES = 4096
"""Largest logits sorted where the candidates do not suffice and before a whole row is sorted."""

_MIN_TOP_P = 1e-30
_NO_TOP_K = 2**31 - 1
_NO_TOP_P = 2.0


class RowShapes:
    """Temperature and truncation of rows, on the host: arrays by row, so that a step's rows are a gather.

    Attributes, all `[num_rows]`: `inv_temperature` float32 (0: greedy), `top_k` int64, `top_p` float64,
    `min_p` float32; values that switch a rule off are such that its formula keeps everything.
    """

    def __init__(
        self,
        inv_temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float64],
        min_p: npt.NDArray[np.float32],
    ) -> None:
        self.inv_temperature = inv_temperature
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p

    @classmethod
    def empty(cls, num_rows: int) -> "RowShapes":
        """Make rows of temperature 1 without any truncation."""
        return cls(
            np.ones(num_rows, np.float32),
            np.full(num_rows, _NO_TOP_K, np.int64),
            np.full(num_rows, _NO_TOP_P, np.float64),
            np.zeros(num_rows, np.float32),
        )

    def set(self, row: int, *, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
        """Set one row, which is not greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""
        self.inv_temperature[row] = 1.0 / temperature
        self.top_k[row] = min(top_k, _NO_TOP_K) if top_k > 0 else _NO_TOP_K
        self.top_p[row] = max(top_p, _MIN_TOP_P) if top_p < 1.0 else _NO_TOP_P
        self.min_p[row] = min_p

    def set_greedy(self, row: int) -> None:
        """Set one row that draws nothing and truncates nothing."""
        self.inv_temperature[row] = 0.0
        self.top_k[row], self.top_p[row], self.min_p[row] = _NO_TOP_K, _NO_TOP_P, 0.0

    def take(self, rows: npt.NDArray[np.int64]) -> "RowShapes":
        """Return the given rows."""
        return RowShapes(self.inv_temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    @property
    def has_top_k(self) -> npt.NDArray[np.bool_]:
        """Which rows have a top-k."""
        has: npt.NDArray[np.bool_] = self.top_k != _NO_TOP_K
        return has

    @property
    def has_top_p(self) -> npt.NDArray[np.bool_]:
        """Which rows have a top-p."""
        has: npt.NDArray[np.bool_] = self.top_p != _NO_TOP_P
        return has

    def truncates(self, row: int) -> bool:
        """Whether a row has any rule that drops tokens."""
        return bool(self.top_k[row] != _NO_TOP_K or self.top_p[row] != _NO_TOP_P or self.min_p[row] > 0)

    @property
    def needs_order(self) -> npt.NDArray[np.bool_]:
        """Which rows need their largest logits in order."""
        return self.has_top_k | self.has_top_p


@dataclass(slots=True)
class Kept:
    """What truncation left of sorted rows.

    Args:
        threshold: `[num_rows, 1]`, smallest logit kept.
        weights: `[num_rows, num_values] float32`, of the sorted values; 0 where dropped.
    """

    threshold: Tensor
    weights: Tensor


def weights_of(logits: Tensor, shapes: RowShapes) -> Tensor:
    """Return the weights of whole rows after temperature and min-p.

    Args:
        logits: `[num_rows, vocab] float32`; left as they are.
        shapes: Of the rows; top-k and top-p are not applied.

    Returns:
        `[num_rows, vocab] float32`; the likeliest token has weight 1.
    """
    # Subtracting the maximum first keeps the quotient finite for any temperature.
    weights = logits - logits.amax(dim=1, keepdim=True)
    weights.mul_(_column(shapes.inv_temperature, logits.device)).exp_()
    if shapes.min_p.any():
        weights.mul_(weights >= _column(shapes.min_p, logits.device))
    return weights


def truncate(
    values: Tensor, shapes: RowShapes, *, is_whole: bool = True, whole_weight: Tensor | None = None
) -> Kept:
    """Apply temperature, top-k, min-p and top-p to sorted logits.

    Args:
        values: `[num_rows, num_values] float32`, the largest logits of each row, largest first.
        shapes: Of the rows.
        is_whole: Whether `values` are whole rows. If not, the result holds for a row only if its threshold is
            above the smallest of its values.
        whole_weight: `[num_rows, 1]`, sum of `weights_of` over the whole vocabulary, for the rows that have
            no top-k; None if `values` are whole rows or every row has a top-k.
    """
    device = values.device
    weights = (values - values[:, :1]).mul_(_column(shapes.inv_temperature, device)).exp_()
    last = (_column(shapes.top_k, device) - 1).clamp_(max=values.shape[1] - 1)
    keep = values >= values.gather(1, last)
    if shapes.min_p.any():
        keep &= weights >= _column(shapes.min_p, device)
    if shapes.has_top_p.any():
        # float64: over a whole vocabulary float32 would lose the tail.
        kept = weights * keep
        up_to = kept.cumsum(dim=1, dtype=torch.float64)
        total = up_to[:, -1:]
        if not is_whole:
            # What top-k keeps beyond these values is not in the sum. No share reaches an infinite total, so
            # the threshold falls to the smallest value, which says that more must be looked at.
            total = total.masked_fill(keep[:, -1:], torch.inf)
        if whole_weight is not None:
            total = torch.where(_column(shapes.has_top_k, device), total, whole_weight.to(torch.float64))
        keep &= up_to - kept < _column(shapes.top_p, device) * total
    # A row with NaN keeps nothing; it is reported elsewhere and must only not break the others here.
    threshold = values.gather(1, keep.sum(dim=1, keepdim=True).clamp_(min=1) - 1)
    return Kept(threshold, weights.mul_(values >= threshold))


def largest_values(logits: Tensor, count: int) -> Tensor:
    """Return every row's `count` largest values, largest first: `[num_rows, vocab]` → `[num_rows, count]`."""
    # numpy partitions and sorts values with vector instructions, over ten times as fast as torch, which
    # carries indexes along.
    values = logits.numpy()
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=1)).flip(1)


def _column(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return upload(values, device).unsqueeze(1)
