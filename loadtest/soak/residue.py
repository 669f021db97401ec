"""What a server process holds: read at rest before and after a soak, and its memory meanwhile.

Takes the process of a `watched_server`; gives plain numbers. What is there after a soak and was not before
has been leaked.
"""

import asyncio
import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

MAX_LAST = 8
"""A coroutine of the engine that waits for work still holds the last piece of work it had."""
REPORT_LIMIT_S = 30.0
WINDOW_SHARE = 0.25
"""Share of a soak, after warm-up, whose most memory is its memory at the beginning, or at the end."""


async def alive(process: psutil.Process, file: Path) -> dict[str, int]:
    """Return what is alive in a `watched_server` that writes to `file`, with its file descriptors.

    Raises:
        TimeoutError: It does not answer the signal.
    """
    num_lines = len(_lines(file))
    process.send_signal(signal.SIGUSR1)
    async with asyncio.timeout(REPORT_LIMIT_S):
        while len(_lines(file)) == num_lines:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)
    found: dict[str, int] = json.loads(_lines(file)[-1])
    num_threads = process.num_threads() - found.pop("pooled threads")
    return {**found, "OS threads": num_threads, "file descriptors": process.num_fds()}


def leaks(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return what there is more of afterwards."""
    spare = {"tasks": 0, "threads": 0, "OS threads": 0, "file descriptors": 0}
    return {
        name: count - before[name]
        for name, count in after.items()
        if count - before[name] > spare.get(name, MAX_LAST)
    }


class Memory:
    """The resident memory of a process over time, in MiB.

    Args:
        process: Its children count apart.
        interval_s: Between two looks.
    """

    def __init__(self, process: psutil.Process, *, interval_s: float = 0.5) -> None:
        self._process = process
        self._interval_s = interval_s
        self.times_s: list[float] = []
        self.sizes_mib: list[float] = []

    async def watch(self, ended: asyncio.Event) -> None:
        """Look at it until `ended` is set."""
        while not ended.is_set():
            self.times_s.append(time.perf_counter())
            self.sizes_mib.append(self._process.memory_info().rss / 2**20)
            try:
                async with asyncio.timeout(self._interval_s):
                    await ended.wait()
            except TimeoutError:
                continue

    def growth(self, warm_s: float) -> dict[str, Any]:
        """Return how much more it is at the end than at the beginning, from the time it was warm on.

        The most of either counts: of a device that has just been opened no page of the KV cache is resident,
        and growth would be hidden, or seem to be, by where in a soak that falls.
        """
        sizes = [size for at_s, size in zip(self.times_s, self.sizes_mib, strict=True) if at_s >= warm_s]
        count = max(1, int(WINDOW_SHARE * len(sizes)))
        first, last = max(sizes[:count]), max(sizes[-count:])
        return {
            "first_mib": round(first, 1),
            "last_mib": round(last, 1),
            "most_mib": round(max(sizes), 1),
            "growth_percent": round(100 * (last / first - 1), 2),
        }

    def thinned(self, count: int = 120) -> list[float]:
        """Return so many sizes at equal distances, for a plot."""
        step = max(1, len(self.sizes_mib) // count)
        return [round(size, 1) for size in self.sizes_mib[::step]]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
