"""The sequences that wait for a slot, in the order of the policy.

`fcfs` serves in order of arrival; `priority` serves lower priority numbers first and, among equals, in
order of arrival; `fair` serves whom the server has given least (`FairQueue`). The order among sequences of
one class or tenant is fixed when a sequence arrives and kept for life, so that a preempted one comes back to
the front. Does not know blocks or budgets.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from asyncserve.errors import ConfigError, InvariantError
from asyncserve.loop.queue_bounds import Load
from asyncserve.loop.sequence import SequenceState

POLICIES = ("fcfs", "priority", "fair")
"""Names that `--scheduling-policy` takes."""
OUTPUT_WEIGHT = 2
"""What a generated token counts against its tenant, where a prompt's counts 1: it takes a step of its own."""

by_order = attrgetter("order")
"""Sort key of sequences: smaller is served first."""


class WaitingQueue:
    """Sequences in the order they will be started: that of arrival, or of their priorities."""

    def __init__(self, *, uses_priority: bool = False) -> None:
        self._uses_priority = uses_priority
        self._num_arrived = 0
        self._num_tokens = 0
        self._sequences: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait: prompts, and what preempted sequences had generated."""
        return self._num_tokens

    def load_of(self, tenant: str) -> Load:
        """Return what waits of a tenant, as far as the policy tells tenants apart: here it does not."""
        return Load(len(self), self._num_tokens)

    def take_order(self, priority: int) -> tuple[int, int]:
        """Return the place of the next arrival: a key that sorts after all earlier ones of its class."""
        self._num_arrived += 1
        return (priority if self._uses_priority else 0, self._num_arrived)

    def push(self, sequence: SequenceState) -> None:
        """Let a sequence wait at the place its order gives it."""
        insort(self._sequences, sequence, key=by_order)
        self._num_tokens += len(sequence.token_ids)

    def remove(self, sequence: SequenceState) -> None:
        """Take out a sequence that waits no longer, though it was not started."""
        _take_out(self._sequences, sequence)
        self._num_tokens -= len(sequence.token_ids)

    def start(self, sequence: SequenceState) -> None:
        """Take out a sequence that has been given a slot."""
        self.remove(sequence)

    def note_outputs(self, sequences: Sequence[SequenceState]) -> None:
        """Note that a step gave each of these sequences a token; here it makes no difference."""

    def check(self) -> None:
        """Verify the invariants; slow, for tests.

        Raises:
            InvariantError: One does not hold.
        """
        _check_sorted(self._sequences)
        if self._num_tokens != sum(len(sequence.token_ids) for sequence in self):
            raise InvariantError("the tokens that wait are miscounted")


class FairQueue(WaitingQueue):
    """Sequences of the tenant first that was given least: the virtual token counters of VTC.

    Each tenant has a counter of what it was served: its prompts' tokens when they are started, its output
    tokens as they come. A tenant that had nothing waiting is lifted to the least counter of those that
    wait, or of the last one that left: idle time earns nothing. So two tenants that both always have
    something waiting are served alike but for what runs at once, whatever their requests' number and
    length, and whenever anything waits, something is offered.

    A sequence that was started before (preempted, or resumed) goes before all others: it holds up its
    client in the middle of an answer, and is not charged again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._returned: list[SequenceState] = []
        self._lanes: dict[str, _Lane] = {}
        self._served: dict[str, int] = {}
        self._last_left = ""

    def __len__(self) -> int:
        return len(self._returned) + sum(len(lane.sequences) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[SequenceState]:
        """Give sequences in the order they are served in; one that has a slot afterwards was started."""
        yield from self._returned
        heap = [
            (self._served[tenant], lane.sequences[0].order, 0, lane) for tenant, lane in self._lanes.items()
        ]
        heapify(heap)
        while heap:
            served, _, position, lane = heap[0]
            sequence = lane.sequences[position]
            yield sequence
            if sequence.slot >= 0:
                served += sequence.prompt_len
            position += 1
            if position < len(lane.sequences):
                heapreplace(heap, (served, lane.sequences[position].order, position, lane))
            else:
                heappop(heap)

    def served(self, tenant: str) -> int:
        """Return the counter of a tenant."""
        return self._served.get(tenant, 0)

    def load_of(self, tenant: str) -> Load:
        """Return what waits of a tenant and was never started."""
        lane = self._lanes.get(tenant)
        return Load(0, 0) if lane is None else Load(len(lane.sequences), lane.num_tokens)

    def push(self, sequence: SequenceState) -> None:
        """Let a sequence wait behind those of its tenant that came earlier, or, started, before everyone."""
        self._num_tokens += len(sequence.token_ids)
        if _was_started(sequence):
            insort(self._returned, sequence, key=by_order)
            return
        tenant = _tenant(sequence)
        lane = self._lanes.get(tenant)
        if lane is None:
            least = min(map(self._served.__getitem__, self._lanes), default=self.served(self._last_left))
            self._served[tenant] = max(self.served(tenant), least)
            lane = self._lanes[tenant] = _Lane()
        insort(lane.sequences, sequence, key=by_order)
        lane.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: SequenceState) -> None:
        """Take out a sequence that waits no longer, though it was not started."""
        self._take_out(sequence, was_started=_was_started(sequence))

    def start(self, sequence: SequenceState) -> None:
        """Take out a sequence that has been given a slot, and charge its tenant for the prompt."""
        # It has been planned by now, so that its lane tells whether it was started before.
        lane = self._lanes.get(_tenant(sequence))
        is_first_start = lane is not None and _holds(lane.sequences, sequence)
        if is_first_start:
            self._served[_tenant(sequence)] += sequence.prompt_len
        self._take_out(sequence, was_started=not is_first_start)

    def note_outputs(self, sequences: Sequence[SequenceState]) -> None:
        """Charge the tenants of sequences that a step gave a token each."""
        served = self._served
        for sequence in sequences:
            if sequence.accepts_output:
                served[sequence.tokenized.request.tenant] += OUTPUT_WEIGHT

    def check(self) -> None:
        """Verify the invariants; slow, for tests.

        Raises:
            InvariantError: One does not hold.
        """
        if self._num_tokens != sum(len(sequence.token_ids) for sequence in self):
            raise InvariantError("the tokens that wait are miscounted")
        _check_sorted(self._returned)
        if not all(map(_was_started, self._returned)):
            raise InvariantError("a sequence that was never started goes before its turn")
        for tenant, lane in self._lanes.items():
            _check_sorted(lane.sequences)
            if not lane.sequences or any(_was_started(each) for each in lane.sequences):
                raise InvariantError("a tenant's lane holds what waits for its first start, and something")
            if any(_tenant(each) != tenant for each in lane.sequences):
                raise InvariantError("a sequence waits in another tenant's lane")
            if lane.num_tokens != sum(len(each.token_ids) for each in lane.sequences):
                raise InvariantError("a tenant's tokens are miscounted")

    def _take_out(self, sequence: SequenceState, *, was_started: bool) -> None:
        tenant = _tenant(sequence)
        if was_started:
            _take_out(self._returned, sequence)
        else:
            lane = self._lanes.get(tenant)
            if lane is None:
                raise InvariantError(f"sequence {sequence.sequence_id} is not waiting")
            _take_out(lane.sequences, sequence)
            lane.num_tokens -= len(sequence.token_ids)
            if not lane.sequences:
                del self._lanes[tenant]
                self._last_left = tenant
        self._num_tokens -= len(sequence.token_ids)


class _Lane:
    """What waits of one tenant for its first start, at least one sequence, sorted by order."""

    __slots__ = ("num_tokens", "sequences")

    def __init__(self) -> None:
        self.sequences: list[SequenceState] = []
        self.num_tokens = 0


def waiting_queue(policy: str) -> WaitingQueue:
    """Return an empty queue of that policy.

    Raises:
        ConfigError: It is unknown.
    """
    if policy not in POLICIES:
        raise ConfigError(f"scheduling policy {policy!r} is unknown; known: {', '.join(POLICIES)}")
    return FairQueue() if policy == "fair" else WaitingQueue(uses_priority=policy == "priority")


def _tenant(sequence: SequenceState) -> str:
    return sequence.tokenized.request.tenant


def _was_started(sequence: SequenceState) -> bool:
    return sequence.last_step_id >= 0


def _place_of(sequences: Sequence[SequenceState], sequence: SequenceState) -> int:
    return bisect_left(sequences, sequence.order, key=by_order)


def _holds(sequences: Sequence[SequenceState], sequence: SequenceState) -> bool:
    place = _place_of(sequences, sequence)
    return place < len(sequences) and sequences[place] is sequence


def _take_out(sequences: list[SequenceState], sequence: SequenceState) -> None:
    if not _holds(sequences, sequence):
        raise InvariantError(f"sequence {sequence.sequence_id} is not waiting")
    del sequences[_place_of(sequences, sequence)]


def _check_sorted(sequences: Sequence[SequenceState]) -> None:
    if list(sequences) != sorted(sequences, key=by_order):
        raise InvariantError("sequences stand in order")
