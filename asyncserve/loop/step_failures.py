"""What a step that failed, or a device that was lost, means for the sequences; who is suspected of it.

`StepFailures` sets sequences back to their known tokens, whatever later steps in flight have made of them,
hands them to `suspects`, and ends the request of the one that fails alone, and again. Takes steps that failed
and those that went well, gives the end of a culprit. Knows how large later steps may be (`step_limit`), not
what is planned.

A fault that strikes by itself may fall on an innocent's trial, and a second one on its next. So failures
alone are counted by their kind: two of one kind condemn, but not two steps that did not end in time, since a
machine that stands still makes those as well. Three of any kinds condemn: what spoils memory shows in more
ways than one, and a culprit does not live for ever. One trial that goes well clears a sequence of all.
"""

from typing import NamedTuple

from asyncserve.errors import AsyncserveError, DeviceHung, DeviceLost, StepFailed, StepOutOfMemory
from asyncserve.loop.live_sequences import LiveSequences, StepInFlight
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.loop.step_limit import StepLimit
from asyncserve.observer import EngineStatistics
from asyncserve.request import TokenDelta

FAILED_ALONE_LIMIT = 8
"""So many sequences failing alone, one after the other and no step between them going well, are the device's
fault."""
ALONE_LIMIT = 2
"""So many failures of one kind, of steps of one sequence alone, condemn it; not of steps that hung."""
ANY_ALONE_LIMIT = 3
"""So many failures of any kinds do."""


class DeviceLoss(NamedTuple):
    """What has come of the loss of a device.

    Attributes:
        number: Of this loss: 0, 1, 2 …
        ends: The ends of the request that was found to be the cause, if one was.
        explained: Numbers of the losses that were its fault, or that may be the fault of one which has left
            before it could be tried alone.
    """

    number: int
    ends: list[TokenDelta]
    explained: frozenset[int]


class StepFailures:
    """Accounts for what goes wrong.

    Args:
        live: The sequences.
        step_limit: Is lowered by a step that lacked memory.
        budget: Most tokens that a step may ever have.
    """

    def __init__(self, live: LiveSequences, step_limit: StepLimit, *, budget: int) -> None:
        self._live = live
        self._step_limit = step_limit
        self._budget = budget
        self._num_failed_alone = 0  # since a step went well
        self._num_losses = 0
        self._num_failed_steps = 0
        self._num_replayed_sequences = 0
        self._num_failed_sequences = 0

    @property
    def blames_device(self) -> bool:
        """Whether what fails is the device: sequence after sequence failed alone, and no step went well."""
        return self._num_failed_alone >= FAILED_ALONE_LIMIT

    def fail(self, step_id: int, error: StepFailed) -> list[TokenDelta]:
        """Account for a step that raised: its sequences are set back to their known tokens and suspected.

        Their clients notice nothing but a pause, unless it was a step of one suspect alone, and not the first
        such: its request ends with `error`. What the step should have written to the KV cache is forgotten; a
        sequence of a later step in flight that read it computes again from its known tokens.

        Returns:
            The end of the culprit, if that was it.

        Raises:
            InvariantError: It is not the oldest step in flight.
        """
        live = self._live
        entry = live.take_oldest(step_id)
        self._num_failed_steps += 1
        invalid = live.allocator.lose_transfers(each.plan for each in (entry, *live.in_flight))
        failed: list[SequenceState] = []
        start = 0
        for scheduled, sequence in zip(entry.plan.sequences, entry.states, strict=True):
            # A branch shares what the sequence before it was to compute.
            start = scheduled.start if scheduled.num_tokens else start
            sequence.num_unseen_tokens -= scheduled.samples
            suspect = live.representative(sequence)
            # Not those that an earlier failed step has set back, and that this one mentions nevertheless.
            is_blamed = suspect.accepts_output and suspect.sequence_id not in live.paused
            if entry.is_trial:
                # Nor those that were paused, and resumed, since it was planned: they are tried no longer.
                is_blamed &= suspect.trial_len > 0
            elif is_blamed:
                suspect.trial_len = scheduled.start + scheduled.num_tokens
            if is_blamed:
                failed.append(suspect)
            self._set_back(sequence, start)
            invalid |= live.allocator.invalidate(sequence, start, step_id)
        for later in live.in_flight:
            origin_is_valid = True
            for scheduled, sequence in zip(later.plan.sequences, later.states, strict=True):
                is_branch = not scheduled.num_tokens
                if sequence.blocks_are_valid:
                    # What a branch copies, and the logits it samples from, are another's.
                    is_wrong = is_branch and not origin_is_valid
                    if is_wrong or live.allocator.holds_any(sequence, invalid, step_id):
                        self._set_back(sequence, 0)
                if not sequence.blocks_are_valid:
                    invalid |= live.allocator.invalidate(sequence, scheduled.start, step_id)
                if not is_branch:
                    origin_is_valid = sequence.blocks_are_valid
        live.drop_ended()
        deltas = self._judge(entry, failed, error)
        live.release_unmentioned(entry)
        return deltas

    def lose_device(self, lost_by: DeviceLost | None = None) -> DeviceLoss:
        """Forget the steps in flight and all that the device held: everybody waits with its known tokens.

        Outputs of those steps are not to be applied any more. Suspects are tried first, as before, and those
        of the step that lost the device are suspects, too.

        Args:
            lost_by: What the oldest step in flight lost the device by; None if that step is not the cause.

        Returns:
            What has come of it: a request may have been found to be the cause, which has ended then.
        """
        live = self._live
        number = self._num_losses
        self._num_losses += 1
        loss = DeviceLoss(number, [], frozenset())
        if lost_by is not None and live.in_flight:
            loss = self._judge_loss(lost_by, number)
        self._num_failed_alone = 0
        self._num_replayed_sequences += live.forget_device()
        return loss._replace(explained=loss.explained | live.suspects.take_unsolved())

    def note_good(self, entry: StepInFlight) -> None:
        """Note that a step went well and is applied: who was tried in it is suspected no longer."""
        live = self._live
        self._num_failed_alone = 0
        if entry.is_trial:
            for sequence in entry.states:
                # A search has shown nothing before it samples.
                was_tried = sequence not in live.beams or live.beams[sequence] in entry.searches
                if was_tried and 0 < sequence.trial_len <= sequence.num_computed_tokens:
                    live.suspects.clear(sequence)
        self._step_limit.note_good()

    def fill_statistics(self, statistics: EngineStatistics) -> None:
        """Write what failed."""
        statistics.num_failed_steps = self._num_failed_steps
        statistics.num_replayed_sequences = self._num_replayed_sequences
        statistics.num_failed_sequences = self._num_failed_sequences

    def _judge(self, entry: StepInFlight, failed: list[SequenceState], error: StepFailed) -> list[TokenDelta]:
        """Suspect the live sequences of a step that failed, or end the one that failed alone."""
        live = self._live
        max_tokens = self._budget
        num_tokens = entry.plan.num_tokens
        is_alone = len(set(map(live.representative, entry.states))) == 1
        if isinstance(error, StepOutOfMemory):
            max_tokens = max(1, num_tokens // 2)
            self._step_limit.lower(max_tokens)
        if not failed:
            return []
        if entry.is_trial:
            live.suspects.narrow(failed, max_tokens)
        else:
            live.suspects.add(failed, max_tokens)
        # With too little memory it may do with a smaller step, as long as there is one.
        is_least = num_tokens == 1 or bool(entry.searches)
        fails_alone = is_least or not isinstance(error, StepOutOfMemory)
        if not (is_alone and fails_alone and self._is_condemned(failed, error)):
            return []
        self._num_failed_alone += 1
        self._num_replayed_sequences -= len(live.rows_of(failed[0]))
        return self._end_request_of(failed[0], error)

    def _judge_loss(self, error: DeviceLost, number: int) -> DeviceLoss:
        """Suspect the live sequences of the step that lost the device, or end the one that did so alone."""
        live = self._live
        entry = live.in_flight[0]
        failed: list[SequenceState] = []
        has_left = False
        for scheduled, sequence in zip(entry.plan.sequences, entry.states, strict=True):
            suspect = live.representative(sequence)
            if not suspect.accepts_output or suspect.sequence_id in live.paused:
                has_left |= suspect.status is SequenceStatus.ENDED or suspect.sequence_id in live.paused
                continue
            if entry.is_trial:
                is_blamed = suspect.trial_len > 0 and suspect not in failed
            else:
                is_blamed = suspect.trial_len == 0
                suspect.trial_len = suspect.trial_len or scheduled.start + scheduled.num_tokens
            if is_blamed:
                failed.append(suspect)
        loss = DeviceLoss(number, [], frozenset({number} if has_left else ()))
        if not failed:
            return loss
        if entry.is_trial:
            live.suspects.narrow(failed, self._budget, loss=number)
        else:
            live.suspects.add(failed, self._budget, loss=number)
        is_alone = len(set(map(live.representative, entry.states))) == 1
        if not (is_alone and self._is_condemned(failed, error)):
            return loss
        explained = live.suspects.first.losses
        alone = StepFailed(f"computed alone, it lost the device again: {error}", step_id=entry.plan.step_id)
        return DeviceLoss(number, self._end_request_of(failed[0], alone), explained)

    def _is_condemned(self, failed: list[SequenceState], error: AsyncserveError) -> bool:
        """Note that a step of a suspect alone failed; return whether it is found guilty."""
        group = self._live.suspects.first
        if group.sequences != failed:
            return False  # a step planned before there were suspects: others are tried first
        kind = type(error)
        group.failed_alone[kind] += 1
        is_repeated = kind is not DeviceHung and group.failed_alone[kind] >= ALONE_LIMIT
        return is_repeated or group.failed_alone.total() >= ANY_ALONE_LIMIT

    def _end_request_of(self, culprit: SequenceState, error: StepFailed) -> list[TokenDelta]:
        """End a culprit and whatever else its request has: that would fail as well, one by one."""
        live = self._live
        request = culprit.tokenized.request
        ended: list[SequenceState] = []
        for sequence in list(live.sequences.values()):
            if sequence.tokenized.request is request and sequence.status is not SequenceStatus.ENDED:
                ended += live.discard(sequence)
        self._num_failed_sequences += len(ended)
        return [live.failure_of(sequence, error) for sequence in ended]

    def _set_back(self, sequence: SequenceState, start: int) -> None:
        """Take a sequence back to position `start`: what steps in flight compute of it from there is wrong.

        It gives up slot and blocks, as by a preemption, and goes on with its known tokens; so do all rows of
        its beam search.
        """
        live = self._live
        if sequence.blocks_are_valid:
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, start)
            live.allocator.prefix_cache.register(sequence)
            sequence.blocks_are_valid = False
        for row in live.rows_of(sequence):
            self._num_replayed_sequences += row.accepts_output
            row.accepts_output = False
            if row.status is SequenceStatus.RUNNING:
                row.status = SequenceStatus.PREEMPTED
                live.num_releasing += 1
