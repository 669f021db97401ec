"""Every live sequence and where it stands: it waits, runs in a slot, is paused, or is about to be released.

`LiveSequences` is what planning and accounting share: the queue, the running lists, the suspects, the slots,
the steps in flight, the allocator. All parts of the scheduler read its fields; moves that more than one of
them makes are methods here. The planner alone fills the running lists; `Scheduler` alone lets sequences
arrive, pause and resume. Takes steps that were planned; gives back slots and blocks by one rule, for all that
finished, failed, were aborted or preempted: when the output of the last plan that mentions the sequence has
been applied (`release_if_unmentioned`). Knows neither why a sequence is moved nor what goes into a plan.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncserve.errors import AsyncserveError, InvariantError, StepFailed
from asyncserve.loop.beams import BeamRows
from asyncserve.loop.kv_groups import KVAllocator
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.loop.suspects import Suspects
from asyncserve.loop.waiting import by_order, waiting_queue
from asyncserve.observer import EngineStatistics
from asyncserve.request import FinishReason, TokenDelta
from asyncserve.step import StepPlan

RELEASED_BLOCKS = 256
"""Blocks that one call of `release_some` gives back, those of its last sequence beyond: less than 0.1 ms."""


@dataclass(slots=True)
class StepInFlight:
    """A plan not yet applied: the states in the order of `plan.sequences`, and those of them that sample.

    Of the latter the first `num_decodes` have had tokens before. `is_trial`: it holds suspects and nobody
    else. `searches`: Beam searches whose rows sample. `entered`: Rows of searches that entered slots with the
    plan, which may compute nothing in it.
    """

    plan: StepPlan
    states: list[SequenceState]
    sampling: list[SequenceState]
    num_decodes: int
    is_trial: bool
    searches: list[BeamRows]
    entered: list[SequenceState]


class LiveSequences:
    """The sequences of one scheduler, from their arrival to their last release.

    Args:
        num_slots: Rows of the device.
        policy: In which order sequences wait.
        make_allocator: Makes the blocks of a device that holds nothing yet.

    Attributes:
        allocator: The blocks. Another one once the device was lost, so nobody keeps it.
        sequences: All that have not ended, by id.
        waiting: Those that wait for a slot, suspects not among them.
        paused: Ids of those that are to be left alone; once no step in flight mentions them, they hold
            nothing.
        suspects: Those of steps that failed.
        decoding: Running ones whose whole prompt is planned, sorted by order.
        prefilling: Running ones with more than that to compute, sorted by order.
        searches: Running beam searches, sorted by the order of their first rows.
        beams: The search of every row that is live or holds a slot.
        free_slots: Slots that nobody holds.
        slot_holders: By slot.
        released_slots: Slots that have become free since the last plan.
        in_flight: Steps that are planned and not applied, the oldest first.
        next_step_id: Of the next plan.
        last_applied_step_id: -1 before the first.
        num_releasing: Ended or preempted sequences that steps in flight still mention, or that are to be
            released now.
        releasable: Those to be released now.
        unregistered: Those with blocks that decode steps have filled and that are to become findable, the
            oldest first; no later than they are released.
    """

    def __init__(self, *, num_slots: int, policy: str, make_allocator: Callable[[], KVAllocator]) -> None:
        self._make_allocator = make_allocator
        self.allocator = make_allocator()
        self.sequences: dict[int, SequenceState] = {}
        self.waiting = waiting_queue(policy)
        self.paused: set[int] = set()
        self.suspects = Suspects()
        self.decoding: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []
        self.searches: list[BeamRows] = []
        self.beams: dict[SequenceState, BeamRows] = {}
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.slot_holders: list[SequenceState | None] = [None] * num_slots
        self.released_slots: list[int] = []
        self.in_flight: deque[StepInFlight] = deque()
        self.next_step_id = 0
        self.last_applied_step_id = -1
        self.num_releasing = 0
        self.releasable: deque[SequenceState] = deque()
        self.unregistered: dict[SequenceState, None] = {}
        self._num_preemptions = 0
        self._num_retried_steps = 0
        self._num_copied_blocks = 0
        self._num_window_blocks_freed_earlier = 0  # before the device was lost
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits; what is paused does neither."""
        return len(self.sequences) == len(self.paused)

    @property
    def holders(self) -> list[SequenceState]:
        """The sequences that hold a slot."""
        return [sequence for sequence in self.slot_holders if sequence is not None]

    def rows_of(self, sequence: SequenceState) -> list[SequenceState]:
        """Return all rows of a sequence's beam search, or the sequence."""
        beams = self.beams.get(sequence)
        return [sequence] if beams is None else beams.rows

    def representative(self, sequence: SequenceState) -> SequenceState:
        """Return the row that stands for a sequence's beam search, or the sequence."""
        return self.rows_of(sequence)[0]

    def last_in_order(self) -> SequenceState:
        """Return the running sequence that is served last and preempted first; there must be one."""
        firsts = [beams.first for beams in self.searches]
        return max((group[-1] for group in (self.decoding, self.prefilling, firsts) if group), key=by_order)

    # Moves

    def enter_slot(self, sequence: SequenceState, now_s: float, *, is_branch: bool) -> None:
        """Give a sequence, whose blocks have been taken, a free slot; there must be one."""
        slot = self.free_slots.pop()
        sequence.slot = slot
        sequence.status = SequenceStatus.RUNNING
        self.slot_holders[slot] = sequence
        timeline = sequence.timeline
        if timeline.first_scheduled_s is None:
            timeline.first_scheduled_s = now_s
            num_cached = sequence.prompt_len if is_branch else sequence.num_computed_tokens
            sequence.num_cached_tokens = timeline.num_cached_tokens = num_cached
            looks_up = self.allocator.prefix_cache.is_enabled and not is_branch
            if looks_up and sequence.prompt_logprobs is None:
                self._prefix_cache_queries += sequence.prompt_len
                self._prefix_cache_hits += sequence.num_computed_tokens

    def leave_running(self, sequence: SequenceState) -> None:
        """Take a sequence, or all rows of its search, out of the running lists."""
        if (beams := self.beams.get(sequence)) is not None:
            self.searches.remove(beams)
            self.prefilling = [each for each in self.prefilling if each not in beams.rows]
            return
        (self.decoding if sequence in self.decoding else self.prefilling).remove(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Take the slot and blocks of a running sequence back; it waits again with all its known tokens."""
        for row in self.rows_of(sequence):
            row.timeline.num_preemptions += 1
        self._num_preemptions += 1
        self.put_back(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """Let a running sequence wait again, or, paused, rest, once no step in flight mentions it."""
        self.leave_running(sequence)
        for row in self.rows_of(sequence):
            row.status = SequenceStatus.PREEMPTED
            self.num_releasing += 1
            self.release_if_unmentioned(row)

    def end(self, sequence: SequenceState) -> None:
        """Mark a live sequence as ended; its lists, slot and blocks are the caller's to see to."""
        del self.sequences[sequence.sequence_id]
        if sequence.slot < 0:
            self.beams.pop(sequence, None)
        sequence.leave_family()
        sequence.note_end()
        self.paused.discard(sequence.sequence_id)
        self.allocator.drop_swapped(sequence)
        if sequence.trial_len:
            self.suspects.let_go(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.num_releasing += 1
        sequence.status = SequenceStatus.ENDED
        sequence.accepts_output = False

    def discard(self, sequence: SequenceState) -> list[SequenceState]:
        """End a live sequence, whatever it is doing, and all rows of its beam search, which are returned."""
        rows = self.rows_of(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.leave_running(sequence)
        for row in rows:
            if row.status is SequenceStatus.WAITING and not row.trial_len:
                self.waiting.remove(row)
            self.end(row)
        for row in rows:
            self.release_if_unmentioned(row)
        return rows

    def end_with_error(self, sequence: SequenceState, error: AsyncserveError) -> TokenDelta:
        """As `end`; return what is to be told of it."""
        self.end(sequence)
        return self.failure_of(sequence, error)

    def failure_of(self, sequence: SequenceState, error: AsyncserveError) -> TokenDelta:
        """Return what is to be told of a sequence that ended with an error."""
        return TokenDelta(
            sequence.sequence_id,
            (),
            finish_reason=FinishReason.ERROR,
            num_cached_tokens=sequence.num_cached_tokens,
            error=error,
        )

    def end_with_bad_logits(self, sequence: SequenceState, step_id: int) -> TokenDelta:
        """As `end_with_error`, because of logits that are not finite; return what is to be told of it."""
        # Where the first bad value came from is not known, so none of its blocks may serve another sequence.
        self.allocator.invalidate(sequence, 0, step_id)
        sequence.blocks_are_valid = False
        error = StepFailed("the model gave logits that are not finite", step_id=step_id)
        return self.end_with_error(sequence, error)

    def drop_ended(self) -> None:
        """Take sequences that just ended out of the running lists, all at once."""
        running = SequenceStatus.RUNNING
        self.decoding = [sequence for sequence in self.decoding if sequence.status is running]
        self.prefilling = [sequence for sequence in self.prefilling if sequence.status is running]
        self.searches = [beams for beams in self.searches if beams.first.status is running]

    # Steps in flight, and release

    def put_in_flight(self, entry: StepInFlight) -> None:
        """Note a step that has been planned: it tells the device of all that was released so far."""
        self._num_copied_blocks += len(entry.plan.block_copies)
        self._num_retried_steps += entry.is_trial
        self.released_slots.clear()
        self.next_step_id += 1
        self.in_flight.append(entry)

    def take_oldest(self, step_id: int) -> StepInFlight:
        """Take the oldest step out of flight, whose output is there.

        Raises:
            InvariantError: It is another one.
        """
        if not self.in_flight or self.in_flight[0].plan.step_id != step_id:
            oldest = self.in_flight[0].plan.step_id if self.in_flight else None
            raise InvariantError(f"step {step_id} is applied; the oldest in flight is {oldest}")
        self.last_applied_step_id = step_id
        return self.in_flight.popleft()

    def release_some(self) -> bool:
        """Take back slots and blocks that the last steps applied have made free, as many as take a moment.

        Sequences that end together may hold many thousands of blocks, and others want the loop, too.

        Returns:
            Whether more are left.
        """
        releasable = self.releasable
        num_blocks = 0
        while releasable and num_blocks < RELEASED_BLOCKS:
            sequence = releasable.popleft()
            num_blocks += sum(map(len, sequence.block_table.block_ids))
            self.release_if_unmentioned(sequence)
        return bool(releasable)

    def release_unmentioned(self, entry: StepInFlight) -> None:
        """Take back what is held by those that ran in a step and do no longer, as far as that may be now."""
        # With one row of a search all were set back, and some may be in no step.
        searches = dict.fromkeys(map(self.beams.get, entry.states))
        rows = [row for beams in searches if beams is not None for row in beams.rows]
        for sequence in (*entry.states, *rows, *entry.entered):
            self.release_if_unmentioned(sequence)

    def release_if_unmentioned(self, sequence: SequenceState) -> None:
        """Take back slot and blocks of a sequence that no longer runs, once no step in flight mentions it."""
        status = sequence.status
        if (
            status is SequenceStatus.RUNNING
            or sequence.slot < 0
            or sequence.last_step_id > self.last_applied_step_id
        ):
            return
        # Rows of a search share blocks: as cached prefixes these come to the host once, not for each row.
        if status is SequenceStatus.PREEMPTED and sequence not in self.beams:
            self.allocator.swap_out(sequence)
        self.allocator.release(sequence)
        self.unregistered.pop(sequence, None)
        slot = sequence.slot
        self.slot_holders[slot] = None
        self.free_slots.append(slot)
        self.released_slots.append(slot)
        self.num_releasing -= 1
        sequence.slot = -1
        if status is SequenceStatus.PREEMPTED:
            self.wait_again(sequence)
        else:
            self.beams.pop(sequence, None)

    def wait_again(self, sequence: SequenceState) -> None:
        """Let a sequence that has given up all it held wait for its turn, or, paused, rest."""
        sequence.reset(self.allocator.num_groups)
        if sequence.sequence_id in self.paused:
            sequence.status = SequenceStatus.PAUSED
        elif not sequence.trial_len:
            self.waiting.push(sequence)

    def forget_device(self) -> int:
        """Forget the steps in flight and all that the device held: everybody waits with its known tokens.

        Returns:
            How many had begun, and begin again.
        """
        num_slots = len(self.slot_holders)
        self.in_flight.clear()
        self.last_applied_step_id = self.next_step_id - 1
        self.decoding, self.prefilling, self.searches = [], [], []
        self._num_window_blocks_freed_earlier += self.allocator.num_window_blocks_freed
        self.allocator = self._make_allocator()
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.released_slots.clear()
        self.releasable.clear()
        self.unregistered.clear()
        self.num_releasing = 0
        holders, self.slot_holders = self.holders, [None] * num_slots
        num_replayed = 0
        for sequence in holders:
            sequence.slot = -1
            if sequence.status is SequenceStatus.ENDED:
                self.beams.pop(sequence, None)
                continue
            num_replayed += 1
            self.wait_again(sequence)
        return num_replayed

    def fill_statistics(self, statistics: EngineStatistics) -> None:
        """Write who runs and rests, which blocks are held, and what was counted."""
        allocator = self.allocator
        statistics.num_running = len(self.slot_holders) - len(self.free_slots)
        statistics.num_paused = len(self.paused)
        statistics.num_blocks = allocator.num_usable
        statistics.num_blocks_used = allocator.num_used
        statistics.num_blocks_cached = allocator.num_cached
        statistics.num_blocks_saved = allocator.num_saved
        statistics.num_copied_blocks = self._num_copied_blocks
        freed_earlier = self._num_window_blocks_freed_earlier
        statistics.num_window_blocks_freed = freed_earlier + allocator.num_window_blocks_freed
        statistics.kv_groups = allocator.group_statistics(self.holders)
        statistics.num_unapplied_steps = len(self.in_flight)
        statistics.num_retried_steps = self._num_retried_steps
        statistics.num_preemptions = self._num_preemptions
        statistics.prefix_cache_queries = self._prefix_cache_queries
        statistics.prefix_cache_hits = self._prefix_cache_hits
