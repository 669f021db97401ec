"""The sequences of steps that failed, in groups to be tried: one of a group may be what makes a step fail.

Takes the sequences of a failed step and says whose turn it is to be computed in a step of its own. A group
whose step fails is halved, until the one is found that fails alone, and twice so, for a fault may pass: a
culprit among n costs at most 2 * ceil(log2(n)) + 1 such steps, and those of innocents give them their tokens.
Those of a step that lost the device are tried one by one: more steps, but each further loss is that of the
culprit, so that it costs two of them and not one for each halving. Pure; plans nothing, knows no device, and
does not judge.

A sequence is under suspicion while its `trial_len` is not 0; it is then in one group (`check`).
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from asyncserve.errors import AsyncserveError, InvariantError
from asyncserve.loop.sequence import SequenceState


@dataclass(slots=True, eq=False)
class SuspectGroup:
    """Sequences, at least one, to be computed in a step of their own of at most `max_tokens` tokens.

    `losses`: Numbers of the times the device was lost that they are suspected of. `failed_alone`: How often a
    step of one sequence alone has failed, by the kind of failure; empty for more than one.
    """

    sequences: list[SequenceState]
    max_tokens: int
    losses: frozenset[int]
    failed_alone: Counter[type[AsyncserveError]] = field(default_factory=Counter)


class Suspects:
    """Every sequence under suspicion, in the order in which they are tried."""

    def __init__(self) -> None:
        self._groups: deque[SuspectGroup] = deque()
        self._unsolved: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[SequenceState]:
        return (sequence for group in self._groups for sequence in group.sequences)

    @property
    def first(self) -> SuspectGroup:
        """The group whose turn it is; there must be one."""
        return self._groups[0]

    def add(self, sequences: Sequence[SequenceState], max_tokens: int, *, loss: int | None = None) -> None:
        """Suspect sequences, whose `trial_len` is set; they are tried after all others.

        Args:
            sequences: Of a step that failed, under suspicion in no group.
            max_tokens: Most tokens of a step that tries them.
            loss: The number of the loss, if the step lost the device; they are tried one by one then.
        """
        self._groups.extend(_parts(sequences, max_tokens, frozenset(), loss))

    def narrow(self, sequences: Sequence[SequenceState], max_tokens: int, *, loss: int | None = None) -> None:
        """Note that a step of these suspects alone failed; the two halves of them are tried next.

        Args:
            sequences: All of one group.
            max_tokens: Most tokens of a step that tries them.
            loss: The number of the loss, if the step lost the device; they are tried one by one then.
        """
        groups = [self._take_out(sequence) for sequence in sequences]
        if not groups:
            return
        parts = _parts(sequences, max_tokens, groups[0].losses, loss)
        for part in parts:
            part.failed_alone = groups[0].failed_alone.copy()
        self._groups.extendleft(reversed(parts))

    def clear(self, sequence: SequenceState) -> None:
        """Suspect a sequence no longer: a step of it went well."""
        self._take_out(sequence)
        sequence.trial_len = 0

    def let_go(self, sequence: SequenceState) -> None:
        """Suspect a sequence no longer: it ends or pauses, and whether it was the cause stays open."""
        self._unsolved |= self._take_out(sequence).losses
        sequence.trial_len = 0

    def take_unsolved(self) -> set[int]:
        """Return the numbers of the losses whose suspects were let go of since this was last called."""
        unsolved, self._unsolved = self._unsolved, set()
        return unsolved

    def check(self) -> None:
        """Verify the invariants; for tests.

        Raises:
            InvariantError: One does not hold.
        """
        ids = [sequence.sequence_id for sequence in self]
        if len(set(ids)) != len(ids) or any(sequence.trial_len < 1 for sequence in self):
            raise InvariantError("a suspect is in one group")
        if not all(group.sequences for group in self._groups):
            raise InvariantError("a group of suspects is not empty")

    def _take_out(self, sequence: SequenceState) -> SuspectGroup:
        for group in self._groups:
            if sequence in group.sequences:
                group.sequences.remove(sequence)
                if not group.sequences:
                    self._groups.remove(group)
                return group
        raise InvariantError(f"sequence {sequence.sequence_id} is not under suspicion")


def _parts(
    sequences: Sequence[SequenceState], max_tokens: int, losses: frozenset[int], loss: int | None
) -> list[SuspectGroup]:
    size = (len(sequences) + 1) // 2
    if loss is not None:
        size, losses, sequences = 1, losses | {loss}, _alternating(sequences)
    return [
        SuspectGroup(list(sequences[first : first + size]), max_tokens, losses)
        for first in range(0, len(sequences), size or 1)
    ]


def _alternating(sequences: Sequence[SequenceState]) -> list[SequenceState]:
    """Return them in turn: one without a token so far, then one that has had some.

    The former are likelier to be culprits; the latter show between two of them that the device still works.
    """
    new = [sequence for sequence in sequences if len(sequence.token_ids) == sequence.prompt_len]
    proven = [sequence for sequence in sequences if len(sequence.token_ids) > sequence.prompt_len]
    return [each for pair in zip_longest(new, proven) for each in pair if each is not None]
