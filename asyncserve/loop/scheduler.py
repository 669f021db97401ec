"""Which sequences compute how many tokens in the next step, and what a finished step means for each.

Takes `TokenizedRequest`s, gives `StepPlan`s; takes `StepOutput`s, gives `TokenDelta`s. Pure: no asyncio, no
torch, no clock (`now_s` comes in). Knows no text: stop strings arrive as `abort`. Sequences, queue, slots and
steps in flight are in `LiveSequences`, blocks in its `KVAllocator`. `Scheduler` adds, aborts, pauses and
resumes; plans are made by `step_planner`, what became of them is seen to by `step_outputs` and
`step_failures`. What follows holds of them together.

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
alone, and again, ends with an error, and with it its request. Nobody is admitted meanwhile, and those that
run give way if they must. A step that lacked memory is tried again with half as many tokens, and later steps
are kept small for a while. After a step that lost the device its sequences are tried one by one.

Invariants (`scheduler_invariants`): see also `PlanRules` in the tests.

* at most `max_unapplied` plans are unapplied; outputs are applied in the order of the plans;
* a slot and its blocks come back when the output of the last plan that mentions the sequence is applied,
  never before: one rule for finished, failed, aborted and preempted sequences, in
  `LiveSequences.release_if_unmentioned`; those of many at once in parts, all of them before the next plan;
* a sequence certain to end by length is not planned any further;
* whatever waits while nothing runs and nothing is in flight is planned;
* a step that tries suspects holds nobody else, and no other step is in flight with it.
"""

from asyncserve.errors import DeviceLost, InvariantError, StepFailed
from asyncserve.kv_spec import pool_bytes_per_block
from asyncserve.loop.beams import BeamRows
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.host_tier import HostCounts, HostTier
from asyncserve.loop.kv_groups import KVAllocator
from asyncserve.loop.live_sequences import LiveSequences
from asyncserve.loop.queue_bounds import Load
from asyncserve.loop.scheduler_invariants import check_invariants
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.loop.sequence_limits import SequenceLimits
from asyncserve.loop.step_failures import DeviceLoss, StepFailures
from asyncserve.loop.step_limit import StepLimit
from asyncserve.loop.step_outputs import StepDeltas, apply_output
from asyncserve.loop.step_planner import StepPlanner
from asyncserve.loop.swap_cost import SwapCost
from asyncserve.observer import EngineStatistics, RequestTimeline
from asyncserve.request import TokenDelta, TokenizedRequest
from asyncserve.step import ExecutorInfo, StepOutput, StepPlan


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
        budget = info.max_num_batched_tokens
        step_limit = StepLimit(budget)
        self._prompt_share = budget
        if enable_chunked_prefill and long_prefill_token_threshold > 0:
            self._prompt_share = min(budget, long_prefill_token_threshold)
        self._max_unapplied = info.max_unapplied if async_scheduling else 1
        self._enable_prefix_caching = enable_prefix_caching
        self._host_counts = HostCounts()
        self._swap_cost = SwapCost(info.host_block_s)
        self._live = LiveSequences(
            num_slots=info.num_slots, policy=policy, make_allocator=self._make_allocator
        )
        allocator = self._live.allocator
        self.limits = SequenceLimits(
            context_len=info.max_model_len,
            context_is_of=info.len_is_of,
            pool_len=allocator.capacity_len,
            max_prompt_len=None if enable_chunked_prefill else budget,
            max_width=min(info.num_slots, budget),
            num_blocks=allocator.num_usable,
            most_blocks=None if allocator.keeps_states else allocator.most_taken,
        )
        self._planner = StepPlanner(
            self._live,
            step_limit,
            chunks_prefill=enable_chunked_prefill,
            prompt_share=self._prompt_share,
            num_spare_blocks=info.kv_groups[0].num_blocks // 100,
        )
        self._failures = StepFailures(self._live, step_limit, budget=budget)
        self._num_pauses = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits; what is paused does neither."""
        return self._live.is_idle

    @property
    def waiting_load(self) -> Load:
        """What waits to be started, preempted and suspected sequences included."""
        live = self._live
        load = Load(len(live.waiting), live.waiting.num_tokens)
        for suspect in live.suspects:
            if suspect.status is SequenceStatus.WAITING:
                load = load.plus(Load(1, len(suspect.token_ids)))
        return load

    def waiting_load_of(self, tenant: str) -> Load:
        """Return what waits of one tenant, where the policy tells tenants apart; else all that waits."""
        return self._live.waiting.load_of(tenant)

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
        live = self._live
        if request.sequence_id in live.sequences:
            raise InvariantError(f"sequence {request.sequence_id} was added twice")
        order = live.waiting.take_order(request.request.priority)
        sequence = SequenceState(request, timeline, order, live.allocator.num_groups)
        leader = None if leader_id is None else live.sequences.get(leader_id)
        live.sequences[request.sequence_id] = sequence
        if request.request.sampling.use_beam_search:
            beams = None if leader is None else live.beams.get(leader)
            if beams is None:
                beams = BeamRows(sequence)
            else:
                beams.rows.append(sequence)
            live.beams[sequence] = beams
        elif leader is not None and leader.last_step_id < 0 and leader.status is SequenceStatus.WAITING:
            sequence.follow(leader)
        live.waiting.push(sequence)

    def abort(self, sequence_id: int) -> bool:
        """End a sequence whose output nobody wants any more, whatever it is doing; all rows of a beam search.

        Returns:
            False if it is unknown or has ended. Either way no further delta of it comes.
        """
        live = self._live
        sequence = live.sequences.get(sequence_id)
        if sequence is None:
            return False
        live.discard(sequence)
        return True

    def pause(self, sequence_id: int) -> bool:
        """Let a sequence rest, whatever it is doing: it gives up slot and blocks until it is resumed.

        As with a preemption, its blocks stay cached until others need them, tokens of steps in flight still
        come, and it goes on with all its known tokens. With a row of a beam search all of them rest.

        Returns:
            False if it is unknown, has ended or is paused already.
        """
        live = self._live
        sequence = live.sequences.get(sequence_id)
        if sequence is None or sequence_id in live.paused:
            return False
        rows = live.rows_of(sequence)
        live.paused.update(row.sequence_id for row in rows)
        self._num_pauses += len(rows)
        sequence.leave_family()
        for row in rows:
            is_suspect = row.trial_len > 0
            if is_suspect:
                # If a step fails because of it, that will show when it goes on.
                live.suspects.let_go(row)
            if row.status is SequenceStatus.WAITING:
                if not is_suspect:
                    live.waiting.remove(row)
                row.status = SequenceStatus.PAUSED
        if sequence.status is SequenceStatus.RUNNING:
            live.put_back(sequence)
        return True

    def resume(self, sequence_id: int) -> bool:
        """Let a paused sequence wait for a slot again, in its place by age.

        Returns:
            False if it is not paused.
        """
        live = self._live
        if sequence_id not in live.paused:
            return False
        for row in live.rows_of(live.sequences[sequence_id]):
            live.paused.remove(row.sequence_id)
            if row.status is SequenceStatus.PAUSED:
                row.status = SequenceStatus.WAITING
                live.waiting.push(row)
        return True

    def plan(self, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do now or no credit left.

        Raises:
            InvariantError: Something waits, nothing runs, and yet nothing can be planned.
        """
        live = self._live
        while live.release_some():
            pass
        if not live.sequences or len(live.in_flight) >= self._max_unapplied:
            return None
        return self._planner.plan(now_s)

    def register_some(self) -> None:
        """Make blocks findable that streams have filled, as many as take a moment.

        To be called once for each plan, when the device has it: hashing them takes as long as planning.
        """
        self._planner.register_some()

    def apply(self, output: StepOutput, now_s: float) -> StepDeltas:
        """Account for a finished step and return what it gave to whom.

        Slots and blocks come back with it; those of many sequences in part by `release_some`, at the latest
        with the next plan.

        Raises:
            InvariantError: It is not the oldest step in flight, or has the wrong number of tokens.
        """
        entry = self._live.take_oldest(output.step_id)
        deltas = apply_output(self._live, entry, output, now_s)
        self._failures.note_good(entry)
        return deltas

    def release_some(self) -> bool:
        """Take back slots and blocks that the last steps applied have made free, as many as take a moment.

        Sequences that end together may hold many thousands of blocks, and others want the loop, too.

        Returns:
            Whether more are left.
        """
        return self._live.release_some()

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
        return self._failures.fail(step_id, error)

    @property
    def blames_device(self) -> bool:
        """Whether what fails is the device: sequence after sequence failed alone, and no step went well."""
        return self._failures.blames_device

    def lose_device(self, lost_by: DeviceLost | None = None) -> DeviceLoss:
        """Forget the steps in flight and all that the device held: everybody waits with its known tokens.

        Outputs of those steps are not to be applied any more. Suspects are tried first, as before, and those
        of the step that lost the device are suspects, too.

        Args:
            lost_by: What the oldest step in flight lost the device by; None if that step is not the cause.

        Returns:
            What has come of it: a request may have been found to be the cause, which has ended then.
        """
        loss = self._failures.lose_device(lost_by)
        if self._cache_log is not None:
            self._cache_log.cleared()
        return loss

    def fill_statistics(self, statistics: EngineStatistics) -> None:
        """Write the scheduler's part of the engine's state."""
        self._live.fill_statistics(statistics)
        self._failures.fill_statistics(statistics)
        statistics.num_waiting, statistics.num_waiting_tokens = self.waiting_load
        statistics.num_pauses = self._num_pauses
        host_tier = self._live.allocator.host_tier
        if host_tier is not None:
            host_tier.fill_statistics(statistics, pool_bytes_per_block(self._info.kv_groups))

    def check(self) -> None:
        """Verify every invariant that holds between two calls; slow, for tests.

        Raises:
            InvariantError: One does not hold.
        """
        check_invariants(self._live, max_unapplied=self._max_unapplied)

    def _make_allocator(self) -> KVAllocator:
        host_tier = None
        if self._info.num_host_blocks:
            host_tier = HostTier(
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
            host_tier=host_tier,
            hash_seed=self._hash_seed,
            cache_log=self._cache_log,
        )
