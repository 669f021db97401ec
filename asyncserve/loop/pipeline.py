"""The five coroutines a request passes through, and the channels between them.

    requests ─tokenize─► arrivals ─schedule─► plans ─launch─► launched ─collect─► completions ─► schedule
                                          └─► applied ─detokenize─► sinks

Takes `Request`s with their sinks, gives `RequestOutput`s to the sinks. Decisions are elsewhere: what is
admitted in `admission`, what runs in `scheduler`, what text tokens make in `detokenizer`; the coroutines
only move values, once per step and never once per token.

The one cycle (schedule → launch → collect → schedule) cannot block: the scheduler plans at most
`max_unapplied` steps ahead, and the cycle's channels hold as many. Everything else points forward, and an
abort is a method call. A stage that raises ends them all.
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
    EngineError,
    InvalidRequest,
    InvariantError,
    StepFailed,
)
from asyncserve.grammar import Grammar
from asyncserve.loop.admission import Admission, is_long, is_quick
from asyncserve.loop.channel import Channel, first_ready
from asyncserve.loop.detokenizer import Detokenizer, DetokenizerState
from asyncserve.loop.grammar_cache import GrammarCache, GrammarRefused, NobodyWaits
from asyncserve.loop.scheduler import Scheduler
from asyncserve.observer import EngineStatistics, Observer, RequestTimeline
from asyncserve.request import (
    FinishReason,
    OutputSink,
    Request,
    TextPrompt,
    TokenDelta,
    TokenizedRequest,
    TokensPrompt,
)
from asyncserve.step import Executor, StepOutput, StepPlan

logger = logging.getLogger(__name__)

STARTED_PER_TURN = 16
"""Prompts given to the tokenizer's threads in one iteration of the loop: about 0.5 ms."""
ARRIVALS_CAPACITY = 64
APPLIED_CAPACITY = 8
"""Steps the detokenizer may be behind before it holds up the scheduler."""
SLICE_LEN = 32
"""Deltas handed to sinks in one iteration of the loop: about 0.2 ms of work with a socket write each."""
ENDS_PER_SLICE = 8
"""Ends of sequences in one iteration: each may wake a handler that writes a whole answer."""


class ActiveRequest:
    """A request in the engine, from submission until the last of its sequences has ended."""

    __slots__ = (
        "bad_words",
        "grammar",
        "has_ended",
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
        self.timelines = [RequestTimeline(arrived_s=request.arrival_s) for _ in range(request.sampling.n)]
        self.num_open = request.sampling.n
        self.bad_words: tuple[tuple[int, ...], ...] = ()  # set with the prompt's encoding
        self.grammar: Grammar | None = None  # set before admission, if a structure is asked for
        self.sequence_ids: list[int] = []
        self.has_ended = False


class ActiveSequence:
    """One of a request's sequences on the way back: where its deltas go."""

    __slots__ = ("last_token_s", "owner", "state", "timeline", "tokenized", "wants_usage")

    def __init__(self, tokenized: TokenizedRequest, owner: ActiveRequest, state: DetokenizerState) -> None:
        self.tokenized = tokenized
        self.owner = owner
        self.state = state
        self.timeline = owner.timelines[tokenized.index]
        self.wants_usage = owner.sink.wants_usage
        self.last_token_s: float | None = None


class Arrival(NamedTuple):
    """A tokenized request on its way to the scheduler."""

    active: ActiveRequest
    sequences: list[ActiveSequence]


class Encoded(NamedTuple):
    """A prompt's token ids, or why it has none, on the way back from a tokenizer's thread."""

    active: ActiveRequest
    outcome: "array[int] | Exception"


class Launched(NamedTuple):
    """A step the device has been given."""

    plan: StepPlan
    output: Awaitable[StepOutput]


class Completion(NamedTuple):
    """What became of a step: its output, or why it has none."""

    plan: StepPlan
    output: StepOutput | StepFailed


class AppliedStep(NamedTuple):
    """What a step gave its sequences."""

    completion: Completion
    deltas: list[TokenDelta]
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
        max_unapplied: Steps that may be on their way at once.
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
        max_unapplied: int,
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
        self._loop_lag_interval_s = loop_lag_interval_s
        self._threads = ThreadPoolExecutor(num_tokenizer_threads, thread_name_prefix="tokenize")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._sequence_ids: Iterator[int] = count()

        self._requests = Channel[ActiveRequest]("requests", requests_capacity)
        self._encoded = Channel[Encoded]("encoded", requests_capacity)
        self._arrivals = Channel[Arrival]("arrivals", ARRIVALS_CAPACITY)
        self._plans = Channel[StepPlan]("plans", max_unapplied)
        self._launched = Channel[Launched]("launched", max_unapplied)
        self._completions = Channel[Completion]("completions", max_unapplied)
        self._applied = Channel[AppliedStep]("applied", APPLIED_CAPACITY)
        self._channels = (
            self._requests,
            self._encoded,
            self._arrivals,
            self._plans,
            self._launched,
            self._completions,
            self._applied,
        )

        self._active: dict[str, ActiveRequest] = {}
        self._sequences: dict[int, ActiveSequence] = {}
        self._num_unadmitted = 0  # sequences, as all counts of what waits
        self._num_unapplied = 0
        self._last_progress_s = clock()
        self._nothing_active = asyncio.Event()
        self._nothing_active.set()

    # ---- called from outside, on the loop thread -------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Sequences that wait: in the scheduler, preempted ones too, or of requests not yet in it."""
        statistics = EngineStatistics()
        self._scheduler.fill_statistics(statistics)
        return self._num_unadmitted + statistics.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in the pipeline and the device has nothing to do."""
        return not self._active and self._num_unapplied == 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._active

    def submit(self, active: ActiveRequest) -> None:
        """Take a request in.

        Raises:
            ChannelClosed: The pipeline has ended.
        """
        self._requests.put_nowait(active)
        if self.is_idle:
            # What came before the idle time is no progress to be measured from.
            self._last_progress_s = self._clock()
        self._active[active.request.request_id] = active
        self._num_unadmitted += len(active.timelines)
        self._nothing_active.clear()

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
                self._end(active, reason)
                _fail_sink(active, error)

    async def wait_nothing_active(self) -> None:
        """Return when no request is in the pipeline."""
        await self._nothing_active.wait()

    def fill_statistics(self, statistics: EngineStatistics) -> None:
        """Write the state of scheduler and channels into `statistics`."""
        self._scheduler.fill_statistics(statistics)
        statistics.num_waiting += self._num_unadmitted
        statistics.num_unapplied_steps = self._num_unapplied
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
            for channel in self._channels:
                channel.close()

    async def close(self) -> None:
        """Free the worker threads; after `run` has ended."""
        for launched in self._launched.take_all():
            # Steps that nobody awaits any more: their failure is no news.
            asyncio.ensure_future(launched.output).add_done_callback(_ignore_outcome)
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
                self._num_unadmitted -= len(active.timelines)
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
            sequences = [ActiveSequence(each, active, self._detokenizer.begin(each)) for each in tokenized]
            for each in sequences:
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
        self._num_unadmitted -= len(active.timelines)
        if not active.has_ended:
            active.has_ended = True
            self._forget(active)
            self._observer.request_rejected(error)
            _fail_sink(active, error)

    # ---- schedule, launch, collect: the cycle ----------------------------------------------------------

    async def _schedule(self) -> None:
        """arrivals and completions → plans and applied steps."""
        scheduler, completions, arrivals = self._scheduler, self._completions, self._arrivals
        plans, applied = self._plans, self._applied
        while True:
            await first_ready(completions, arrivals)
            now_s = self._clock()
            steps: list[AppliedStep] = []
            for completion in completions.take_all():
                output = completion.output
                if isinstance(output, StepFailed):
                    logger.error("%s", output)
                    deltas = scheduler.fail(output.step_id, output)
                else:
                    deltas = scheduler.apply(output, now_s)
                self._num_unapplied -= 1
                self._last_progress_s = now_s
                steps.append(AppliedStep(completion, deltas, now_s))
            for arrival in arrivals.take_all():
                self._num_unadmitted -= len(arrival.sequences)
                if not arrival.active.has_ended:
                    self._add(arrival)
            while (plan := scheduler.plan(now_s)) is not None:
                plans.put_nowait(plan)
                self._num_unapplied += 1
            # Only now, with the device supplied, is it time for the outputs.
            for step in steps:
                await applied.put(step)

    def _add(self, arrival: Arrival) -> None:
        for sequence in arrival.sequences:
            sequence_id = sequence.tokenized.sequence_id
            self._sequences[sequence_id] = sequence
            arrival.active.sequence_ids.append(sequence_id)
            self._scheduler.add(sequence.tokenized, sequence.timeline)

    async def _launch(self) -> None:
        """plans → launched."""
        async for plan in self._plans:
            self._launched.put_nowait(Launched(plan, self._executor.submit(plan)))

    async def _collect(self) -> None:
        """launched → completions, in the order launched."""
        async for plan, awaitable in self._launched:
            output: StepOutput | StepFailed
            try:
                output = await awaitable
            except StepFailed as error:
                output = error
            self._completions.put_nowait(Completion(plan, output))

    # ---- detokenize ------------------------------------------------------------------------------------

    async def _detokenize(self) -> None:
        """Applied steps → the sinks, a slice of sequences per iteration of the loop."""
        sequences, observer = self._sequences, self._observer
        num_since_yield = num_ends = 0
        async for completion, deltas, now_s in self._applied:
            inter_token_s: list[float] = []
            for delta in deltas:
                if num_since_yield == SLICE_LEN:
                    num_since_yield = num_ends = 0
                    await asyncio.sleep(0)
                num_since_yield += 1
                sequence = sequences.get(delta.sequence_id)
                if sequence is None:
                    continue  # aborted while the delta was on its way
                if delta.token_ids:
                    last_token_s = sequence.last_token_s
                    sequence.last_token_s = now_s
                    if last_token_s is not None:
                        inter_token_s.append(now_s - last_token_s)
                    else:
                        observer.first_token(sequence.timeline)
                try:
                    output = sequence.state.feed(delta)
                    if sequence.wants_usage and output.usage is None:
                        output.usage = sequence.state.usage()
                    sequence.owner.sink.put(output)
                except Exception:
                    self._sink_raised(sequence.owner)
                    continue
                reason = output.finish_reason
                if reason is not None:
                    self._finish(sequence, reason, tell_scheduler=delta.finish_reason is None)
                    num_ends += 1
                    if num_ends == ENDS_PER_SLICE:
                        num_since_yield = SLICE_LEN
            if not isinstance(completion.output, StepFailed):
                observer.step_applied(completion.plan, completion.output, inter_token_s, now_s)

    # ---- ends ------------------------------------------------------------------------------------------

    def _finish(self, sequence: ActiveSequence, reason: FinishReason, *, tell_scheduler: bool) -> None:
        """Note that one sequence has given its last output."""
        if self._sequences.pop(sequence.tokenized.sequence_id, None) is None:
            return  # its sink aborted the request while it took that output
        if tell_scheduler:  # a stop string: the scheduler would go on
            self._scheduler.abort(sequence.tokenized.sequence_id)
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
            if self._sequences.pop(sequence_id, None) is not None:
                self._scheduler.abort(sequence_id)
        now_s = self._clock()
        for timeline in active.timelines:
            if timeline.finished_s is None:
                timeline.finished_s = now_s
                self._observer.request_finished(timeline, reason)

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


def _ignore_outcome(future: "asyncio.Future[Any]") -> None:
    """Keep asyncio from reporting an error that nobody may come to look at."""
    if not future.cancelled():
        future.exception()
