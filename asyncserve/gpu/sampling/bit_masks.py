"""Masks of one bit per token: packed on the host, applied to logits on the device.

Bit `i % 32` of int32 word `i // 32` says whether token `i` may be chosen. Used by whatever forbids most of a
vocabulary: lists of allowed tokens and grammars. Knows no slot.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncserve.gpu.sampling.upload import upload_ids

WORD_BITS = 32

Words = npt.NDArray[np.int32]


def num_words(vocab_size: int) -> int:
    """Return how many words hold one mask."""
    return -(-vocab_size // WORD_BITS)


def pack(may_come: npt.NDArray[np.bool_]) -> Words:
    """Return the mask of `[vocab] bool`; bits beyond the vocabulary are clear."""
    words = np.zeros(num_words(len(may_come)), np.int32)
    packed = np.packbits(may_come, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words


class MaskApplier:
    """Forbids what masks forbid.

    Args:
        device: Where the logits are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Entry b is eight bytes: one for each bit of b, lowest first, set where the bit is not.
        clear = np.unpackbits(~np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._clear_bits = torch.from_numpy(clear.view(np.int64).reshape(256)).to(device)

    def apply(self, logits: Tensor, rows: Sequence[int], masks: Tensor) -> None:
        """Set the logits of every row's forbidden tokens to minus infinity, in place.

        Args:
            logits: `[num_samples, vocab] float32`, contiguous.
            rows: Indexes into `num_samples`, ascending.
            masks: `[num_rows, num_words] int32` on the device, contiguous; one for each of these rows.
        """
        each_byte = masks.view(torch.uint8).to(torch.int32)
        is_forbidden = self._clear_bits.index_select(0, each_byte.view(-1)).view(torch.bool)
        is_forbidden = is_forbidden.view(len(rows), -1)[:, : logits.shape[1]]
        if len(rows) == logits.shape[0]:
            logits.masked_fill_(is_forbidden, -torch.inf)
            return
        index = upload_ids(rows, self._device)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(is_forbidden, -torch.inf))
