"""What becomes of a client that reads more slowly than its answer is made.

Takes, from time to time, how much of it is unsent and how much waits, and says what to do: wait, for outputs
merge meanwhile; let its request rest, so that others get its place on the device; or give it up. Pure; knows
no transport and no engine.
"""

import enum

PAUSE_AFTER_S = 1.0
"""A client that has read nothing for so long has its request paused."""
PAUSE_TOKENS = 512
"""So does one for which so many tokens wait, if it reads on: more would only fill memory."""
MAX_TOKENS = 16_384
"""A client for which so many wait all the same is given up."""
MAX_STALLS = 10
"""So is one that reads, but has been behind for so many times as long as it may read nothing at all."""


class Verdict(enum.Enum):
    """What is to be done about a client that is behind."""

    WAIT = enum.auto()
    PAUSE = enum.auto()
    GIVE_UP = enum.auto()


class SlowReader:
    """A client that is behind, from when it fell behind.

    Args:
        unsent_bytes: What is written and not read.
        now_s: Monotonic time.
        stall_timeout_s: Seconds without progress after which it is given up.
    """

    def __init__(self, unsent_bytes: int, now_s: float, *, stall_timeout_s: float) -> None:
        self._unsent_bytes = unsent_bytes
        self._began_s = self._progress_s = now_s
        self._stall_timeout_s = stall_timeout_s

    def verdict(self, unsent_bytes: int, num_waiting: int, now_s: float) -> Verdict:
        """Say what is to be done now.

        Args:
            unsent_bytes: What is written and not read.
            num_waiting: Tokens that are not written either.
        """
        if unsent_bytes < self._unsent_bytes:
            self._unsent_bytes = unsent_bytes
            self._progress_s = now_s
        if (
            now_s - self._progress_s >= self._stall_timeout_s
            or now_s - self._began_s >= MAX_STALLS * self._stall_timeout_s
            or num_waiting > MAX_TOKENS
        ):
            return Verdict.GIVE_UP
        if now_s - self._progress_s >= PAUSE_AFTER_S or num_waiting >= PAUSE_TOKENS:
            return Verdict.PAUSE
        return Verdict.WAIT
