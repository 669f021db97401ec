"""What becomes of the prefix cache, noted as it happens and told once a turn.

The pool and the allocator note; the pipeline flushes. Nobody has a log unless somebody listens.
"""

from array import array
from collections.abc import Callable, Sequence

from asyncserve.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent


class CacheLog:
    """Keeps events until they are flushed.

    Args:
        listener: Is given them, in order, on the loop thread; must return at once and not raise.
    """

    def __init__(self, listener: Callable[[Sequence[CacheEvent]], None]) -> None:
        self._listener = listener
        self._events: list[CacheEvent] = []
        # Blocks are evicted one by one, and many in a row.
        self._removed: list[bytes] = []
        self._removed_group = 0

    def stored(
        self,
        group_id: int,
        *,
        block_len: int,
        window_len: int | None,
        parent: bytes | None,
        digests: Sequence[bytes],
        token_ids: "array[int]",
        cache_salt: str | None,
    ) -> None:
        """Note that blocks can be found; arguments as of `BlocksStored`."""
        self._end_removed()
        self._events.append(
            BlocksStored(group_id, block_len, window_len, parent, tuple(digests), token_ids, cache_salt)
        )

    def removed(self, group_id: int, digest: bytes) -> None:
        """Note that a block cannot be found any more."""
        if group_id != self._removed_group:
            self._end_removed()
            self._removed_group = group_id
        self._removed.append(digest)

    def cleared(self) -> None:
        """Note that no block can be found any more."""
        self._removed.clear()
        self._events.append(CacheCleared())

    def flush(self) -> None:
        """Tell what was noted since the last time, if anything was."""
        self._end_removed()
        if self._events:
            events, self._events = self._events, []
            self._listener(events)

    def _end_removed(self) -> None:
        if self._removed:
            self._events.append(BlocksRemoved(self._removed_group, tuple(self._removed)))
            self._removed = []
