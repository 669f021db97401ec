"""How often a lost device may be opened anew: a number of times within a window, then no more.

Takes the times of restarts, says whether there may be another. Pure; knows no device.
"""

from collections import deque

WINDOW_S = 3600.0
"""Seconds after which a restart counts no more."""


class RestartBudget:
    """Counts the restarts of one device.

    Args:
        limit: Most restarts within `WINDOW_S`; 0 for none at all.

    Attributes:
        num_restarts: So far, of the whole life.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times_s: deque[float] = deque()
        self.num_restarts = 0

    def spend(self, now_s: float) -> bool:
        """Take note of a restart; return whether it is allowed."""
        while self._times_s and now_s - self._times_s[0] > WINDOW_S:
            self._times_s.popleft()
        if len(self._times_s) >= self._limit:
            return False
        self._times_s.append(now_s)
        self.num_restarts += 1
        return True
