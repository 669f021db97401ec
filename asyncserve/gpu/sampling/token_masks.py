"""Rows that follow a grammar: which tokens may come next, as a mask over their logits.

Owns a matcher for each slot that has a grammar. A matcher works on the host, and the mask of a row depends
on its last token; so it is made as late as can be. A step's forward pass is launched without it, and only
then is the copy of the step before waited for (`expect` told of it), the matcher moved on, the mask filled
and applied: a device that is one step ahead stays so. A matcher that refuses a token or raises forbids its
row everything, which ends that sequence and no other. So does one whose grammar has taken far too long, for
all its rows, and the costliest ones of a step in which all masks together do.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncserve.gpu.device import Event
from asyncserve.gpu.sampling.bit_masks import WORD_BITS, MaskApplier, Words, num_words, pack
from asyncserve.gpu.sampling.upload import upload_ids
from asyncserve.grammar import USUAL_S, GrammarMatcher, TimeBudget
from asyncserve.step import SlotAssignment

logger = logging.getLogger(__name__)

SLOW_STEP_S = 0.05
"""Processor time beyond `USUAL_S` a call, of all masks of a step together, above which the costliest rows
end."""


@dataclass(slots=True, eq=False)
class _Row:
    """One slot's matcher.

    Args:
        slot: Whose it is.
        matcher: Moved on by all tokens but those of `TokenMasks._unseen`; None once it is of no use any more.
        budget: Of the grammar, hence of all its rows.
        stops: The grammar's stop tokens.
        others: Mask words that allow all but these.
        early: Mask words that allow all but what `min_tokens` forbids; None once it forbids nothing.
        first_end: Absolute position from which it forbids nothing.
        late_s: What its calls took in this step beyond `USUAL_S` each.
    """

    slot: int
    matcher: GrammarMatcher | None
    budget: TimeBudget
    stops: Sequence[int]
    others: Words
    early: Words | None = None
    first_end: int = 0
    late_s: float = 0.0


class TokenMasks:
    """The matchers of all slots.

    Args:
        vocab_size: Columns of the logits.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._applier = MaskApplier(device)
        self._rows: dict[int, _Row] = {}
        self._late_s = 0.0  # of all rows in this step
        self._unseen: deque[tuple[list[tuple[_Row, int]], Tensor, Event]] = deque()

    def admit(self, assignment: SlotAssignment) -> None:
        """Give a slot the matcher of its grammar, moved on by the outputs it already has."""
        grammar = assignment.grammar
        assert grammar is not None
        stops = [token_id for token_id in grammar.stop_token_ids if 0 <= token_id < self._vocab_size]
        row = _Row(assignment.slot, None, grammar.time_budget, stops, self._words_without(stops))
        self._rows[assignment.slot] = row
        try:
            row.matcher = grammar.matcher()
        except Exception as error:  # of a foreign library: this row's alone
            self._fail(row, repr(error))
        first_end = assignment.prompt_len + assignment.sampling.min_tokens
        if len(assignment.token_ids) < first_end:
            row.first_end = first_end
            row.early = self._words_without(assignment.stop_token_ids)
        for token_id in assignment.token_ids[assignment.prompt_len :]:
            self._accept(row, token_id)

    def release(self, slot: int) -> None:
        """Forget a slot's matcher; nothing happens if it has none."""
        self._rows.pop(slot, None)
        if not self._rows:
            self._unseen.clear()

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
        for row in self._rows.values():
            row.late_s = 0.0
        self._late_s = 0.0
        self._take_unseen()
        # Pinned, since copies of this size would wait otherwise; its memory is given out again only when this
        # one is done.
        shape = (len(rows), num_words(self._vocab_size))
        host = torch.zeros(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        words: Words = host.numpy()
        for own, slot, position in zip(words, slots, positions, strict=True):
            self._fill(self._rows[slot], own, position)
            self._end_costliest()
        ending: list[tuple[int, int]] = []
        for own, slot, logits_row in zip(words, slots, rows, strict=True):
            row = self._rows[slot]
            if self._matcher_of(row) is None:  # maybe since its mask was made
                own.fill(0)
            elif not (own & row.others).any():
                ending += [(logits_row, token_id) for token_id in row.stops if _has(own, token_id)]
        if ending:
            self._lift(logits, ending)
        self._applier.apply(logits, rows, host.to(self._device, non_blocking=True))

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
        matcher = self._matcher_of(row)
        if matcher is None:
            return
        if token_id < 0:  # the sequence ends with an error
            row.matcher = None
            return
        began_s = time.thread_time()
        try:
            if not matcher.accept(token_id):
                self._fail(row, f"refused token {token_id}")
        except Exception as error:  # of a foreign library: this row's alone
            self._fail(row, repr(error))
        self._note_time(row, began_s)

    def _fill(self, row: _Row, words: Words, position: int) -> None:
        """Write the mask of one row; all its words are zero before."""
        matcher = self._matcher_of(row)
        if matcher is None:
            return
        began_s = time.thread_time()
        try:
            matcher.fill_mask(words.data)
        except Exception as error:  # of a foreign library: this row's alone
            self._fail(row, repr(error))
        self._note_time(row, began_s)
        if row.matcher is not None and row.early is not None:
            if position >= row.first_end:  # positions only grow
                row.early = None
            elif (words & row.early).any():
                words &= row.early

    def _note_time(self, row: _Row, began_s: float) -> None:
        took_s = time.thread_time() - began_s
        late_s = max(0.0, took_s - USUAL_S)
        row.late_s += late_s
        self._late_s += late_s
        row.budget.note(took_s)

    def _matcher_of(self, row: _Row) -> GrammarMatcher | None:
        """Return a row's matcher unless it is done or fails, as all of a grammar do whose time is spent."""
        matcher = row.matcher
        if matcher is None or matcher.is_done:
            return None
        if row.budget.is_spent:
            self._fail(row, "is one of a grammar that takes too long to follow")
            return None
        return matcher

    def _end_costliest(self) -> None:
        """Let the costliest rows of the step fail, until what the others took can be borne."""
        while self._late_s > SLOW_STEP_S:
            costliest = max(self._rows.values(), key=lambda row: row.late_s)
            if costliest.matcher is not None:
                self._fail(costliest, f"took {costliest.late_s:.2f} s longer than usual in one step")
            costliest.late_s = 0.0
            self._late_s = sum(row.late_s for row in self._rows.values())

    def _fail(self, row: _Row, why: str) -> None:
        row.matcher = None
        logger.warning("the grammar of slot %d cannot be followed any further: its matcher %s", row.slot, why)

    def _lift(self, logits: Tensor, ending: Sequence[tuple[int, int]]) -> None:
        """Let these (row, token) be chosen, whatever forbade them."""
        index = upload_ids([row * logits.shape[1] + token_id for row, token_id in ending], self._device)
        flat = logits.view(-1)
        values = flat.take(index)
        flat.index_copy_(0, index, values.masked_fill_(values == -torch.inf, 0.0))

    def _words_without(self, token_ids: Collection[int]) -> Words:
        is_kept = np.ones(self._vocab_size, np.bool_)
        is_kept[[token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]] = False
        return pack(is_kept)


def _has(words: Words, token_id: int) -> bool:
    return bool(words[token_id // WORD_BITS] >> (token_id % WORD_BITS) & 1)
