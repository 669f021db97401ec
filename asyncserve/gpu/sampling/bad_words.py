"""Token sequences that never stand in an output: the last token of one is forbidden after all others.

What a sequence's newest outputs are is read from the token history on the device, so the host need not know
the token of the step before. Prompt tokens do not count. The work is by the lengths of the words and not by
the vocabulary. Knows nothing of other stages; the sampler says which rows ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncserve.gpu.sampling.upload import upload, upload_ids
from asyncserve.gpu.slots import SlotTable


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of one slot, or of several one after the other; all tensors are on the device.

    `tokens`, `distances` and `word_of` speak of all tokens that are not the last of their word: which token,
    how far before the new one, in which word. `last` has one token per word. `row_of_token` and `row_of_word`
    are the places of their slots.
    """

    tokens: Tensor  # int32
    distances: Tensor  # int64
    word_of: Tensor  # int64
    row_of_token: Tensor  # int64
    last: Tensor  # int64
    row_of_word: Tensor  # int64


class BadWords:
    """The words of all slots.

    Args:
        vocab_size: A word with an id at or above it is left out: it cannot occur.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._words: dict[int, _Words] = {}
        self._prompt_lens: dict[int, int] = {}
        # Those of the slots that asked last: the same ask again and again.
        self._joined: tuple[tuple[int, ...], _Words] | None = None

    def set(self, slot: int, words: Sequence[Sequence[int]], *, prompt_len: int) -> bool:
        """Forbid a slot these token sequences; returns whether there are any."""
        words = [word for word in words if word and min(word) >= 0 and max(word) < self._vocab_size]
        if not words:
            return False
        before = [
            (token_id, len(word) - 1 - place, index)
            for index, word in enumerate(words)
            for place, token_id in enumerate(word[:-1])
        ]
        table = np.array(before, np.int64).reshape(len(before), 3)
        device = self._device
        self._words[slot] = _Words(
            tokens=upload(table[:, 0].astype(np.int32), device),
            distances=upload(table[:, 1].copy(), device),
            word_of=upload(table[:, 2].copy(), device),
            row_of_token=upload(np.zeros(len(before), np.int64), device),
            last=upload_ids([word[-1] for word in words], device),
            row_of_word=upload(np.zeros(len(words), np.int64), device),
        )
        self._prompt_lens[slot] = prompt_len
        return True

    def release(self, slot: int) -> None:
        """Forget a slot's words; nothing happens if it has none."""
        if self._words.pop(slot, None) is not None:
            del self._prompt_lens[slot]
            self._joined = None

    def apply(
        self,
        logits: Tensor,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        history: SlotTable,
    ) -> None:
        """Forbid the tokens that would complete a word, in place.

        Args:
            logits: `[num_samples, vocab] float32`, contiguous.
            rows: Indexes into `num_samples`.
            slots: The slot of each of these rows; each has words.
            positions: Absolute position that each of these rows' token will take.
            history: The slots' tokens, complete below these positions.
        """
        words = self._join(tuple(slots))
        row_slots = np.array(slots, np.int64)
        prompt_lens = np.array([self._prompt_lens[slot] for slot in slots], np.int64)
        bounds = np.stack(
            (
                history.flat_indices(row_slots, np.array(positions, np.int64)),
                history.flat_indices(row_slots, prompt_lens),
                np.array(rows, np.int64) * logits.shape[1],
            )
        )
        new, first_output, row_start = upload(bounds, self._device).unbind()
        places = new.index_select(0, words.row_of_token) - words.distances
        # Before the first output nothing matches; such a place may even lie before the whole history.
        differs = history.gather(places.clamp(min=0)) != words.tokens
        differs |= places < first_output.index_select(0, words.row_of_token)
        num_differing = torch.zeros_like(words.last, dtype=torch.int32)
        num_differing.index_add_(0, words.word_of, differs.to(torch.int32))
        bans = torch.zeros_like(words.last, dtype=torch.float32)
        bans.masked_fill_(num_differing == 0, -torch.inf)
        logits.view(-1).index_add_(0, row_start.index_select(0, words.row_of_word) + words.last, bans)

    def _join(self, slots: tuple[int, ...]) -> _Words:
        if self._joined is not None and self._joined[0] == slots:
            return self._joined[1]
        each = [self._words[slot] for slot in slots]
        word_of, row_of_token, row_of_word = [], [], []
        num_words = 0
        for row, words in enumerate(each):
            word_of.append(words.word_of + num_words)
            row_of_token.append(words.row_of_token + row)
            row_of_word.append(words.row_of_word + row)
            num_words += words.last.shape[0]
        joined = _Words(
            tokens=torch.cat([words.tokens for words in each]),
            distances=torch.cat([words.distances for words in each]),
            word_of=torch.cat(word_of),
            row_of_token=torch.cat(row_of_token),
            last=torch.cat([words.last for words in each]),
            row_of_word=torch.cat(row_of_word),
        )
        self._joined = (slots, joined)
        return joined
