"""From the end of a step on the device to a result on the event loop.

A `PendingOutput` is a launched step whose results are on their way to the host: it keeps the device tensors
alive until the copy is done and then builds the `StepOutput`. A `CompletionQueue` waits for pending outputs
in order and resolves their futures with one wake-up of the loop per step: on a GPU from a thread that sleeps
on the step's event, on a CPU at once, because there the step is done when it is launched. After a step that
lost the device all further ones get the same `DeviceLost`. Knows no plan's content and no model.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from asyncserve.errors import DeviceLost
from asyncserve.gpu.device import Device, Event
from asyncserve.gpu.device_errors import step_error
from asyncserve.step import StepOutput, StepTimes

logger = logging.getLogger(__name__)


class PendingOutput:
    """One launched step.

    Args:
        step_id: Of its plan.
        event: Reached when everything `finish` reads is on the host.
        sources: Device tensors that must outlive their copy to the host.
        finish: Makes the output from what is on the host; called once, after the event.
        times: Of the step; when it was waited for is filled in.
    """

    __slots__ = ("_event", "_finish", "_sources", "_times", "step_id")

    def __init__(
        self,
        *,
        step_id: int,
        event: Event,
        sources: Sequence[torch.Tensor],
        finish: Callable[[], StepOutput],
        times: StepTimes | None = None,
    ) -> None:
        self.step_id = step_id
        self._event = event
        self._sources: Sequence[torch.Tensor] = sources
        self._finish = finish
        self._times = times or StepTimes()

    def wait(self) -> StepOutput:
        """Block until the step is done and return what it gave."""
        self._times.wait_begin_s = time.monotonic()
        self._event.wait()
        self._times.done_s = time.monotonic()
        self._sources = ()
        return self._finish()


_Delivery = tuple[PendingOutput | Exception, "asyncio.Future[StepOutput]"]


class CompletionQueue:
    """Resolves the futures of launched steps, in order.

    Args:
        device: Decides whether a waiting thread is needed.
        loop: The event loop the futures belong to.
    """

    def __init__(self, device: Device, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lost: DeviceLost | None = None
        self._inbox: SimpleQueue[_Delivery | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if device.is_async:
            self._thread = threading.Thread(target=self._run, name="asyncserve-completion", daemon=True)
            self._thread.start()

    @property
    def lost(self) -> DeviceLost | None:
        """What the device was lost by, once a step has shown it."""
        return self._lost

    def deliver(self, result: PendingOutput | Exception, future: "asyncio.Future[StepOutput]") -> None:
        """Resolve `future` when the step is done, or fail it when the steps before it are.

        Called on the device thread; returns at once on a GPU.
        """
        if self._thread is None:
            self._resolve(result, future)
        else:
            self._inbox.put((result, future))

    def close(self) -> None:
        """Deliver everything handed over so far, then end. Blocks; called on the device thread."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            self._resolve(*item)

    def _resolve(self, result: PendingOutput | Exception, future: "asyncio.Future[StepOutput]") -> None:
        failure: Exception
        if self._lost is not None:
            failure = self._lost
        elif isinstance(result, PendingOutput):
            try:
                output = result.wait()
            except Exception as error:  # the top of a thread; a kernel's error surfaces here
                failure = step_error(result.step_id, error)
            except BaseException as error:
                # Nothing that a step raises; but a thread that ended here would leave all steps unanswered.
                logger.critical("waiting for step %d ended", result.step_id, exc_info=True)
                failure = DeviceLost(f"the thread that waits for steps was ended by {error!r}")
            else:
                call_on_loop(self._loop, lambda: None if future.done() else future.set_result(output))
                return
        else:
            failure = result
        if isinstance(failure, DeviceLost):
            self._lost = failure
        call_on_loop(self._loop, lambda: None if future.done() else future.set_exception(failure))


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Run a callback on the loop from any thread; nothing if the loop is closed, for then nobody waits."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
