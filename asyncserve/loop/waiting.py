"""The sequences that wait for a slot, in the order of the policy.

`fcfs` serves in order of arrival; `priority` serves lower priority numbers first and, among equals, in
order of arrival. The order is fixed when a sequence arrives and kept for life, so that a preempted one
comes back to the front of its class. Does not know blocks or budgets.
"""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from asyncserve.errors import ConfigError, InvariantError
from asyncserve.loop.sequence import SequenceState

POLICIES = ("fcfs", "priority")
"""Names that `--scheduling-policy` takes."""

by_order = attrgetter("order")
"""Sort key of sequences: smaller is served first."""


class WaitingQueue:
    """Sequences in the order they will be admitted.

    Raises:
        ConfigError: `policy` is unknown.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"scheduling policy {policy!r} is unknown; known: {', '.join(POLICIES)}")
        self._uses_priority = policy == "priority"
        self._num_arrived = 0
        self._sequences: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences)

    def take_order(self, priority: int) -> tuple[int, int]:
        """Return the place of the next arrival: a key that sorts after all earlier ones of its class."""
        self._num_arrived += 1
        return (priority if self._uses_priority else 0, self._num_arrived)

    def push(self, sequence: SequenceState) -> None:
        """Let a sequence wait at the place its order gives it."""
        self._sequences.insert(self._place_of(sequence), sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Take out a sequence, admitted or aborted."""
        place = self._place_of(sequence)
        if place == len(self._sequences) or self._sequences[place] is not sequence:
            raise InvariantError(f"sequence {sequence.sequence_id} is not waiting")
        del self._sequences[place]

    def _place_of(self, sequence: SequenceState) -> int:
        return bisect_left(self._sequences, sequence.order, key=by_order)
