"""Engine: the pipeline's life and its front door.

Takes an executor, a tokenizer and plain options; starts the device and the stages, takes requests with
their sinks, aborts them, and ends: gently (`drain`), at once (`stop`), or because a stage died (`failure`).
Whatever happens, every request that was taken either gets all its outputs, or `fail`, or was aborted by its
owner. All methods run on the loop thread. Knows nothing of HTTP and nothing of the device.
"""

import asyncio
import itertools
import logging
import random
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from asyncserve.cache_events import CacheEvent
from asyncserve.errors import AsyncserveError, DeadlineExceeded, EngineStopped, InvalidRequest, NotReady
from asyncserve.loop.active_request import ActiveRequest
from asyncserve.loop.admission import Admission, estimated_len
from asyncserve.loop.best_of import BestOfSink, with_scores
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.channel import ChannelClosed
from asyncserve.loop.detokenizer import Detokenizer
from asyncserve.loop.grammar import XGrammarCompiler
from asyncserve.loop.grammar_cache import GrammarCache, GrammarCompiler
from asyncserve.loop.pipeline import Pipeline
from asyncserve.loop.queue_bounds import Load, QueueBounds
from asyncserve.loop.scheduler import Scheduler
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.observer import EngineStatistics, Observer, ObserverGroup
from asyncserve.request import FinishReason, OutputSink, Request, RequestOutput, TokenizedRequest
from asyncserve.step import Executor, ExecutorInfo

logger = logging.getLogger(__name__)

FAILED_STOP_LIMIT_S = 10.0
"""How long executor and worker threads have to end when the engine has failed."""


class Engine:
    """Serves requests with one executor.

    Args:
        executor: The device side, not yet started.
        tokenizer: The model's.
        observer: Told of every step and every end; None for nobody.
        max_num_queued_requests: Most sequences that wait, preempted ones included (a request with `n` = 3
            counts three times); a request that would make it more is refused.
        max_num_queued_tokens: Most tokens that these may have; None for no bound.
        policy: `fcfs`, `priority` or `fair`.
        enable_prefix_caching: Reuse KV blocks of equal beginnings.
        enable_chunked_prefill: Split long prompts over several steps.
        long_prefill_token_threshold: Most tokens of one prompt in one step; 0 for no limit but the step's.
        async_scheduling: Plan one step ahead of the device.
        step_timeout_s: Seconds after which a step that has not ended means that the device is lost; 0 for no
            limit.
        max_device_restarts: Most times a lost device is opened anew within an hour, those not counted that
            were one request's fault; then the engine fails.
        grammar_compile_timeout_s: Seconds that compiling one structured output may take.
        make_grammar_compiler: Instead of xgrammar's: given the tokenizer and the model's vocabulary size.
        seed: Of the seeds drawn for requests that bring none.
        num_tokenizer_threads: Threads that encode prompts; one more encodes those above 64 K characters.
        loop_lag_interval_s: Seconds between two measurements of the event loop's lateness.
        hash_seed: Of the digests by which prefixes are known; replicas of one seed have the same.
        cache_listener: Is told what becomes of the prefix cache, once a step at most; must return at once.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        tokenizer: Tokenizer,
        observer: Observer | None = None,
        max_num_queued_requests: int = 2048,
        max_num_queued_tokens: int | None = None,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        async_scheduling: bool = True,
        step_timeout_s: float = 300.0,
        max_device_restarts: int = 5,
        grammar_compile_timeout_s: float = 10.0,
        make_grammar_compiler: Callable[[Tokenizer, int], GrammarCompiler] | None = None,
        seed: int = 0,
        num_tokenizer_threads: int = 2,
        loop_lag_interval_s: float = 1.0,
        hash_seed: str = "0",
        cache_listener: Callable[[Sequence[CacheEvent]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        # A group, so that an observer that raises, which it must not, ends no request and no stage.
        if not isinstance(observer, ObserverGroup):
            observer = ObserverGroup([] if observer is None else [observer])
        self._observer = observer
        self._bounds = QueueBounds(
            max_sequences=max_num_queued_requests,
            max_tokens=max_num_queued_tokens,
            shares=policy == "fair",
        )
        self._policy = policy
        self._enable_prefix_caching = enable_prefix_caching
        self._enable_chunked_prefill = enable_chunked_prefill
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._async_scheduling = async_scheduling
        self._step_timeout_s = step_timeout_s or None
        self._max_device_restarts = max_device_restarts
        self._make_grammar_compiler = make_grammar_compiler or partial(
            XGrammarCompiler, timeout_s=grammar_compile_timeout_s
        )
        self._seeds = random.Random(seed)
        self._num_tokenizer_threads = num_tokenizer_threads
        self._loop_lag_interval_s = loop_lag_interval_s
        self._hash_seed = hash_seed
        self._cache_log = None if cache_listener is None else CacheLog(cache_listener)
        self._clock = clock

        self._has_been_started = False
        self._is_accepting = False
        self._is_stopping = False
        self._info: ExecutorInfo | None = None
        self._admission: Admission | None = None
        self._pipeline: Pipeline | None = None
        self._stages: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._stopped = asyncio.Event()

    # ---- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the executor and the stages; requests are accepted when it returns.

        Raises:
            StartupError: What the executor raised.
            EngineStopped: `stop` was called meanwhile.
            RuntimeError: It was started before.
        """
        if self._has_been_started:
            raise RuntimeError("an engine is started once")
        self._has_been_started = True
        try:
            info = await self._executor.start()
        except BaseException:
            await self._executor.stop()
            self._stopped.set()
            raise
        if self._is_stopping:
            raise EngineStopped("the engine was stopped while it started")
        scheduler = Scheduler(
            info=info,
            policy=self._policy,
            enable_prefix_caching=self._enable_prefix_caching,
            enable_chunked_prefill=self._enable_chunked_prefill,
            long_prefill_token_threshold=self._long_prefill_token_threshold,
            async_scheduling=self._async_scheduling,
            hash_seed=self._hash_seed,
            cache_log=self._cache_log,
        )
        self._info = info
        self._admission = Admission(
            tokenizer=self._tokenizer,
            vocab_size=info.vocab_size,
            max_sequence_len=scheduler.limits.max_len,
            check_admissible=scheduler.limits.check,
            check_search=scheduler.limits.check_search,
        )
        self._pipeline = Pipeline(
            executor=self._executor,
            admission=self._admission,
            scheduler=scheduler,
            detokenizer=Detokenizer(self._tokenizer),
            grammars=GrammarCache(
                self._make_grammar_compiler(self._tokenizer, info.vocab_size),
                # They are compiled one by one, so most of what may wait should wait for something else.
                max_pending=max(32, self._bounds.max_sequences // 8),
            ),
            observer=self._observer,
            clock=self._clock,
            info=info,
            step_timeout_s=self._step_timeout_s,
            max_device_restarts=self._max_device_restarts,
            requests_capacity=max(1, self._bounds.max_sequences),
            num_tokenizer_threads=self._num_tokenizer_threads,
            loop_lag_interval_s=self._loop_lag_interval_s,
            cache_log=self._cache_log,
        )
        self._stages = asyncio.create_task(self._pipeline.run(), name="pipeline")
        self._supervisor = asyncio.create_task(
            self._supervise(self._pipeline, self._stages), name="engine-supervisor"
        )
        self._is_accepting = True
        logger.info(
            "%s serves up to %d sequences at once, of at most %d tokens each",
            info.device_name or "the device",
            info.num_slots,
            scheduler.limits.max_len,
        )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let those in the engine finish; `stop` is still to be called.

        Args:
            timeout_s: Seconds after which the rest are ended, their sinks getting `EngineStopped`.
        """
        self._is_accepting = False
        if self._pipeline is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._pipeline.wait_nothing_active()
        except TimeoutError:
            error = EngineStopped(f"the server is stopping and waited {timeout_s:g} s for running requests")
            self._pipeline.end_all(error, FinishReason.ABORT)

    async def stop(self) -> None:
        """End everything now; sinks of requests in the engine get `EngineStopped`. Idempotent."""
        self._is_accepting = False
        self._is_stopping = True
        if self._stages is None:
            await self._executor.stop()
            self._stopped.set()
        else:
            self._stages.cancel()
        await self._stopped.wait()

    async def wait_stopped(self) -> None:
        """Return when the engine has ended, by `stop` or by a failure (then `failure` says which)."""
        await self._stopped.wait()

    async def _supervise(self, pipeline: Pipeline, stages: "asyncio.Task[None]") -> None:
        """Wait for the stages to end, and end all that hangs on them."""
        await asyncio.wait([stages])
        self._is_accepting = False
        error = EngineStopped("the server was stopped")
        reason = FinishReason.ABORT
        if not stages.cancelled() and (failure := stages.exception()) is not None:
            self._failure = _innermost(failure)
            logger.critical("the engine died", exc_info=self._failure)
            error = EngineStopped(f"the server failed: {self._failure}")
            error.__cause__ = self._failure
            reason = FinishReason.ERROR
        # After a failure a thread may be in something that never ends: then the process has to.
        limit_s = None if self._failure is None else FAILED_STOP_LIMIT_S
        try:
            pipeline.end_all(error, reason)
            for end in (self._executor.stop, pipeline.close):
                try:
                    async with asyncio.timeout(limit_s):
                        await end()
                except Exception:
                    logger.exception("a part of the engine did not stop cleanly")
        finally:
            self._stopped.set()

    # ---- requests --------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Take a request; from here on its sink hears of it. Returns at once.

        Raises:
            NotReady: The engine is loading, draining or stopped.
            EngineStopped: The engine has just failed.
            Overloaded: Too many sequences or tokens wait already.
            DeadlineExceeded: Its time was over before it came.
            InvalidRequest: It asks for more sequences than may ever wait, or a request of that id is in the
                engine.
        """
        self.submit_all([request], [sink])

    def submit_all(self, requests: Sequence[Request], sinks: Sequence[OutputSink]) -> None:
        """Take the requests of one call, all of one tenant, or none: there is room for all of them.

        Raises:
            AsyncserveError: As `submit`. One that is wrong by itself leaves those before it in the engine.
        """
        self.check_room(requests)
        for request, sink in zip(requests, sinks, strict=True):
            self._submit(request, sink)

    def _submit(self, request: Request, sink: OutputSink) -> None:
        try:
            pipeline = self._accepting_pipeline()
            if request.deadline_s is not None and request.deadline_s <= self._clock():
                raise DeadlineExceeded("the time for the answer was over before the request could be taken")
            if request.request_id in pipeline:
                raise InvalidRequest(f"a request with id {request.request_id!r} is being served")
            sampling = request.sampling
            if sampling.num_sequences > sampling.n:
                request, sink = with_scores(request), BestOfSink(sink, sampling)
            seed = sampling.seed
            if seed is None:
                seed = self._seeds.getrandbits(63)
            try:
                pipeline.submit(ActiveRequest(request, sink, seed=seed))
            except ChannelClosed as closed:
                raise EngineStopped("the server failed and is stopping") from closed
        except AsyncserveError as error:
            self._observer.request_rejected(error)
            raise

    def check_room(self, requests: Sequence[Request]) -> None:
        """Refuse a call that the queue has no room for.

        Args:
            requests: All those of the call, of one tenant.

        Raises:
            NotReady: The engine is loading, draining or stopped.
            Overloaded: Too many sequences or tokens wait already.
            InvalidRequest: They are more than may ever wait.
        """
        try:
            pipeline = self._accepting_pipeline()
            asked = Load(
                sum(request.sampling.num_sequences for request in requests),
                sum(request.sampling.num_sequences * estimated_len(request) for request in requests),
            )
            excess = self._bounds.excess(
                asked,
                queued=pipeline.queued_load,
                of_tenant=pipeline.queued_load_of(requests[0].tenant),
            )
            if excess is not None:
                raise excess.error(pipeline.retry_after_s(excess.load, asked))
        except AsyncserveError as error:
            self._observer.request_rejected(error)
            raise

    def _accepting_pipeline(self) -> Pipeline:
        if self._pipeline is not None and self._is_accepting:
            return self._pipeline
        is_starting = self._pipeline is None and not (self._is_stopping or self._stopped.is_set())
        raise NotReady(
            "The server is starting." if is_starting else "The server is stopping and takes no new requests."
        )

    def tokenized(self, request: Request) -> TokenizedRequest:
        """Return the first sequence that a request would become, without taking the request.

        Its bad words and its grammar are left out.

        Thread-safe, and to be called in a thread: a prompt may take long to encode.

        Raises:
            NotReady: The engine is starting.
            RequestError: The request could not be served.
        """
        if self._admission is None:
            raise NotReady("The server is starting.")
        return self._admission.admit(
            request, self._admission.encode_prompt(request), seed=0, sequence_ids=itertools.count()
        )[0]

    def abort(self, request_id: str) -> None:
        """End a request at once; its sink gets nothing more. Idempotent; unknown ids are no error."""
        if self._pipeline is None:
            return
        sink = self._pipeline.abort(request_id)
        if isinstance(sink, BestOfSink):
            sink = sink.sink
        if isinstance(sink, _IteratorSink):
            sink.end()

    def pause(self, request_id: str) -> None:
        """Let a request rest whose client does not read: others get its slot, and if need be its blocks.

        Outputs of steps in flight still come. Idempotent; unknown ids are no error.
        """
        if self._pipeline is not None:
            self._pipeline.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Let a paused request go on, in its place by age. Idempotent; unknown ids are no error."""
        if self._pipeline is not None:
            self._pipeline.resume(request_id)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Submit a request and yield its outputs; leaving the iteration early aborts it.

        Leave it through `contextlib.aclosing`, or the abort waits for the garbage collector. If the request
        is aborted from elsewhere, the iteration ends.

        Raises:
            AsyncserveError: What `submit` raises, and what the sink would have been failed with.
        """
        sink = _IteratorSink(request.sampling.n)
        self.submit(request, sink)
        try:
            while not sink.is_complete:
                for output in await sink.take():
                    yield output
        finally:
            if sink.expects_more:
                self.abort(request.request_id)

    # ---- state -----------------------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo:
        """What the executor offers.

        Raises:
            NotReady: Before `start` has returned.
        """
        if self._info is None:
            raise NotReady("The server is starting.")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def is_accepting(self) -> bool:
        """Whether `submit` takes requests."""
        return self._is_accepting

    @property
    def failure(self) -> BaseException | None:
        """What killed a stage, if one died."""
        return self._failure

    def statistics(self) -> EngineStatistics:
        """State at this moment."""
        statistics = EngineStatistics(last_progress_s=self._clock())
        if self._pipeline is not None:
            self._pipeline.fill_statistics(statistics)
            statistics.graphs_pending = self._executor.graphs_pending
        return statistics

    def check(self) -> None:
        """Check every invariant of the loop side, for tests.

        Raises:
            InvariantError: One does not hold.
        """
        if self._pipeline is not None:
            self._pipeline.check()


class _IteratorSink:
    """Collects outputs for `Engine.generate`: one future, made only when nothing has come yet."""

    wants_usage = False

    def __init__(self, num_choices: int) -> None:
        self._num_open = num_choices
        self._outputs: list[RequestOutput] = []
        self._error: AsyncserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def expects_more(self) -> bool:
        """Whether outputs are still to come."""
        return self._num_open > 0 and self._error is None

    @property
    def is_complete(self) -> bool:
        """Whether every output has come and been taken."""
        return self._num_open == 0 and not self._outputs

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Ignore it."""

    def put(self, output: RequestOutput) -> None:
        """Keep it until taken."""
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._num_open -= 1
        self._wake()

    def fail(self, error: AsyncserveError) -> None:
        """Let the iteration raise it."""
        self._error = error
        self._wake()

    def end(self) -> None:
        """Let the iteration end with what has come: the request was aborted."""
        self._num_open = 0
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """Return what has come, waiting if more is to come; raise what the request failed with."""
        if not self._outputs and self.expects_more:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _innermost(error: BaseException) -> BaseException:
    """Return the first exception that is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
