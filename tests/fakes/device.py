"""A device that works behind the caller's back, as a GPU does, without one.

`copy_out` gives host tensors that stay zero until the event is reached, which happens when the test calls
`finish`; `host_buffer` memory is handed out as on a GPU. So code written for asynchronous devices (waiter
thread, packed copies, rotation of buffers) is run, and a result read too early is seen. With `late_copies`
the larger copies between host and device are done when something waits for them and no earlier, so that who
fails to wait meets what was there before.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from asyncserve.gpu.device import Event, HostCopy, MemoryInfo


class FakeEvent:
    """Reached when the device gets there; counts as one second after the event before it."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.reached = threading.Event()
        self.num_waits = 0

    def wait(self) -> None:
        """Block until reached."""
        self.num_waits += 1
        self.reached.wait()

    def seconds_since(self, earlier: Event) -> float:
        """Return the distance in events; both must be reached, as CUDA demands."""
        assert isinstance(earlier, FakeEvent)
        assert self.reached.is_set()
        assert earlier.reached.is_set()
        return float(self.order - earlier.order)


class _Transfer(NamedTuple):
    """Copies that are queued: (target, source) each."""

    event: FakeEvent
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    after: Sequence[Event]


PLENTY = MemoryInfo(free_bytes=80 * 2**30, total_bytes=100 * 2**30)


class FakeDevice:
    """An asynchronous device whose tensors live on the CPU.

    Args:
        holds: Whether events are reached only when `finish` is called; else at once.
        late_copies: Whether `copy_to_host` and `copy_from_host` wait to be waited for.
        memory: What `memory` returns.
        has_fast_bfloat16: Whether it says so.
    """

    is_async = True

    def __init__(
        self,
        *,
        holds: bool = False,
        late_copies: bool = False,
        memory: MemoryInfo = PLENTY,
        has_fast_bfloat16: bool = True,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "fake"
        self.holds = holds
        self.has_fast_bfloat16 = has_fast_bfloat16
        self.events: list[FakeEvent] = []
        self.host_buffers: list[torch.Tensor] = []
        self._memory = memory
        self._copies: list[tuple[FakeEvent, torch.Tensor, torch.Tensor]] = []
        self.waited_for: list[Event] = []
        """What the main stream or a copy waited for."""
        self._late_copies = late_copies
        self._to_host: deque[_Transfer] = deque()
        self._from_host: deque[_Transfer] = deque()

    def activate(self) -> None:
        """Do nothing."""

    def memory(self) -> MemoryInfo:
        """Return what the test said."""
        return self._memory

    def reset_peak(self) -> None:
        """Do nothing."""

    def peak_bytes(self) -> int:
        """Return 0."""
        return 0

    def allocated_bytes(self) -> int:
        """Return 0."""
        return 0

    def empty_cache(self) -> None:
        """Do nothing."""

    def record_event(self) -> Event:
        """Return an event, reached at once unless the device holds."""
        event = FakeEvent(len(self.events))
        self.events.append(event)
        if not self.holds:
            event.reached.set()
        return event

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return memory, and remember it."""
        self.host_buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.host_buffers[-1]

    def copy_out(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Return tensors that are filled when the event is reached."""
        copies = [torch.zeros_like(source) for source in sources]
        event = FakeEvent(len(self.events))
        self.events.append(event)
        self._copies += [(event, copy, source) for copy, source in zip(copies, sources, strict=True)]
        if not self.holds:
            self.finish()
        return copies, event

    def copy_to_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Queue copies to the host."""
        return self._queue(self._to_host, [(copy.host, copy.device) for copy in copies], after)

    def copy_from_host(self, copies: Sequence[HostCopy], after: Sequence[Event]) -> Event:
        """Queue copies from the host."""
        return self._queue(self._from_host, [(copy.device, copy.host) for copy in copies], after)

    def wait_for(self, event: Event) -> None:
        """Do the copies that the event is the end of, those queued before them and what they wait for."""
        self.waited_for.append(event)
        for queue in (self._to_host, self._from_host):
            while any(transfer.event is event for transfer in queue):
                first = queue[0]
                for earlier in first.after:
                    self.wait_for(earlier)
                if queue and queue[0] is first:
                    del queue[0]
                    for target, source in first.copies:
                        target.copy_(source)
                    first.event.reached.set()

    @property
    def num_pending_copies(self) -> int:
        """Calls whose copies are not done."""
        return len(self._to_host) + len(self._from_host)

    def pending_copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the copies that are not done, as (target, source)."""
        return [copy for queue in (self._to_host, self._from_host) for each in queue for copy in each.copies]

    def _queue(
        self,
        queue: "deque[_Transfer]",
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Event],
    ) -> Event:
        event = FakeEvent(len(self.events))
        self.events.append(event)
        queue.append(_Transfer(event, copies, after))
        if not self._late_copies:
            self.wait_for(event)
        return event

    def graph_pool(self) -> object:
        """Return nothing."""
        return None

    def capture(
        self, launch: Callable[[], Sequence[torch.Tensor]], pool: object
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """Run the function, and again at each replay, into the tensors that it returned first."""
        outputs = launch()

        def replay() -> None:
            for output, fresh in zip(outputs, launch(), strict=True):
                output.copy_(fresh)

        return replay, outputs

    def finish(self) -> None:
        """Let the device get to the end of what was queued."""
        for _, copy, source in self._copies:
            copy.copy_(source)
        self._copies.clear()
        for queue in (self._to_host, self._from_host):
            while queue:
                self.wait_for(queue[-1].event)
        for event in self.events:
            event.reached.set()

    def synchronize(self) -> None:
        """Finish everything."""
        self.finish()
