"""How late an event loop runs its timers: a client whose loop is late takes late times.

A timer asks to be called every few milliseconds and notes by how much it was missed. It costs the loop about
a thousandth of its time.
"""

import asyncio
import time
from array import array

INTERVAL_S = 0.01


class LoopLag:
    """Watches the running loop from `start` to `stop`.

    Attributes:
        late_s: By how many seconds each call came late.
    """

    def __init__(self) -> None:
        self.late_s: array[float] = array("d")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; the loop must be running."""
        self._wait(asyncio.get_running_loop())

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        # uvloop counts timers in whole milliseconds from the turn's beginning, hence the clock of our own.
        self._timer = loop.call_later(INTERVAL_S, self._note, loop, time.perf_counter() + INTERVAL_S)

    def _note(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.late_s.append(max(time.perf_counter() - due_s, 0.0))
        self._wait(loop)
