"""Rows that may only choose among listed tokens: all others are set to minus infinity.

Keeps one bit per token of the vocabulary for each slot that has such a list, on the device, however long the
list is. Knows nothing of other stages; the sampler says which rows ask.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncserve.gpu.sampling.bit_masks import MaskApplier, pack
from asyncserve.gpu.sampling.upload import upload


class AllowedTokens:
    """The lists of all slots.

    Args:
        vocab_size: Ids at or above it are left out.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._applier = MaskApplier(device)
        self._masks: dict[int, Tensor] = {}

    def set(self, slot: int, token_ids: Sequence[int]) -> bool:
        """Let a slot choose among these tokens alone; returns whether that forbids any."""
        ids = np.array(token_ids, np.int64)
        is_allowed = np.zeros(self._vocab_size, np.bool_)
        is_allowed[ids[(ids >= 0) & (ids < self._vocab_size)]] = True
        if is_allowed.all() or not is_allowed.any():  # something must be left to choose
            return False
        self._masks[slot] = upload(pack(is_allowed), self._device)
        return True

    def release(self, slot: int) -> None:
        """Forget a slot's list; nothing happens if it has none."""
        self._masks.pop(slot, None)

    def apply(self, logits: Tensor, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Forbid every listed slot's other tokens in its row, in place.

        Args:
            logits: `[num_samples, vocab] float32`, contiguous.
            rows: Indexes into `num_samples`, ascending.
            slots: The slot of each of these rows; each has a list.
        """
        self._applier.apply(logits, rows, torch.stack([self._masks[slot] for slot in slots]))
