"""The five stages a request passes through, coroutines all, and the channels between them.

    requests ─intake─► arrivals ─schedule─► plans ─launch─► launched ─collect─► completions ─► schedule
                                        └─► applied ─detokenize─► sinks

Takes `ActiveRequest`s, gives `RequestOutput`s to their sinks. The first stage is `intake`'s, the others are
here. Decisions are elsewhere: what runs in `scheduler`, what text tokens make in `detokenizer`; what is done
once per token is `token_path`'s; the coroutines only move values.

The one cycle (schedule → launch → collect → schedule) cannot block: the scheduler plans at most
`max_unapplied` steps ahead, and the cycle's channels hold as many. Everything else points forward, and an
abort is a method call. A stage that raises ends them all.

A step that failed goes back to the scheduler like any other. A device that is lost, or does not answer within
the time a step may take, is opened anew here, and every sequence goes on from its known tokens: nothing is
planned meanwhile, and what is on its way through the cycle comes back as lost.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from asyncserve.errors import (
    AsyncserveError,
    DeadlineExceeded,
    DeviceHung,
    DeviceLost,
    EngineError,
    InvariantError,
    StepFailed,
)
from asyncserve.futures import ignore_outcome
from asyncserve.loop.active_request import ActiveRequest, ActiveSequence
from asyncserve.loop.admission import Admission
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.channel import Channel, first_ready
from asyncserve.loop.deadlines import Deadlines
from asyncserve.loop.detokenizer import Detokenizer
from asyncserve.loop.grammar_cache import GrammarCache
from asyncserve.loop.intake import Arrival, Intake
from asyncserve.loop.queue_bounds import Load
from asyncserve.loop.restart_budget import RestartBudget
from asyncserve.loop.scheduler import Scheduler
from asyncserve.loop.start_rate import StartRate
from asyncserve.loop.step_outputs import StepDeltas
from asyncserve.observer import EngineStatistics, Observer
from asyncserve.request import (
    FinishReason,
    OutputSink,
    TokenDelta,
)
from asyncserve.step import Executor, ExecutorInfo, StepOutput, StepPlan
from asyncserve.token_path import Outbox, deliver

logger = logging.getLogger(__name__)

REOPEN_LIMIT_S = 1800.0
"""Seconds within which a lost device must be open again, its model loaded; then the engine gives up."""
HEARING_S = 0.1
"""Seconds in which a step may still be heard to have ended when its time is over: a loop that stood still, as
that of a process that was stopped or of a machine that slept, learns only now what happened meanwhile."""
APPLIED_CAPACITY = 2
"""Steps the detokenizer may be behind before it holds up the scheduler, which has supplied the device by
then: more would only let tokens grow old, and their plans with them."""
ROWS_PER_TURN = 256
"""Rows of steps, applied or planned, after which the scheduler's stage gives way to others: at most 0.1 ms.
Where that is a plan, the device has it the sooner."""
CHANGE_ROWS = 64
"""A sequence that arrives, is admitted, ends, or got more than a token counts as so many."""
SLICE_LEN = 32
"""Deltas handed to sinks in one iteration of the loop: about 0.2 ms of work with a socket write each."""
PLAIN_SLICE_LEN = 256
"""Plain tokens in one iteration that are not written: 0.05 ms, or 0.4 where all are parts of characters."""
END_WEIGHT = 8
"""The end of a sequence counts as so many deltas: it may wake a handler that writes a whole answer."""


class Launched(NamedTuple):
    """A step the device has been given, or, the device being lost, has not."""

    plan: StepPlan
    output: Awaitable[StepOutput] | DeviceLost


class Completion(NamedTuple):
    """What became of a step: its output, or why it has none."""

    plan: StepPlan
    output: StepOutput | StepFailed | DeviceLost


class AppliedStep(NamedTuple):
    """What a step gave its sequences."""

    completion: Completion
    deltas: StepDeltas
    now_s: float


class Turn:
    """How much of an iteration of the loop a stage has used, counted in rows of steps."""

    def __init__(self) -> None:
        self._num_rows = 0

    async def use(self, num_rows: int) -> None:
        """Count what was done, and give way to the others where that was enough for an iteration."""
        self._num_rows += num_rows
        if self._num_rows >= ROWS_PER_TURN:
            self._num_rows = 0
            await asyncio.sleep(0)


class Pipeline:
    """The stages of one engine, and the requests in them.

    Args:
        executor: Started already.
        admission: What requests must satisfy.
        scheduler: Made for this executor.
        detokenizer: Makes text of tokens.
        grammars: Makes and keeps the grammars of structured outputs.
        observer: Told of every step and every end.
        clock: Monotonic seconds.
        info: What the executor offers.
        step_timeout_s: Seconds after which a step that has not ended means a lost device; None for no limit.
        max_device_restarts: The limit of `RestartBudget`.
        requests_capacity: Requests that may wait for the tokenizer.
        num_tokenizer_threads: Threads that encode prompts; one more encodes long ones (`is_long`), which
            would hold up the others for seconds.
        loop_lag_interval_s: Seconds between two measurements of the loop's lateness.
        cache_log: Is flushed once a turn, if there is one.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        admission: Admission,
        scheduler: Scheduler,
        detokenizer: Detokenizer,
        grammars: GrammarCache,
        observer: Observer,
        clock: Callable[[], float],
        info: ExecutorInfo,
        step_timeout_s: float | None,
        max_device_restarts: int,
        requests_capacity: int,
        num_tokenizer_threads: int,
        loop_lag_interval_s: float,
        cache_log: CacheLog | None = None,
    ) -> None:
        self._cache_log = cache_log
        self._executor = executor
        self._scheduler = scheduler
        self._intake = Intake(
            admission=admission,
            detokenizer=detokenizer,
            grammars=grammars,
            clock=clock,
            refuse=self._refuse,
            sink_raised=self._sink_raised,
            requests_capacity=requests_capacity,
            num_threads=num_tokenizer_threads,
        )
        self._observer = observer
        self._clock = clock
        self._info = info
        self._step_timeout_s = step_timeout_s
        self._restarts = RestartBudget(max_device_restarts)
        self._lost: DeviceLost | None = None  # as long as the device is not open again
        self._loop_lag_interval_s = loop_lag_interval_s

        self._resumed = Channel[ActiveRequest]("resumed", 1)
        self._plans = Channel[StepPlan]("plans", info.max_unapplied)
        self._launched = Channel[Launched]("launched", info.max_unapplied)
        self._completions = Channel[Completion]("completions", info.max_unapplied)
        self._applied = Channel[AppliedStep]("applied", APPLIED_CAPACITY)
        self._channels: tuple[Channel[Any], ...] = (
            *self._intake.channels,
            self._resumed,
            self._plans,
            self._launched,
            self._completions,
            self._applied,
        )

        self._active: dict[str, ActiveRequest] = {}
        self._sequences: dict[int, ActiveSequence] = {}
        self._starts = StartRate()
        self._deadlines = Deadlines[ActiveRequest](clock, self._expire)
        self._num_deadlines_missed = 0
        self._num_unapplied = 0
        self._last_progress_s = clock()
        self._nothing_active = asyncio.Event()
        self._nothing_active.set()

    # ---- called from outside, on the loop thread -------------------------------------------------------

    @property
    def queued_load(self) -> Load:
        """What waits: in the scheduler, preempted sequences too, or of requests not yet in it."""
        return self._intake.load.total.plus(self._scheduler.waiting_load)

    def queued_load_of(self, tenant: str) -> Load:
        """Return what waits of one tenant, where the policy tells tenants apart."""
        return self._intake.load.of(tenant).plus(self._scheduler.waiting_load_of(tenant))

    def retry_after_s(self, excess: Load, asked: Load) -> float:
        """Return how long a client should wait that was refused since `excess` must be started first."""
        return self._starts.retry_after_s(excess, asked, self._clock())

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs, and the device has nothing to do; what is paused does neither."""
        return (
            self._num_unapplied == 0
            and self._scheduler.is_idle
            and self._intake.load.total.num_sequences == 0
        )

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._active

    def submit(self, active: ActiveRequest) -> None:
        """Take a request in.

        Raises:
            ChannelClosed: The pipeline has ended.
        """
        self._note_work()  # before it is work itself
        self._intake.put(active)
        self._active[active.request.request_id] = active
        self._nothing_active.clear()
        if active.request.deadline_s is not None:
            self._deadlines.add(active.request.deadline_s, active)

    def pause(self, request_id: str) -> None:
        """Let a request rest until it is resumed: its sequences give up slots and blocks. Idempotent."""
        active = self._active.get(request_id)
        if active is not None:
            active.is_paused = True
            for sequence_id in active.sequence_ids:
                self._scheduler.pause(sequence_id)

    def resume(self, request_id: str) -> None:
        """Let a paused request go on. Idempotent."""
        active = self._active.get(request_id)
        if active is None or not active.is_paused:
            return
        self._note_work()
        active.is_paused = False
        for sequence_id in active.sequence_ids:
            self._scheduler.resume(sequence_id)
        if not self._resumed.is_ready:
            self._resumed.put_nowait(active)  # nothing else may come that would have a step planned

    def abort(self, request_id: str) -> OutputSink | None:
        """End a request wherever it is; its sink, which is returned, gets nothing more. Idempotent."""
        active = self._active.get(request_id)
        if active is None:
            return None
        self._end(active, FinishReason.ABORT)
        return active.sink

    def end_all(self, error: AsyncserveError, reason: FinishReason) -> None:
        """End every request and give its sink the error."""
        for active in list(self._active.values()):
            if not active.has_ended:
                try:
                    self._end(active, reason)
                except Exception:  # whatever state things are in, everybody is told
                    logger.exception("a request could not be ended")
                _fail_sink(active, error)

    async def wait_nothing_active(self) -> None:
        """Return when no request is in the pipeline."""
        await self._nothing_active.wait()

    def fill_statistics(self, statistics: EngineStatistics) -> None:
        """Write the state of scheduler and channels into `statistics`."""
        self._scheduler.fill_statistics(statistics)
        statistics.num_waiting, statistics.num_waiting_tokens = self.queued_load
        statistics.num_deadlines_missed = self._num_deadlines_missed
        statistics.num_unapplied_steps = self._num_unapplied
        statistics.num_device_restarts = self._restarts.num_restarts
        statistics.num_explained_losses = self._restarts.num_explained
        statistics.device_is_lost = self._lost is not None
        statistics.last_progress_s = self._clock() if self.is_idle else self._last_progress_s
        statistics.channels = tuple(channel.statistics() for channel in self._channels)

    def check(self) -> None:
        """Check the invariants of pipeline and scheduler, for tests.

        Raises:
            InvariantError: One does not hold.
        """
        self._scheduler.check()
        for sequence_id, sequence in self._sequences.items():
            owner = self._active.get(sequence.owner.request.request_id)
            if owner is not sequence.owner or sequence_id not in owner.sequence_ids:
                raise InvariantError(f"sequence {sequence_id} belongs to no active request")
        if self._nothing_active.is_set() != (not self._active):
            raise InvariantError("the pipeline is wrong about whether a request is active")

    async def run(self) -> None:
        """Run the stages until cancelled, or until one raises.

        Raises:
            ExceptionGroup: What the stage that died raised.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._intake.run(), name="tokenize")
                group.create_task(self._schedule(), name="schedule")
                group.create_task(self._launch(), name="launch")
                group.create_task(self._collect(), name="collect")
                group.create_task(self._detokenize(), name="detokenize")
                group.create_task(self._watch_loop(), name="watch-loop")
        finally:
            self._deadlines.close()
            for channel in self._channels:
                channel.close()

    async def close(self) -> None:
        """Free the worker threads; after `run` has ended."""
        for launched in self._launched.take_all():
            # Steps that nobody awaits any more: their failure is no news.
            _forget_output(launched.output)
        await self._intake.close()

    # ---- schedule, launch, collect: the cycle ----------------------------------------------------------

    async def _schedule(self) -> None:
        """arrivals and completions → plans and applied steps."""
        scheduler, completions, arrivals = self._scheduler, self._completions, self._intake.arrivals
        plans, applied, resumed = self._plans, self._applied, self._resumed
        observer = self._observer
        while True:
            await first_ready(completions, arrivals, resumed)
            now_s = self._clock()
            steps: list[AppliedStep] = []
            lost: DeviceLost | None = None
            lost_by: Completion | None = None
            turn = Turn()
            for completion in completions.take_all():
                began_s = self._clock()
                output = completion.output
                self._num_unapplied -= 1
                if isinstance(output, DeviceLost):
                    lost, lost_by = output, lost_by or completion
                    continue
                if isinstance(output, StepFailed):
                    deltas = StepDeltas((), (), scheduler.fail(output.step_id, output))
                    self._tell_failure(completion.plan, output, deltas.deltas)
                    if scheduler.blames_device:
                        lost = DeviceLost(f"every step fails, whatever it computes; the last: {output}")
                else:
                    deltas = scheduler.apply(output, now_s)
                    if len(output.token_ids) or output.beams:
                        self._restarts.note_good()
                self._last_progress_s = now_s
                steps.append(AppliedStep(completion, deltas, now_s))
                observer.stage_ran("apply", completion.plan.step_id, began_s, self._clock())
                await turn.use(len(completion.plan.sequences) + CHANGE_ROWS * len(deltas.deltas))
            if lost is not None:
                while steps:
                    await applied.put(steps.pop(0))
                await self._reopen_device(lost, lost_by)
                now_s = self._clock()
            while scheduler.release_some():  # noqa: ASYNC110 - it waits for nobody, others have their turn
                await asyncio.sleep(0)
            resumed.take_all()
            for arrival in arrivals.take_all():
                self._intake.note_taken(arrival)
                if not arrival.active.has_ended:
                    self._add(arrival)
                await turn.use(CHANGE_ROWS)
            began_s = self._clock()
            while (plan := scheduler.plan(now_s)) is not None:
                plans.put_nowait(plan)
                self._num_unapplied += 1
                if plan.admitted:
                    num_tokens = sum(len(each.token_ids) for each in plan.admitted)
                    self._starts.note(Load(len(plan.admitted), num_tokens), now_s)
                observer.stage_ran("plan", plan.step_id, began_s, self._clock())
                await turn.use(len(plan.sequences) + CHANGE_ROWS * len(plan.admitted))
                began_s = self._clock()
            # Only now, with the device supplied, is it time for the outputs.
            for step in steps:
                await applied.put(step)
            if self._cache_log is not None:
                self._cache_log.flush()

    def _add(self, arrival: Arrival) -> None:
        leader_id = arrival.sequences[0].tokenized.sequence_id
        for sequence in arrival.sequences:
            sequence_id = sequence.tokenized.sequence_id
            self._sequences[sequence_id] = sequence
            arrival.active.sequence_ids.append(sequence_id)
            self._scheduler.add(sequence.tokenized, sequence.timeline, leader_id=leader_id)
            if arrival.active.is_paused:
                self._scheduler.pause(sequence_id)

    def _tell_failure(self, plan: StepPlan, error: StepFailed, ends: list[TokenDelta]) -> None:
        if ends:
            request_id = self._request_id_of(ends)
            logger.error("%s; computed alone, so that request ends", error, extra={"request_id": request_id})
        else:
            logger.error("%s; its %d sequences are tried again by halves", error, len(plan.sequences))

    def _request_id_of(self, ends: list[TokenDelta]) -> str | None:
        """Return whose the sequences are that end; None if that has ended already."""
        ended = self._sequences.get(ends[0].sequence_id)
        return None if ended is None else ended.owner.request.request_id

    async def _reopen_device(self, lost: DeviceLost, lost_by: Completion | None) -> None:
        """Open the device anew, and let every sequence go on from its known tokens.

        Args:
            lost: What it was lost by.
            lost_by: The step of that, if it was one.

        Raises:
            DeviceLost: It was lost too often, cannot be opened again, or offers less than before.
        """
        began_s = self._clock()
        self._lost = lost
        while self._num_unapplied:
            await first_ready(self._completions)
            self._num_unapplied -= len(self._completions.take_all())
        loss = self._scheduler.lose_device(lost if lost_by is not None else None)
        if loss.ends and lost_by is not None:
            logger.error(
                "%s; as before when it was computed alone, so that request ends, and the losses it caused do"
                " not count against the device",
                lost,
                extra={"request_id": self._request_id_of(loss.ends)},
            )
            await self._applied.put(AppliedStep(lost_by, StepDeltas((), (), loss.ends), began_s))
        refusal = self._restarts.spend(began_s, loss.number, loss.explained)
        if refusal is not None:
            raise DeviceLost(f"{lost}; {refusal}")
        logger.error("the device is lost: %s; opening it anew", lost)
        try:
            async with asyncio.timeout(REOPEN_LIMIT_S):
                info = await self._executor.restart()
        except (AsyncserveError, TimeoutError) as error:
            raise DeviceLost(f"{lost}; it cannot be opened again: {error}") from error
        if not _offers_as_much(info, self._info):
            raise DeviceLost(f"{lost}; opened anew it offers less: {info} and not {self._info}")
        self._lost = None
        self._last_progress_s = self._clock()
        logger.warning(
            "the device is open again after %.1f s; %d requests go on from where they were",
            self._last_progress_s - began_s,
            len(self._active),
        )

    async def _launch(self) -> None:
        """plans → launched."""
        async for plan in self._plans:
            began_s = self._clock()
            self._launched.put_nowait(Launched(plan, self._lost or self._executor.submit(plan)))
            self._observer.stage_ran("submit", plan.step_id, began_s, self._clock())
            await asyncio.sleep(0)  # the device's thread takes the plan while the loop asks for events
            self._scheduler.register_some()

    async def _collect(self) -> None:
        """launched → completions, in the order launched; the watchdog of steps."""
        async for plan, launched in self._launched:
            output: StepOutput | StepFailed | DeviceLost
            if self._lost is not None:
                _forget_output(launched)
                output = self._lost
            elif isinstance(launched, DeviceLost):
                raise InvariantError(f"step {plan.step_id} was withheld from a device that is not lost")
            else:
                try:
                    output = await self._ended_in_time(plan, asyncio.ensure_future(launched))
                except StepFailed as error:
                    output = error
                except DeviceLost as error:
                    output = self._lost = error
            self._completions.put_nowait(Completion(plan, output))

    async def _ended_in_time(self, plan: StepPlan, step: "asyncio.Future[StepOutput]") -> StepOutput:
        """Wait for a step, and give up on it when its time is over.

        Raises:
            StepFailed: It failed.
            DeviceLost: Likewise; `DeviceHung` if it has not ended within the time a step may take.
        """
        try:
            done, _ = await asyncio.wait((step,), timeout=self._step_timeout_s)
            if not done:
                done, _ = await asyncio.wait((step,), timeout=HEARING_S)
            if not done:
                raise DeviceHung(f"step {plan.step_id} has not ended within {self._step_timeout_s:g} s")
            return step.result()
        finally:
            step.cancel()

    # ---- detokenize ------------------------------------------------------------------------------------

    async def _detokenize(self) -> None:
        """Applied steps → the sinks, a slice of sequences per iteration of the loop."""
        sequences, observer = self._sequences, self._observer
        num_since_yield = 0
        last_s = 0.0
        async for completion, (plain, plain_ids, deltas), now_s in self._applied:
            step_id, began_s = completion.plan.step_id, self._clock()
            num_alike = 0  # sequences whose last token came with the step before
            gaps_s: list[float] = []
            position = 0
            while position < len(plain):
                if position or num_since_yield >= SLICE_LEN:
                    num_since_yield = 0
                    began_s = await self._give_way(step_id, began_s)
                end = min(position + PLAIN_SLICE_LEN, len(plain))
                most = SLICE_LEN - num_since_yield
                position, num_before, slice_gaps_s, others, outboxes = deliver(
                    sequences, plain, plain_ids, position, end, most, now_s, last_s
                )
                num_alike += num_before
                gaps_s += slice_gaps_s
                for sequence, token_id in others:
                    if num_since_yield >= SLICE_LEN:
                        _write(outboxes)
                        num_since_yield = 0
                        began_s = await self._give_way(step_id, began_s)
                    if sequence.tokenized.sequence_id not in sequences:
                        continue  # aborted meanwhile
                    try:
                        output = sequence.take(token_id, outboxes)
                    except Exception:
                        self._sink_raised(sequence.owner)
                        continue
                    if output is not None:
                        num_since_yield += 1
                        if output.finish_reason is not None:
                            self._finish(sequence, output.finish_reason, tell_scheduler=True)
                            num_since_yield += END_WEIGHT
                num_since_yield += _write(outboxes)
            for delta in deltas:
                if num_since_yield >= SLICE_LEN:
                    num_since_yield = 0
                    began_s = await self._give_way(step_id, began_s)
                num_since_yield += 1
                row = sequences.get(delta.sequence_id)
                if row is None:
                    continue
                if delta.token_ids:
                    if row.last_token_s is not None:
                        gaps_s.append(now_s - row.last_token_s)
                    else:
                        observer.first_token(row.timeline, len(delta.token_ids))
                    row.last_token_s = now_s
                try:
                    output = row.feed(delta)
                except Exception:
                    self._sink_raised(row.owner)
                    continue
                if output.finish_reason is not None:
                    self._finish(row, output.finish_reason, tell_scheduler=delta.finish_reason is None)
                    num_since_yield += END_WEIGHT
            if num_alike:
                gaps_s += [now_s - last_s] * num_alike
            last_s = now_s
            if isinstance(completion.output, StepOutput):
                observer.step_applied(completion.plan, completion.output, gaps_s, now_s)
            observer.stage_ran("detokenize", step_id, began_s, self._clock())

    async def _give_way(self, step_id: int, began_s: float) -> float:
        """End a slice of `_detokenize`; returns when the next one begins."""
        self._observer.stage_ran("detokenize", step_id, began_s, self._clock())
        await asyncio.sleep(0)
        return self._clock()

    # ---- ends ------------------------------------------------------------------------------------------

    def _finish(self, sequence: ActiveSequence, reason: FinishReason, *, tell_scheduler: bool) -> None:
        """Note that one sequence has given its last output."""
        if self._sequences.pop(sequence.tokenized.sequence_id, None) is None:
            return  # its sink aborted the request while it took that output
        if tell_scheduler:  # a stop string: the scheduler would go on
            self._scheduler.abort(sequence.tokenized.sequence_id)
            sequence.timeline.num_output_tokens = sequence.state.num_output_tokens
        sequence.timeline.last_token_s = sequence.last_token_s
        sequence.timeline.finished_s = self._clock()
        self._observer.request_finished(sequence.timeline, reason)
        owner = sequence.owner
        owner.num_open -= 1
        if owner.num_open == 0:
            owner.has_ended = True
            self._forget(owner)

    def _end(self, active: ActiveRequest, reason: FinishReason) -> None:
        """End all of a request's sequences that have not ended yet, wherever they are."""
        active.has_ended = True
        self._forget(active)
        for sequence_id in active.sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._scheduler.abort(sequence_id)
                sequence.timeline.last_token_s = sequence.last_token_s
        now_s = self._clock()
        for timeline in active.timelines:
            if timeline.finished_s is None:
                timeline.finished_s = now_s
                self._observer.request_finished(timeline, reason)

    def _refuse(self, active: ActiveRequest, error: AsyncserveError) -> None:
        """End a request that becomes no sequences."""
        active.has_ended = True
        self._forget(active)
        self._observer.request_rejected(error)
        _fail_sink(active, error)

    def _expire(self, active: ActiveRequest) -> None:
        """End a request whose time is over."""
        self._num_deadlines_missed += 1
        taken_s = self._clock() - active.request.arrival_s
        for timeline in active.timelines:
            timeline.missed_deadline = timeline.finished_s is None
        self._end(active, FinishReason.ABORT)
        _fail_sink(active, DeadlineExceeded(f"the answer was not complete {taken_s:.1f} s after the request"))

    def _note_work(self) -> None:
        """Note that there is about to be work: the idle time before it is no lack of progress."""
        if self.is_idle:
            self._last_progress_s = self._clock()

    def _forget(self, active: ActiveRequest) -> None:
        del self._active[active.request.request_id]
        if not self._active:
            self._nothing_active.set()

    def _sink_raised(self, active: ActiveRequest) -> None:
        """End a request whose sink (or detokenizer) raised: a bug, which must not harm the others."""
        logger.exception("output could not be delivered", extra={"request_id": active.request.request_id})
        if not active.has_ended:
            self._end(active, FinishReason.ERROR)
            _fail_sink(active, EngineError("the request's output could not be delivered"))

    # ---- the loop's own health -------------------------------------------------------------------------

    async def _watch_loop(self) -> None:
        """Tell the observer how late the loop runs a timer."""
        interval_s = self._loop_lag_interval_s
        while True:
            started_s = self._clock()
            await asyncio.sleep(interval_s)
            self._observer.loop_lag(max(0.0, self._clock() - started_s - interval_s))


def _write(outboxes: list[Outbox]) -> int:
    """Write what lanes that are due hold, and return how many those were."""
    num_lanes = sum(map(len, outboxes))
    for outbox in outboxes:
        outbox.write()
    outboxes.clear()
    return num_lanes


def _fail_sink(active: ActiveRequest, error: AsyncserveError) -> None:
    try:
        active.sink.fail(error)
    except Exception:
        logger.debug("a sink raised when told of %r", error, exc_info=True)


def _offers_as_much(info: ExecutorInfo, before: ExecutorInfo) -> bool:
    """Return whether what was planned for one executor can be run by another."""
    return (
        info.num_slots >= before.num_slots
        and info.max_model_len >= before.max_model_len
        and info.max_num_batched_tokens >= before.max_num_batched_tokens
        and info.max_unapplied >= before.max_unapplied
        and info.vocab_size == before.vocab_size
        and len(info.kv_groups) == len(before.kv_groups)
        and all(
            group.spec == known.spec and group.num_blocks >= known.num_blocks
            for group, known in zip(info.kv_groups, before.kv_groups, strict=True)
        )
    )


def _forget_output(output: Awaitable[StepOutput] | DeviceLost) -> None:
    if not isinstance(output, DeviceLost):
        asyncio.ensure_future(output).add_done_callback(ignore_outcome)
