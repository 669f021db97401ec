"""Values added to single logits: `logit_bias`, and the ban on stop tokens before `min_tokens` outputs.

Both are lists of (token id, value) per slot, a ban being minus infinity. Only rows that have such a list
are touched. Knows nothing of other stages; the sampler says which rows ask.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncserve.gpu.sampling.upload import upload


class LogitBias:
    """The (token id, value) lists of all slots.

    Args:
        vocab_size: Ids at or above it are left out: an index outside would take the whole step down.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._entries: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> bool:
        """Give a slot these additions; returns whether any is left to make."""
        return self._set(slot, bias.keys(), bias.values())

    def set_ban(self, slot: int, token_ids: Iterable[int]) -> bool:
        """Forbid a slot these tokens; returns whether any is left to forbid."""
        banned = frozenset(token_id for token_id in token_ids if token_id < self._vocab_size)
        if len(banned) >= self._vocab_size:  # something must be left to choose
            banned = frozenset()
        return self._set(slot, banned, (-np.inf for _ in banned))

    def release(self, slot: int) -> None:
        """Forget a slot's list; nothing happens if it has none."""
        self._entries.pop(slot, None)

    def apply(self, logits: Tensor, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Add every listed slot's values to its row, in place.

        Args:
            logits: `[num_samples, vocab] float32`, contiguous.
            rows: Indexes into `num_samples`.
            slots: The slot of each of these rows; each has a list.
        """
        entries = [self._entries[slot] for slot in slots]
        vocab = logits.shape[1]
        index = np.concatenate([ids + row * vocab for row, (ids, _) in zip(rows, entries, strict=True)])
        values = np.concatenate([values for _, values in entries])
        device = logits.device
        logits.view(-1).index_add_(0, upload(index, device), upload(values, device))

    def _set(self, slot: int, token_ids: Iterable[int], values: Iterable[float]) -> bool:
        pairs = [
            (token_id, value)
            for token_id, value in zip(token_ids, values, strict=True)
            if 0 <= token_id < self._vocab_size
        ]
        if not pairs:
            return False
        ids, added = zip(*pairs, strict=True)
        self._entries[slot] = (np.array(ids, np.int64), np.array(added, np.float32))
        return True
