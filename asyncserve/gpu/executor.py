"""The executor: one thread that owns the device, fed through a first-in first-out inbox.

Takes `StepPlan`s from the event loop and gives `StepOutput`s through futures; everything that touches the
device (startup included) runs on its thread, and so does the capturing of graphs while no step waits. The
border where errors of torch become errors of ours. Knows no scheduling and no request.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from asyncserve.errors import (
    AsyncserveError,
    EngineStopped,
    InvariantError,
    NotReady,
    OutOfDeviceMemory,
    StartupError,
)
from asyncserve.gpu.completion import CompletionQueue, call_on_loop, step_failed
from asyncserve.gpu.runner import ModelRunner
from asyncserve.step import ExecutorInfo, StepOutput, StepPlan

logger = logging.getLogger(__name__)

_IDLE_AFTER_S = 0.05
_CAPTURE_PAUSE_S = 1.0
"""Time that steps go first after a capture, for each holds up the next step for tens of milliseconds."""

_Job = tuple[StepPlan, "asyncio.Future[StepOutput]"]


class ThreadExecutor:
    """An `Executor` whose device is served by a thread of this process.

    Args:
        start_runner: Brings the device up; called once, on the device thread.
    """

    def __init__(self, start_runner: Callable[[], tuple[ModelRunner, ExecutorInfo]]) -> None:
        self._start_runner = start_runner
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._is_started = False
        self._graphs_pending = 0
        self._next_capture_s = 0.0
        self._is_stopping = False

    async def start(self) -> ExecutorInfo:
        """Start the thread, run the startup there and return what the device offers.

        Raises:
            StartupError: With what to change.
            EngineStopped: `stop` was called before.
        """
        if self._is_stopping:
            raise EngineStopped("the executor was stopped")
        if self._thread is not None:
            raise InvariantError("the executor is started twice")
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        started: asyncio.Future[ExecutorInfo] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._serve, args=(self._loop, started, self._ended), name="asyncserve-device", daemon=True
        )
        self._thread.start()
        info = await started
        self._is_started = True
        return info

    def submit(self, plan: StepPlan) -> "asyncio.Future[StepOutput]":
        """Queue one step and return its future at once; steps run and finish in the order submitted.

        The future raises `StepFailed` if the step raised, `EngineStopped` if the executor stopped before
        the step ran.

        Raises:
            NotReady: `start` has not returned yet.
        """
        if self._loop is None or not self._is_started:
            raise NotReady("the executor is not started")
        future: asyncio.Future[StepOutput] = self._loop.create_future()
        if self._is_stopping:
            future.set_exception(EngineStopped("the executor was stopped"))
        else:
            self._inbox.put((plan, future))
        return future

    @property
    def graphs_pending(self) -> int:
        """CUDA graphs that are captured when no step waits."""
        return self._graphs_pending

    async def stop(self) -> None:
        """Finish the step that runs, fail the ones that wait, end the thread. Idempotent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._inbox.put(None)
        if self._ended is not None:
            # Shielded: a caller that gives up waiting must not cancel the future others wait for.
            await asyncio.shield(self._ended)
        if self._thread is not None:
            # Its frame holds the model until it is really gone.
            try:
                await asyncio.to_thread(self._thread.join)
            except RuntimeError:  # the interpreter is ending and starts no thread
                self._thread.join()

    def _serve(
        self,
        loop: asyncio.AbstractEventLoop,
        started: "asyncio.Future[ExecutorInfo]",
        ended: "asyncio.Future[None]",
    ) -> None:
        """Be the device thread, from startup to the end."""
        try:
            runner, info = self._start_runner()
        except Exception as error:  # the top of a thread
            failure = _startup_error(error)
            call_on_loop(loop, lambda: None if started.done() else started.set_exception(failure))
        else:
            completions = CompletionQueue(runner.device, loop)
            self._graphs_pending = runner.graphs_pending
            call_on_loop(loop, lambda: None if started.done() else started.set_result(info))
            self._run_steps(runner, completions)
            self._fail_waiting(completions)
            completions.close()
        call_on_loop(loop, lambda: None if ended.done() else ended.set_result(None))

    def _run_steps(self, runner: ModelRunner, completions: CompletionQueue) -> None:
        while not self._is_stopping and (job := self._next_job(runner)) is not None:
            plan, future = job
            if self._is_stopping:
                completions.deliver(_stopped_before(plan), future)
                return
            try:
                completions.deliver(runner.run(plan), future)
            except Exception as error:  # the top of a thread: any failure is this step's alone
                logger.exception("step %d failed", plan.step_id)
                completions.deliver(step_failed(plan.step_id, error), future)

    def _next_job(self, runner: ModelRunner) -> _Job | None:
        """Return the next step, and capture graphs while there is none."""
        # Slots are given back by the next plan, so an idle server is one that gets none for a while.
        patience_s = _IDLE_AFTER_S if runner.num_occupied else 0.0
        while runner.graphs_pending and not self._is_stopping:
            if time.monotonic() >= self._next_capture_s:
                patience_s = 0.0
            try:
                return self._inbox.get(timeout=patience_s) if patience_s else self._inbox.get_nowait()
            except Empty:
                runner.capture_next()
                self._graphs_pending = runner.graphs_pending
                self._next_capture_s = time.monotonic() + _CAPTURE_PAUSE_S
                patience_s = 0.0
        return self._inbox.get()

    def _fail_waiting(self, completions: CompletionQueue) -> None:
        while True:
            try:
                job = self._inbox.get_nowait()
            except Empty:
                return
            if job is not None:
                plan, future = job
                completions.deliver(_stopped_before(plan), future)


def _stopped_before(plan: StepPlan) -> EngineStopped:
    return EngineStopped(f"the executor was stopped before step {plan.step_id} ran")


def _startup_error(error: Exception) -> AsyncserveError:
    """Translate what startup raised, keeping it as `__cause__`."""
    if isinstance(error, AsyncserveError):
        return error
    is_out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
    translated: AsyncserveError
    if is_out_of_memory:
        translated = OutOfDeviceMemory(
            f"the device ran out of memory while starting ({error}); lower --gpu-memory-utilization, "
            "--max-num-batched-tokens, --max-num-seqs or --max-model-len",
            needed_bytes=0,
            free_bytes=0,
        )
    else:
        translated = StartupError(f"startup failed: {type(error).__name__}: {error}")
    translated.__cause__ = error
    return translated
