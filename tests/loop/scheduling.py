"""A scheduler on a fake device, driven step by step and checked after every call."""

import dataclasses
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from asyncserve.errors import DeviceLost, StepFailed
from asyncserve.kv_spec import RecurrentState
from asyncserve.loop.scheduler import Scheduler
from asyncserve.loop.sequence import SequenceStatus
from asyncserve.loop.step_outputs import StepDeltas
from asyncserve.observer import EngineStatistics, RequestTimeline
from asyncserve.request import (
    FinishReason,
    Request,
    SamplingParams,
    TokenDelta,
    TokenizedRequest,
    TokenLogprobs,
    TokensPrompt,
)
from asyncserve.step import ExecutorInfo, StepOutput, StepPlan
from tests.contracts.plan_rules import PlanRules
from tests.fakes.executor import FakeRunner, NextToken, fake_info
from tests.loop.cache_mirror import CacheMirror


class Received:
    """What a client got of one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[Sequence[TokenLogprobs]] = []
        self.end: TokenDelta | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.end is None else self.end.finish_reason


class Bench:
    """Scheduler, plan rules and fake device together. Time is the number of steps applied."""

    def __init__(
        self,
        info: ExecutorInfo | None = None,
        *,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        async_scheduling: bool = True,
        next_token: NextToken | None = None,
    ) -> None:
        self.info = info or fake_info()
        self.cache_mirror = CacheMirror()
        self.scheduler = Scheduler(
            info=self.info,
            cache_log=self.cache_mirror.log,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            async_scheduling=async_scheduling,
        )
        self.rules = PlanRules(self.info)
        self.runner = FakeRunner(self.info, next_token=next_token)
        self.in_flight: deque[StepPlan] = deque()
        self.received: dict[int, Received] = {}
        self.timelines: dict[int, RequestTimeline] = {}
        self.tokenized: dict[int, TokenizedRequest] = {}
        self._leaders: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.culprits: dict[int, int] = {}
        """Sequence id → the position whose computing lets every step fail."""
        self.trials: list[set[int]] = []
        """Whose steps were tried alone after a failure, in order."""
        self.loses_device = False
        """Whether a culprit lets the device be lost, instead of a step fail."""
        self.step_s = 0.0
        """Seconds that the device says it took for a step; 0: it does not."""
        self.num_failed_steps = 0
        self.num_losses = 0
        self.explained: set[int] = set()
        """Numbers of the losses that were found to be a culprit's fault."""
        self.num_operations = 0
        """Sequences added, aborted, paused and resumed, steps planned, applied and failed, devices lost."""
        self._holders: dict[int, int] = {}  # slot → sequence id
        self._num_passed: dict[int, int] = {}  # sequence id → plans since it was last in one, though it could
        self._sequence_ids: dict[int, dict[int, int]] = {}  # step → sequence → positions computed by then
        self.now_s = 0.0

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        stop_token_ids: frozenset[int] = frozenset(),
        leader_id: int | None = None,
        **sampling: Any,
    ) -> int:
        """Add one sequence and return its id: 0, 1, 2 …"""
        self.num_operations += 1
        sequence_id = len(self.received)
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        request = Request(
            request_id=f"r{sequence_id}",
            prompt=TokensPrompt(token_ids=prompt),
            sampling=params,
            arrival_s=self.now_s,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        tokenized = TokenizedRequest(
            request=request,
            sequence_id=sequence_id,
            index=0,
            prompt_token_ids=array("i", prompt),
            max_output_len=max_tokens,
            stop_token_ids=stop_token_ids,
            seed=sequence_id,
        )
        timeline = RequestTimeline(arrived_s=self.now_s)
        self._leaders[sequence_id] = sequence_id if leader_id is None else leader_id
        self.scheduler.add(tokenized, timeline, leader_id=leader_id)
        self.scheduler.check()
        self.received[sequence_id] = Received()
        self.timelines[sequence_id] = timeline
        self.tokenized[sequence_id] = tokenized
        return sequence_id

    def add_family(self, num: int, prompt: Sequence[int], **more: Any) -> list[int]:
        """Add the sequences of one request and return their ids."""
        first = self.add(prompt, **more)
        return [first, *(self.add(prompt, leader_id=first, **more) for _ in range(num - 1))]

    def family_of(self, sequence_id: int) -> list[int]:
        """Return the ids of all sequences of the same request."""
        return [each for each, leader in self._leaders.items() if leader == self._leaders[sequence_id]]

    def abort(self, sequence_id: int) -> bool:
        self.num_operations += 1
        was_live = self.scheduler.abort(sequence_id)
        self.scheduler.check()
        self.aborted.add(sequence_id)
        return was_live

    def pause(self, sequence_id: int) -> bool:
        self.num_operations += 1
        was_running = self.scheduler.pause(sequence_id)
        self.scheduler.check()
        return was_running

    def resume(self, sequence_id: int) -> bool:
        self.num_operations += 1
        was_paused = self.scheduler.resume(sequence_id)
        self.scheduler.check()
        return was_paused

    def plan(self) -> StepPlan | None:
        """Plan one step and give it to the device, which does not run it yet."""
        plan = self.scheduler.plan(self.now_s)
        self.scheduler.register_some()
        self.scheduler.check()
        self.cache_mirror.check(self.scheduler._live.allocator)
        if plan is not None:
            self.num_operations += 1
            self.rules.check(plan)
            mentioned = {sequence.slot for earlier in self.in_flight for sequence in earlier.sequences}
            assert not mentioned.intersection(plan.released_slots), "a step in flight uses a released slot"
            self.in_flight.append(plan)
            self._note(plan)
            self._check_turns(plan)
        return plan

    def _note(self, plan: StepPlan) -> None:
        for assignment in plan.admitted:
            self._holders[assignment.slot] = assignment.seed
        self._sequence_ids[plan.step_id] = {
            self._holders[sequence.slot]: sequence.start + sequence.num_tokens for sequence in plan.sequences
        }

    def _check_turns(self, plan: StepPlan) -> None:
        """See that who decodes, or searches, is not passed over again and again; suspects come first."""
        live = self.scheduler._live
        able = live.decoding + [beams.first for beams in live.searches if beams.is_ready]
        planned = self.sequence_ids(plan)
        self._num_passed = {
            each.sequence_id: self._num_passed.get(each.sequence_id, 0) + 1
            for each in able
            if each.sequence_id not in planned and not live.suspects and not each.is_planned_to_its_end
        }
        # Every other step is theirs, in which one at least of them has its turn.
        most = 2 * self.info.num_slots + 2
        assert max(self._num_passed.values(), default=0) <= most, "who can compute gets its turn"

    def sequence_ids(self, plan: StepPlan) -> set[int]:
        """Return whom a plan computes."""
        return set(self._sequence_ids[plan.step_id])

    def must_plan(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None, "nothing was planned"
        return plan

    def apply(self) -> list[TokenDelta]:
        """Run the oldest step and apply what it gave."""
        output = self.runner.run(self.in_flight.popleft())
        return self.apply_output(dataclasses.replace(output, device_s=self.step_s))

    def advance(self, kind: type[StepFailed] = StepFailed) -> list[TokenDelta]:
        """Run the oldest step and apply what it gave, or let it fail if a culprit is in it."""
        lens = self._sequence_ids[self.in_flight[0].step_id]
        if any(lens.get(culprit, -1) > position for culprit, position in self.culprits.items()):
            return self.lose_device() if self.loses_device else self.fail(kind)
        return self.apply()

    def apply_output(self, output: StepOutput) -> list[TokenDelta]:
        self.now_s += 1.0
        self.num_operations += 1
        deltas = self._deliver(_all_deltas(self.scheduler.apply(output, self.now_s)))
        if not self.in_flight:
            self.check_tables()
        return deltas

    def check_tables(self) -> None:
        """Hold the block tables of running sequences against the device's; no step may be in flight."""
        for sequence in self.scheduler._live.slot_holders:
            if sequence is None or sequence.status is not SequenceStatus.RUNNING:
                continue
            table = sequence.block_table
            held = self.runner.tables_of(sequence.slot)
            for block_ids, num_null, own in zip(table.block_ids, table.num_null, held, strict=True):
                assert block_ids[num_null:] == own[num_null:], "host and device have the same tables"

    def fail(self, kind: type[StepFailed] = StepFailed) -> list[TokenDelta]:
        """Let the oldest step fail."""
        plan = self.in_flight.popleft()
        self.runner.fail(plan)
        self.now_s += 1.0
        self.num_failed_steps += 1
        self.num_operations += 1
        error = kind("out of order", step_id=plan.step_id)
        deltas = self._deliver(self.scheduler.fail(plan.step_id, error))
        for delta in deltas:
            assert delta.error is error
        ended = {delta.sequence_id for delta in deltas}
        assert not ended or self.sequence_ids(plan) <= ended, "only what fails alone ends"
        return deltas

    def lose_device(self, kind: type[DeviceLost] = DeviceLost, *, by_step: bool = True) -> list[TokenDelta]:
        """Let the device forget everything, by the oldest step or by itself, and open it anew."""
        oldest = self.in_flight[0] if self.in_flight and by_step else None
        self.in_flight.clear()
        self.num_losses += 1
        self.num_operations += 1
        loss = self.scheduler.lose_device(kind("gone") if oldest else None)
        assert loss.number == self.num_losses - 1
        self.explained |= loss.explained
        deltas = self._deliver(loss.ends)
        for delta in deltas:
            assert isinstance(delta.error, StepFailed)
            assert oldest is not None
        ended = {delta.sequence_id for delta in deltas}
        assert oldest is None or not ended or self.sequence_ids(oldest) <= ended, (
            "only what loses it alone ends"
        )
        assert not ended or ended <= set(self.family_of(min(ended))), "only what loses it alone ends"
        self.runner = self.runner.reopened()
        self.rules = self.rules.reopened()
        return deltas

    def step(self) -> tuple[StepPlan, list[TokenDelta]]:
        """Plan, run and apply one step, with none ahead."""
        plan = self.must_plan()
        return plan, self.apply()

    def run(self) -> list[StepPlan]:
        """Go on, as far ahead as allowed, until nothing is left; return the plans."""
        plans = []
        while self.has_work:
            while (plan := self.plan()) is not None:
                plans.append(plan)
            self.advance()
        self.check_nothing_leaked()
        return plans

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs, or a step is in flight."""
        statistics = self.statistics()
        return bool(statistics.num_running or statistics.num_waiting or statistics.num_unapplied_steps)

    def check_nothing_leaked(self) -> None:
        statistics = self.statistics()
        assert statistics.num_running == statistics.num_waiting == statistics.num_unapplied_steps == 0
        assert statistics.num_blocks_used == 0

    def statistics(self) -> EngineStatistics:
        statistics = EngineStatistics()
        self.scheduler.fill_statistics(statistics)
        self._check_ledger(statistics)
        return statistics

    def _check_ledger(self, statistics: EngineStatistics) -> None:
        """Hold what is told of the pool against the tables, block by block."""
        groups = statistics.kv_groups
        assert sum(each.num_blocks_used for each in groups) == statistics.num_blocks_used
        assert sum(each.num_blocks_cached for each in groups) == statistics.num_blocks_cached
        assert statistics.num_blocks_used + statistics.num_blocks_cached <= statistics.num_blocks
        for group in groups:
            spec = self.info.kv_groups[group.group_id].spec
            if isinstance(spec, RecurrentState):
                continue
            filled: dict[int, int] = {}
            for sequence in self.scheduler._live.slot_holders:
                if sequence is None:
                    continue
                table = sequence.block_table
                for idx, block_id in enumerate(table.block_ids[group.group_id]):
                    if idx >= table.num_null[group.group_id]:
                        num = min(spec.block_len, max(0, sequence.num_computed_tokens - idx * spec.block_len))
                        filled[block_id] = max(num, filled.get(block_id, 0))
            assert group.num_blocks_used == len(filled)
            assert group.num_slots == len(filled) * spec.block_len
            assert group.num_slots_unused == group.num_slots - sum(filled.values())

    def tokens_of(self, sequence_id: int) -> list[int]:
        return self.received[sequence_id].token_ids

    def _deliver(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        self.scheduler.check()
        seen: set[int] = set()
        for delta in deltas:
            assert delta.sequence_id not in seen, "one delta per sequence and step"
            seen.add(delta.sequence_id)
            received = self.received[delta.sequence_id]
            assert delta.sequence_id not in self.aborted, "nothing comes after an abort"
            assert received.end is None, "nothing comes after the end"
            received.token_ids.extend(delta.token_ids)
            received.logprobs.extend(delta.logprobs or ())
            if delta.prompt_logprobs is not None:
                received.prompt_logprobs.append(delta.prompt_logprobs)
            if delta.finish_reason is not None:
                received.end = delta
        return deltas


def _all_deltas(given: StepDeltas) -> list[TokenDelta]:
    """Return what a step gave as one delta a sequence."""
    plain = [
        TokenDelta(sequence.sequence_id, (token_id,), num_cached_tokens=sequence.num_cached_tokens)
        for sequence, token_id in zip(given.sequences, given.token_ids, strict=True)
    ]
    return plain + given.deltas


def lengths(plan: StepPlan) -> dict[int, int]:
    """Return slot → tokens computed by the plan."""
    return {sequence.slot: sequence.num_tokens for sequence in plan.sequences}
