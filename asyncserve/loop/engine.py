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
from collections.abc import AsyncGenerator, Callable
from functools import partial

from asyncserve.errors import AsyncserveError, EngineStopped, InvalidRequest, NotReady, Overloaded
from asyncserve.loop.admission import Admission
from asyncserve.loop.channel import ChannelClosed
from asyncserve.loop.detokenizer import Detokenizer
from asyncserve.loop.grammar import XGrammarCompiler
from asyncserve.loop.grammar_cache import GrammarCache, GrammarCompiler
from asyncserve.loop.pipeline import ActiveRequest, Pipeline
from asyncserve.loop.scheduler import Scheduler
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.observer import EngineStatistics, NullObserver, Observer
from asyncserve.request import FinishReason, OutputSink, Request, RequestOutput, TokenizedRequest
from asyncserve.step import Executor, ExecutorInfo

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""What a refused client is told to wait. The queue's own time is not known: outputs end when they end."""


class Engine:
    """Serves requests with one executor.

    Args:
        executor: The device side, not yet started.
        tokenizer: The model's.
        observer: Told of every step and every end; None for nobody.
        max_num_queued_requests: Most sequences that wait, preempted ones included (a request with `n` = 3
            counts three times); a request that would make it more is refused.
        policy: `fcfs` or `priority`.
        enable_prefix_caching: Reuse KV blocks of equal beginnings.
        enable_chunked_prefill: Split long prompts over several steps.
        long_prefill_token_threshold: Most tokens of one prompt in one step; 0 for no limit but the step's.
        async_scheduling: Plan one step ahead of the device.
        grammar_compile_timeout_s: Seconds that compiling one structured output may take.
        make_grammar_compiler: Instead of xgrammar's: given the tokenizer and the model's vocabulary size.
        seed: Of the seeds drawn for requests that bring none.
        num_tokenizer_threads: Threads that encode prompts; one more encodes those above 64 K characters.
        loop_lag_interval_s: Seconds between two measurements of the event loop's lateness.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        tokenizer: Tokenizer,
        observer: Observer | None = None,
        max_num_queued_requests: int = 2048,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        async_scheduling: bool = True,
        grammar_compile_timeout_s: float = 10.0,
        make_grammar_compiler: Callable[[Tokenizer, int], GrammarCompiler] | None = None,
        seed: int = 0,
        num_tokenizer_threads: int = 2,
        loop_lag_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._observer: Observer = NullObserver() if observer is None else observer
        self._max_num_queued_requests = max_num_queued_requests
        self._policy = policy
        self._enable_prefix_caching = enable_prefix_caching
        self._enable_chunked_prefill = enable_chunked_prefill
        self._long_prefill_token_threshold = long_prefill_token_threshold
        self._async_scheduling = async_scheduling
        self._make_grammar_compiler = make_grammar_compiler or partial(
            XGrammarCompiler, timeout_s=grammar_compile_timeout_s
        )
        self._seeds = random.Random(seed)
        self._num_tokenizer_threads = num_tokenizer_threads
        self._loop_lag_interval_s = loop_lag_interval_s
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
        )
        self._info = info
        self._admission = Admission(
            tokenizer=self._tokenizer,
            vocab_size=info.vocab_size,
            max_sequence_len=scheduler.max_sequence_len,
            check_admissible=scheduler.check_admissible,
        )
        self._pipeline = Pipeline(
            executor=self._executor,
            admission=self._admission,
            scheduler=scheduler,
            detokenizer=Detokenizer(self._tokenizer),
            grammars=GrammarCache(
                self._make_grammar_compiler(self._tokenizer, info.vocab_size),
                # They are compiled one by one, so most of what may wait should wait for something else.
                max_pending=max(32, self._max_num_queued_requests // 8),
            ),
            observer=self._observer,
            clock=self._clock,
            max_unapplied=info.max_unapplied,
            requests_capacity=max(1, self._max_num_queued_requests),
            num_tokenizer_threads=self._num_tokenizer_threads,
            loop_lag_interval_s=self._loop_lag_interval_s,
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
            scheduler.max_sequence_len,
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
        pipeline.end_all(error, reason)
        try:
            await self._executor.stop()
        except Exception:
            logger.exception("the executor did not stop cleanly")
        try:
            await pipeline.close()
        finally:
            self._stopped.set()

    # ---- requests --------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Take a request; from here on its sink hears of it. Returns at once.

        Raises:
            NotReady: The engine is loading, draining or stopped.
            EngineStopped: The engine has just failed.
            Overloaded: Too many sequences wait already.
            InvalidRequest: It asks for more sequences than may ever wait, or a request of that id is in the
                engine.
        """
        self.check_room(request.sampling.n)
        try:
            pipeline = self._accepting_pipeline()
            if request.request_id in pipeline:
                raise InvalidRequest(f"a request with id {request.request_id!r} is being served")
            seed = request.sampling.seed
            if seed is None:
                seed = self._seeds.getrandbits(63)
            try:
                pipeline.submit(ActiveRequest(request, sink, seed=seed))
            except ChannelClosed as closed:
                raise EngineStopped("the server failed and is stopping") from closed
        except AsyncserveError as error:
            self._observer.request_rejected(error)
            raise

    def check_room(self, num_sequences: int) -> None:
        """Refuse a call that the queue has no room for; requests submitted at once after it all find room.

        Args:
            num_sequences: Of all its requests together.

        Raises:
            NotReady: The engine is loading, draining or stopped.
            Overloaded: Too many sequences wait already.
            InvalidRequest: They are more than may ever wait.
        """
        try:
            pipeline = self._accepting_pipeline()
            bound = self._max_num_queued_requests
            if num_sequences > bound:
                raise InvalidRequest(
                    f"{num_sequences} sequences are asked for at once; this server lets at most {bound} wait"
                )
            num_queued = pipeline.num_queued
            if num_queued + num_sequences > bound:
                raise Overloaded(
                    f"{num_queued} sequences are waiting, {num_sequences} more are asked for, and this server"
                    f" lets at most {bound} wait; try again later.",
                    retry_after_s=RETRY_AFTER_S,
                )
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
        if isinstance(sink, _IteratorSink):
            sink.end()

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
