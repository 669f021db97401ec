"""The sampler: logits of the rows that sample → their next tokens.

Owns what sampling must know of each slot (parameters, seed, penalty counts), given once on admission. The
stages run in this order, each only if a row of the step needs it: logit bias and the ban on stop tokens
before `min_tokens`, lists of allowed tokens, bad words, penalties, masks of grammars, then for greedy rows
the argmax, for the others temperature, top-k, min-p, top-p and a random draw that depends on seed and
position alone. What a row gets depends on nothing but its own logits, slot and tokens, so neither the batch,
the row index nor a preemption changes it. Log-probabilities are those of the raw logits. Knows no plan and
no KV cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncserve.gpu.device import Event
from asyncserve.gpu.sampling import logprobs as scoring
from asyncserve.gpu.sampling.allowed_tokens import AllowedTokens
from asyncserve.gpu.sampling.bad_words import BadWords
from asyncserve.gpu.sampling.gumbel import draw, draw_among, row_keys
from asyncserve.gpu.sampling.logit_bias import LogitBias
from asyncserve.gpu.sampling.penalties import Penalties
from asyncserve.gpu.sampling.selection import argmax, largest
from asyncserve.gpu.sampling.token_masks import TokenMasks
from asyncserve.gpu.sampling.truncation import (
    NUM_CANDIDATES,
    NUM_VALUES,
    RowShapes,
    largest_values,
    truncate,
    weights_of,
)
from asyncserve.gpu.sampling.upload import upload, upload_ids
from asyncserve.gpu.slots import SlotTable
from asyncserve.request import TokenLogprobs
from asyncserve.step import BAD_LOGITS, NO_TOKEN, SlotAssignment

# What a slot needs beyond an argmax; a step runs the stages in the union over its slots.
_DRAWS = 1
_BIAS = 2
_BAN = 4
_PENALTIES = 8
_LOGPROBS = 16
_ALLOWED = 32
_BAD_WORDS = 64
_GRAMMAR = 128
_CHANGES_LOGITS = _BIAS | _BAN | _PENALTIES | _ALLOWED | _BAD_WORDS | _GRAMMAR


@dataclass(slots=True)
class Sampled:
    """The step's tokens, still on the device.

    Args:
        token_ids: `[num_samples] int64`; `BAD_LOGITS` where logits were not finite, `NO_TOKEN` where all were
            forbidden.
        logprobs: Slot to log-probabilities for the slots that asked, built when read; None if none asked.
    """

    token_ids: Tensor
    logprobs: Mapping[int, TokenLogprobs] | None = None


class Sampler:
    """Samples for all slots.

    Args:
        num_slots: Rows of the device; slots are below it.
        vocab_size: Columns of the logits.
        max_model_len: Most tokens of one sequence.
        device: Where the logits are.
    """

    def __init__(self, num_slots: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._needs = [0] * num_slots
        self._first_stops = [0] * num_slots  # absolute position from which stop tokens are allowed
        self._num_logprobs = [0] * num_slots
        self._seeds = np.zeros(num_slots, np.uint64)
        self._shapes = RowShapes.empty(num_slots)
        self._bias = LogitBias(vocab_size)
        self._bans = LogitBias(vocab_size)
        self._allowed = AllowedTokens(vocab_size, device)
        self._bad_words = BadWords(vocab_size, device)
        self._penalties = Penalties(num_slots, vocab_size, max_model_len, device)
        self._masks = TokenMasks(vocab_size, device)

    @torch.inference_mode()
    def admit(self, assignment: SlotAssignment) -> None:
        """Take what sampling must know of a sequence, in place of what the slot had before."""
        slot, sampling = assignment.slot, assignment.sampling
        self.release(slot)
        needs = 0
        if not sampling.is_greedy:
            needs |= _DRAWS
            self._seeds[slot] = assignment.seed & 0xFFFF_FFFF_FFFF_FFFF
            self._shapes.set(
                slot,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
            )
        if sampling.logit_bias and self._bias.set_bias(slot, sampling.logit_bias):
            needs |= _BIAS
        first_stop = assignment.prompt_len + sampling.min_tokens
        if assignment.grammar is not None:
            # The mask holds the ban on stop tokens too: it knows where nothing else is left.
            needs |= _GRAMMAR
            self._masks.admit(assignment)
        elif len(assignment.token_ids) < first_stop and self._bans.set_ban(slot, assignment.stop_token_ids):
            needs |= _BAN
            self._first_stops[slot] = first_stop
        if sampling.allowed_token_ids is not None and self._allowed.set(slot, sampling.allowed_token_ids):
            needs |= _ALLOWED
        if assignment.bad_words and self._bad_words.set(
            slot, assignment.bad_words, prompt_len=assignment.prompt_len
        ):
            needs |= _BAD_WORDS
        if sampling.has_penalties:
            needs |= _PENALTIES
            self._penalties.admit(assignment)
        if sampling.num_logprobs is not None:
            needs |= _LOGPROBS
            self._num_logprobs[slot] = sampling.num_logprobs
        self._needs[slot] = needs

    def release(self, slot: int) -> None:
        """Forget a slot; idempotent."""
        self._needs[slot] = 0
        self._bias.release(slot)
        self._bans.release(slot)
        self._allowed.release(slot)
        self._bad_words.release(slot)
        self._penalties.release(slot)
        self._masks.release(slot)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        sample_positions: Sequence[int],
        history: SlotTable | None = None,
    ) -> Sampled:
        """Choose one token for each row.

        Args:
            logits: `[num_samples, vocab] float32`, contiguous; may be overwritten.
            slots: The slot of each row, distinct.
            sample_positions: Absolute position that each row's token will take.
            history: The slots' tokens, complete below these positions; without it no slot may have bad words.
        """
        needs = 0
        for slot in slots:
            needs |= self._needs[slot]
        best, token_ids = argmax(logits)
        # x - x is 0 for a finite x, else NaN. A NaN or +inf anywhere is the maximum, and -inf if all are.
        bad = (best - best) != 0
        if needs == 0:
            return Sampled(token_ids.masked_fill_(bad, BAD_LOGITS))
        asking: list[int] = []
        nothing_left: Tensor | None = None
        raw = logits
        if needs & _LOGPROBS:
            asking = self._rows_that_need(_LOGPROBS, slots)
            raw = _rows(logits, asking)
            if raw is logits and needs & _CHANGES_LOGITS:
                raw = logits.clone()
        if needs & _CHANGES_LOGITS and self._change_logits(logits, slots, sample_positions, needs, history):
            best, token_ids = argmax(logits)
            nothing_left = (best == -torch.inf) & ~bad
            bad |= (best - best) != 0
        if needs & _DRAWS:
            rows = self._rows_that_need(_DRAWS, slots)
            row_slots = np.fromiter((slots[row] for row in rows), np.int64, len(rows))
            positions = np.fromiter((sample_positions[row] for row in rows), np.uint64, len(rows))
            keys = upload(row_keys(self._seeds[row_slots], positions), self._device).unsqueeze(1)
            drawn = draw_rows(_rows(logits, rows), self._shapes.take(row_slots), keys)
            if len(rows) == len(slots):
                token_ids = drawn
            else:
                token_ids.index_copy_(0, upload_ids(rows, self._device), drawn)
        token_ids.masked_fill_(bad, BAD_LOGITS)
        if nothing_left is not None:
            token_ids.masked_fill_(nothing_left, NO_TOKEN)
        if not needs & _LOGPROBS:
            return Sampled(token_ids)
        asking_slots = [slots[row] for row in asking]
        nums = [self._num_logprobs[slot] for slot in asking_slots]
        scored = scoring.ScoredTokens(raw, _rows(token_ids, asking), max(nums))
        return Sampled(token_ids, scoring.StepLogprobs(asking_slots, nums, scored))

    @torch.inference_mode()
    def record(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Count the sampled tokens for penalties; call it once after each `sample`.

        Args:
            slots: As given to `sample`.
            token_ids: `[num_samples] int64`, as it returned them.
        """
        rows = self._rows_that_need(_PENALTIES, slots)
        if rows:
            self._penalties.record(rows, [slots[row] for row in rows], token_ids)

    def expect(self, slots: Sequence[int], token_ids: Tensor, copied: Event) -> None:
        """Take note of where the sampled tokens will be on the host: the next mask of a grammar needs them.

        Args:
            slots: As given to `sample`.
            token_ids: `[num_samples] int64`, as it returned them, on the host once `copied` is reached.
            copied: Reached when they are there.
        """
        self._masks.expect(slots, token_ids, copied)

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, target_ids: Tensor, num: int) -> list[TokenLogprobs]:
        """Score prompt tokens under the model's own distribution; waits for the device.

        Args:
            logits: `[num_rows, vocab] float32`, row `i` predicting `target_ids[i]`; left as they are.
            target_ids: `[num_rows]`, integers.
            num: How many likeliest tokens to give with each.
        """
        return scoring.prompt_logprobs(logits, target_ids.to(self._device, torch.int64), num)

    def _change_logits(
        self,
        logits: Tensor,
        slots: Sequence[int],
        sample_positions: Sequence[int],
        needs: int,
        history: SlotTable | None,
    ) -> bool:
        changed = False
        if needs & _BIAS:
            rows = self._rows_that_need(_BIAS, slots)
            self._bias.apply(logits, rows, [slots[row] for row in rows])
            changed = True
        if needs & _BAN:
            rows = []
            for row in self._rows_that_need(_BAN, slots):
                slot = slots[row]
                if sample_positions[row] < self._first_stops[slot]:
                    rows.append(row)
                else:  # positions only grow
                    self._needs[slot] &= ~_BAN
                    self._bans.release(slot)
            if rows:
                self._bans.apply(logits, rows, [slots[row] for row in rows])
                changed = True
        if needs & _ALLOWED:
            rows = self._rows_that_need(_ALLOWED, slots)
            self._allowed.apply(logits, rows, [slots[row] for row in rows])
            changed = True
        if needs & _BAD_WORDS:
            assert history is not None, "a slot has bad words, and nobody gave the tokens they end"
            rows = self._rows_that_need(_BAD_WORDS, slots)
            self._bad_words.apply(
                logits, rows, [slots[row] for row in rows], [sample_positions[row] for row in rows], history
            )
            changed = True
        if needs & _PENALTIES:
            rows = self._rows_that_need(_PENALTIES, slots)
            self._penalties.apply(logits, rows, [slots[row] for row in rows])
            changed = True
        if needs & _GRAMMAR:
            rows = self._rows_that_need(_GRAMMAR, slots)
            self._masks.apply(
                logits, rows, [slots[row] for row in rows], [sample_positions[row] for row in rows]
            )
            changed = True
        return changed

    def _rows_that_need(self, stage: int, slots: Sequence[int]) -> list[int]:
        needs = self._needs
        return [row for row, slot in enumerate(slots) if needs[slot] & stage]


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
    # Whether the candidates suffice must be known on the host, which elsewhere than on a CPU means waiting.
    few = ordered & ((shapes.top_k < NUM_CANDIDATES) | ~shapes.has_top_k) & (logits.device.type == "cpu")
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
    if logits.device.type != "cpu" or vocab <= NUM_VALUES:
        return truncate(largest_values(logits, vocab), shapes).threshold
    values = largest_values(logits, NUM_VALUES)
    threshold = truncate(values, shapes, is_whole=False, whole_weight=whole_weight).threshold
    for row in _insufficient(threshold, values, logits):  # one by one: several do not fit a cache
        values = largest_values(logits[row : row + 1], vocab)
        threshold[row] = truncate(values, shapes.take(np.array([row]))).threshold[0]
    return threshold


def _insufficient(threshold: Tensor, values: Tensor, logits: Tensor) -> npt.NDArray[np.int64]:
    """Return the rows whose largest values may not hold all that is to be kept; waits for the device.

    A threshold above the smallest of them proves that everything kept, ties included, is among them.
    """
    if values.shape[1] == logits.shape[1]:
        return np.empty(0, np.int64)
    rows: npt.NDArray[np.int64] = (threshold <= values[:, -1:]).squeeze(1).nonzero().squeeze(1).numpy()
    return rows


def _rows(rows: Tensor, picked: Sequence[int]) -> Tensor:
    """Copy out the picked rows, in the order given; all of them come as they are."""
    if len(picked) == rows.shape[0]:
        return rows
    return rows.index_select(0, upload_ids(picked, rows.device))
