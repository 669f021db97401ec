"""What planning and applying a step do for the sequences that decode, which are nearly all, in Python."""

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeVar


class SequenceRow:
    """What planning and applying a token need of a sequence.

    Attributes:
        token_ids: Prompt and outputs known here; append-only but for rows of beam searches.
        stop_token_ids: Tokens that may end it.
        slot: Device row, -1 when it holds none.
        max_len: Length at which it ends by length.
        plain_until: Before this position it decodes without lacking a block or reaching its end.
        num_computed_tokens: Positions whose KV is computed by steps planned so far, or was found cached.
        num_unseen_tokens: Tokens sampled by steps planned and not applied.
        last_step_id: Last plan that mentions it, -1 before the first.
        accepts_output: Tokens of steps in flight count; false once ended, or preempted since they are wrong.
    """

    __slots__ = (
        "accepts_output",
        "last_step_id",
        "max_len",
        "num_computed_tokens",
        "num_unseen_tokens",
        "plain_until",
        "slot",
        "stop_token_ids",
        "token_ids",
    )

    token_ids: "array[int]"
    stop_token_ids: frozenset[int]
    slot: int
    max_len: int
    plain_until: int
    num_computed_tokens: int
    num_unseen_tokens: int
    last_step_id: int
    accepts_output: bool


Row = TypeVar("Row", bound=SequenceRow)


def plan_rows(
    sequences: list[Row], step_id: int, slots: list[int], starts: list[int], planned: list[Row]
) -> list[Row]:
    """Let each sequence compute its last token in a step.

    Args:
        sequences: All of whose known tokens are computed but the last.
        step_id: The step.
        slots: Their slots are appended here,
        starts: the positions they compute here,
        planned: and they themselves here.

    Returns:
        Those that lack a block for it, unchanged; those at their end are left out.
    """
    lacking: list[Row] = []
    for sequence in sequences:
        start = sequence.num_computed_tokens
        if start >= sequence.plain_until:
            if start + 1 < sequence.max_len:
                lacking.append(sequence)
            continue
        slots.append(sequence.slot)
        starts.append(start)
        planned.append(sequence)
        sequence.num_computed_tokens = start + 1
        sequence.num_unseen_tokens += 1
        sequence.last_step_id = step_id
    return lacking


def apply_rows(
    sequences: list[Row], token_ids: Sequence[int], special_slots: Mapping[int, object]
) -> list[tuple[Row, int]]:
    """Append to each sequence its token of a step.

    Args:
        sequences: As the step's plan has them.
        token_ids: One for each.
        special_slots: Slots of which there is more to be said than a token.

    Returns:
        Sequences for which their token may mean more than that, unchanged, with that token: it may end them,
        is none, or comes too late.

    Raises:
        ValueError: There are more or fewer tokens; nothing was done.
    """
    if len(token_ids) != len(sequences):
        raise ValueError("there is a token for each sequence")
    others: list[tuple[Row, int]] = []
    for sequence, token_id in zip(sequences, token_ids, strict=True):
        known = sequence.token_ids
        if (
            token_id in sequence.stop_token_ids
            or len(known) + 1 >= sequence.max_len
            or token_id < 0
            or not sequence.accepts_output
            or sequence.slot in special_slots
        ):
            others.append((sequence, token_id))
        else:
            known.append(token_id)
            sequence.num_unseen_tokens -= 1
    return others
