"""A thread that writes what others hand it, so that the event loop never waits for a disk or a network.

Takes items one by one, gives them to a function in batches, on its own thread. Bounded: an item that comes
while too many wait is dropped and counted, and so is a batch that could not be written. Knows no item.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class BackgroundWriter(Generic[Item]):
    """Hands items to a function on a thread of its own.

    Args:
        write: Called with the items of a batch; what it raises is logged, and counts them as dropped.
        name: Of the thread.
        capacity: Most items that wait.
        batch_len: Most items of a batch.
        linger_s: Seconds that a batch waits for more items after its first.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Item]], None],
        *,
        name: str,
        capacity: int,
        batch_len: int,
        linger_s: float,
    ) -> None:
        self._write = write
        self._capacity = capacity
        self._batch_len = batch_len
        self._linger_s = linger_s
        self._inbox: SimpleQueue[Item | None] = SimpleQueue()
        self._num_put = 0
        self._num_refused = 0
        self._num_written = 0
        self._num_failed = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_written(self) -> int:
        """Items written so far."""
        return self._num_written

    @property
    def num_dropped(self) -> int:
        """Items that will never be written: there was no room for them, or writing them failed."""
        return self._num_refused + self._num_failed

    def put(self, item: Item) -> None:
        """Hand over an item; it is dropped if too many wait, or after `close`."""
        if self._is_closed or self._num_put - self._num_written - self._num_failed >= self._capacity:
            self._num_refused += 1
            return
        self._num_put += 1
        self._inbox.put(item)

    def close(self, timeout_s: float) -> None:
        """Write what waits and end the thread; it is left behind if that takes too long. Blocks."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_open, has_failed = True, False
        while is_open:
            batch, is_open = self._next_batch()
            if not batch:
                continue
            try:
                self._write(batch)
            except Exception as error:  # the top of a thread
                self._num_failed += len(batch)
                if not has_failed:  # one line for a collector that is down, not one for each batch
                    logger.warning("%s: %s", self._thread.name, error)
                has_failed = True
            else:
                self._num_written += len(batch)
                has_failed = False

    def _next_batch(self) -> tuple[list[Item], bool]:
        """Return the next items, and whether more may come."""
        item = self._inbox.get()
        batch: list[Item] = []
        ends_s = time.monotonic() + self._linger_s
        while item is not None:
            batch.append(item)
            if len(batch) == self._batch_len:
                return batch, True
            try:
                item = self._inbox.get(timeout=max(0.0, ends_s - time.monotonic()))
            except Empty:
                return batch, True
        return batch, False
