"""Noticing that files have changed: certificates and keys that are renewed while the server runs.

Takes paths and what to do; looks at the files' state (time, size, inode, through symbolic links, so that
Kubernetes' swapping of a mounted secret shows) every second in a thread. A change counts when two looks in
a row see the same new state: a file that is being written is left alone. Does not know what is in the files.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two looks."""

State = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Watches files and calls back when one of them has changed.

    Args:
        paths: Of the files; one that is missing is a state like any other.
        on_change: Called in a thread.
    """

    def __init__(self, paths: Sequence[str], on_change: Callable[[], None]) -> None:
        self._paths = tuple(paths)
        self._on_change = on_change
        self._known = self._last = self._state()

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Look once, and call back if a change has settled."""
        state = self._state()
        has_settled = state == self._last
        self._last = state
        if not has_settled or state == self._known:
            return
        self._known = state
        try:
            self._on_change()
        except Exception:
            logger.exception("taking up a change of %s failed", ", ".join(self._paths))

    def _state(self) -> State:
        return tuple(map(_state_of, self._paths))


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
