"""The sampler: logits of the rows that sample → their next tokens.

Owns what sampling must know of each slot (parameters, seed, penalty counts), given once on admission. The
stages run in this order, each only if a row of the step needs it: logit bias and the ban on stop tokens
before `min_tokens`, lists of allowed tokens, bad words, penalties, masks of grammars, then for greedy rows
the argmax, for the others temperature, top-k, min-p, top-p and a random draw that depends on seed and
position alone. What a row gets depends on nothing but its own logits, slot and tokens, so neither the batch,
the row index nor a preemption changes it. Log-probabilities are those of the raw logits. On a GPU the last
stages are kernels (`choice`), and a step whose rows need no others is nothing but these: `choose`. Rows of
beam searches are left to `beams`. Knows no plan and no KV cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncserve.gpu.batch import SampleRows
from asyncserve.gpu.device import Event
from asyncserve.gpu.sampling import logprobs as scoring
from asyncserve.gpu.sampling.allowed_tokens import AllowedTokens
from asyncserve.gpu.sampling.bad_words import BadWords
from asyncserve.gpu.sampling.beams import BeamSearches, ChosenBeams
from asyncserve.gpu.sampling.drawing import draw_rows
from asyncserve.gpu.sampling.gumbel import row_keys
from asyncserve.gpu.sampling.logit_bias import LogitBias
from asyncserve.gpu.sampling.penalties import Penalties
from asyncserve.gpu.sampling.selection import argmax
from asyncserve.gpu.sampling.slot_values import SlotValues
from asyncserve.gpu.sampling.token_masks import TokenMasks
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
_TRUNCATES = 256
_BEAM = 512
_CHANGES_LOGITS = _BIAS | _BAN | _PENALTIES | _ALLOWED | _BAD_WORDS | _GRAMMAR
_IS_NOT_PLAIN = _CHANGES_LOGITS | _LOGPROBS | _BEAM


@dataclass(slots=True)
class Sampled:
    """The step's tokens, still on the device.

    Args:
        token_ids: `[num_samples] int64`; `BAD_LOGITS` where logits were not finite, `NO_TOKEN` where all were
            forbidden.
        logprobs: Slot to log-probabilities for the slots that asked, built when read; None if none asked.
        beams: What the beam searches go on with; None if there are none.
    """

    token_ids: Tensor
    logprobs: Mapping[int, TokenLogprobs] | None = None
    beams: ChosenBeams | None = None


class Sampler:
    """Samples for all slots.

    Args:
        num_slots: Rows of the device; slots are below it.
        vocab_size: Columns of the logits.
        max_model_len: Most tokens of one sequence.
        device: Where the logits are.
        has_kernels: Whether the last stages are kernels; None: on a GPU.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        *,
        has_kernels: bool | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._needs = [0] * num_slots
        self._first_stops = [0] * num_slots  # absolute position from which stop tokens are allowed
        self._num_logprobs = [0] * num_slots
        self._values = SlotValues(num_slots, device)
        self._bias = LogitBias(vocab_size)
        self._bans = LogitBias(vocab_size)
        self._allowed = AllowedTokens(vocab_size, device)
        self._bad_words = BadWords(vocab_size, device)
        self._penalties = Penalties(num_slots, vocab_size, max_model_len, device)
        self._masks = TokenMasks(vocab_size, device)
        self._beams = BeamSearches(num_slots, device)
        self._has_kernels = device.type != "cpu" if has_kernels is None else has_kernels

    @torch.inference_mode()
    def admit(self, assignment: SlotAssignment) -> None:
        """Take what sampling must know of a sequence, in place of what the slot had before."""
        slot, sampling = assignment.slot, assignment.sampling
        self.release(slot)
        needs = 0
        self._values.set(slot, sampling, assignment.seed)
        if not sampling.is_greedy:
            needs |= _DRAWS
            if self._values.shapes.truncates(slot):
                needs |= _TRUNCATES
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
        if assignment.beam is not None:
            needs |= _BEAM
            self._beams.admit(assignment)
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
        self._beams.release(slot)

    def upload(self) -> None:
        """Let `choose` know what was admitted; call it after the admissions of a plan. Waits for nothing."""
        self._values.upload()
        self._beams.upload()

    def is_plain(self, slots: Sequence[int]) -> bool:
        """Whether `choose` is all that the slots' rows need: no changed logits and no log-probabilities."""
        needs = self._needs
        return not any(needs[slot] & _IS_NOT_PLAIN for slot in slots)

    def truncates(self, slots: Sequence[int]) -> bool:
        """Whether a slot has a top-k, top-p or min-p."""
        needs = self._needs
        return any(needs[slot] & _TRUNCATES for slot in slots)

    @torch.inference_mode()
    def choose(
        self, logits: Tensor, rows: SampleRows, history: Tensor, results: Tensor, *, truncates: bool = True
    ) -> Tensor:
        """Choose one token for each row of a plain step; only launches kernels, as a graph can hold.

        Args:
            logits: `[num_samples, vocab]` of any float dtype, rows contiguous in themselves.
            rows: Its rows, padding included; they say where the tokens go.
            history: `SlotTable.history`.
            results: `[depth, num_slots] int64`, on the device or in pinned memory of the host.
            truncates: Whether some row may have a top-k, top-p or min-p; if not, two kernels are saved.

        Returns:
            Token ids `[num_samples] int64`; `BAD_LOGITS` where logits were not finite, anything for padding.
        """
        # Imported here: not on a CPU.
        from asyncserve.gpu.kernels.sampling import Destination
        from asyncserve.gpu.sampling.choice import choose

        assert rows.result_row is not None, "a plain step writes its results itself"
        return choose(
            logits,
            rows.slots,
            rows.positions,
            self._values.on_device,
            truncates=truncates,
            destination=Destination(
                history=history, write_back=rows.write_back, results=results, result_row=rows.result_row
            ),
        )

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
            logits: `[num_samples, vocab]` of any float dtype, contiguous; may be overwritten.
            slots: The slot of each row, distinct.
            sample_positions: Absolute position that each row's token will take.
            history: The slots' tokens, complete below these positions; without it no slot may have bad words.
        """
        needs = self._needs_of(slots, sample_positions)
        if needs & _BEAM:
            return self._sample_with_beams(logits, slots, sample_positions, history)
        if self._has_kernels:
            return self._sample_by_kernels(logits, slots, sample_positions, needs, history)
        logits = logits.to(torch.float32)
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
        if needs & _CHANGES_LOGITS:
            self._change_logits(logits, slots, sample_positions, needs, history)
            best, token_ids = argmax(logits)
            nothing_left = (best == -torch.inf) & ~bad
            bad |= (best - best) != 0
        if needs & _DRAWS:
            rows = self._rows_that_need(_DRAWS, slots)
            row_slots = np.fromiter((slots[row] for row in rows), np.int64, len(rows))
            positions = np.fromiter((sample_positions[row] for row in rows), np.uint64, len(rows))
            keys = upload(row_keys(self._values.seed_keys[row_slots], positions), self._device).unsqueeze(1)
            drawn = draw_rows(_rows(logits, rows), self._values.shapes.take(row_slots), keys)
            if len(rows) == len(slots):
                token_ids = drawn
            else:
                token_ids.index_copy_(0, upload_ids(rows, self._device), drawn)
        token_ids.masked_fill_(bad, BAD_LOGITS)
        if nothing_left is not None:
            token_ids.masked_fill_(nothing_left, NO_TOKEN)
        if not needs & _LOGPROBS:
            return Sampled(token_ids)
        return self._scored(token_ids, raw, asking, slots)

    def _sample_with_beams(
        self,
        logits: Tensor,
        slots: Sequence[int],
        sample_positions: Sequence[int],
        history: SlotTable | None,
    ) -> Sampled:
        self.upload()

        def restrict(log_probs: Tensor, rows: Sequence[int]) -> None:
            own_slots, own_positions = [slots[row] for row in rows], [sample_positions[row] for row in rows]
            needs = self._needs_of(own_slots, own_positions)
            if needs & _CHANGES_LOGITS:
                self._change_logits(log_probs, own_slots, own_positions, needs, history)

        beams = self._beams.choose(logits, slots, restrict)
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        token_ids.index_copy_(0, upload_ids(beams.rows, self._device), beams.token_ids)
        others = sorted(set(range(len(slots))).difference(beams.rows))
        logprobs = None
        if others:
            sampled = self.sample(
                _rows(logits, others),
                [slots[row] for row in others],
                [sample_positions[row] for row in others],
                history,
            )
            token_ids.index_copy_(0, upload_ids(others, self._device), sampled.token_ids)
            logprobs = sampled.logprobs
        return Sampled(token_ids, logprobs, beams)

    def _sample_by_kernels(
        self,
        logits: Tensor,
        slots: Sequence[int],
        sample_positions: Sequence[int],
        needs: int,
        history: SlotTable | None,
    ) -> Sampled:
        from asyncserve.gpu.sampling.choice import choose

        self.upload()
        truncates = bool(needs & _TRUNCATES)
        values = self._values.on_device
        slot_ids = upload(np.array(slots, np.int32), self._device)
        positions = upload_ids(sample_positions, self._device)
        # All rows, as if nobody changed any: so a row that nobody changes gets what it gets by `choose`, and
        # one that is not finite is found before something hides it.
        token_ids = choose(logits, slot_ids, positions, values, truncates=truncates)
        if needs & _CHANGES_LOGITS:
            rows = self._rows_that_need(_CHANGES_LOGITS, slots)
            index = upload_ids(rows, self._device)
            changed = logits.index_select(0, index).to(torch.float32)
            own_slots = [slots[row] for row in rows]
            own_positions = [sample_positions[row] for row in rows]
            self._change_logits(changed, own_slots, own_positions, needs, history)
            chosen = choose(
                changed,
                slot_ids.index_select(0, index),
                positions.index_select(0, index),
                values,
                truncates=truncates,
                empty_token=NO_TOKEN,
            )
            before = token_ids.index_select(0, index)
            token_ids.index_copy_(0, index, torch.where(before == BAD_LOGITS, before, chosen))
        if not needs & _LOGPROBS:
            return Sampled(token_ids)
        asking = self._rows_that_need(_LOGPROBS, slots)
        return self._scored(token_ids, _rows(logits, asking).to(torch.float32), asking, slots)

    def _scored(self, token_ids: Tensor, raw: Tensor, asking: Sequence[int], slots: Sequence[int]) -> Sampled:
        """Add the log-probabilities of the rows that ask, whose raw logits are given."""
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
            logits: `[num_rows, vocab]` of any float dtype, row `i` predicting `target_ids[i]`; left as they
                are.
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
    ) -> None:
        """Apply all stages that change logits, in place; `needs` is the union of what the slots need."""
        if needs & _BIAS:
            rows = self._rows_that_need(_BIAS, slots)
            self._bias.apply(logits, rows, [slots[row] for row in rows])
        if needs & _BAN:
            rows = self._rows_that_need(_BAN, slots)
            self._bans.apply(logits, rows, [slots[row] for row in rows])
        if needs & _ALLOWED:
            rows = self._rows_that_need(_ALLOWED, slots)
            self._allowed.apply(logits, rows, [slots[row] for row in rows])
        if needs & _BAD_WORDS:
            assert history is not None, "a slot has bad words, and nobody gave the tokens they end"
            rows = self._rows_that_need(_BAD_WORDS, slots)
            self._bad_words.apply(
                logits, rows, [slots[row] for row in rows], [sample_positions[row] for row in rows], history
            )
        if needs & _PENALTIES:
            rows = self._rows_that_need(_PENALTIES, slots)
            self._penalties.apply(logits, rows, [slots[row] for row in rows])
        if needs & _GRAMMAR:
            rows = self._rows_that_need(_GRAMMAR, slots)
            self._masks.apply(
                logits, rows, [slots[row] for row in rows], [sample_positions[row] for row in rows]
            )

    def _needs_of(self, slots: Sequence[int], sample_positions: Sequence[int]) -> int:
        """Return the union of what the slots need at these positions."""
        needs = self._union(slots)
        if needs & _BAN:
            for row in self._rows_that_need(_BAN, slots):
                slot = slots[row]
                if sample_positions[row] >= self._first_stops[slot]:  # positions only grow
                    self._needs[slot] &= ~_BAN
                    self._bans.release(slot)
            return self._union(slots)
        return needs

    def _union(self, slots: Sequence[int]) -> int:
        needs = 0
        for slot in slots:
            needs |= self._needs[slot]
        return needs

    def _rows_that_need(self, stage: int, slots: Sequence[int]) -> list[int]:
        needs = self._needs
        return [row for row, slot in enumerate(slots) if needs[slot] & stage]


def _rows(rows: Tensor, picked: Sequence[int]) -> Tensor:
    """Copy out the picked rows, in the order given; all of them come as they are."""
    if len(picked) == rows.shape[0]:
        return rows
    return rows.index_select(0, upload_ids(picked, rows.device))
