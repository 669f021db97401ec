"""Which sequences compute how many tokens in the next step, and what a finished step means for each.

Takes `TokenizedRequest`s, gives `StepPlan`s; takes `StepOutput`s, gives `TokenDelta`s. Pure: no asyncio, no
torch, no clock (`now_s` comes in). Knows no text: stop strings arrive as `abort`. Owns waiting and running
sequences and the slots; blocks are `KVAllocator`'s.

Policy. Decode steps first, one token each. What is left of the token budget goes to prompts in order (a
token that is scored counts as `SCORED_TOKEN_COST`, so that such a step takes no longer than others): one
that fits is computed whole, one that does not gets half of what is left as long as others want some, so a
long prompt slows the others down but never stops them. A prompt's blocks are taken when it is admitted, all
at once (for window layers, those of a window and a chunk); a decode step that finds no block preempts the
last in order, which waits again with all its known tokens.

Sequences of one request have one prompt. The first leads: the others wait until a plan ends its prompt and,
as slots and blocks allow, begin in that same plan as branches, which share its blocks and sample from its
logits. Of those that find no room the first leads the others; so it does when their leader ends before, or
its prompt is computed in a trial.

Blocks of a preempted sequence may be kept in the host's memory (`host_tier`); then it goes on where it was.

A step that fails sets its sequences back to their known tokens and puts them under suspicion: they are
tried again in steps of their own, by halves (`suspects`), nothing else in flight, and only one that fails
alone, twice, ends with an error. Nobody is admitted meanwhile, and those that run give way if they must. A
step that lacked memory is tried again with half as many tokens, and later steps are kept small for a while.
After a step that lost the device its sequences are tried one by one.

Invariants (`check`): see also `PlanRules` in the tests.

* at most `max_unapplied` plans are unapplied; outputs are applied in the order of the plans;
* a slot and its blocks come back when the output of the last plan that mentions the sequence is applied,
  never before: one rule for finished, failed, aborted and preempted sequences, in
  `_release_if_unmentioned`; those of many at once in parts, all of them before the next plan;
* a sequence certain to end by length is not planned any further;
* whatever waits while nothing runs and nothing is in flight is planned;
* a step that tries suspects holds nobody else, and no other step is in flight with it.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncserve.errors import (
    AsyncserveError,
    DeviceLost,
    InvalidRequest,
    InvariantError,
    StepFailed,
    StepOutOfMemory,
)
from asyncserve.kv_spec import pool_bytes_per_block
from asyncserve.loop.beams import BeamRows
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.host_tier import HostCounts, HostTier
from asyncserve.loop.kv_groups import KVAllocator
from asyncserve.loop.queue_bounds import Load
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.loop.sequence_limits import SequenceLimits
from asyncserve.loop.step_limit import StepLimit
from asyncserve.loop.suspects import Suspects
from asyncserve.loop.swap_cost import SwapCost
from asyncserve.loop.waiting import by_order, waiting_queue
from asyncserve.observer import EngineStatistics, RequestTimeline
from asyncserve.request import FinishReason, TokenDelta, TokenizedRequest, TokenLogprobs
from asyncserve.step import (
    BAD_LOGITS,
    NO_TOKEN,
    BlockAppend,
    BlockCopy,
    ExecutorInfo,
    ScheduledSequence,
    SlotAssignment,
    StepOutput,
    StepPlan,
)

SCORED_TOKEN_COST = 2
"""What a prompt token takes of the budget when its log-probability is asked for: its logits are made, too."""
_new_tuple = tuple.__new__
"""Makes a named tuple in half the time its class takes, which counts in a loop over all streams."""
MAX_ADMITTED = 32
"""Sequences admitted by one plan: hashing their prompts and taking their blocks takes about 0.5 ms."""
MAX_DEFERRED = 64
"""Waiting sequences passed over in one plan because another is computing their prefix; then the scan ends."""
RELEASED_BLOCKS = 1_024
"""Blocks that one call of `release_some` gives back, those of its last sequence beyond: about 0.15 ms."""
FAILED_ALONE_LIMIT = 8
"""So many sequences failing alone, one after the other and no step between them going well, are the device's
fault."""


class _Draft:
    """A plan in the making.

    `prefills`: (sequence, num_tokens) in order, already counted as computed. `branches`: by the sequence they
    branch off from, which is among the prefills. `searches`: beam searches that sample; `beam_rows`: rows of
    them that have sampled before.
    """

    __slots__ = (
        "admitted",
        "appends",
        "beam_rows",
        "branches",
        "budget_left",
        "copies",
        "decodes",
        "prefills",
        "searches",
        "step_id",
    )

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget_left = budget
        self.decodes: list[SequenceState] = []
        self.prefills: list[tuple[SequenceState, int]] = []
        self.branches: dict[SequenceState, list[SequenceState]] = {}
        self.copies: list[BlockCopy] = []
        self.searches: list[BeamRows] = []
        self.beam_rows: list[SequenceState] = []
        self.admitted: list[SlotAssignment] = []
        self.appends: list[BlockAppend] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody computes anything yet."""
        return not (self.decodes or self.prefills or self.beam_rows)


@dataclass(slots=True)
class _InFlight:
    """A plan not yet applied: the states in the order of `plan.sequences`, and those of them that sample.

    Of the latter the first `num_decodes` have had tokens before. `is_trial`: it holds suspects and nobody
    else. `searches`: Beam searches whose rows sample.
    """

    plan: StepPlan
    states: list[SequenceState]
    sampling: list[SequenceState]
    num_decodes: int
    is_trial: bool
    searches: list[BeamRows]


class StepDeltas(NamedTuple):
    """What a step gave: scheduler → detokenizer. Each sequence is in it once at most.

    Args:
        sequences: Those that got one more token, and nothing is to be said but that: nearly all.
        token_ids: That token of each.
        deltas: What the others got.
    """

    sequences: Sequence[SequenceState]
    token_ids: Sequence[int]
    deltas: list[TokenDelta]


class Scheduler:
    """Continuous batching over one executor.

    Args:
        info: What the executor offers.
        policy: `fcfs`, `priority` or `fair`.
        enable_prefix_caching: Reuse the blocks of equal prefixes.
        enable_chunked_prefill: Split prompts over steps; otherwise a prompt is computed whole or waits.
        long_prefill_token_threshold: Most tokens of one prompt in one step; 0 for no limit of its own.
        async_scheduling: Plan ahead of the device, as far as `info.max_unapplied` allows.
        hash_seed: Of the digests of the prefix cache.
        cache_log: Is told what becomes of the prefix cache.

    Attributes:
        limits: How long the sequences may be that are added.

    Raises:
        ConfigError: The policy is unknown, or the KV groups cannot be served together.
    """

    def __init__(
        self,
        *,
        info: ExecutorInfo,
        policy: str,
        enable_prefix_caching: bool,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: int = 0,
        async_scheduling: bool = True,
        hash_seed: str = "0",
        cache_log: CacheLog | None = None,
    ) -> None:
        self._info = info
        self._hash_seed = hash_seed
        self._cache_log = cache_log
        self._budget = info.max_num_batched_tokens
        self._chunks_prefill = enable_chunked_prefill
        self._prompt_share = self._budget
        if enable_chunked_prefill and long_prefill_token_threshold > 0:
            self._prompt_share = min(self._budget, long_prefill_token_threshold)
        self._max_unapplied = info.max_unapplied if async_scheduling else 1
        self._enable_prefix_caching = enable_prefix_caching
        self._host_tier: HostTier | None = None
        self._host_counts = HostCounts()
        self._swap_cost = SwapCost(info.host_block_s)
        self._allocator = self._make_allocator()
        self.limits = SequenceLimits(
            context_len=info.max_model_len,
            pool_len=self._allocator.capacity_len,
            max_prompt_len=None if enable_chunked_prefill else self._budget,
            max_width=min(info.num_slots, self._budget),
            num_blocks=self._allocator.num_usable,
            most_blocks=None if self._allocator.keeps_states else self._allocator.most_taken,
        )
        # Room kept for decode steps when a prompt is admitted beside others, so that it is not preempted at
        # once.
        self._num_spare_blocks = info.kv_groups[0].num_blocks // 100
        self._waiting = waiting_queue(policy)
        self._sequences: dict[int, SequenceState] = {}
        # Those that are to be left alone; once no step in flight mentions them, they hold nothing.
        self._paused: set[int] = set()
        # Running sequences: whole prompt planned, or not yet; each list sorted by order.
        self._decoding: list[SequenceState] = []
        self._prefilling: list[SequenceState] = []
        # Running beam searches, sorted by the order of their first rows.
        self._searches: list[BeamRows] = []
        self._beams: dict[SequenceState, BeamRows] = {}  # of every live row
        self._next_search_id = 0
        self._in_flight: deque[_InFlight] = deque()
        self._next_step_id = 0
        self._last_applied_step_id = -1
        # Ended or preempted sequences that steps in flight still mention, or that are to be released now.
        self._num_releasing = 0
        self._releasable: deque[SequenceState] = deque()
        self._free_slots = list(range(info.num_slots - 1, -1, -1))
        self._slot_holders: list[SequenceState | None] = [None] * info.num_slots
        self._released_slots: list[int] = []
        self._suspects = Suspects()
        self._step_limit = StepLimit(self._budget)
        self._last_turn = (0, 0)  # order of the last that got its token when not all could
        self._num_failed_alone = 0  # since a step went well
        self._num_failed_steps = 0
        self._num_retried_steps = 0
        self._num_replayed_sequences = 0
        self._num_failed_sequences = 0
        self._num_preemptions = 0
        self._num_pauses = 0
        self._num_copied_blocks = 0
        self._num_window_blocks_freed_earlier = 0  # before the device was lost
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits; what is paused does neither."""
        return len(self._sequences) == len(self._paused)

    @property
    def waiting_load(self) -> Load:
        """What waits to be started, preempted and suspected sequences included."""
        load = Load(len(self._waiting), self._waiting.num_tokens)
        for suspect in self._suspects:
            if suspect.status is SequenceStatus.WAITING:
                load = load.plus(Load(1, len(suspect.token_ids)))
        return load

    def waiting_load_of(self, tenant: str) -> Load:
        """Return what waits of one tenant, where the policy tells tenants apart; else all that waits."""
        return self._waiting.load_of(tenant)

    def add(
        self, request: TokenizedRequest, timeline: RequestTimeline, *, leader_id: int | None = None
    ) -> None:
        """Let a sequence wait for its first step; `limits` has nothing against its lengths.

        Args:
            leader_id: The first sequence of the same request, of the same prompt therefore. This one begins
                as a branch of it if that one's prompt is still to be computed.

        Raises:
            InvariantError: Its id is in use.
        """
        if request.sequence_id in self._sequences:
            raise InvariantError(f"sequence {request.sequence_id} was added twice")
        order = self._waiting.take_order(request.request.priority)
        sequence = SequenceState(request, timeline, order, self._allocator.num_groups)
        leader = None if leader_id is None else self._sequences.get(leader_id)
        self._sequences[request.sequence_id] = sequence
        if request.request.sampling.use_beam_search:
            beams = None if leader is None else self._beams.get(leader)
            if beams is None:
                beams = BeamRows(sequence)
            else:
                beams.rows.append(sequence)
            sequence.rows = beams.rows
            self._beams[sequence] = beams
        elif leader is not None and leader.last_step_id < 0 and leader.status is SequenceStatus.WAITING:
            sequence.follow(leader)
        self._waiting.push(sequence)

    def abort(self, sequence_id: int) -> bool:
        """End a sequence whose output nobody wants any more, whatever it is doing; all rows of a beam search.

        Returns:
            False if it is unknown or has ended. Either way no further delta of it comes.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        rows = self._rows_of(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_running(sequence)
        for row in rows:
            if row.status is SequenceStatus.WAITING and not row.trial_len:
                self._waiting.remove(row)
            self._end(row)
        for row in rows:
            self._release_if_unmentioned(row)
        return True

    def pause(self, sequence_id: int) -> bool:
        """Let a sequence rest, whatever it is doing: it gives up slot and blocks until it is resumed.

        As with a preemption, its blocks stay cached until others need them, tokens of steps in flight still
        come, and it goes on with all its known tokens. With a row of a beam search all of them rest.

        Returns:
            False if it is unknown, has ended or is paused already.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence_id in self._paused:
            return False
        rows = self._rows_of(sequence)
        self._paused.update(row.sequence_id for row in rows)
        self._num_pauses += len(rows)
        sequence.leave_family()
        for row in rows:
            is_suspect = row.trial_len > 0
            if is_suspect:
                # If a step fails because of it, that will show when it goes on.
                self._suspects.clear(row)
            if row.status is SequenceStatus.WAITING:
                if not is_suspect:
                    self._waiting.remove(row)
                row.status = SequenceStatus.PAUSED
        if sequence.status is SequenceStatus.RUNNING:
            self._put_back(sequence)
        return True

    def resume(self, sequence_id: int) -> bool:
        """Let a paused sequence wait for a slot again, in its place by age.

        Returns:
            False if it is not paused.
        """
        if sequence_id not in self._paused:
            return False
        for row in self._rows_of(self._sequences[sequence_id]):
            self._paused.remove(row.sequence_id)
            if row.status is SequenceStatus.PAUSED:
                row.status = SequenceStatus.WAITING
                self._waiting.push(row)
        return True

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do now or no credit left.

        Raises:
            InvariantError: Something waits, nothing runs, and yet nothing can be planned.
        """
        while self.release_some():
            pass
        if not self._sequences or len(self._in_flight) >= self._max_unapplied:
            return None
        draft = _Draft(self._next_step_id, self._step_limit.num_tokens)
        if self._suspects:
            if self._in_flight:
                return None
            while not (has_room := self._plan_trial(draft, now_s)) and (
                self._decoding or self._prefilling or self._searches
            ):
                # Nobody is admitted before the trial is over, so it waits for nobody: who runs gives way.
                self._preempt(self._last_in_order())
            if has_room:
                return self._submit(draft, [], is_trial=True)
        for beams in self._searches[:]:
            if beams.first.status is SequenceStatus.RUNNING and beams.is_ready:
                self._plan_search(draft, beams)
        scheduled = self._plan_decodes(draft)
        if draft.budget_left > 0:
            self._plan_prefills(draft, now_s)
        if draft.is_empty:
            if not self._in_flight and not self.is_idle:
                raise InvariantError(
                    f"{len(self._waiting)} sequences wait, {len(self._decoding)} decode,"
                    f" {len(self._prefilling)} prefill, no step is in flight, and none can be planned"
                )
            return None
        return self._submit(draft, scheduled)

    def apply(self, output: StepOutput, now_s: float) -> StepDeltas:
        """Account for a finished step and return what it gave to whom.

        Slots and blocks come back with it; those of many sequences in part by `release_some`, at the latest
        with the next plan.

        Raises:
            InvariantError: It is not the oldest step in flight, or has the wrong number of tokens.
        """
        entry = self._take_oldest(output.step_id)
        if len(output.token_ids) != len(entry.sampling):
            raise InvariantError(
                f"step {output.step_id} gave {len(output.token_ids)} tokens, not {len(entry.sampling)}"
            )
        self._waiting.note_outputs(entry.sampling)
        if output.prompt_logprobs:
            self._gather_prompt_logprobs(entry, output)
        num_live = len(self._sequences)
        deltas: list[TokenDelta] = []
        sampling, sampled = entry.sampling, output.token_ids
        num_plain, logprobs = entry.num_decodes, output.logprobs
        others: set[SequenceState] = set()
        # Once per token of every stream: no call.
        for sequence, token_id in zip(sampling[:num_plain], sampled, strict=False):
            token_ids = sequence.token_ids
            if (
                token_id in sequence.stop_token_ids
                or len(token_ids) + 1 >= sequence.max_len
                or token_id < 0
                or not sequence.accepts_output
                or (logprobs and sequence.slot in logprobs)
            ):
                others.add(sequence)
                self._apply_row(sequence, token_id, output, now_s, deltas)
            else:
                sequence.num_unseen_tokens -= 1
                token_ids.append(token_id)
        for sequence, token_id in zip(sampling[num_plain:], sampled[num_plain:], strict=True):
            self._apply_row(sequence, token_id, output, now_s, deltas)
        for beams in entry.searches:
            self._apply_search(beams, output, now_s, deltas)
        plain, plain_ids = sampling[:num_plain], sampled[:num_plain]
        if others:
            plain_ids = [
                each for each, sequence in zip(plain_ids, plain, strict=True) if sequence not in others
            ]
            plain = [sequence for sequence in plain if sequence not in others]
        if len(self._sequences) != num_live:
            self._drop_ended()
        if self._num_releasing:
            rows = [row for sequence in entry.states for row in sequence.rows or ()]
            self._releasable += [
                each for each in (*entry.states, *rows) if each.status is not SequenceStatus.RUNNING
            ]
            self.release_some()
        self._num_failed_alone = 0
        self._allocator.note_step(entry.plan, entry.num_decodes, output.device_s)
        if entry.is_trial:
            for sequence in entry.states:
                # A search has shown nothing before it samples.
                was_tried = sequence not in self._beams or self._beams[sequence] in entry.searches
                if was_tried and 0 < sequence.trial_len <= sequence.num_computed_tokens:
                    self._suspects.clear(sequence)
        self._step_limit.note_good()
        return StepDeltas(plain, plain_ids, deltas)

    def release_some(self) -> bool:
        """Take back slots and blocks that the last steps applied have made free, as many as take a moment.

        Sequences that end together may hold many thousands of blocks, and others want the loop, too.

        Returns:
            Whether more are left.
        """
        releasable = self._releasable
        num_blocks = 0
        while releasable and num_blocks < RELEASED_BLOCKS:
            sequence = releasable.popleft()
            num_blocks += sum(map(len, sequence.block_table.block_ids))
            self._release_if_unmentioned(sequence)
        return bool(releasable)

    def _apply_row(
        self,
        sequence: SequenceState,
        token_id: int,
        output: StepOutput,
        now_s: float,
        deltas: list[TokenDelta],
    ) -> None:
        """Account for any token of a step; what is to be told of it is added to `deltas`."""
        sequence.num_unseen_tokens -= 1
        if not sequence.accepts_output:
            return
        if (beams := self._beams.get(sequence)) is not None:
            beams.has_bad_logits |= token_id == BAD_LOGITS
            return
        if token_id < 0:
            if token_id == BAD_LOGITS:
                deltas.append(self._end_with_bad_logits(sequence, output.step_id))
            elif token_id == NO_TOKEN:
                deltas.append(self._end_with_error(sequence, _nothing_allowed(sequence)))
            else:
                raise InvariantError(f"step {output.step_id} gave token {token_id}")
            return
        token_ids = sequence.token_ids
        token_ids.append(token_id)
        timeline = sequence.timeline
        if timeline.first_token_s is None:
            timeline.first_token_s = now_s
        timeline.last_token_s = now_s
        delta = TokenDelta(sequence.sequence_id, (token_id,), num_cached_tokens=sequence.num_cached_tokens)
        deltas.append(delta)
        if output.logprobs and (logprobs := output.logprobs.get(sequence.slot)) is not None:
            delta.logprobs = (logprobs,)
        if sequence.prompt_logprobs is not None:
            delta.prompt_logprobs = sequence.prompt_logprobs
            sequence.prompt_logprobs = None
        if token_id in sequence.stop_token_ids and len(token_ids) >= sequence.min_len:
            delta.finish_reason = FinishReason.STOP
            delta.stop_token_id = token_id
            self._end(sequence)
        elif len(token_ids) >= sequence.max_len:
            delta.finish_reason = FinishReason.LENGTH
            self._end(sequence)

    def _apply_search(
        self, beams: BeamRows, output: StepOutput, now_s: float, deltas: list[TokenDelta]
    ) -> None:
        """Account for what a step gave a beam search; its results, in the end, are added to `deltas`."""
        if not beams.first.accepts_output:
            return
        if beams.has_bad_logits:
            deltas += [self._end_with_bad_logits(row, output.step_id) for row in beams.rows]
            return
        num_computed = len(beams.first.token_ids)
        parents = beams.advance(output.beams[beams.search_id])
        self._allocator.inherit(beams.rows, parents, num_computed)
        for row in beams.rows:
            self._allocator.register(row)
        if not beams.search.is_done:
            return
        for row, result in zip(beams.rows, beams.results(), strict=True):
            if result is None:
                deltas.append(self._end_with_error(row, _nothing_allowed(row)))
                continue
            row.timeline.first_token_s = row.timeline.last_token_s = now_s
            deltas.append(result)
            self._end(row)

    def fail(self, step_id: int, error: StepFailed) -> list[TokenDelta]:
        """Account for a step that raised: its sequences are set back to their known tokens and suspected.

        Their clients notice nothing but a pause, unless it was a step of one suspect alone: that one ends
        with `error`. What the step should have written to the KV cache is forgotten; a sequence of a later
        step in flight that read it computes again from its known tokens.

        Returns:
            The end of the culprit, if that was it.

        Raises:
            InvariantError: It is not the oldest step in flight.
        """
        entry = self._take_oldest(step_id)
        self._num_failed_steps += 1
        invalid = self._allocator.lose_transfers(each.plan for each in (entry, *self._in_flight))
        failed: list[SequenceState] = []
        for scheduled, sequence in zip(entry.plan.sequences, entry.states, strict=True):
            sequence.num_unseen_tokens -= scheduled.samples
            suspect = self._representative(sequence)
            # Not those that an earlier failed step has set back, and that this one mentions nevertheless.
            is_blamed = suspect.accepts_output and suspect.sequence_id not in self._paused
            if entry.is_trial:
                # Nor those that were paused, and resumed, since it was planned: they are tried no longer.
                is_blamed &= suspect.trial_len > 0
            elif is_blamed:
                suspect.trial_len = scheduled.start + scheduled.num_tokens
            if is_blamed:
                failed.append(suspect)
            self._set_back(sequence, scheduled.start)
            invalid |= self._allocator.invalidate(sequence, scheduled.start, step_id)
        for later in self._in_flight:
            origin_is_valid = True
            for scheduled, sequence in zip(later.plan.sequences, later.states, strict=True):
                is_branch = not scheduled.num_tokens
                if sequence.blocks_are_valid:
                    # What a branch copies, and the logits it samples from, are another's.
                    is_wrong = is_branch and not origin_is_valid
                    if is_wrong or self._allocator.holds_any(sequence, invalid, step_id):
                        self._set_back(sequence, 0)
                if not sequence.blocks_are_valid:
                    invalid |= self._allocator.invalidate(sequence, scheduled.start, step_id)
                if not is_branch:
                    origin_is_valid = sequence.blocks_are_valid
        self._drop_ended()
        deltas = self._judge(entry, failed, error)
        self._release_unmentioned(entry)
        return deltas

    @property
    def blames_device(self) -> bool:
        """Whether what fails is the device: sequence after sequence failed alone, and no step went well."""
        return self._num_failed_alone >= FAILED_ALONE_LIMIT

    def lose_device(self, lost_by: DeviceLost | None = None) -> list[TokenDelta]:
        """Forget the steps in flight and all that the device held: everybody waits with its known tokens.

        Outputs of those steps are not to be applied any more. Suspects are tried first, as before, and those
        of the step that lost the device are suspects, too.

        Args:
            lost_by: What the oldest step in flight lost the device by; None if that step is not the cause.

        Returns:
            The end of a sequence that lost the device alone, twice.
        """
        deltas = [] if lost_by is None or not self._in_flight else self._judge_loss(lost_by)
        self._in_flight.clear()
        self._last_applied_step_id = self._next_step_id - 1
        self._decoding, self._prefilling, self._searches = [], [], []
        self._num_window_blocks_freed_earlier += self._allocator.num_window_blocks_freed
        self._allocator = self._make_allocator()
        if self._cache_log is not None:
            self._cache_log.cleared()
        self._free_slots = list(range(self._info.num_slots - 1, -1, -1))
        self._released_slots.clear()
        self._releasable.clear()
        self._num_releasing = 0
        self._num_failed_alone = 0
        holders = [sequence for sequence in self._slot_holders if sequence is not None]
        self._slot_holders = [None] * self._info.num_slots
        for sequence in holders:
            sequence.slot = -1
            if sequence.status is not SequenceStatus.ENDED:
                self._num_replayed_sequences += 1
                self._wait_again(sequence)
        return deltas

    def fill_statistics(self, statistics: EngineStatistics) -> None:
        """Write the scheduler's part of the engine's state."""
        statistics.num_running = self._info.num_slots - len(self._free_slots)
        statistics.num_waiting, statistics.num_waiting_tokens = self.waiting_load
        statistics.num_paused = len(self._paused)
        statistics.num_pauses = self._num_pauses
        statistics.num_blocks = self._allocator.num_usable
        statistics.num_blocks_used = self._allocator.num_used
        statistics.num_blocks_cached = self._allocator.num_cached
        if self._host_tier is not None:
            self._host_tier.fill_statistics(statistics, pool_bytes_per_block(self._info.kv_groups))
        statistics.num_blocks_saved = self._allocator.num_saved
        statistics.num_copied_blocks = self._num_copied_blocks
        freed_earlier = self._num_window_blocks_freed_earlier
        statistics.num_window_blocks_freed = freed_earlier + self._allocator.num_window_blocks_freed
        statistics.kv_groups = self._allocator.group_statistics(
            [sequence for sequence in self._slot_holders if sequence is not None]
        )
        statistics.num_unapplied_steps = len(self._in_flight)
        statistics.prefix_cache_queries = self._prefix_cache_queries
        statistics.prefix_cache_hits = self._prefix_cache_hits
        statistics.num_preemptions = self._num_preemptions
        statistics.num_failed_steps = self._num_failed_steps
        statistics.num_retried_steps = self._num_retried_steps
        statistics.num_replayed_sequences = self._num_replayed_sequences
        statistics.num_failed_sequences = self._num_failed_sequences

    def check(self) -> None:
        """Verify every invariant that holds between two calls; slow, for tests.

        Raises:
            InvariantError: One does not hold.
        """
        running = self._decoding + [s for s in self._prefilling if s not in self._beams]
        for beams in self._searches:
            running += beams.rows
        self._check_searches()
        holders = [sequence for sequence in self._slot_holders if sequence is not None]
        _require(len(self._in_flight) <= self._max_unapplied, "no more steps in flight than credits")
        _require(
            all(s.status is SequenceStatus.RUNNING for s in running), "the running lists hold running ones"
        )
        _require(
            all(s.status is SequenceStatus.WAITING for s in self._waiting), "the waiting queue holds waiters"
        )
        self._waiting.check()
        for sequences in (self._decoding, self._prefilling):
            _require(sequences == sorted(sequences, key=by_order), "sequences stand in order")
        _require(
            sorted(self._free_slots + [s.slot for s in holders]) == list(range(self._info.num_slots)),
            "every slot is free or held once",
        )
        releasing = [s for s in holders if s.status is not SequenceStatus.RUNNING]
        _require(len(releasing) == self._num_releasing, "sequences to be released are counted")
        _require(
            {s.sequence_id for s in releasing if s.status is SequenceStatus.PREEMPTED}
            | {s.sequence_id for s in running}
            | {s.sequence_id for s in self._waiting}
            | {s.sequence_id for s in self._suspects}
            | {s.sequence_id for s in self._sequences.values() if s.status is SequenceStatus.PAUSED}
            == set(self._sequences),
            "a live sequence waits, runs, is preempted or paused",
        )
        _require(
            all(
                self._sequences[each].status in (SequenceStatus.PAUSED, SequenceStatus.PREEMPTED)
                for each in self._paused
            ),
            "a paused sequence neither waits nor runs",
        )
        _require(len(running) + len(releasing) == len(holders), "a running sequence holds a slot")
        _require(
            all(s.last_step_id > self._last_applied_step_id or s in self._releasable for s in releasing),
            "what no step in flight mentions is released, or about to be",
        )
        self._suspects.check()
        _require(
            {s.sequence_id for s in self._sequences.values() if s.trial_len}
            == {s.sequence_id for s in self._suspects},
            "a live sequence under suspicion will be tried",
        )
        _require(not any(s.trial_len for s in self._waiting), "no suspect stands in the queue")
        _require(
            len(self._in_flight) < 2
            or not any(
                entry.is_trial and any(s.trial_len for s in entry.states) for entry in self._in_flight
            ),
            "a step that tries suspects is alone in flight",
        )
        num_unseen: dict[int, int] = {}
        for entry in self._in_flight:
            for sequence in entry.sampling:
                num_unseen[sequence.slot] = num_unseen.get(sequence.slot, 0) + 1
            for sequence in entry.states:
                _require(self._slot_holders[sequence.slot] is sequence, "a sequence in flight holds its slot")
        for sequence in holders:
            _require(
                sequence.num_unseen_tokens == num_unseen.get(sequence.slot, 0), "unseen tokens are in flight"
            )
            _require(
                sequence.block_table.covered_len >= sequence.num_computed_tokens,
                "computed positions have blocks",
            )
        for sequence in running:
            known_len = len(sequence.token_ids) + sequence.num_unseen_tokens
            _require(known_len <= sequence.max_len, "no sequence is planned beyond its length")
        for sequence in self._decoding:
            known_len = len(sequence.token_ids) + sequence.num_unseen_tokens
            _require(sequence.num_computed_tokens == known_len - 1, "a decode step has one token to compute")
        planned_to_end = {s.sequence_id for s in self._decoding}
        for sequence in self._sequences.values():
            for follower in sequence.followers:
                _require(follower.leader is sequence, "a leader knows its followers")
                _require(not follower.followers, "who follows leads nobody")
                _require(
                    follower.status is SequenceStatus.WAITING
                    and self._sequences.get(follower.sequence_id) is follower,
                    "who follows waits",
                )
                _require(
                    sequence.sequence_id not in planned_to_end and not sequence.num_unseen_tokens,
                    "who leads has its prompt to be computed still",
                )
            leader = sequence.leader
            _require(
                leader is None
                or (self._sequences.get(leader.sequence_id) is leader and sequence in leader.followers),
                "who is followed lives",
            )
            if sequence.status not in (SequenceStatus.WAITING, SequenceStatus.PAUSED):
                continue
            _require(not any(sequence.block_table.block_ids), "a waiting sequence holds no blocks")
        if self._host_tier is not None:
            _require(
                all(
                    each in self._sequences and self._sequences[each].slot < 0
                    for each in self._host_tier.swapped_ids
                ),
                "who is swapped waits or rests",
            )
        self._allocator.check(holders)

    def _check_searches(self) -> None:
        _require(
            self._searches == sorted(self._searches, key=lambda beams: beams.first.order),
            "searches stand in order",
        )
        _require(set(self._beams) <= set(self._sequences.values()), "rows of searches live")
        for row, beams in self._beams.items():
            _require(row in beams.rows, "a row is one of its search")
            _require(
                (beams in self._searches) == (row.status is SequenceStatus.RUNNING),
                "the rows of a search run together",
            )
            is_computing = row in beams.computing_rows and row.num_remaining_tokens > 1
            _require(
                (row in self._prefilling) == (row.status is SequenceStatus.RUNNING and is_computing),
                "rows with more than a token to compute are computed as prompts are",
            )

    # Planning

    def _plan_decodes(self, draft: _Draft) -> list[ScheduledSequence]:
        """Schedule one token of every decoding sequence; return their entries in the plan."""
        step_id = draft.step_id
        decodes = draft.decodes
        scheduled: list[ScheduledSequence] = []
        lacking: list[SequenceState] = []
        decoding = self._decoding
        num_decoding = len(decoding)
        if num_decoding > draft.budget_left:
            # Steps are kept small for a while: everybody gets its token in turn.
            able = [each for each in decoding if each.num_computed_tokens + 1 < each.max_len]
            turn = bisect_right(able, self._last_turn, key=by_order)
            decoding = (able[turn:] + able[:turn])[: draft.budget_left]
            self._last_turn = decoding[-1].order if decoding else self._last_turn
        # Once per stream and step: no calls but those that make the entry.
        for sequence in decoding:
            start = sequence.num_computed_tokens
            if start + 1 >= sequence.max_len:
                continue
            if start >= sequence.block_table.covered_len:
                lacking.append(sequence)
                continue
            scheduled.append(_new_tuple(ScheduledSequence, (sequence.slot, start, 1, True)))
            decodes.append(sequence)
            sequence.num_computed_tokens = start + 1
            sequence.num_unseen_tokens += 1
            sequence.last_step_id = step_id
        for sequence in lacking:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            # Its last block is full and known, now that a new one begins.
            self._allocator.register(sequence)
            self._allocator.drop_unseen(sequence)
            if not self._cover_or_preempt(draft, sequence, self._allocator.extend):
                continue
            start = sequence.num_computed_tokens
            scheduled.append(ScheduledSequence(sequence.slot, start, 1, True))
            decodes.append(sequence)
            sequence.num_computed_tokens = start + 1
            sequence.num_unseen_tokens += 1
            sequence.last_step_id = step_id
        if not scheduled and len(self._decoding) < num_decoding > draft.budget_left:
            return self._plan_decodes(draft)  # those whose turn it was were preempted: it is that of others
        draft.budget_left -= len(scheduled)
        return scheduled

    def _cover_or_preempt(
        self, draft: _Draft, sequence: SequenceState, cover: Callable[[SequenceState], list[list[int]] | None]
    ) -> bool:
        """Let `cover` give a sequence further blocks, taken from the last in order if need be.

        Returns:
            False if there are not enough now.
        """
        while (block_ids := cover(sequence)) is None:
            # Blocks that come back with a step in flight are waited for: one preemption at a time.
            firsts = [beams.first for beams in self._searches]
            if self._num_releasing or any(other.is_planned_to_its_end for other in self._decoding + firsts):
                return False
            victim = self._last_in_order()
            self._preempt(victim)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        for group_id, new_ids in enumerate(block_ids):
            if new_ids:
                draft.appends.append(BlockAppend(group_id, sequence.slot, tuple(new_ids)))
        return True

    def _last_in_order(self) -> SequenceState:
        firsts = [beams.first for beams in self._searches]
        return max((group[-1] for group in (self._decoding, self._prefilling, firsts) if group), key=by_order)

    def _plan_search(self, draft: _Draft, beams: BeamRows) -> None:
        """Let all rows of a search sample that is ready, if there is room for that."""
        rows = beams.computing_rows
        first, others = beams.first, beams.rows[1:]
        begins, start = beams.begins, first.num_computed_tokens
        before = dict(draft.prefills)
        # Where steps are kept small it goes beyond that, alone: rows cannot take turns.
        if start + 1 >= first.max_len or (len(rows) > draft.budget_left and not draft.is_empty):
            return
        if beams.has_sampled:
            lacking = [row for row in rows if start >= row.block_table.covered_len]
            for row in lacking:
                self._allocator.drop_unseen(row)
            if not self._make_room(draft, first, sum(map(self._allocator.extend_cost, lacking))):
                return
            for row in lacking:
                self._append_blocks(draft, row, self._allocator.extend(row))
        else:
            if begins and not self._make_room(
                draft, first, len(others) * self._allocator.fork_cost(len(first.token_ids))
            ):
                return
            # Rows whose chunk is in this plan keep all that they hold: this step writes it. They are covered
            # for their last token, too, unless their windows hold no more than the chunk.
            advancing = [row for row in rows if row not in before]
            if any(start >= row.block_table.covered_len for row in before if row in rows):
                return
            for row in advancing:
                new_ids = self._allocator.advance(row)
                if new_ids is None:
                    self._preempt(first)  # what other rows were given is not lost with the draft
                    return
                self._append_blocks(draft, row, new_ids)
        for row in beams.rows:
            row.last_step_id = draft.step_id
        for row in rows:
            row.num_computed_tokens += 1
        if beams.has_sampled:
            draft.beam_rows += rows
        else:
            # For some this step is to compute what is before their last token, too.
            draft.prefills = [each for each in draft.prefills if each[0] not in rows]
            draft.prefills += [(row, before.get(row, 0) + 1) for row in rows]
        if begins:
            for row in others:
                copies = self._allocator.fork(first, row, 0)
                assert copies is not None, "room was made"
                draft.copies += copies
                self._append_blocks(draft, row, row.block_table.block_ids)
            draft.branches[first] = others
        beams.has_sampled = True
        draft.searches.append(beams)
        draft.budget_left = max(0, draft.budget_left - len(rows))

    def _make_room(self, draft: _Draft, sequence: SequenceState, num_blocks: int) -> bool:
        """Let so many blocks be free, taken from the last in order if need be; return whether they are."""
        pool = self._allocator.pool
        return self._cover_or_preempt(draft, sequence, lambda _: [] if pool.num_free >= num_blocks else None)

    @staticmethod
    def _append_blocks(draft: _Draft, sequence: SequenceState, new_ids: Sequence[list[int]] | None) -> None:
        assert new_ids is not None, "room was made"
        for group_id, block_ids in enumerate(new_ids):
            if block_ids:
                draft.appends.append(BlockAppend(group_id, sequence.slot, tuple(block_ids)))

    def _admit_search(self, draft: _Draft, beams: BeamRows, now_s: float, num_spare: int) -> bool:
        """Give all rows of a waiting search slots, and blocks for what they know, if there are enough."""
        beams.enter(self._next_search_id)
        width, rows = beams.width, beams.computing_rows
        allocator = self._allocator
        num_tokens = len(beams.first.token_ids)
        needed = len(rows) * allocator.most_taken(num_tokens)
        if beams.begins:
            needed += (width - 1) * allocator.fork_cost(num_tokens)
        if len(self._free_slots) < width or needed + num_spare > allocator.pool.num_free:
            return False
        self._next_search_id += 1
        insort(self._searches, beams, key=lambda each: each.first.order)
        for row in beams.rows:
            is_branch = row not in rows
            if not is_branch:
                taken = allocator.take(row, allocator.match_prefix(row), 0)
                assert taken, "blocks were counted"
            self._enter_slot(draft, row, now_s, is_branch=is_branch)
            row.last_step_id = draft.step_id
            if not is_branch and row.num_remaining_tokens > 1:
                insort(self._prefilling, row, key=by_order)
                if draft.budget_left > 0:
                    self._take_chunk(
                        draft, row, self._prompt_chunk(row, self._num_wanted(row), draft, others_want=True)
                    )
        if beams.is_ready:
            self._plan_search(draft, beams)
        return True

    def _num_wanted(self, sequence: SequenceState) -> int:
        """Return how many tokens a sequence is to compute as prompts are: a search's rows not their last."""
        return sequence.num_remaining_tokens - (sequence in self._beams)

    def _plan_prefills(self, draft: _Draft, now_s: float) -> None:
        """Share what is left of the budget among prompts: those that run, then those that wait."""
        prefilling = self._prefilling
        can_admit = bool(self._waiting) and bool(self._free_slots) and not self._suspects
        for position, sequence in enumerate(prefilling[:]):
            others_want = can_admit or position + 1 < len(prefilling)
            if draft.budget_left == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING or not self._cover_or_preempt(
                draft, sequence, self._allocator.advance
            ):
                continue
            num_tokens = self._prompt_chunk(sequence, self._num_wanted(sequence), draft, others_want)
            self._take_chunk(draft, sequence, num_tokens)
            self._branch_off(draft, sequence, now_s)
        if can_admit:
            self._admit_waiting(draft, now_s)
        # What nobody else wanted goes to the prompts that were cut, in order.
        for position, (sequence, num_tokens) in enumerate(draft.prefills):
            if draft.budget_left == 0:
                break
            cost = self._token_cost(sequence)
            extra = min(
                self._num_wanted(sequence), self._prompt_share - num_tokens, draft.budget_left // cost
            )
            if extra > 0:
                draft.prefills[position] = (sequence, num_tokens + extra)
                draft.budget_left -= extra * cost
                sequence.num_computed_tokens += extra
                self._allocator.register(sequence)

    def _token_cost(self, sequence: SequenceState) -> int:
        """Return what one token of a prompt takes of the budget."""
        # A preempted sequence scores its prompt again. Where a prompt must be whole, there is no choice.
        is_scored = sequence.tokenized.request.sampling.num_prompt_logprobs is not None
        return SCORED_TOKEN_COST if is_scored and self._chunks_prefill else 1

    def _prompt_chunk(
        self, sequence: SequenceState, num_remaining: int, draft: _Draft, others_want: bool
    ) -> int:
        """Return how many of a prompt's remaining tokens this step computes before leftovers are shared."""
        # One at least: so the budget may be overdrawn, but a step never has more tokens than it.
        left = max(1, draft.budget_left // self._token_cost(sequence))
        if num_remaining > left and others_want:
            left = max(left // 2, min(left, self._allocator.block_len))
        return min(num_remaining, left, self._prompt_share)

    def _take_chunk(self, draft: _Draft, sequence: SequenceState, num_tokens: int) -> None:
        draft.prefills.append((sequence, num_tokens))
        draft.budget_left = max(0, draft.budget_left - num_tokens * self._token_cost(sequence))
        sequence.num_computed_tokens += num_tokens
        sequence.last_step_id = draft.step_id
        self._allocator.register(sequence)

    def _branch_off(self, draft: _Draft, leader: SequenceState, now_s: float) -> None:
        """Let the followers of a sequence begin, if its prompt ends in this plan; for some there is no room.

        They leave the queue when the plan is submitted.
        """
        if not leader.followers or leader.num_remaining_tokens:
            return
        branches: list[SequenceState] = []
        for follower in leader.followers:
            if not self._free_slots:
                break
            copies = self._allocator.fork(leader, follower, self._num_spare_blocks)
            if copies is None:
                break
            draft.copies += copies
            self._enter_slot(draft, follower, now_s, is_branch=True)
            follower.prompt_logprobs = leader.prompt_logprobs
            follower.last_step_id = draft.step_id
            branches.append(follower)
        draft.branches[leader] = branches
        for follower in branches:
            follower.leave_family()

    def _admit_waiting(self, draft: _Draft, now_s: float) -> None:
        """Admit waiting sequences in order, as far as slots, blocks and budget go."""
        admitted: list[SequenceState] = []
        num_deferred = 0
        num_waiting = len(self._waiting)
        for position, sequence in enumerate(self._waiting):
            if sequence.leader is not None or sequence.slot >= 0:
                continue
            beams = self._beams.get(sequence)
            if beams is not None and (sequence is not beams.first or not beams.can_start):
                continue
            if (
                draft.budget_left == 0
                or not self._free_slots
                or not self._allocator.has_free_blocks
                or len(admitted) >= MAX_ADMITTED
            ):
                break
            if self._is_being_computed(sequence, draft):
                num_deferred += 1
                if num_deferred == MAX_DEFERRED:
                    break
                continue
            runs_alone = draft.is_empty and not (self._decoding or self._prefilling or self._searches)
            num_spare = 0 if runs_alone else self._num_spare_blocks
            if beams is not None:
                if not self._admit_search(draft, beams, now_s, num_spare):
                    break
                admitted += beams.rows
                continue
            matches = self._allocator.match_prefix(sequence)
            num_remaining = len(sequence.token_ids) - self._allocator.matched_len(sequence, matches)
            # Without chunked prefill only a preempted sequence, with its outputs, can exceed the budget: it
            # is computed in parts. A prompt waits, and lets nobody pass, until it fits beside decode steps.
            if not self._chunks_prefill and draft.budget_left < num_remaining <= self._step_limit.num_tokens:
                break
            num_tokens = self._prompt_chunk(sequence, num_remaining, draft, position + 1 < num_waiting)
            if not self._allocator.take(sequence, matches, num_spare):
                break
            self._enter_slot(draft, sequence, now_s)
            self._take_chunk(draft, sequence, num_tokens)
            self._branch_off(draft, sequence, now_s)
            admitted.append(sequence)
        for sequence in admitted:
            self._waiting.start(sequence)
            if sequence not in self._beams:
                insort(self._prefilling, sequence, key=by_order)

    def _is_being_computed(self, sequence: SequenceState, draft: _Draft) -> bool:
        """Return whether a prompt of this plan, earlier in order, is about to compute this one's next block.

        Waiting for it costs nothing in the end, and saves computing the same prefix twice.
        """
        max_blocks = self._allocator.reusable_blocks(sequence)
        if max_blocks == 0:
            return False
        self._allocator.hash_blocks(sequence, max_blocks)
        for other, _ in draft.prefills:
            next_block = other.num_registered_blocks
            if (
                next_block < max_blocks
                and next_block < len(other.block_digests)
                and other.order < sequence.order
                and other.block_digests[next_block] == sequence.block_digests[next_block]
            ):
                return True
        return False

    def _enter_slot(
        self, draft: _Draft, sequence: SequenceState, now_s: float, *, is_branch: bool = False
    ) -> None:
        slot = self._free_slots.pop()
        sequence.slot = slot
        sequence.status = SequenceStatus.RUNNING
        self._slot_holders[slot] = sequence
        tokenized, timeline = sequence.tokenized, sequence.timeline
        beams = self._beams.get(sequence)
        if timeline.first_scheduled_s is None:
            timeline.first_scheduled_s = now_s
            num_cached = sequence.prompt_len if is_branch else sequence.num_computed_tokens
            sequence.num_cached_tokens = timeline.num_cached_tokens = num_cached
            looks_up = self._allocator.enable_prefix_caching and not is_branch
            if looks_up and sequence.prompt_logprobs is None:
                self._prefix_cache_queries += sequence.prompt_len
                self._prefix_cache_hits += sequence.num_computed_tokens
        draft.admitted.append(
            SlotAssignment(
                slot=slot,
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
        self._append_blocks(draft, sequence, sequence.block_table.block_ids)

    def _plan_trial(self, draft: _Draft, now_s: float) -> bool:
        """Plan for the suspects whose turn it is what a step takes; return whether there is room for any.

        They compute at least what the step that failed was to compute, over several steps if need be.
        """
        group = self._suspects.first
        draft.budget_left = min(draft.budget_left, group.max_tokens)
        for sequence in group.sequences:
            if draft.budget_left == 0:
                break
            if (beams := self._beams.get(sequence)) is not None:
                if not self._plan_search_trial(draft, beams, now_s):
                    break
                continue
            if sequence.status is SequenceStatus.WAITING:
                matches = self._allocator.match_prefix(sequence)
                if not self._free_slots or not self._allocator.take(sequence, matches, 0):
                    break
                self._enter_slot(draft, sequence, now_s)
                insort(self._prefilling, sequence, key=by_order)
            elif not self._cover_or_preempt(draft, sequence, self._allocator.advance):
                break
            num_tokens = self._prompt_chunk(sequence, sequence.num_remaining_tokens, draft, others_want=False)
            self._take_chunk(draft, sequence, num_tokens)
        return not draft.is_empty

    def _plan_search_trial(self, draft: _Draft, beams: BeamRows, now_s: float) -> bool:
        """Plan for a suspected search what a step takes; return whether there is room for it."""
        if beams.first.status is SequenceStatus.WAITING:
            if not self._admit_search(draft, beams, now_s, 0):
                return False
            for row in beams.rows[1:]:
                self._waiting.start(row)
            return True
        for row in beams.rows:
            if row in self._prefilling and draft.budget_left > 0:
                if not self._cover_or_preempt(draft, row, self._allocator.advance):
                    return False
                num_tokens = self._prompt_chunk(row, self._num_wanted(row), draft, others_want=False)
                self._take_chunk(draft, row, num_tokens)
        if beams.is_ready and beams not in draft.searches:
            self._plan_search(draft, beams)
        return True

    def _submit(
        self, draft: _Draft, scheduled: list[ScheduledSequence], *, is_trial: bool = False
    ) -> StepPlan:
        """Turn the draft into a plan in flight."""
        states = draft.decodes
        num_decodes = len(states)
        for row in draft.beam_rows:
            scheduled.append(ScheduledSequence(row.slot, row.num_computed_tokens - 1, 1, True))
            states.append(row)
            row.num_unseen_tokens += 1
        sampling = states[:] if draft.prefills else states
        for sequence, num_tokens in draft.prefills:
            samples = sequence.num_remaining_tokens == 0
            start = sequence.num_computed_tokens - num_tokens
            scheduled.append(ScheduledSequence(sequence.slot, start, num_tokens, samples))
            states.append(sequence)
            is_beam = sequence in self._beams
            if is_beam and sequence.num_remaining_tokens <= 1 and sequence in self._prefilling:
                self._prefilling.remove(sequence)
            if not samples:
                continue
            sampling.append(sequence)
            sequence.num_unseen_tokens += 1
            if sequence.status is SequenceStatus.RUNNING and not is_beam:
                self._prefilling.remove(sequence)
                insort(self._decoding, sequence, key=by_order)
            for branch in draft.branches.get(sequence, ()):
                if not is_beam:
                    self._waiting.start(branch)
                    insort(self._decoding, branch, key=by_order)
                scheduled.append(ScheduledSequence(branch.slot, branch.num_computed_tokens, 0, True))
                states.append(branch)
                sampling.append(branch)
                branch.num_unseen_tokens += 1
            if sequence.status is SequenceStatus.RUNNING:
                self._allocator.drop_unseen(sequence)
            sequence.leave_family()  # those that found no room; in a trial, all of them
        block_stores, block_loads = self._allocator.take_transfers()
        plan = StepPlan(
            step_id=draft.step_id,
            sequences=tuple(scheduled),
            admitted=tuple(draft.admitted),
            released_slots=tuple(self._released_slots),
            block_appends=tuple(draft.appends),
            block_stores=block_stores,
            block_loads=block_loads,
            block_copies=tuple(draft.copies),
        )
        self._num_copied_blocks += len(draft.copies)
        self._released_slots.clear()
        self._next_step_id += 1
        self._in_flight.append(_InFlight(plan, states, sampling, num_decodes, is_trial, draft.searches))
        self._num_retried_steps += is_trial
        return plan

    # Accounting

    def _take_oldest(self, step_id: int) -> _InFlight:
        if not self._in_flight or self._in_flight[0].plan.step_id != step_id:
            oldest = self._in_flight[0].plan.step_id if self._in_flight else None
            raise InvariantError(f"step {step_id} is applied; the oldest in flight is {oldest}")
        self._last_applied_step_id = step_id
        return self._in_flight.popleft()

    def _gather_prompt_logprobs(self, entry: _InFlight, output: StepOutput) -> None:
        for scheduled, sequence in zip(entry.plan.sequences, entry.states, strict=True):
            gathered = sequence.prompt_logprobs
            scored: Sequence[TokenLogprobs] = output.prompt_logprobs.get(scheduled.slot, ())
            # Those of one that has ended, too: it may share its list with branches.
            if gathered is None or not scored or not sequence.blocks_are_valid:
                continue
            # Entry i scores position start + 1 + i; a preempted sequence scores some positions again.
            num_known = len(gathered) - scheduled.start
            if num_known < 0:
                raise InvariantError(
                    f"sequence {sequence.sequence_id} lacks prompt logprobs before {scheduled.start}"
                )
            gathered.extend(scored[num_known:])

    def _end_with_error(self, sequence: SequenceState, error: AsyncserveError) -> TokenDelta:
        self._end(sequence)
        return TokenDelta(
            sequence.sequence_id,
            (),
            finish_reason=FinishReason.ERROR,
            num_cached_tokens=sequence.num_cached_tokens,
            error=error,
        )

    def _set_back(self, sequence: SequenceState, start: int) -> None:
        """Take a sequence back to position `start`: what steps in flight compute of it from there is wrong.

        It gives up slot and blocks, as by a preemption, and goes on with its known tokens; so do all rows of
        its beam search.
        """
        if sequence.blocks_are_valid:
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, start)
            self._allocator.register(sequence)
            sequence.blocks_are_valid = False
        for row in self._rows_of(sequence):
            self._num_replayed_sequences += row.accepts_output
            row.accepts_output = False
            if row.status is SequenceStatus.RUNNING:
                row.status = SequenceStatus.PREEMPTED
                self._num_releasing += 1

    def _rows_of(self, sequence: SequenceState) -> list[SequenceState]:
        """Return all rows of a sequence's beam search, or the sequence."""
        return sequence.rows or [sequence]

    def _representative(self, sequence: SequenceState) -> SequenceState:
        """Return the row that stands for a sequence's beam search, or the sequence."""
        return self._rows_of(sequence)[0]

    def _judge(self, entry: _InFlight, failed: list[SequenceState], error: StepFailed) -> list[TokenDelta]:
        """Suspect the live sequences of a step that failed, or end the one that failed alone."""
        max_tokens = self._budget
        num_tokens = entry.plan.num_tokens
        is_alone = len(set(map(self._representative, entry.states))) == 1
        if isinstance(error, StepOutOfMemory):
            max_tokens = max(1, num_tokens // 2)
            self._step_limit.lower(max_tokens)
        if not failed:
            return []
        if not entry.is_trial:
            self._suspects.add(failed, max_tokens)
            had_failed_alone = False
        else:
            had_failed_alone = self._suspects.first.has_failed_alone
            self._suspects.narrow(failed, max_tokens)
        if not is_alone:
            return []
        # With too little memory it may do with a smaller step, as long as there is one.
        is_least = num_tokens == 1 or bool(entry.searches)
        fails_alone = is_least or not isinstance(error, StepOutOfMemory)
        if had_failed_alone and fails_alone:
            rows = self._rows_of(failed[0])
            self._num_failed_alone += 1
            self._num_failed_sequences += len(rows)
            self._num_replayed_sequences -= len(rows)
            return [self._end_with_error(row, error) for row in rows]
        if self._suspects.first.sequences == failed:
            self._suspects.first.has_failed_alone = had_failed_alone or fails_alone
        return []

    def _judge_loss(self, error: DeviceLost) -> list[TokenDelta]:
        """Suspect the live sequences of the step that lost the device, or end the one that did so alone."""
        entry = self._in_flight[0]
        failed: list[SequenceState] = []
        for scheduled, sequence in zip(entry.plan.sequences, entry.states, strict=True):
            suspect = self._representative(sequence)
            if not suspect.accepts_output or suspect.sequence_id in self._paused:
                continue
            if entry.is_trial:
                is_blamed = suspect.trial_len > 0 and suspect not in failed
            else:
                is_blamed = suspect.trial_len == 0
                suspect.trial_len = suspect.trial_len or scheduled.start + scheduled.num_tokens
            if is_blamed:
                failed.append(suspect)
        if not failed:
            return []
        had_failed_alone = entry.is_trial and self._suspects.first.has_failed_alone
        if entry.is_trial:
            self._suspects.narrow(failed, self._budget, one_by_one=True)
        else:
            self._suspects.add(failed, self._budget, one_by_one=True)
        if len(set(map(self._representative, entry.states))) > 1:
            return []
        if had_failed_alone:
            rows = self._rows_of(failed[0])
            self._num_failed_sequences += len(rows)
            alone = StepFailed(
                f"computed alone, it lost the device again: {error}", step_id=entry.plan.step_id
            )
            return [self._end_with_error(row, alone) for row in rows]
        if self._suspects.first.sequences == failed:
            self._suspects.first.has_failed_alone = True
        return []

    def _make_allocator(self) -> KVAllocator:
        if self._info.num_host_blocks:
            self._host_tier = HostTier(
                num_blocks=self._info.num_host_blocks,
                num_swap_blocks=self._info.num_swap_blocks,
                num_groups=len(self._info.kv_groups),
                cost=self._swap_cost,
                counts=self._host_counts,
            )
        return KVAllocator(
            self._info.kv_groups,
            enable_prefix_caching=self._enable_prefix_caching,
            chunk_len=self._prompt_share,
            max_unapplied=self._max_unapplied,
            host_tier=self._host_tier,
            hash_seed=self._hash_seed,
            cache_log=self._cache_log,
        )

    def _end_with_bad_logits(self, sequence: SequenceState, step_id: int) -> TokenDelta:
        # Where the first bad value came from is not known, so none of its blocks may serve another sequence.
        self._allocator.invalidate(sequence, 0, step_id)
        sequence.blocks_are_valid = False
        error = StepFailed("the model gave logits that are not finite", step_id=step_id)
        return self._end_with_error(sequence, error)

    def _end(self, sequence: SequenceState) -> None:
        """Mark a live sequence as ended; its lists, slot and blocks are the caller's to see to."""
        del self._sequences[sequence.sequence_id]
        self._beams.pop(sequence, None)
        sequence.leave_family()
        sequence.note_end()
        self._paused.discard(sequence.sequence_id)
        self._allocator.drop_swapped(sequence)
        if sequence.trial_len:
            self._suspects.clear(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._num_releasing += 1
        sequence.status = SequenceStatus.ENDED
        sequence.accepts_output = False

    def _drop_ended(self) -> None:
        """Take sequences that just ended out of the running lists, all at once."""
        running = SequenceStatus.RUNNING
        self._decoding = [sequence for sequence in self._decoding if sequence.status is running]
        self._prefilling = [sequence for sequence in self._prefilling if sequence.status is running]
        self._searches = [beams for beams in self._searches if beams.first.status is running]

    def _leave_running(self, sequence: SequenceState) -> None:
        if (beams := self._beams.get(sequence)) is not None:
            self._searches.remove(beams)
            self._prefilling = [each for each in self._prefilling if each not in beams.rows]
            return
        (self._decoding if sequence in self._decoding else self._prefilling).remove(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        """Take the slot and blocks of a running sequence back; it waits again with all its known tokens."""
        for row in self._rows_of(sequence):
            row.timeline.num_preemptions += 1
        self._num_preemptions += 1
        self._put_back(sequence)

    def _put_back(self, sequence: SequenceState) -> None:
        """Let a running sequence wait again, or, paused, rest, once no step in flight mentions it."""
        self._leave_running(sequence)
        for row in self._rows_of(sequence):
            row.status = SequenceStatus.PREEMPTED
            self._num_releasing += 1
            self._release_if_unmentioned(row)

    def _release_unmentioned(self, entry: _InFlight) -> None:
        """Take back what is held by those that ran in a step and do no longer, as far as that may be now."""
        for sequence in entry.states:
            self._release_if_unmentioned(sequence)
        for sequence in entry.states:
            # Rows that enter slots with a search may be in none of its steps.
            for row in self._rows_of(sequence):
                self._release_if_unmentioned(row)

    def _release_if_unmentioned(self, sequence: SequenceState) -> None:
        """Take back slot and blocks of a sequence that no longer runs, once no step in flight mentions it."""
        status = sequence.status
        if (
            status is SequenceStatus.RUNNING
            or sequence.slot < 0
            or sequence.last_step_id > self._last_applied_step_id
        ):
            return
        # Rows of a search share blocks: as cached prefixes these come to the host once, not for each row.
        if status is SequenceStatus.PREEMPTED and sequence not in self._beams:
            self._allocator.swap_out(sequence)
        self._allocator.release(sequence)
        slot = sequence.slot
        self._slot_holders[slot] = None
        self._free_slots.append(slot)
        self._released_slots.append(slot)
        self._num_releasing -= 1
        sequence.slot = -1
        if status is SequenceStatus.PREEMPTED:
            self._wait_again(sequence)

    def _wait_again(self, sequence: SequenceState) -> None:
        """Let a sequence that has given up all it held wait for its turn, or, paused, rest."""
        sequence.reset(self._allocator.num_groups)
        if sequence.sequence_id in self._paused:
            sequence.status = SequenceStatus.PAUSED
        elif not sequence.trial_len:
            self._waiting.push(sequence)


def _nothing_allowed(sequence: SequenceState) -> InvalidRequest:
    structured = sequence.tokenized.request.sampling.structured
    return InvalidRequest(
        "no token is left to continue with: what restricts the output (its structure, allowed_token_ids,"
        " bad_words, logit_bias) allows none, or its structure takes too long to follow",
        param=None if structured is None else structured.param,
    )


def _require(holds: bool, invariant: str) -> None:
    if not holds:
        raise InvariantError(f"scheduler: it does not hold that {invariant}")
