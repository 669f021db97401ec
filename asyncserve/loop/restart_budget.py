"""How often a lost device may be opened anew: as long as the losses are not the device's own fault.

Takes the times and numbers of losses, and which of them were found to be one request's fault; says whether
the device may be opened once more. Pure; knows no device.

Two bounds. Losses that no request explains are the device's: no more than a number of them within a window.
Those that are explained, or may be the fault of a request that has left, count no longer, or a client whose
requests lose the device would end the process.
But a device that loses whatever it computes makes a culprit of every request: so there are bounded losses
one after the other with no step between them that gave a token, however long they take.
"""

from collections import deque
from collections.abc import Set

WINDOW_S = 3600.0
"""Seconds after which a restart counts no more."""
LOSSES_OF_A_CULPRIT = 3
"""Losses it takes to find one: of a step of many, and of it alone, and again (once more if it hangs)."""


class RestartBudget:
    """Counts the restarts of one device.

    Args:
        limit: Most restarts within `WINDOW_S` that are nobody's fault; 0 for no restarts at all.
            `LOSSES_OF_A_CULPRIT` times as many may follow each other with no good step between them.

    Attributes:
        num_restarts: So far, of the whole life.
        num_explained: Losses that are explained, so far; each once, whatever number of requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._unexplained: deque[tuple[float, int]] = deque()
        """Time and number of the losses that count."""
        self._num_in_a_row = 0
        self.num_restarts = 0
        self.num_explained = 0

    def note_good(self) -> None:
        """Note that a step gave a token: the device works, for some at least."""
        self._num_in_a_row = 0

    def spend(self, now_s: float, number: int, explained: Set[int] = frozenset()) -> str | None:
        """Take note of a loss, and of the restart after it.

        Args:
            now_s: When it was lost.
            number: Of the loss.
            explained: Numbers of losses, this one perhaps among them, that were the fault of one request,
                which has ended.

        Returns:
            Why there may be no restart; None if there may.
        """
        num_before = len(self._unexplained)
        self._unexplained = deque(loss for loss in self._unexplained if loss[1] not in explained)
        self.num_explained += num_before - len(self._unexplained) + (number in explained)
        while self._unexplained and now_s - self._unexplained[0][0] > WINDOW_S:
            self._unexplained.popleft()
        if number not in explained and len(self._unexplained) >= self._limit:
            return f"it was opened anew as often as it may be within {WINDOW_S:.0f} s"
        if self._num_in_a_row >= self._limit * LOSSES_OF_A_CULPRIT:
            return f"it was opened anew {self._num_in_a_row} times, and no step went well in between"
        if number not in explained:
            self._unexplained.append((now_s, number))
        self._num_in_a_row += 1
        self.num_restarts += 1
        return None
