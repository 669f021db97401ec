"""The five coroutines a request passes through, and the channels between them.

    requests ─tokenize─► arrivals ─schedule─► plans ─launch─► launched ─collect─► completions ─► schedule
                                          └─► applied ─detokenize─► sinks

Takes `Request`s with their sinks, gives `RequestOutput`s to the sinks. Decisions are elsewhere: what is
admitted in `admission`, what runs in `scheduler`, what text tokens make in `detokenizer`; the coroutines
only move values, once per step and never once per token.

The one cycle (schedule → launch → collect → schedule) cannot block: the scheduler plans at most
`max_unapplied` steps ahead, and the cycle's channels hold as many. Everything else points forward, and an
abort is a method call. A stage that raises ends them all.

A step that failed goes back to the scheduler like any other. A device that is lost, or does not answer within
the time a step may take, is opened anew here, and every sequence goes on from its known tokens: nothing is
planned meanwhile, and what is on its way through the cycle comes back as lost.
"""

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from asyncserve.errors import (
    AsyncserveError,
    DeadlineExceeded,
    DeviceLost,
    EngineError,
    InvalidRequest,
    InvariantError,
    StepFailed,
)
from asyncserve.grammar import Grammar
from asyncserve.loop.admission import Admission, estimated_len, is_long, is_quick
from asyncserve.loop.channel import Channel, first_ready
from asyncserve.loop.deadlines import Deadlines
from asyncserve.loop.detokenizer import Detokenizer, DetokenizerState, EncodedTexts
from asyncserve.loop.grammar_cache import GrammarCache, GrammarRefused, NobodyWaits
from asyncserve.loop.queue_bounds import Load, LoadByTenant
from asyncserve.loop.restart_budget import WINDOW_S, RestartBudget
from asyncserve.loop.scheduler import Scheduler, StepDeltas
from asyncserve.loop.start_rate import StartRate
from asyncserve.observer import EngineStatistics, Observer, RequestTimeline
from asyncserve.request import (
    FinishReason,
    OutputSink,
    Request,
    RequestOutput,
    TextLane,
    TextPrompt,
    TextSink,
    TokenDelta,
    TokenizedRequest,
    TokensPrompt,
)
from asyncserve.step import Executor, ExecutorInfo, StepOutput, StepPlan

logger = logging.getLogger(__name__)

STARTED_PER_TURN = 16
"""Prompts given to the tokenizer's threads in one iteration of the loop: about 0.5 ms."""
ARRIVALS_CAPACITY = 32
"""Requests given to the scheduler in one iteration of the loop: about 0.2 ms."""
REOPEN_LIMIT_S = 1800.0
"""Seconds within which a lost device must be open again, its model loaded; then the engine gives up."""
APPLIED_CAPACITY = 8
"""Steps the detokenizer may be behind before it holds up the scheduler."""
SLICE_LEN = 32
"""Deltas handed to sinks in one iteration of the loop: about 0.2 ms of work with a socket write each."""
PLAIN_SLICE_LEN = 512
"""Plain tokens that wait for a later write, in one iteration: about 0.1 ms."""
ENDS_PER_SLICE = 8
"""Ends of sequences in one iteration: each may wake a handler that writes a whole answer."""


class ActiveRequest:
    """A request in the engine, from submission until the last of its sequences has ended."""

    __slots__ = (
        "bad_words",
        "grammar",
        "has_ended",
        "is_paused",
        "load",
        "num_open",
        "request",
        "seed",
        "sequence_ids",
        "sink",
        "timelines",
    )

    def __init__(self, request: Request, sink: OutputSink, *, seed: int) -> None:
        self.request = request
        self.sink = sink
        self.seed = seed
        self.timelines = [
            RequestTimeline(arrived_s=request.arrival_s, request=request) for _ in range(request.sampling.n)
        ]
        self.num_open = request.sampling.n
        # As long as it is in nobody's queue; estimated until the prompt is encoded.
        self.load = Load(self.num_open, self.num_open * estimated_len(request))
        self.is_paused = False
        self.bad_words: tuple[tuple[int, ...], ...] = ()  # set with the prompt's encoding
        self.grammar: Grammar | None = None  # set before admission, if a structure is asked for
        self.sequence_ids: list[int] = []
        self.has_ended = False


class ActiveSequence:
    """One of a request's sequences on the way back: where its deltas go."""

    __slots__ = (
        "encoded",
        "is_bare",
        "lane",
        "last_token_s",
        "owner",
        "state",
        "text_sink",
        "texts",
        "timeline",
        "tokenized",
        "wants_usage",
    )

    def __init__(self, tokenized: TokenizedRequest, owner: ActiveRequest, state: DetokenizerState) -> None:
        self.tokenized = tokenized
        self.owner = owner
        self.state = state
        self.timeline = owner.timelines[tokenized.index]
        self.wants_usage = owner.sink.wants_usage
        self.last_token_s: float | None = None
        self.text_sink = owner.sink if isinstance(owner.sink, TextSink) else None
        # Set while plain tokens may take the short way.
        self.lane: TextLane | None = None
        self.texts: list[bytes] = []
        self.encoded: EncodedTexts | None = None  # and while no bytes of a character are held back
        self.is_bare = False  # and what `encoded` lacks may take it as well

    def feed(self, delta: TokenDelta) -> RequestOutput:
        """Give the sink what it is to hear of a delta, and return that."""
        state, lane = self.state, self.lane
        if lane is not None:
            state.note_passed(lane.settle())
        output = state.feed(delta)
        if self.wants_usage and output.usage is None:
            output.usage = state.usage()
        self.owner.sink.put(output)
        if self.text_sink is not None and output.finish_reason is None:
            self._choose_way(self.text_sink)
        return output

    def _choose_way(self, sink: TextSink) -> None:
        """Let plain tokens take the short way from now on, or no longer."""
        lane = sink.lane(self.tokenized.index) if self.state.is_clear else None
        if lane is None:
            self.lane = self.encoded = None
            self.is_bare = False
        elif self.encoded is None:
            self.lane, self.texts = lane, lane.texts
            self.encoded = self.state.encoded_texts(sink.encode)
            self.is_bare = not self.state.has_stop_strings

    def bare_text(self, token_id: int) -> bytes:
        """Return what a token adds to the lane: nothing, if it is part of a character or a special token."""
        text = self.state.take_bare(token_id)
        sink = self.text_sink
        assert sink is not None
        self.encoded = self.state.encoded_texts(sink.encode) if self.state.is_clear else None
        return sink.encode(text) if text else b""


class Arrival(NamedTuple):
    """A tokenized request on its way to the scheduler."""

    active: ActiveRequest
    sequences: list[ActiveSequence]


class Encoded(NamedTuple):
    """A prompt's token ids, or why it has none, on the way back from a tokenizer's thread."""

    active: ActiveRequest
    outcome: "array[int] | Exception"


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
        max_device_restarts: Most times a lost device is opened anew within `WINDOW_S`.
        requests_capacity: Requests that may wait for the tokenizer.
        num_tokenizer_threads: Threads that encode prompts; one more encodes long ones (`is_long`), which
            would hold up the others for seconds.
        loop_lag_interval_s: Seconds between two measurements of the loop's lateness.
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
    ) -> None:
        self._executor = executor
        self._admission = admission
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._grammars = grammars
        self._observer = observer
        self._clock = clock
        self._info = info
        self._step_timeout_s = step_timeout_s
        self._restarts = RestartBudget(max_device_restarts)
        self._lost: DeviceLost | None = None  # as long as the device is not open again
        self._loop_lag_interval_s = loop_lag_interval_s
        self._threads = ThreadPoolExecutor(num_tokenizer_threads, thread_name_prefix="tokenize")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._sequence_ids: Iterator[int] = count()

        self._requests = Channel[ActiveRequest]("requests", requests_capacity)
        self._encoded = Channel[Encoded]("encoded", requests_capacity)
        self._arrivals = Channel[Arrival]("arrivals", ARRIVALS_CAPACITY)
        self._resumed = Channel[ActiveRequest]("resumed", 1)
        self._plans = Channel[StepPlan]("plans", info.max_unapplied)
        self._launched = Channel[Launched]("launched", info.max_unapplied)
        self._completions = Channel[Completion]("completions", info.max_unapplied)
        self._applied = Channel[AppliedStep]("applied", APPLIED_CAPACITY)
        self._channels = (
            self._requests,
            self._encoded,
            self._arrivals,
            self._resumed,
            self._plans,
            self._launched,
            self._completions,
            self._applied,
        )

        self._active: dict[str, ActiveRequest] = {}
        self._sequences: dict[int, ActiveSequence] = {}
        self._unadmitted = LoadByTenant()
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
        return self._unadmitted.total.plus(self._scheduler.waiting_load)

    def queued_load_of(self, tenant: str) -> Load:
        """Return what waits of one tenant, where the policy tells tenants apart."""
        return self._unadmitted.of(tenant).plus(self._scheduler.waiting_load_of(tenant))

    def retry_after_s(self, excess: Load, asked: Load) -> float:
        """Return how long a client should wait that was refused since `excess` must be started first."""
        return self._starts.retry_after_s(excess, asked, self._clock())

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs, and the device has nothing to do; what is paused does neither."""
        return (
            self._num_unapplied == 0
            and self._scheduler.is_idle
            and self._unadmitted.total.num_sequences == 0
        )

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._active

    def submit(self, active: ActiveRequest) -> None:
        """Take a request in.

        Raises:
            ChannelClosed: The pipeline has ended.
        """
        self._requests.put_nowait(active)
        self._note_work()
        self._active[active.request.request_id] = active
        self._unadmitted.add(active.request.tenant, active.load)
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
                group.create_task(self._tokenize(), name="tokenize")
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
        # A prompt may be in a thread still: it is waited for, though not by the loop.
        ends: list[Callable[[], None]] = [self._grammars.close]
        ends += [partial(each.shutdown, cancel_futures=True) for each in (self._threads, self._long_thread)]
        for end in ends:
            try:
                await asyncio.to_thread(end)
            except RuntimeError:  # the interpreter is ending: it starts no thread, and has waited for these
                end()

    # ---- tokenize --------------------------------------------------------------------------------------

    async def _tokenize(self) -> None:
        """requests → arrivals: each prompt is admitted when it is encoded, so no slow one holds up others.

        Prompts encoded in place, and prompts of one thread, stay in order of arrival.
        """
        requests, encoded = self._requests, self._encoded
        while True:
            await first_ready(requests, encoded)
            for finished in encoded.take_all():
                await self._admit(finished.active, finished.outcome)
            for _ in range(STARTED_PER_TURN):
                active = requests.get_nowait()
                if active is None:
                    break
                outcome = self._encode(active)
                if outcome is not None:
                    await self._admit(active, outcome)
                    break  # that was this iteration's share of the loop's time
            await asyncio.sleep(0)

    def _encode(self, active: ActiveRequest) -> "array[int] | Exception | None":
        """Encode a small prompt in place; any other is given to a thread, and None is returned."""
        try:
            if active.has_ended:
                return array("i")
            if is_quick(active.request):
                return self._admission.encode_prompt(active.request)
            self._start_encoding(active, None)
        except Exception as error:
            return error
        return None

    def _start_encoding(self, active: ActiveRequest, rendered: TextPrompt | TokensPrompt | None) -> None:
        """Give a prompt to a thread; `_note_encoded` is called with what becomes of it."""
        lane = self._long_thread if is_long(rendered or active.request.prompt) else self._threads
        future = asyncio.get_running_loop().run_in_executor(lane, self._encode_in_thread, active, rendered)
        future.add_done_callback(partial(self._note_encoded, active))

    def _encode_in_thread(
        self, active: ActiveRequest, rendered: TextPrompt | TokensPrompt | None
    ) -> "array[int] | TextPrompt | TokensPrompt":
        """Return a prompt's ids; of a conversation that turns out to be long, its text for the other lane."""
        if active.has_ended:
            return array("i")  # aborted while it waited for the thread
        prompt = active.request.prompt
        if rendered is None:
            rendered = self._admission.rendered(prompt)
            if is_long(rendered) and not is_long(prompt):
                return rendered
        active.bad_words = self._admission.encode_bad_words(active.request)
        return self._admission.encode_prompt(active.request, rendered)

    def _note_encoded(
        self, active: ActiveRequest, future: "asyncio.Future[array[int] | TextPrompt | TokensPrompt]"
    ) -> None:
        _ignore_outcome(future)  # if the pipeline has ended, nobody looks at it
        if self._encoded.is_closed:
            return
        error = future.exception()
        if error is not None:
            outcome = error if isinstance(error, Exception) else EngineError(repr(error))
            self._encoded.put_nowait(Encoded(active, outcome))
        elif isinstance(result := future.result(), array):
            self._encoded.put_nowait(Encoded(active, result))
        else:
            self._start_encoding(active, result)

    async def _admit(self, active: ActiveRequest, prompt_token_ids: "array[int] | Exception") -> None:
        try:
            if active.has_ended:
                self._unadmitted.remove(active.request.tenant, active.load)
                return
            if isinstance(prompt_token_ids, Exception):
                raise prompt_token_ids
            if not self._has_grammar(active):
                self._start_compiling(active, prompt_token_ids)
                return  # it comes here again
            now_s = self._clock()
            tokenized = self._admission.admit(
                active.request,
                prompt_token_ids,
                seed=active.seed,
                sequence_ids=self._sequence_ids,
                bad_words=active.bad_words,
                grammar=active.grammar,
            )
            active.request = tokenized[0].request
            known = Load(active.load.num_sequences, active.load.num_sequences * len(prompt_token_ids))
            self._unadmitted.remove(active.request.tenant, active.load)
            self._unadmitted.add(active.request.tenant, known)
            active.load = known
            sequences = [ActiveSequence(each, active, self._detokenizer.begin(each)) for each in tokenized]
            for each in sequences:
                each.timeline.request = each.tokenized.request  # without what was asked, which may be large
                each.timeline.tokenized_s = now_s
                each.timeline.num_prompt_tokens = len(prompt_token_ids)
                each.timeline.max_output_len = each.tokenized.max_output_len
        except AsyncserveError as error:
            self._reject(active, error)
            return
        except Exception as error:
            logger.exception(
                "a request could not be admitted", extra={"request_id": active.request.request_id}
            )
            rejection = EngineError(f"the request could not be admitted: {error!r}")
            rejection.__cause__ = error
            self._reject(active, rejection)
            return
        try:
            active.sink.begin(prompt_token_ids)
        except Exception:
            self._sink_raised(active)
        await self._arrivals.put(Arrival(active, sequences))

    def _has_grammar(self, active: ActiveRequest) -> bool:
        """Return whether a request has the grammar it asks for, if any; one that is kept is given to it."""
        structured = active.request.sampling.structured
        if structured is not None and active.grammar is None:
            active.grammar = self._grammars.find(structured)
        return structured is None or active.grammar is not None

    def _start_compiling(self, active: ActiveRequest, prompt_token_ids: "array[int]") -> None:
        """Have a request's grammar made; `_note_compiled` is called with what becomes of it."""
        structured = active.request.sampling.structured
        assert structured is not None
        future = self._grammars.compile(structured, lambda: not active.has_ended)
        future.add_done_callback(partial(self._note_compiled, active, prompt_token_ids))

    def _note_compiled(
        self, active: ActiveRequest, prompt_token_ids: "array[int]", future: "asyncio.Future[Grammar]"
    ) -> None:
        _ignore_outcome(future)  # if the pipeline has ended, nobody looks at it
        if self._encoded.is_closed:
            return
        outcome: array[int] | Exception = prompt_token_ids
        error = future.exception()
        if error is None:
            active.grammar = future.result()
        elif isinstance(error, NobodyWaits):
            pass  # if it has not ended itself, it came as the others had left, and asks again
        elif isinstance(error, GrammarRefused):
            structured = active.request.sampling.structured
            param = None if structured is None else structured.param
            outcome = InvalidRequest(f"{param} cannot be used: {error}", param=param)
        else:
            outcome = error if isinstance(error, Exception) else EngineError(repr(error))
        self._encoded.put_nowait(Encoded(active, outcome))

    def _reject(self, active: ActiveRequest, error: AsyncserveError) -> None:
        self._unadmitted.remove(active.request.tenant, active.load)
        if not active.has_ended:
            active.has_ended = True
            self._forget(active)
            self._observer.request_rejected(error)
            _fail_sink(active, error)

    # ---- schedule, launch, collect: the cycle ----------------------------------------------------------

    async def _schedule(self) -> None:
        """arrivals and completions → plans and applied steps."""
        scheduler, completions, arrivals = self._scheduler, self._completions, self._arrivals
        plans, applied, resumed = self._plans, self._applied, self._resumed
        observer = self._observer
        while True:
            await first_ready(completions, arrivals, resumed)
            now_s = self._clock()
            steps: list[AppliedStep] = []
            lost: DeviceLost | None = None
            for completion in completions.take_all():
                began_s = self._clock()
                output = completion.output
                self._num_unapplied -= 1
                if isinstance(output, DeviceLost):
                    lost = output
                    continue
                if isinstance(output, StepFailed):
                    deltas = StepDeltas((), (), scheduler.fail(output.step_id, output))
                    self._tell_failure(completion.plan, output, deltas.deltas)
                    if scheduler.blames_device:
                        lost = DeviceLost(f"every step fails, whatever it computes; the last: {output}")
                else:
                    deltas = scheduler.apply(output, now_s)
                self._last_progress_s = now_s
                steps.append(AppliedStep(completion, deltas, now_s))
                observer.stage_ran("apply", completion.plan.step_id, began_s, self._clock())
            if lost is not None:
                while steps:
                    await applied.put(steps.pop(0))
                await self._reopen_device(lost)
                now_s = self._clock()
            if any(len(step.deltas.deltas) >= STARTED_PER_TURN for step in steps):
                await asyncio.sleep(0)  # many ends, perhaps: their blocks were this iteration's share
            resumed.take_all()
            for arrival in arrivals.take_all():
                self._unadmitted.remove(arrival.active.request.tenant, arrival.active.load)
                if not arrival.active.has_ended:
                    self._add(arrival)
            began_s = self._clock()
            while (plan := scheduler.plan(now_s)) is not None:
                plans.put_nowait(plan)
                self._num_unapplied += 1
                if plan.admitted:
                    num_tokens = sum(len(each.token_ids) for each in plan.admitted)
                    self._starts.note(Load(len(plan.admitted), num_tokens), now_s)
                ended_s = self._clock()
                observer.stage_ran("plan", plan.step_id, began_s, ended_s)
                began_s = ended_s
                if len(plan.admitted) >= STARTED_PER_TURN:
                    await asyncio.sleep(0)  # that was this iteration's share of the loop's time
                    began_s = self._clock()
            # Only now, with the device supplied, is it time for the outputs.
            for step in steps:
                await applied.put(step)

    def _add(self, arrival: Arrival) -> None:
        for sequence in arrival.sequences:
            sequence_id = sequence.tokenized.sequence_id
            self._sequences[sequence_id] = sequence
            arrival.active.sequence_ids.append(sequence_id)
            self._scheduler.add(sequence.tokenized, sequence.timeline)
            if arrival.active.is_paused:
                self._scheduler.pause(sequence_id)

    def _tell_failure(self, plan: StepPlan, error: StepFailed, ends: list[TokenDelta]) -> None:
        if ends:
            ended = self._sequences.get(ends[0].sequence_id)
            request_id = None if ended is None else ended.owner.request.request_id
            logger.error("%s; computed alone, so that request ends", error, extra={"request_id": request_id})
        else:
            logger.error("%s; its %d sequences are tried again by halves", error, len(plan.sequences))

    async def _reopen_device(self, lost: DeviceLost) -> None:
        """Open the device anew, and let every sequence go on from its known tokens.

        Raises:
            DeviceLost: It was lost too often, cannot be opened again, or offers less than before.
        """
        began_s = self._clock()
        self._lost = lost
        while self._num_unapplied:
            await first_ready(self._completions)
            self._num_unapplied -= len(self._completions.take_all())
        self._scheduler.lose_device()
        if not self._restarts.spend(began_s):
            raise DeviceLost(f"{lost}; it was opened anew as often as it may be within {WINDOW_S:.0f} s")
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
                limit = asyncio.timeout(self._step_timeout_s)
                try:
                    async with limit:
                        output = await launched
                except StepFailed as error:
                    output = error
                except DeviceLost as error:
                    output = self._lost = error
                except TimeoutError:
                    if not limit.expired():
                        raise
                    output = self._lost = DeviceLost(
                        f"step {plan.step_id} has not ended within {self._step_timeout_s:g} s"
                    )
            self._completions.put_nowait(Completion(plan, output))

    # ---- detokenize ------------------------------------------------------------------------------------

    async def _detokenize(self) -> None:
        """Applied steps → the sinks, a slice of sequences per iteration of the loop."""
        sequences, observer = self._sequences, self._observer
        num_since_yield = num_ends = 0
        last_s = 0.0
        async for completion, (plain, plain_ids, deltas), now_s in self._applied:
            step_id, began_s = completion.plan.step_id, self._clock()
            num_alike = 0  # sequences whose last token came with the step before
            gaps_s: list[float] = []
            for first in range(0, len(plain), PLAIN_SLICE_LEN):
                end = first + PLAIN_SLICE_LEN
                if first or num_since_yield == SLICE_LEN:
                    num_since_yield = num_ends = 0
                    began_s = await self._give_way(step_id, began_s)
                # Once per token of every stream: no call but those that write.
                for state, token_id in zip(plain[first:end], plain_ids[first:end], strict=True):
                    sequence = sequences.get(state.sequence_id)
                    if sequence is None:
                        continue  # aborted while the token was on its way
                    if sequence.last_token_s is last_s:
                        num_alike += 1
                    elif sequence.last_token_s is not None:
                        gaps_s.append(now_s - sequence.last_token_s)
                    sequence.last_token_s = now_s
                    try:
                        encoded = sequence.encoded
                        text = None if encoded is None else encoded[token_id]
                        if text is None and sequence.is_bare:
                            text = sequence.bare_text(token_id)
                        if text is not None:
                            texts = sequence.texts
                            if text:
                                texts.append(text)
                            if not text or len(texts) != sequence.lane.flush_len:  # type: ignore[union-attr]
                                continue
                            sequence.lane.flush()  # type: ignore[union-attr]
                        else:
                            output = sequence.feed(TokenDelta(state.sequence_id, (token_id,)))
                            if output.finish_reason is not None:
                                self._finish(sequence, output.finish_reason, tell_scheduler=True)
                                num_ends += 1
                    except Exception:
                        self._sink_raised(sequence.owner)
                    num_since_yield += 1
                    if num_since_yield == SLICE_LEN or num_ends == ENDS_PER_SLICE:
                        num_since_yield = num_ends = 0
                        began_s = await self._give_way(step_id, began_s)
            for delta in deltas:
                if num_since_yield == SLICE_LEN or num_ends == ENDS_PER_SLICE:
                    num_since_yield = num_ends = 0
                    began_s = await self._give_way(step_id, began_s)
                num_since_yield += 1
                sequence = sequences.get(delta.sequence_id)
                if sequence is None:
                    continue
                if delta.token_ids:
                    if sequence.last_token_s is not None:
                        gaps_s.append(now_s - sequence.last_token_s)
                    else:
                        observer.first_token(sequence.timeline)
                    sequence.last_token_s = now_s
                try:
                    output = sequence.feed(delta)
                except Exception:
                    self._sink_raised(sequence.owner)
                    continue
                if output.finish_reason is not None:
                    self._finish(sequence, output.finish_reason, tell_scheduler=delta.finish_reason is None)
                    num_ends += 1
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

    def _expire(self, active: ActiveRequest) -> None:
        """End a request whose time is over."""
        self._num_deadlines_missed += 1
        taken_s = self._clock() - active.request.arrival_s
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
        asyncio.ensure_future(output).add_done_callback(_ignore_outcome)


def _ignore_outcome(future: "asyncio.Future[Any]") -> None:
    """Keep asyncio from reporting an error that nobody may come to look at."""
    if not future.cancelled():
        future.exception()
