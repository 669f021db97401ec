"""A draw for each row after temperature and truncation, on a CPU.

Looks at as few values of a row as suffice: its largest, some thousands sorted, or all of them. How a row is
treated follows from its own values alone, never from its neighbours'. A GPU has kernels for it (`choice`).
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncserve.gpu.sampling.gumbel import draw, draw_among
from asyncserve.gpu.sampling.selection import largest
from asyncserve.gpu.sampling.truncation import (
    NUM_CANDIDATES,
    NUM_VALUES,
    RowShapes,
    largest_values,
    truncate,
    weights_of,
)
from asyncserve.gpu.sampling.upload import upload


def draw_rows(logits: Tensor, shapes: RowShapes, keys: Tensor) -> Tensor:
    """Draw a token for each row after temperature and truncation.

    How a row is treated follows from its own values alone, never from its neighbours'.

    Args:
        logits: `[num_rows, vocab] float32`; left as they are.
        shapes: Of the rows.
        keys: `[num_rows, 1] int64`, of `row_keys`.

    Returns:
        Token ids `[num_rows] int64`.
    """
    ordered = shapes.needs_order
    few = ordered & ((shapes.top_k < NUM_CANDIDATES) | ~shapes.has_top_k)
    if few.all():
        return _draw_from_largest(logits, shapes, keys)
    if not ordered.any():
        return draw(weights_of(logits, shapes), keys)
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for rows, method in (
        (few, _draw_from_largest),
        (ordered & ~few, _draw_from_sorted),
        (~ordered, lambda some, of, by: draw(weights_of(some, of), by)),
    ):
        picked = np.flatnonzero(rows)
        if len(picked):
            index = upload(picked, logits.device)
            drawn = method(logits.index_select(0, index), shapes.take(picked), keys.index_select(0, index))
            token_ids.index_copy_(0, index, drawn)
    return token_ids


def _draw_from_largest(logits: Tensor, shapes: RowShapes, keys: Tensor) -> Tensor:
    """Draw from the largest logits, where they suffice, and from sorted rows where not."""
    num_values = min(NUM_CANDIDATES, logits.shape[1])
    values, ids = largest(logits, num_values)
    whole_weight = None
    if not shapes.has_top_k.all():
        whole_weight = weights_of(logits, shapes).sum(dim=1, keepdim=True)
    is_whole = num_values == logits.shape[1]
    kept = truncate(values, shapes, is_whole=is_whole, whole_weight=whole_weight)
    token_ids = draw_among(kept.weights, ids, keys)
    rows = _insufficient(kept.threshold, values, logits)
    if len(rows):
        index = torch.from_numpy(rows)
        drawn = _draw_from_sorted(
            logits.index_select(0, index), shapes.take(rows), keys.index_select(0, index)
        )
        token_ids.index_copy_(0, index, drawn)
    return token_ids


def _draw_from_sorted(logits: Tensor, shapes: RowShapes, keys: Tensor) -> Tensor:
    """Draw from the whole vocabulary, cut at a threshold."""
    weights = weights_of(logits, shapes)
    threshold = sorted_threshold(logits, shapes, weights.sum(dim=1, keepdim=True))
    return draw(weights.mul_(logits >= threshold), keys)


def sorted_threshold(logits: Tensor, shapes: RowShapes, whole_weight: Tensor) -> Tensor:
    """Return the smallest logit that truncation keeps in each row, found by sorting as much as it takes.

    Args:
        logits: `[num_rows, vocab] float32`; left as they are.
        shapes: Of the rows.
        whole_weight: `[num_rows, 1]`, sum of the rows' `weights_of`.

    Returns:
        `[num_rows, 1] float32`.
    """
    vocab = logits.shape[1]
    if vocab <= NUM_VALUES:
        return truncate(largest_values(logits, vocab), shapes).threshold
    values = largest_values(logits, NUM_VALUES)
    threshold = truncate(values, shapes, is_whole=False, whole_weight=whole_weight).threshold
    for row in _insufficient(threshold, values, logits):  # one by one: several do not fit a cache
        values = largest_values(logits[row : row + 1], vocab)
        threshold[row] = truncate(values, shapes.take(np.array([row]))).threshold[0]
    return threshold


def _insufficient(threshold: Tensor, values: Tensor, logits: Tensor) -> npt.NDArray[np.int64]:
    """Return the rows whose largest values may not hold all that is to be kept.

    A threshold above the smallest of them proves that everything kept, ties included, is among them.
    """
    if values.shape[1] == logits.shape[1]:
        return np.empty(0, np.int64)
    rows: npt.NDArray[np.int64] = (threshold <= values[:, -1:]).squeeze(1).nonzero().squeeze(1).numpy()
    return rows
