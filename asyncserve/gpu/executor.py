"""The executor: one thread that owns the device, fed through a first-in first-out inbox.

Takes `StepPlan`s from the event loop and gives `StepOutput`s through futures; everything that touches the
device (startup included) runs on its thread, and so does the capturing of graphs while no step waits. The
border where errors of torch become errors of ours. Knows no scheduling and no request.

A restart is a new thread with a new runner. A thread that does not come back from its step is left behind
with the memory it holds, on a CPU; a GPU that does not answer, or whose CUDA context an error has made
useless, can only be opened again by a new process, and `restart` says so.
"""

import asyncio
import gc
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from asyncserve.errors import (
    AsyncserveError,
    DeviceLost,
    EngineStopped,
    InvariantError,
    NotReady,
    OutOfDeviceMemory,
    StartupError,
)
from asyncserve.futures import ignore_outcome
from asyncserve.gpu.completion import CompletionQueue, call_on_loop
from asyncserve.gpu.device_errors import is_out_of_memory, is_sticky, step_error
from asyncserve.gpu.runner import ModelRunner
from asyncserve.step import ExecutorInfo, StepOutput, StepPlan

logger = logging.getLogger(__name__)

_IDLE_AFTER_S = 0.05
_CAPTURE_PAUSE_S = 1.0
"""Time that steps go first after a capture, for each holds up the next step for tens of milliseconds."""

_Job = tuple[StepPlan, "asyncio.Future[StepOutput]"]
StartRunner = Callable[[], tuple[ModelRunner, ExecutorInfo]]


class ThreadExecutor:
    """An `Executor` whose device is served by a thread of this process.

    Args:
        start_runner: Brings the device up; called on the device thread, once and again for each restart.
        left_behind_after_s: How long a lost device's thread has to end before it is left behind.
    """

    def __init__(self, start_runner: StartRunner, *, left_behind_after_s: float = 5.0) -> None:
        self._start_runner = start_runner
        self._left_behind_after_s = left_behind_after_s
        self._device: _DeviceThread | None = None
        self._is_stopping = False

    async def start(self) -> ExecutorInfo:
        """Start the thread, run the startup there and return what the device offers.

        Raises:
            StartupError: With what to change.
            EngineStopped: `stop` was called before.
        """
        if self._is_stopping:
            raise EngineStopped("the executor was stopped")
        if self._device is not None:
            raise InvariantError("the executor is started twice")
        self._device = _DeviceThread(self._start_runner)
        return await self._device.open()

    def submit(self, plan: StepPlan) -> "asyncio.Future[StepOutput]":
        """Queue one step and return its future at once; steps run and finish in the order submitted.

        The future raises `StepFailed` if the step raised, `DeviceLost` if the device did not survive it or an
        earlier one, `EngineStopped` if the executor stopped before the step ran.

        Raises:
            NotReady: `start` has not returned yet.
        """
        if self._device is None or not self._device.is_open:
            raise NotReady("the executor is not started")
        return self._device.submit(plan)

    @property
    def graphs_pending(self) -> int:
        """CUDA graphs that are captured when no step waits."""
        return 0 if self._device is None else self._device.graphs_pending

    async def restart(self) -> ExecutorInfo:
        """Open the device anew, with a new thread; steps that are not finished raise `DeviceLost`.

        Raises:
            DeviceLost: A GPU does not answer, or its context is of no more use to this process.
            StartupError: With what to change.
            EngineStopped: `stop` was called.
        """
        old = self._device
        if old is None or not old.is_open:
            raise NotReady("the executor is not started")
        old.abandon()
        if old.is_gpu and old.lost is not None:
            raise DeviceLost("the error has made the GPU useless to this process; only a new one can use it")
        if not await old.wait_ended(self._left_behind_after_s):
            if old.is_gpu:
                raise DeviceLost("the GPU does not answer; only a new process may be able to use it")
            logger.error("the device thread does not answer: it is left behind, with the memory it holds")
        if self._is_stopping:
            raise EngineStopped("the executor was stopped")
        self._device = _DeviceThread(self._start_runner, frees_memory=True)
        del old  # the last that holds anything of it
        return await self._device.open()

    async def stop(self) -> None:
        """Finish the step that runs, fail the ones that wait, end the thread. Idempotent."""
        self._is_stopping = True
        device = self._device
        if device is None:
            return
        device.stop()
        # One that was given up on may never end.
        await device.wait_ended(self._left_behind_after_s if device.is_abandoned else None)


class _DeviceThread:
    """The thread of one opening of the device, from its startup to its end.

    All but `_serve` and what that calls is for the loop's thread.

    Args:
        start_runner: Brings the device up.
        frees_memory: Whether an earlier opening has left something for the garbage collector.

    Attributes:
        is_open: Steps can be submitted.
        is_gpu: It serves a device that works behind the caller's back.
        is_abandoned: Nobody waits for its answers any more.
        graphs_pending: CUDA graphs that are still to be captured.
    """

    def __init__(self, start_runner: StartRunner, *, frees_memory: bool = False) -> None:
        self._start_runner = start_runner
        self._frees_memory = frees_memory
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[ExecutorInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._unanswered: deque[asyncio.Future[StepOutput]] = deque()
        self._is_stopping = False
        self._next_capture_s = 0.0
        self.is_open = False
        self.is_gpu = False
        self.is_abandoned = False
        self._lost: DeviceLost | None = None  # seen by the thread itself
        self._completions: CompletionQueue | None = None
        self.graphs_pending = 0
        self._thread = threading.Thread(target=self._serve, name="asyncserve-device", daemon=True)

    @property
    def lost(self) -> DeviceLost | None:
        """What showed that the device is lost, if it is: a step's launch, or the wait for its results."""
        if self._lost is None and self._completions is not None:
            return self._completions.lost
        return self._lost

    async def open(self) -> ExecutorInfo:
        """Start the thread and return what the device offers."""
        self._thread.start()
        info = await self._started
        self.is_open = True
        return info

    def submit(self, plan: StepPlan) -> "asyncio.Future[StepOutput]":
        """Queue one step, or fail it at once if the thread is ending."""
        future: asyncio.Future[StepOutput] = self._loop.create_future()
        if self._is_stopping or self._ended.done():
            future.set_exception(self.lost or _stopped_before(plan))
            return future
        while self._unanswered and self._unanswered[0].done():
            del self._unanswered[0]
        self._unanswered.append(future)
        self._inbox.put((plan, future))
        return future

    def stop(self) -> None:
        """Let the thread end after the step it is in. Idempotent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._inbox.put(None)

    def abandon(self) -> None:
        """Let the thread end, and answer for it all that it has not answered."""
        self.is_abandoned = True
        self.stop()
        lost = self.lost or DeviceLost("the device was given up before the step ended")
        for future in self._unanswered:
            if not future.done():
                future.set_exception(lost)
                future.add_done_callback(ignore_outcome)
        self._unanswered.clear()

    async def wait_ended(self, timeout_s: float | None) -> bool:
        """Return whether the thread has ended, as soon as it has or when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                # Shielded: a caller that gives up waiting must not cancel the future others wait for.
                await asyncio.shield(self._ended)
        except TimeoutError:
            return False
        # Its frame holds the model until it is really gone.
        try:
            await asyncio.to_thread(self._thread.join)
        except RuntimeError:  # the interpreter is ending and starts no thread
            self._thread.join()
        return True

    # On the thread

    def _serve(self) -> None:
        """Be the device thread."""
        try:
            if self._frees_memory:
                _collect_garbage()
            runner, info = self._start_runner()
            completions = self._completions = CompletionQueue(runner.device, self._loop)
        except BaseException as error:  # the top of a thread
            failure = _startup_error(error)
            self._call_on_loop(lambda: None if self._started.done() else self._started.set_exception(failure))
        else:
            self.is_gpu = runner.device.is_async
            self.graphs_pending = runner.graphs_pending
            self._call_on_loop(lambda: None if self._started.done() else self._started.set_result(info))
            try:
                self._run_steps(runner, completions)
            except BaseException as error:  # the top of a thread: no end of it may go unnoticed
                logger.critical("the device thread has ended", exc_info=True)
                self._lost = _thread_ended(error)
                # Its frames hold the runner, which must go before another one comes; so does this one.
                traceback.clear_frames(error.__traceback__)
            del runner
            completions.close()
        self._call_on_loop(self._note_ended)

    def _run_steps(self, runner: ModelRunner, completions: CompletionQueue) -> None:
        while not self._is_stopping and (job := self._next_job(runner)) is not None:
            plan, future = job
            if self._is_stopping:
                completions.deliver(_stopped_before(plan), future)
                return
            if (lost := self.lost) is not None:
                completions.deliver(lost, future)
                continue
            try:
                completions.deliver(runner.run(plan), future)
            except Exception as error:  # any failure is this step's alone, unless it is the device's
                logger.exception("step %d failed", plan.step_id)
                failure = step_error(plan.step_id, error)
                if isinstance(failure, DeviceLost):
                    self._lost = failure
                completions.deliver(failure, future)
            except BaseException as error:
                completions.deliver(_thread_ended(error), future)
                raise

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
                self._capture_next(runner)
                self.graphs_pending = runner.graphs_pending
                self._next_capture_s = time.monotonic() + _CAPTURE_PAUSE_S
                patience_s = 0.0
        return self._inbox.get()

    def _capture_next(self, runner: ModelRunner) -> None:
        """Capture a graph; steps run without it, too, so that no failure of it is one of theirs."""
        try:
            runner.capture_next()
        except Exception as error:  # torch's errors and Triton's have no common base
            runner.give_up_capturing()
            if is_sticky(error):
                self._lost = DeviceLost(f"capturing a graph lost the device: {error}")
            else:
                logger.exception("a graph could not be captured; there will be no more of them")
            # Its frames hold what the capture allocated.
            traceback.clear_frames(error.__traceback__)

    def _call_on_loop(self, callback: Callable[[], object]) -> None:
        call_on_loop(self._loop, callback)

    # On the loop again

    def _note_ended(self) -> None:
        """Answer what the thread has left in its inbox; after this nothing is put there any more."""
        self._ended.set_result(None)
        while True:
            try:
                job = self._inbox.get_nowait()
            except Empty:
                return
            if job is not None and not job[1].done():
                job[1].set_exception(self.lost or _stopped_before(job[0]))


def _thread_ended(error: BaseException) -> DeviceLost:
    lost = DeviceLost(f"the device thread was ended by {error!r}")
    lost.__cause__ = error
    return lost


def _stopped_before(plan: StepPlan) -> EngineStopped:
    return EngineStopped(f"the executor was stopped before step {plan.step_id} ran")


def _collect_garbage() -> None:
    """Free what the device's last opening has left, though it was frozen out of the collector's sight."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()


def _startup_error(error: BaseException) -> AsyncserveError:
    """Translate what startup raised, keeping it as `__cause__`."""
    if isinstance(error, AsyncserveError):
        return error
    translated: AsyncserveError
    if is_out_of_memory(error):
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
