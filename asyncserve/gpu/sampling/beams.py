"""Beam searches on the device: which rows of a search go on with which tokens.

Takes the logits of rows that were admitted with a `BeamAssignment`, gives the best `(row, token)` pairs of
each search, and of each row the token it goes on with and the row it goes on from. Keeps the rows' scores, on
the device, and changes nothing else: what a row inherits of its parent is moved by the runner. Only launches,
so the next step need not wait. Restrictions of the output forbid tokens, or shift them, after the softmax, as
in transformers. Knows no plan and no KV cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncserve.errors import InvariantError
from asyncserve.gpu.sampling.upload import upload, upload_ids
from asyncserve.step import BAD_LOGITS, NO_TOKEN, BeamAssignment, BeamCandidate, SlotAssignment

Restrict = Callable[[Tensor, Sequence[int]], None]
"""Changes the log-probabilities `[num, vocab]` of the rows given, in place, to what their requests allow."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What searches have in common that are chosen in together."""

    width: int
    stop_token_ids: tuple[int, ...]

    def num_candidates(self, vocab_size: int) -> int:
        return min(max(2, 1 + len(self.stop_token_ids)), vocab_size) * self.width


class _Search:
    """One search: its rows as far as they are admitted."""

    __slots__ = ("kind", "search_id", "slots")

    def __init__(self, search_id: int, kind: _Kind) -> None:
        self.search_id = search_id
        self.kind = kind
        self.slots = [-1] * kind.width

    @property
    def is_empty(self) -> bool:
        return max(self.slots) < 0


@dataclass(slots=True, kw_only=True)
class ChosenBeams:
    """What the searches of one step go on with; `num` rows of all of them, in no order of the step's.

    Args:
        rows: `[num]`, which of the step's sampling rows each is.
        slots: `[num]`, its slot.
        slot_ids: The same, on the device.
        parent_slots: `[num] int64` on the device, the slot of the row that it goes on from.
        token_ids: `[num] int64` on the device, with what; `BAD_LOGITS` in all rows of a search one of whose
            logits were not finite, `NO_TOKEN` where nothing was allowed.
        pairs: `[num_candidates] int64` on the device, `row * vocab + token` of every candidate.
        scores: `[num_candidates] float32` on the device.
        searches: Search id and number of candidates of each search, in the order of these.
        vocab_size: Columns of the logits.
    """

    rows: Sequence[int]
    slots: Sequence[int]
    slot_ids: Tensor
    parent_slots: Tensor
    token_ids: Tensor
    pairs: Tensor
    scores: Tensor
    searches: Sequence[tuple[int, int]]
    vocab_size: int

    def candidates(self, pairs: Tensor, scores: Tensor) -> Mapping[int, Sequence[BeamCandidate]]:
        """Return each search's candidates.

        Args:
            pairs: As `self.pairs`, on the host.
            scores: As `self.scores`, on the host.
        """
        vocab_size = self.vocab_size
        each = [
            BeamCandidate(pair // vocab_size, pair % vocab_size, score)
            for pair, score in zip(pairs.tolist(), scores.tolist(), strict=True)
        ]
        candidates: dict[int, Sequence[BeamCandidate]] = {}
        begin = 0
        for search_id, num in self.searches:
            candidates[search_id] = each[begin : begin + num]
            begin += num
        return candidates


class BeamSearches:
    """The searches of all slots.

    Args:
        num_slots: Rows of the device.
        device: Where the logits are.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._scores = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._searches: dict[int, _Search] = {}
        self._places: dict[int, BeamAssignment] = {}
        self._unsent: dict[int, float] = {}
        self._stop_ids: dict[tuple[int, ...], Tensor] = {}

    def admit(self, assignment: SlotAssignment) -> None:
        """Take note of a row, if it is one of a search.

        Raises:
            InvariantError: Its place in the search is taken, or there is none.
        """
        beam = assignment.beam
        if beam is None:
            return
        kind = _Kind(beam.width, tuple(sorted(assignment.stop_token_ids)))
        search = self._searches.get(beam.search_id)
        if search is None:
            search = _Search(beam.search_id, kind)
        if not 0 <= beam.beam_idx < kind.width or search.kind != kind or search.slots[beam.beam_idx] >= 0:
            raise InvariantError(f"slot {assignment.slot} cannot be row {beam}")
        search.slots[beam.beam_idx] = assignment.slot
        self._searches[beam.search_id] = search
        self._places[assignment.slot] = beam
        self._unsent[assignment.slot] = beam.score

    def release(self, slot: int) -> None:
        """Forget a row; nothing happens if it is none of a search."""
        beam = self._places.pop(slot, None)
        if beam is None:
            return
        search = self._searches[beam.search_id]
        search.slots[beam.beam_idx] = -1
        if search.is_empty:
            del self._searches[beam.search_id]
            if not self._searches:
                self._stop_ids.clear()

    def upload(self) -> None:
        """Send the scores of rows that were admitted since the last time. Waits for nothing."""
        if self._unsent:
            scores = upload(np.array(list(self._unsent.values()), np.float32), self._device)
            self._scores.index_copy_(0, upload_ids(list(self._unsent), self._device), scores)
            self._unsent.clear()

    @torch.inference_mode()
    def choose(self, logits: Tensor, slots: Sequence[int], restrict: Restrict) -> ChosenBeams:
        """Choose what the searches of a step go on with, and take note of their scores.

        Args:
            logits: `[num_samples, vocab]` of any float dtype; left as they are.
            slots: The slot of each row; some are rows of searches.
            restrict: Called with the log-probabilities of some of the rows, and with which they are.

        Raises:
            InvariantError: A search samples with some of its rows only.
        """
        row_of = {slot: row for row, slot in enumerate(slots)}
        searches = self._searches_of(slots)
        rows: list[int] = []
        for search in searches:
            if any(slot not in row_of for slot in search.slots):
                raise InvariantError(f"beam search {search.search_id} samples without some of its rows")
            rows += [row_of[slot] for slot in search.slots]
        own_slots = [slots[row] for row in rows]
        slot_ids = upload_ids(own_slots, self._device)
        is_all = rows == list(range(logits.shape[0]))
        own = logits if is_all else logits.index_select(0, upload_ids(rows, self._device))
        own = own.to(torch.float32)
        # As the sampler: x - x is 0 for a finite x only. A NaN or +inf is the maximum, and -inf if all are.
        best = own.amax(dim=1)
        is_bad = (best - best) != 0
        log_probs = own.log_softmax(dim=1)
        log_probs.masked_fill_(is_bad.unsqueeze(1), -torch.inf)
        restrict(log_probs, rows)
        log_probs += self._scores.index_select(0, slot_ids).unsqueeze(1)

        parents, tokens, scores = [], [], []
        pairs, pair_scores, counts = [], [], []
        begin = 0
        while searches:
            kind = searches[0].kind
            num = next((num for num, each in enumerate(searches) if each.kind != kind), len(searches))
            end = begin + num * kind.width
            own_pairs, values = self._best(log_probs[begin:end], kind)
            pairs.append(own_pairs.view(-1))
            pair_scores.append(values.view(-1))
            counts += [(search.search_id, own_pairs.shape[1]) for search in searches[:num]]
            parent, token_ids, score = self._rows_of(
                own_pairs, values, is_bad[begin:end], kind, logits.shape[1]
            )
            firsts = torch.arange(begin, end, kind.width, device=self._device)
            parents.append((parent + firsts.unsqueeze(1)).view(-1))
            tokens.append(token_ids.view(-1))
            scores.append(score.view(-1))
            searches, begin = searches[num:], end
        self._scores.index_copy_(0, slot_ids, torch.cat(scores))
        return ChosenBeams(
            rows=rows,
            slots=own_slots,
            slot_ids=slot_ids,
            parent_slots=slot_ids.index_select(0, torch.cat(parents)),
            token_ids=torch.cat(tokens),
            pairs=torch.cat(pairs),
            scores=torch.cat(pair_scores),
            searches=counts,
            vocab_size=logits.shape[1],
        )

    def _searches_of(self, slots: Sequence[int]) -> list[_Search]:
        """Return the searches of a step, those of one kind together."""
        ids = dict.fromkeys(self._places[slot].search_id for slot in slots if slot in self._places)
        by_kind: dict[_Kind, list[_Search]] = {}
        for search_id in ids:
            search = self._searches[search_id]
            by_kind.setdefault(search.kind, []).append(search)
        return [search for searches in by_kind.values() for search in searches]

    @staticmethod
    def _best(scores: Tensor, kind: _Kind) -> tuple[Tensor, Tensor]:
        """Return the best pairs of each search of a kind and their scores, `[num_searches, num_candidates]`.

        Of equal ones whichever `torch.topk` puts first.
        """
        vocab_size = scores.shape[1]
        values, pairs = scores.view(-1, kind.width * vocab_size).topk(kind.num_candidates(vocab_size), dim=1)
        return pairs, values

    def _rows_of(
        self, pairs: Tensor, values: Tensor, is_bad: Tensor, kind: _Kind, vocab_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's parent, token and score, `[num_searches, width]` each."""
        parents = torch.div(pairs, vocab_size, rounding_mode="floor")
        token_ids = pairs - parents * vocab_size
        if kind.stop_token_ids:
            is_stop = (token_ids.unsqueeze(2) == self._stops(kind)).any(dim=2)
            order = is_stop.to(torch.uint8).argsort(dim=1, stable=True)[:, : kind.width]
        else:
            order = torch.arange(kind.width, device=pairs.device).expand(len(pairs), -1)
        is_empty = values[:, :1] == -torch.inf
        has_bad = is_bad.view(-1, kind.width).any(dim=1, keepdim=True)
        chosen = token_ids.gather(1, order)
        chosen = chosen.masked_fill(is_empty, NO_TOKEN).masked_fill_(has_bad, BAD_LOGITS)
        return parents.gather(1, order), chosen, values.gather(1, order)

    def _stops(self, kind: _Kind) -> Tensor:
        stops = self._stop_ids.get(kind.stop_token_ids)
        if stops is None:
            stops = self._stop_ids[kind.stop_token_ids] = upload_ids(kind.stop_token_ids, self._device)
        return stops
