"""Which sequences compute how many tokens in the next step: the policy that `scheduler` tells of.

`StepPlanner` takes the live sequences and gives the next `StepPlan`, or None. A step tries suspects and
nobody else, or holds, in this order: searches that are ready, a token of every decoding sequence (these first
every other time, where not all fit), chunks of running prompts, and of those it admits. It puts them into a
`PlanDraft`, which sees to slots and blocks. Knows nothing of outputs and of what failed, but that there are
suspects.
"""

from bisect import bisect_right, insort
from itertools import islice

from asyncserve.errors import InvariantError
from asyncserve.loop.live_sequences import LiveSequences
from asyncserve.loop.plan_draft import PlanDraft
from asyncserve.loop.search_planner import SearchPlanner
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.loop.step_limit import StepLimit
from asyncserve.loop.waiting import by_order
from asyncserve.step import StepPlan
from asyncserve.token_path import plan_rows

SCORED_TOKEN_COST = 2
"""What a prompt token takes of the budget when its log-probability is asked for: its logits are made, too."""
MAX_ADMITTED = 24
"""Sequences admitted by one plan: hashing their prompts and taking their blocks takes about 0.4 ms."""
LEAST_REGISTERED = 16
"""Sequences whose full blocks `register_some` makes findable, if there are so many, and a quarter more than
fill one in a step, if that is more: streams that began together fill theirs together, and hashing hundreds
would hold up the loop."""
MAX_DEFERRED = 64
"""Waiting sequences passed over in one plan because another is computing their prefix; then the scan ends."""


class StepPlanner:
    """Makes plans for one executor.

    Args:
        live: The sequences.
        step_limit: Most tokens of the next step.
        chunks_prefill: Split prompts over steps.
        prompt_share: Most tokens of one prompt in one step.
        num_spare_blocks: Room kept for decode steps when a prompt is admitted beside others, so that it is
            not preempted at once.
    """

    def __init__(
        self,
        live: LiveSequences,
        step_limit: StepLimit,
        *,
        chunks_prefill: bool,
        prompt_share: int,
        num_spare_blocks: int,
    ) -> None:
        self._live = live
        self._step_limit = step_limit
        self._chunks_prefill = chunks_prefill
        self._prompt_share = prompt_share
        self._num_spare_blocks = num_spare_blocks
        self._search_planner = SearchPlanner(live)
        self._last_turn = (0, 0)  # order of the last that got its token when not all could
        self._searches_went_first = False

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do now.

        Raises:
            InvariantError: Something waits, nothing runs, and yet nothing can be planned.
        """
        live = self._live
        draft = PlanDraft(
            live,
            budget=self._step_limit.num_tokens,
            prompt_share=self._prompt_share,
            # Where a prompt must be whole, there is no choice.
            scored_token_cost=SCORED_TOKEN_COST if self._chunks_prefill else 1,
            now_s=now_s,
        )
        if live.suspects:
            if live.in_flight:
                return None
            while not (has_room := self._plan_trial(draft)) and (
                live.decoding or live.prefilling or live.searches
            ):
                # Nobody is admitted before the trial is over, so it waits for nobody: who runs gives way.
                live.preempt(live.last_in_order())
            if has_room:
                return draft.submit(is_trial=True)
        searches_go_first = self._searches_go_first(draft)
        if searches_go_first:
            self._search_planner.sample_ready(draft)
        self._plan_decodes(draft)
        if not searches_go_first:
            self._search_planner.sample_ready(draft)
        if draft.budget_left > 0:
            self._plan_prefills(draft)
        if draft.is_empty:
            if not live.in_flight and not live.is_idle:
                raise InvariantError(
                    f"{len(live.waiting)} sequences wait, {len(live.decoding)} decode,"
                    f" {len(live.prefilling)} prefill, no step is in flight, and none can be planned"
                )
            return None
        self._searches_went_first = searches_go_first
        return draft.submit()

    def register_some(self) -> None:
        """Make blocks findable that decode steps have filled, as many as take a moment."""
        live = self._live
        unregistered, prefix_cache = live.unregistered, live.allocator.prefix_cache
        num_now = max(LEAST_REGISTERED, 5 * len(live.decoding) // (4 * prefix_cache.block_len))
        for sequence in list(islice(unregistered, num_now)):
            del unregistered[sequence]
            if sequence.status is SequenceStatus.RUNNING:
                prefix_cache.register(sequence)

    def _searches_go_first(self, draft: PlanDraft) -> bool:
        """Return whether searches choose before decode steps; every other time, where not all fit a step."""
        live = self._live
        num_rows = sum(beams.width for beams in live.searches)
        return num_rows + len(live.decoding) <= draft.budget_left or not self._searches_went_first

    def _plan_trial(self, draft: PlanDraft) -> bool:
        """Plan for the suspects whose turn it is what a step takes; return whether there is room for any.

        They compute at least what the step that failed was to compute, over several steps if need be.
        """
        live = self._live
        group = live.suspects.first
        draft.budget_left = min(draft.budget_left, group.max_tokens)
        for sequence in group.sequences:
            if draft.budget_left == 0:
                break
            if (beams := live.beams.get(sequence)) is not None:
                if not self._search_planner.retry(draft, beams):
                    break
                continue
            if sequence.status is SequenceStatus.WAITING:
                matches = live.allocator.match_prefix(sequence)
                if not live.free_slots or not live.allocator.take(sequence, matches, 0):
                    break
                draft.admit(sequence)
                insort(live.prefilling, sequence, key=by_order)
            elif not draft.cover_or_preempt(sequence, live.allocator.advance):
                break
            num_tokens = draft.prompt_chunk(sequence, sequence.num_remaining_tokens, others_want=False)
            draft.take_chunk(sequence, num_tokens)
        return not draft.is_empty

    def _plan_decodes(self, draft: PlanDraft) -> None:
        """Schedule one token of every decoding sequence."""
        live = self._live
        step_id = draft.step_id
        decodes, slots, starts = draft.decodes, draft.decode_slots, draft.decode_starts
        decoding = live.decoding
        num_decoding = len(decoding)
        if num_decoding > draft.budget_left:
            # Steps are kept small for a while: everybody gets its token in turn.
            able = [each for each in decoding if each.num_computed_tokens + 1 < each.max_len]
            turn = bisect_right(able, self._last_turn, key=by_order)
            decoding = (able[turn:] + able[:turn])[: draft.budget_left]
            self._last_turn = decoding[-1].order if decoding else self._last_turn
        lacking = plan_rows(decoding, step_id, slots, starts, decodes)
        allocator = live.allocator
        for sequence in lacking:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            # Its last block is full and known, now that a new one begins.
            if allocator.has_windows:
                allocator.prefix_cache.register(sequence)
                allocator.drop_unseen(sequence)
            else:
                live.unregistered[sequence] = None
            if not draft.cover_or_preempt(sequence, allocator.extend):
                continue
            plan_rows([sequence], step_id, slots, starts, decodes)
        if not decodes and len(live.decoding) < num_decoding > draft.budget_left:
            self._plan_decodes(draft)  # those whose turn it was were preempted: it is that of others
            return
        draft.budget_left -= len(decodes)

    def _plan_prefills(self, draft: PlanDraft) -> None:
        """Share what is left of the budget among prompts: those that run, then those that wait."""
        live = self._live
        prefilling = live.prefilling
        can_admit = bool(live.waiting) and bool(live.free_slots) and not live.suspects
        for position, sequence in enumerate(prefilling[:]):
            others_want = can_admit or position + 1 < len(prefilling)
            if draft.budget_left == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING or not draft.cover_or_preempt(
                sequence, live.allocator.advance
            ):
                continue
            num_tokens = draft.prompt_chunk(sequence, draft.num_wanted(sequence), others_want)
            draft.take_chunk(sequence, num_tokens)
            self._branch_off(draft, sequence)
        if can_admit:
            self._admit_waiting(draft)
        # What nobody else wanted goes to the prompts that were cut, in order.
        for position, (sequence, num_tokens) in enumerate(draft.prefills):
            if draft.budget_left == 0:
                break
            cost = draft.token_cost(sequence)
            extra = min(
                draft.num_wanted(sequence), self._prompt_share - num_tokens, draft.budget_left // cost
            )
            if extra > 0:
                draft.prefills[position] = (sequence, num_tokens + extra)
                draft.budget_left -= extra * cost
                sequence.num_computed_tokens += extra
                live.allocator.prefix_cache.register(sequence)

    def _admit_waiting(self, draft: PlanDraft) -> None:
        """Admit waiting sequences in order, as far as slots, blocks and budget go."""
        live = self._live
        admitted: list[SequenceState] = []
        num_deferred = 0
        num_waiting = len(live.waiting)
        for position, sequence in enumerate(live.waiting):
            if sequence.leader is not None or sequence.slot >= 0:
                continue
            beams = live.beams.get(sequence)
            if beams is not None and (sequence is not beams.first or not beams.can_start):
                continue
            if (
                draft.budget_left == 0
                or not live.free_slots
                or not live.allocator.has_free_blocks
                or len(admitted) >= MAX_ADMITTED
            ):
                break
            if self._is_being_computed(sequence, draft):
                num_deferred += 1
                if num_deferred == MAX_DEFERRED:
                    break
                continue
            runs_alone = draft.is_empty and not (live.decoding or live.prefilling or live.searches)
            num_spare = 0 if runs_alone else self._num_spare_blocks
            if beams is not None:
                if not self._search_planner.admit(draft, beams, num_spare):
                    break
                admitted += beams.rows
                continue
            matches = live.allocator.match_prefix(sequence)
            num_remaining = len(sequence.token_ids) - live.allocator.matched_len(sequence, matches)
            # Without chunked prefill only a preempted sequence, with its outputs, can exceed the budget: it
            # is computed in parts. A prompt waits, and lets nobody pass, until it fits beside decode steps.
            if not self._chunks_prefill and draft.budget_left < num_remaining <= self._step_limit.num_tokens:
                break
            num_tokens = draft.prompt_chunk(sequence, num_remaining, position + 1 < num_waiting)
            if not live.allocator.take(sequence, matches, num_spare):
                break
            draft.admit(sequence)
            draft.take_chunk(sequence, num_tokens)
            self._branch_off(draft, sequence)
            admitted.append(sequence)
        for sequence in admitted:
            live.waiting.start(sequence)
            if sequence not in live.beams:
                insort(live.prefilling, sequence, key=by_order)

    def _is_being_computed(self, sequence: SequenceState, draft: PlanDraft) -> bool:
        """Return whether a prompt of this plan, earlier in order, is about to compute this one's next block.

        Waiting for it costs nothing in the end, and saves computing the same prefix twice.
        """
        prefix_cache = self._live.allocator.prefix_cache
        max_blocks = prefix_cache.reusable_blocks(sequence)
        if max_blocks == 0:
            return False
        return any(
            other.num_registered_blocks < max_blocks
            and other.order < sequence.order
            and prefix_cache.fills_next(other, sequence)
            for other, _ in draft.prefills
        )

    def _branch_off(self, draft: PlanDraft, leader: SequenceState) -> None:
        """Let the followers of a sequence begin, if its prompt ends in this plan; for some there is no room.

        They leave the queue when the plan is submitted.
        """
        live = self._live
        if not leader.followers or leader.num_remaining_tokens:
            return
        branches: list[SequenceState] = []
        for follower in leader.followers:
            if not live.free_slots:
                break
            copies = live.allocator.fork(leader, follower, self._num_spare_blocks)
            if copies is None:
                break
            draft.copies += copies
            draft.admit(follower, is_branch=True)
            follower.prompt_logprobs = leader.prompt_logprobs
            follower.last_step_id = draft.step_id
            branches.append(follower)
        draft.branches[leader] = branches
        for follower in branches:
            follower.leave_family()
