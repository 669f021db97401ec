"""When the time of requests is over: one timer for all of them.

Takes things that have a deadline and may end before it; calls back with each that has not. Costs nothing
while nothing has a deadline, and one timer otherwise. Does not know what a request is.
"""

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

MIN_ENTRIES = 64
"""Below so many entries nobody looks for those that have ended."""


class Ending(Protocol):
    """What may end before its deadline."""

    has_ended: bool


T = TypeVar("T", bound=Ending)


class Deadlines(Generic[T]):
    """The deadlines of what has not ended.

    Args:
        clock: Monotonic seconds.
        on_passed: Called, on the loop, with each thing whose deadline passes before it has ended.
    """

    def __init__(self, clock: Callable[[], float], on_passed: Callable[[T], None]) -> None:
        self._clock = clock
        self._on_passed = on_passed
        self._heap: list[tuple[float, int, T]] = []
        self._serials = count()
        self._num_after_sweep = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_s: float, thing: T) -> None:
        """Call back about `thing` at its deadline, never from within this call."""
        if len(self._heap) >= max(MIN_ENTRIES, 2 * self._num_after_sweep):
            # Most requests end long before their time is over.
            self._heap = [entry for entry in self._heap if not entry[2].has_ended]
            heapify(self._heap)
            self._num_after_sweep = len(self._heap)
        heappush(self._heap, (deadline_s, next(self._serials), thing))
        if self._heap[0][2] is thing:
            self._arm()

    def close(self) -> None:
        """Call back about nothing more."""
        self._heap.clear()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            delay_s = max(0.0, self._heap[0][0] - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._clock()
        try:
            while self._heap and (self._heap[0][2].has_ended or self._heap[0][0] <= now_s):
                _, _, thing = heappop(self._heap)
                if not thing.has_ended:
                    self._on_passed(thing)
        finally:  # whatever that raised is one thing's, and the others have deadlines, too
            self._arm()
