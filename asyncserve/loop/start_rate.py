"""How fast waiting sequences are started, and so how long a refused client should wait.

Takes what each step starts and tells, for what must be started before there is room, how many seconds that
will take at the rate of the last seconds. Clients that were refused shortly before are counted as standing
in front: they come back, too, and must not all come at once. Pure; the time is passed in.
"""

from collections import deque

from asyncserve.loop.queue_bounds import Load

WINDOW_S = 10.0
"""The rate is that of so many seconds."""
LEAST_S = 1.0
"""What a refused client waits at least: `Retry-After` knows whole seconds only."""
MOST_S = 60.0
"""What it waits at most, however slowly the queue moves: outputs may end earlier than expected."""


class _Second:
    """What was started within one second."""

    __slots__ = ("began_s", "num_sequences", "num_tokens")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.num_sequences = 0
        self.num_tokens = 0


class StartRate:
    """The rate at which sequences and their tokens leave the queue."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._last_start_s: float | None = None
        self._promised_until_s = 0.0

    def note(self, started: Load, now_s: float) -> None:
        """Note that a step starts so much."""
        self._last_start_s = now_s
        if not self._seconds or now_s - self._seconds[-1].began_s >= 1.0:
            self._forget(now_s)
            self._seconds.append(_Second(now_s))
        second = self._seconds[-1]
        second.num_sequences += started.num_sequences
        second.num_tokens += started.num_tokens

    def retry_after_s(self, excess: Load, asked: Load, now_s: float) -> float:
        """Return the seconds that a refused client should wait.

        Args:
            excess: What must be started before it finds room.
            asked: What it wants to add; the next one that is refused is told to come that much later.
        """
        self._forget(now_s)
        if not self._seconds:
            # Nothing was started for long: it may take as long again.
            idle_s = LEAST_S if self._last_start_s is None else now_s - self._last_start_s
            return min(MOST_S, max(LEAST_S, idle_s))
        measured_s = max(1.0, now_s - self._seconds[0].began_s)
        rates = Load(
            sum(second.num_sequences for second in self._seconds),
            sum(second.num_tokens for second in self._seconds),
        )
        promised_s = max(0.0, self._promised_until_s - now_s)
        wait_s = _time_s(excess, rates, measured_s) + promised_s
        # A promise for later than anyone is told to wait would only grow.
        added_s = min(MOST_S, promised_s + _time_s(asked, rates, measured_s))
        self._promised_until_s = now_s + added_s
        return min(MOST_S, max(LEAST_S, wait_s))

    def _forget(self, now_s: float) -> None:
        while self._seconds and now_s - self._seconds[0].began_s > WINDOW_S:
            self._seconds.popleft()


def _time_s(load: Load, started: Load, within_s: float) -> float:
    """Return how long starting `load` takes if `started` took `within_s`."""
    time_s = load.num_sequences * within_s / started.num_sequences if started.num_sequences else 0.0
    if load.num_tokens and started.num_tokens:
        time_s = max(time_s, load.num_tokens * within_s / started.num_tokens)
    return time_s
