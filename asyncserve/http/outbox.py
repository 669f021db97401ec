"""Streams whose events are due, written together.

`token_path.write` writes them; what it cannot, and what a socket did not take, streams see to themselves. One
that fails ends alone.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from asyncserve.token_path import TextLane, write

logger = logging.getLogger(__name__)


class PacedStream(TextLane, ABC):
    """A stream of events, as those see it who say when it writes."""

    __slots__ = ()

    @abstractmethod
    def end_rest(self) -> bool:
        """Go into the outbox if anything waits, and return whether it does; it rests no longer."""

    @abstractmethod
    def write_rest(self, rest: bytes | None) -> None:
        """Write what was not sent of a write; or, given None, all that waits."""

    @abstractmethod
    def give_up(self) -> None:
        """End at once, and break the connection off: it cannot be written."""


class Outbox(list[PacedStream]):
    """Streams that are due.

    Args:
        flush_len: At how many texts they are due again.
        note_writes: Told of those that were written, and of how many tokens; not of those that see to
            themselves.
    """

    def __init__(self, flush_len: int, note_writes: Callable[[Sequence[PacedStream], int], None]) -> None:
        super().__init__()
        self._flush_len = flush_len
        self._note_writes = note_writes

    def write(self) -> None:
        """Write what they hold, and forget them."""
        streams = self[:]
        self.clear()
        num_texts, unwritten = write(streams, self._flush_len)
        for stream, rest in unwritten:
            try:
                stream.write_rest(rest)
            except Exception:
                # Its own affair: others wait behind it.
                logger.exception("a stream could not be written")
                stream.give_up()
        if unwritten:
            apart = {stream for stream, _ in unwritten}
            streams = [stream for stream in streams if stream not in apart]
        self._note_writes(streams, num_texts)
