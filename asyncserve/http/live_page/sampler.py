"""One task that looks at the engine a few times a second, and whoever watches.

Takes a recorder, a callable that gives the engine's state, and one that gives what does not change; gives
each viewer a snapshot and then what is new since, as server-sent events. An event is made once, whatever the
number of viewers, and none while nobody watches: the task starts with the first viewer and ends with the
last. A viewer that missed an event gets a snapshot instead. Knows no HTTP.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from asyncserve.errors import Overloaded
from asyncserve.http.live_page.recorder import PipelineRecorder, SecondRecord, StepRecord, Totals
from asyncserve.http.sse import named_event
from asyncserve.observer import EngineStatistics

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
"""Between two events."""
MAX_VIEWERS = 64
"""More are refused: each costs a connection and a few writes a second."""
RETRY_AFTER_S = 10.0
MAX_FAILED_LOOKS = 40
"""After so many one after the other, ten seconds, whoever watches is let go; those who come again are looked
for again."""

COUNTS = (
    "num_preemptions",
    "num_failed_steps",
    "num_retried_steps",
    "num_replayed_sequences",
    "num_device_restarts",
    "num_pauses",
    "num_deadlines_missed",
)
"""Counts of `EngineStatistics` that are shown."""

_FIELDS = {
    "step_fields": StepRecord._fields,
    "second_fields": SecondRecord._fields,
    "total_fields": Totals._fields,
}


class _Viewer:
    """One who watches: wakes when there is something new."""

    __slots__ = ("is_let_go", "news", "seen")

    def __init__(self, seen: int) -> None:
        self.news = asyncio.Event()
        self.seen = seen
        self.is_let_go = False


class PipelineSampler:
    """Makes the events of the live page.

    Args:
        recorder: The last steps and seconds.
        statistics: Gives the engine's state of this moment.
        facts: Gives what a snapshot holds besides: what changes only when the model has been loaded.
        phase: Gives in a word what the engine is doing: `loading`, `ready`, `draining` or `failed`.
        clock: Monotonic seconds, the engine's clock.
        interval_s: Between two events.
    """

    def __init__(
        self,
        recorder: PipelineRecorder,
        *,
        statistics: Callable[[], EngineStatistics],
        facts: Callable[[], Mapping[str, Any]],
        phase: Callable[[], str],
        clock: Callable[[], float],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._recorder = recorder
        self._statistics = statistics
        self._facts = facts
        self._phase = phase
        self._clock = clock
        self._interval_s = interval_s
        self._viewers: set[_Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._has_failed = False
        self._version = 0
        self._event = b""
        self._shown_phase = ""
        self._last_step = 0
        self._last_second = -1
        self._encode = msgspec.json.Encoder().encode

    @property
    def num_viewers(self) -> int:
        """How many watch."""
        return len(self._viewers)

    @property
    def is_running(self) -> bool:
        """Whether the engine is looked at."""
        return self._task is not None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield a snapshot, then an event at every look, until the server stops or too many looks fail.

        Leave it through `contextlib.aclosing`.

        Raises:
            Overloaded: Too many watch already.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} viewers watch the pipeline already; close a page that is not looked at.",
                retry_after_s=RETRY_AFTER_S,
            )
        if not self._is_closed and (self._task is None or self._task.done()):
            self._look()  # so that the first event after the snapshot has only what came after it
            self._task = asyncio.create_task(self._run(), name="live-page-sampler")
        viewer = _Viewer(self._version)
        self._viewers.add(viewer)
        try:
            yield self._snapshot()
            while not self._is_closed:
                await viewer.news.wait()
                viewer.news.clear()
                if viewer.is_let_go:
                    return
                missed = self._version - viewer.seen > 1
                viewer.seen = self._version
                yield self._snapshot() if missed else self._event
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self) -> None:
        """End everybody's watching. Idempotent."""
        self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        """End the events of everybody who watches now."""
        for viewer in self._viewers:
            viewer.is_let_go = True
            viewer.news.set()

    async def _run(self) -> None:
        num_failed = 0
        while num_failed < MAX_FAILED_LOOKS:
            await asyncio.sleep(self._interval_s)
            try:
                self._look()
            except Exception:
                num_failed += 1
                if not self._has_failed:  # a bug: told once, and not four times a second
                    logger.exception("the live page cannot be shown what is new; told once")
                self._has_failed = True
            else:
                num_failed = 0
        self._let_go()

    def _look(self) -> None:
        """Make the next event, and wake whoever watches."""
        recorder = self._recorder
        recorder.advance(self._clock())
        phase = self._phase()
        if phase == self._shown_phase:
            steps = _newer(recorder.steps, self._last_step)
            seconds = _newer(recorder.seconds, self._last_second)
            news = {"steps": steps, "seconds": seconds, "state": self._state()}
            self._event = named_event(b"update", self._encode(news))
        else:
            self._event = self._snapshot()
            self._shown_phase = phase
        if recorder.steps:
            self._last_step = recorder.steps[-1].number
        if recorder.seconds:
            self._last_second = recorder.seconds[-1].number
        self._version += 1
        for viewer in self._viewers:
            viewer.news.set()

    def _snapshot(self) -> bytes:
        """Return an event with everything up to the last look."""
        recorder = self._recorder
        everything = {
            **_FIELDS,
            **self._facts(),
            "interval_s": self._interval_s,
            "steps": tuple(recorder.steps),
            "seconds": tuple(recorder.seconds),
            "state": self._state(),
        }
        return named_event(b"snapshot", self._encode(everything))

    def _state(self) -> dict[str, Any]:
        now = self._statistics()
        return {
            "phase": self._phase(),
            "device_is_lost": now.device_is_lost,
            "running": now.num_running,
            "waiting": now.num_waiting,
            "waiting_tokens": now.num_waiting_tokens,
            "paused": now.num_paused,
            "unapplied": now.num_unapplied_steps,
            "blocks": (
                now.num_blocks_used,
                now.num_blocks_cached,
                now.num_blocks - now.num_blocks_used - now.num_blocks_cached,
            ),
            "prefix": (now.prefix_cache_queries, now.prefix_cache_hits),
            "graphs_pending": now.graphs_pending,
            "channels": [
                (channel.name, channel.depth, channel.capacity, channel.peak) for channel in now.channels
            ],
            "totals": self._recorder.totals(),
            "counts": {name: getattr(now, name) for name in COUNTS},
        }


def _newer(records: Sequence[Any], last_number: int) -> list[Any]:
    """Return the records after the one of this number; numbers rise by one, up to the last."""
    if not records or records[-1].number <= last_number:
        return []
    num_new = min(records[-1].number - last_number, len(records))
    return [records[position] for position in range(-num_new, 0)]
