"""Rows that follow a grammar: which tokens may come next, as a mask over their logits.

Owns a matcher for each slot that has a grammar. A matcher works on the host, and the mask of a row depends
on its last token; so it is made as late as can be. A step's forward pass is launched without it, and only
then is the copy of the step before waited for (`expect` told of it), the matcher moved on, the mask filled
and
applied: a device that is one step ahead stays so. A matcher that refuses a token, raises or takes far too
long forbids its row everything, which ends that sequence and no other.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncserve.gpu.device import Event
from asyncserve.gpu.sampling.upload import upload_ids
from asyncserve.grammar import GrammarMatcher
from asyncserve.step import SlotAssignment

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""Processor time of one call of a matcher above which its sequence ends: all others wait for it."""

_WORD_BITS = 32

Words = npt.NDArray[np.int32]


class _Row:
    """One slot's matcher.

    Attributes:
        matcher: Moved on by all tokens but those of `TokenMasks._unseen`.
        has_failed: It is of no use any more.
        stops: The grammar's stop tokens.
        others: Mask words that allow all but these.
        early: Mask words that allow all but what `min_tokens` forbids; None once it forbids nothing.
        first_end: Absolute position from which it forbids nothing.
    """

    __slots__ = ("early", "first_end", "has_failed", "matcher", "others", "slot", "stops")

    def __init__(self, slot: int, matcher: GrammarMatcher, stops: Sequence[int], others: Words) -> None:
        self.slot = slot
        self.matcher = matcher
        self.stops = stops
        self.others = others
        self.early: Words | None = None
        self.first_end = 0
        self.has_failed = False


class TokenMasks:
    """The matchers of all slots.

    Args:
        vocab_size: Columns of the logits.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._unseen: deque[tuple[list[tuple[_Row, int]], Tensor, Event]] = deque()
        # Entry b is eight bytes: one for each bit of b, lowest first, set where the bit is not.
        clear = np.unpackbits(~np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._clear_bits = torch.from_numpy(clear.view(np.int64).reshape(256)).to(device)

    def admit(self, assignment: SlotAssignment) -> None:
        """Give a slot the matcher of its grammar, moved on by the outputs it already has."""
        grammar = assignment.grammar
        assert grammar is not None
        stops = [token_id for token_id in grammar.stop_token_ids if 0 <= token_id < self._vocab_size]
        row = _Row(assignment.slot, grammar.matcher(), stops, self._words_without(stops))
        self._rows[assignment.slot] = row
        first_end = assignment.prompt_len + assignment.sampling.min_tokens
        if len(assignment.token_ids) < first_end:
            row.first_end = first_end
            row.early = self._words_without(assignment.stop_token_ids)
        for token_id in assignment.token_ids[assignment.prompt_len :]:
            self._accept(row, token_id)

    def release(self, slot: int) -> None:
        """Forget a slot's matcher; nothing happens if it has none."""
        self._rows.pop(slot, None)

    def expect(self, slots: Sequence[int], token_ids: Tensor, copied: Event) -> None:
        """Take note of where the tokens just sampled will be.

        Args:
            slots: Of the rows that sampled.
            token_ids: `[num_samples] int64` on the host.
            copied: Reached when they are there.
        """
        if not self._rows:
            return
        rows = self._rows
        each = [(rows[slot], place) for place, slot in enumerate(slots) if slot in rows]
        if each:
            self._unseen.append((each, token_ids, copied))

    def apply(
        self, logits: Tensor, rows: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Forbid every row's tokens that may not come next, in place; waits for the tokens before them.

        A restriction applied before that leaves a row nothing is lifted where the grammar allows nothing but
        an end: a text that is complete can always end.

        Args:
            logits: `[num_samples, vocab] float32`, contiguous.
            rows: Indexes into `num_samples`, ascending.
            slots: The slot of each of these rows; each has a matcher.
            positions: Absolute position that each of these rows' token will take.
        """
        self._take_unseen()
        host = torch.zeros(
            (len(rows), self._num_words), dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        words: Words = host.numpy()
        ending: list[tuple[int, int]] = []
        for place, (logits_row, slot, position) in enumerate(zip(rows, slots, positions, strict=True)):
            row = self._rows[slot]
            own = words[place]
            self._fill(row, own, position)
            if not (own & row.others).any():
                ending += [(logits_row, token_id) for token_id in row.stops if _has(own, token_id)]
        if ending:
            self._lift(logits, ending)
        # Pinned, since copies of this size would wait otherwise; its memory is given out again only when this
        # one is done.
        packed = host.to(self._device, non_blocking=True).view(torch.uint8).to(torch.int32)
        is_forbidden = self._clear_bits.index_select(0, packed.view(-1)).view(torch.bool)
        is_forbidden = is_forbidden.view(len(rows), -1)[:, : logits.shape[1]]
        if len(rows) == logits.shape[0]:
            logits.masked_fill_(is_forbidden, -torch.inf)
            return
        index = upload_ids(rows, self._device)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(is_forbidden, -torch.inf))

    def _take_unseen(self) -> None:
        """Move the matchers on by the tokens of the steps before; waits for their copies."""
        while self._unseen:
            each, token_ids, copied = self._unseen.popleft()
            copied.wait()
            tokens = token_ids.tolist()
            for row, place in each:
                if self._rows.get(row.slot) is row:
                    self._accept(row, tokens[place])

    def _accept(self, row: _Row, token_id: int) -> None:
        # After its end a row may still be in the step that was launched before anybody knew.
        if row.has_failed or row.matcher.is_done:
            return
        if token_id < 0:  # the sequence ends with an error
            row.has_failed = True
            return
        began_s = time.thread_time()
        try:
            if not row.matcher.accept(token_id):
                self._fail(row, f"refused token {token_id}")
        except Exception as error:  # of a foreign library: this row's alone
            self._fail(row, repr(error))
        self._check_time(row, began_s)

    def _fill(self, row: _Row, words: Words, position: int) -> None:
        """Write the mask of one row; all its words are zero before."""
        if row.has_failed or row.matcher.is_done:
            return
        began_s = time.thread_time()
        try:
            row.matcher.fill_mask(words.data)
        except Exception as error:  # of a foreign library: this row's alone
            self._fail(row, repr(error))
        self._check_time(row, began_s)
        if row.has_failed:
            words.fill(0)
        elif row.early is not None:
            if position >= row.first_end:  # positions only grow
                row.early = None
            elif (words & row.early).any():
                words &= row.early

    def _check_time(self, row: _Row, began_s: float) -> None:
        took_s = time.thread_time() - began_s
        if took_s > SLOW_S and not row.has_failed:
            self._fail(row, f"took {took_s:.1f} s for one token")

    def _fail(self, row: _Row, why: str) -> None:
        row.has_failed = True
        logger.warning("the grammar of slot %d cannot be followed any further: its matcher %s", row.slot, why)

    def _lift(self, logits: Tensor, ending: Sequence[tuple[int, int]]) -> None:
        """Let these (row, token) be chosen, whatever forbade them."""
        index = upload_ids([row * logits.shape[1] + token_id for row, token_id in ending], self._device)
        flat = logits.view(-1)
        values = flat.take(index)
        flat.index_copy_(0, index, values.masked_fill_(values == -torch.inf, 0.0))

    def _words_without(self, token_ids: Sequence[int] | frozenset[int]) -> Words:
        is_kept = np.ones(self._num_words * _WORD_BITS, np.bool_)
        is_kept[[token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]] = False
        return np.packbits(is_kept, bitorder="little").view(np.int32)


def _has(words: Words, token_id: int) -> bool:
    return bool(words[token_id // _WORD_BITS] >> (token_id % _WORD_BITS) & 1)
