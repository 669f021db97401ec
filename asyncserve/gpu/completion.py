"""From the end of a step on the device to a result on the event loop.

A `PendingOutput` is a launched step whose results are on their way to the host: it keeps the device tensors
alive until the copy is done and then builds the `StepOutput`. A `CompletionQueue` waits for pending outputs
in order and resolves their futures with one wake-up of the loop per step: on a GPU from a thread that sleeps
on the step's event, on a CPU at once, because there the step is done when it is launched.
Knows no plan's content and no model.
"""

import asyncio
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from asyncserve.errors import StepFailed
from asyncserve.gpu.device import Device, Event
from asyncserve.step import StepOutput


class PendingOutput:
    """One launched step.

    Args:
        step_id: Of its plan.
        event: Reached when everything `finish` reads is on the host.
        sources: Device tensors that must outlive their copy to the host.
        finish: Makes the output from what is on the host; called once, after the event.
    """

    __slots__ = ("_event", "_finish", "_sources", "step_id")

    def __init__(
        self,
        *,
        step_id: int,
        event: Event,
        sources: Sequence[torch.Tensor],
        finish: Callable[[], StepOutput],
    ) -> None:
        self.step_id = step_id
        self._event = event
        self._sources: Sequence[torch.Tensor] = sources
        self._finish = finish

    def wait(self) -> StepOutput:
        """Block until the step is done and return what it gave."""
        self._event.wait()
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
        self._inbox: SimpleQueue[_Delivery | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if device.is_async:
            self._thread = threading.Thread(target=self._run, name="asyncserve-completion", daemon=True)
            self._thread.start()

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
        if isinstance(result, PendingOutput):
            try:
                output = result.wait()
            except Exception as error:  # the top of a thread; a kernel's error surfaces here
                result = step_failed(result.step_id, error)
            else:
                call_on_loop(self._loop, lambda: None if future.done() else future.set_result(output))
                return
        failure = result
        call_on_loop(self._loop, lambda: None if future.done() else future.set_exception(failure))


def step_failed(step_id: int, error: Exception) -> StepFailed:
    """Translate what torch (or anything below) raised in a step, keeping it as `__cause__`."""
    lines = str(error).strip().splitlines()
    failed = StepFailed(f"{type(error).__name__}: {lines[0] if lines else ''}", step_id=step_id)
    failed.__cause__ = error
    # Its frames hold the step's activations, which must not live as long as the error is looked at.
    traceback.clear_frames(error.__traceback__)
    return failed


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Run a callback on the loop from any thread; nothing if the loop is closed, for then nobody waits."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
