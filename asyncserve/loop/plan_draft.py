"""A plan in the making: who is in it, what is left of its budget, and how it becomes a `StepPlan`.

`PlanDraft` takes sequences, gives them slots, blocks and tokens of the budget, and notes what the device is
to be told of it. Where blocks are lacking it takes them from the last in order. What is put into a draft
counts as planned at once: it is not taken out again. Knows no policy: whose turn it is says `step_planner`.
"""

from bisect import insort
from collections.abc import Callable, Sequence

from asyncserve.loop.beams import BeamRows
from asyncserve.loop.live_sequences import LiveSequences, StepInFlight
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.loop.waiting import by_order
from asyncserve.step import BlockAppend, BlockCopy, ScheduledRows, SlotAssignment, StepPlan


class PlanDraft:
    """The next step.

    Args:
        live: Whom it is made for.
        budget: Most tokens it may have.
        prompt_share: Most tokens of one prompt.
        scored_token_cost: What a prompt token takes of the budget when its log-probability is asked for.
        now_s: When it is made.

    Attributes:
        budget_left: Tokens that may be added.
        decodes: Sequences that compute their last token; `decode_slots` and `decode_starts` have their rows,
            in the same order.
        prefills: (sequence, num_tokens) in order, already counted as computed.
        branches: By the sequence they branch off from, which is among the prefills.
        copies: Of blocks that branches begin with.
        searches: Beam searches that sample.
        entered: Rows of searches that enter slots.
        beam_rows: Rows of them that have sampled before.
    """

    __slots__ = (
        "_admitted",
        "_appends",
        "_live",
        "_now_s",
        "_prompt_share",
        "_scored_token_cost",
        "beam_rows",
        "branches",
        "budget_left",
        "copies",
        "decode_slots",
        "decode_starts",
        "decodes",
        "entered",
        "prefills",
        "searches",
        "step_id",
    )

    def __init__(
        self, live: LiveSequences, *, budget: int, prompt_share: int, scored_token_cost: int, now_s: float
    ) -> None:
        self._live = live
        self._prompt_share = prompt_share
        self._scored_token_cost = scored_token_cost
        self._now_s = now_s
        self.step_id = live.next_step_id
        self.budget_left = budget
        self.decodes: list[SequenceState] = []
        self.decode_slots: list[int] = []
        self.decode_starts: list[int] = []
        self.prefills: list[tuple[SequenceState, int]] = []
        self.branches: dict[SequenceState, list[SequenceState]] = {}
        self.copies: list[BlockCopy] = []
        self.searches: list[BeamRows] = []
        self.beam_rows: list[SequenceState] = []
        self.entered: list[SequenceState] = []
        self._admitted: list[SlotAssignment] = []
        self._appends: list[BlockAppend] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody computes anything yet."""
        return not (self.decodes or self.prefills or self.beam_rows)

    def cover_or_preempt(
        self, sequence: SequenceState, cover: Callable[[SequenceState], list[list[int]] | None]
    ) -> bool:
        """Let `cover` give a sequence further blocks, taken from the last in order if need be.

        Returns:
            False if there are not enough now.
        """
        while (block_ids := cover(sequence)) is None:
            live = self._live
            # Blocks that come back with a step in flight are waited for: one preemption at a time.
            firsts = [beams.first for beams in live.searches]
            if live.num_releasing or any(other.is_planned_to_its_end for other in live.decoding + firsts):
                return False
            victim = live.last_in_order()
            live.preempt(victim)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        self.append_blocks(sequence, block_ids)
        return True

    def make_room(self, sequence: SequenceState, num_blocks: int) -> bool:
        """Let so many blocks be free, taken from the last in order if need be; return whether they are."""
        pool = self._live.allocator.pool
        return self.cover_or_preempt(sequence, lambda _: [] if pool.num_free >= num_blocks else None)

    def append_blocks(self, sequence: SequenceState, new_ids: Sequence[list[int]] | None) -> None:
        """Let the device know blocks that a sequence was given, by group; there must be some."""
        assert new_ids is not None, "room was made"
        for group_id, block_ids in enumerate(new_ids):
            if block_ids:
                self._appends.append(BlockAppend(group_id, sequence.slot, tuple(block_ids)))

    def admit(self, sequence: SequenceState, *, is_branch: bool = False) -> None:
        """Give a sequence, whose blocks have been taken, a free slot."""
        self._live.enter_slot(sequence, self._now_s, is_branch=is_branch)
        tokenized, beams = sequence.tokenized, self._live.beams.get(sequence)
        self._admitted.append(
            SlotAssignment(
                slot=sequence.slot,
                # A copy: the device thread reads it while this one grows.
                token_ids=sequence.token_ids[:],
                prompt_len=sequence.prompt_len,
                sampling=tokenized.request.sampling,
                seed=tokenized.seed,
                stop_token_ids=tokenized.stop_token_ids,
                bad_words=tokenized.bad_words,
                grammar=tokenized.grammar,
                beam=None if beams is None else beams.assignment(sequence),
            )
        )
        self.append_blocks(sequence, sequence.block_table.block_ids)

    def num_wanted(self, sequence: SequenceState) -> int:
        """Return how many tokens a sequence is to compute as prompts are: a search's rows not their last."""
        return sequence.num_remaining_tokens - (sequence in self._live.beams)

    def token_cost(self, sequence: SequenceState) -> int:
        """Return what one token of a prompt takes of the budget."""
        # A preempted sequence scores its prompt again.
        is_scored = sequence.tokenized.request.sampling.num_prompt_logprobs is not None
        return self._scored_token_cost if is_scored else 1

    def prompt_chunk(self, sequence: SequenceState, num_remaining: int, others_want: bool) -> int:
        """Return how many of a prompt's remaining tokens this step computes before leftovers are shared."""
        # One at least: so the budget may be overdrawn, but a step never has more tokens than it.
        left = max(1, self.budget_left // self.token_cost(sequence))
        if num_remaining > left and others_want:
            left = max(left // 2, min(left, self._live.allocator.block_len))
        return min(num_remaining, left, self._prompt_share)

    def take_chunk(self, sequence: SequenceState, num_tokens: int) -> None:
        """Let a sequence compute so many of its known tokens, for which it has blocks."""
        self.prefills.append((sequence, num_tokens))
        self.budget_left = max(0, self.budget_left - num_tokens * self.token_cost(sequence))
        sequence.num_computed_tokens += num_tokens
        sequence.last_step_id = self.step_id
        self._live.allocator.prefix_cache.register(sequence)

    def submit(self, *, is_trial: bool = False) -> StepPlan:
        """Turn the draft into a plan in flight."""
        live = self._live
        states = self.decodes
        num_decodes = len(states)
        rows = ScheduledRows(self.decode_slots, self.decode_starts, [1] * num_decodes, [True] * num_decodes)
        for row in self.beam_rows:
            rows.append(row.slot, row.num_computed_tokens - 1, 1, True)
            states.append(row)
            row.num_unseen_tokens += 1
        sampling = states[:] if self.prefills else states
        for sequence, num_tokens in self.prefills:
            samples = sequence.num_remaining_tokens == 0
            start = sequence.num_computed_tokens - num_tokens
            rows.append(sequence.slot, start, num_tokens, samples)
            states.append(sequence)
            is_beam = sequence in live.beams
            if is_beam and sequence.num_remaining_tokens <= 1 and sequence in live.prefilling:
                live.prefilling.remove(sequence)
            if not samples:
                continue
            sampling.append(sequence)
            sequence.num_unseen_tokens += 1
            if sequence.status is SequenceStatus.RUNNING and not is_beam:
                live.prefilling.remove(sequence)
                insort(live.decoding, sequence, key=by_order)
            for branch in self.branches.get(sequence, ()):
                if not is_beam:
                    live.waiting.start(branch)
                    insort(live.decoding, branch, key=by_order)
                rows.append(branch.slot, branch.num_computed_tokens, 0, True)
                states.append(branch)
                sampling.append(branch)
                branch.num_unseen_tokens += 1
            if sequence.status is SequenceStatus.RUNNING:
                live.allocator.drop_unseen(sequence)
            sequence.leave_family()  # those that found no room; in a trial, all of them
        block_stores, block_loads = live.allocator.take_transfers()
        plan = StepPlan(
            step_id=self.step_id,
            sequences=rows,
            admitted=tuple(self._admitted),
            released_slots=tuple(live.released_slots),
            block_appends=tuple(self._appends),
            block_stores=block_stores,
            block_loads=block_loads,
            block_copies=tuple(self.copies),
        )
        live.put_in_flight(
            StepInFlight(plan, states, sampling, num_decodes, is_trial, self.searches, self.entered)
        )
        return plan
