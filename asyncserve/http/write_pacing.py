"""When each stream's waiting events are written: at once, on a clock, or by a number of tokens.

A write to a socket costs the kernel several times what the event in it costs us, so many tokens a second
are cheaper in fewer writes. A stream that was written to under load *rests* for `JOIN_INTERVAL_S`, or longer
where so many rest that there would be more than `JOINED_WRITES_PER_S`: what comes meanwhile is kept, and goes
out in one write when its rest is over. Rests end in the order they began, in slices, by one timer; so the
writes of many streams spread over the interval. Below the load, and with `stream_interval`, nobody rests.
Knows no transport: what is due goes into an `Outbox`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from asyncserve.http.outbox import Outbox, PacedStream
from asyncserve.token_path import NEVER

JOIN_INTERVAL_S = 0.004
"""How long a stream rests at least after a write under load."""
JOINED_WRITES_PER_S = 64_000.0
"""Most writes under load, a third of a core: 256 streams rest for 4 ms, 1,024 for 16, 4,096 for 64. Without a
bound the writes of one step over many streams take longer than a rest, and nothing is ever joined."""
JOIN_ABOVE_PER_S = 50_000.0
"""Tokens a second from which streams rest: writing each by itself would take a quarter of a core."""
JOIN_BELOW_PER_S = 40_000.0
"""Tokens a second below which they no longer do."""
JUDGED_TOKENS = 512
"""After so many tokens the load is judged anew."""
EARLY_S = 0.0005
"""By so much a rest may end early: the loop's timers count in milliseconds."""
LEAST_DELAY_S = 0.001
WRITES_PER_SLICE = 16
"""Writes in one iteration of the loop: about 0.1 ms, beside what a step needs of it."""


class WritePacer:
    """The pace of all streams of a server.

    Args:
        clock: Monotonic seconds.
        stream_interval: Tokens of one write, whatever the load; None leaves it to the clock.
    """

    def __init__(self, *, clock: Callable[[], float], stream_interval: int | None = None) -> None:
        self.flush_len = stream_interval or 1
        """At how many waiting tokens a stream that does not rest writes."""
        self._clock = clock
        self._is_clocked = stream_interval is None
        self.outbox = Outbox(self.flush_len, self.note_writes)
        """Of all its streams."""
        self._joins = False
        self._num_tokens = 0
        self._judged_s = clock()
        self._resting: deque[tuple[float, PacedStream]] = deque()
        self.is_waking = False
        """Whether the loop will call it."""

    @property
    def joins(self) -> bool:
        """Whether a stream that is written to rests."""
        return self._joins

    def note_writes(self, streams: Sequence[PacedStream], num_tokens: int) -> None:
        """Let streams that have written rest, if they are to; others have got their `flush_len` already."""
        self._num_tokens += num_tokens
        if self._num_tokens >= JUDGED_TOKENS and self._is_clocked:
            self._judge_load()
        if not self._joins:
            return
        for stream in streams:
            if not stream.is_resting:
                stream.is_resting = True
                stream.flush_len = NEVER
                rest_s = max(JOIN_INTERVAL_S, len(self._resting) / JOINED_WRITES_PER_S)
                self._resting.append((self._clock() + rest_s, stream))
        if self._resting and not self.is_waking:
            self.is_waking = True
            asyncio.get_running_loop().call_later(JOIN_INTERVAL_S, self._wake)

    def _judge_load(self) -> None:
        now_s = self._clock()
        limit_per_s = JOIN_BELOW_PER_S if self._joins else JOIN_ABOVE_PER_S
        self._joins = self._num_tokens > limit_per_s * (now_s - self._judged_s)
        self._num_tokens = 0
        self._judged_s = now_s

    def _wake(self) -> None:
        """End the rests that are over, a slice of writes at a time."""
        resting = self._resting
        due_s = self._clock() + EARLY_S
        num_writes = 0
        while resting and resting[0][0] <= due_s and num_writes < WRITES_PER_SLICE:
            _, stream = resting.popleft()
            stream.is_resting = False
            num_writes += stream.end_rest()
        self.is_waking = bool(resting)
        if resting:
            delay_s = resting[0][0] - due_s
            loop = asyncio.get_running_loop()
            if delay_s <= 0:
                loop.call_soon(self._wake)
            else:
                loop.call_later(max(delay_s, LEAST_DELAY_S), self._wake)
        self.outbox.write()  # last: whatever becomes of it, the others are woken
