"""The order in which suspects are tried; whom it finds is seen in `test_scheduler_faults`."""

from array import array

import pytest

from asyncserve.errors import DeviceLost, InvariantError
from asyncserve.loop.sequence import SequenceState
from asyncserve.loop.suspects import Suspects
from asyncserve.observer import RequestTimeline
from asyncserve.request import Request, SamplingParams, TokenizedRequest, TokensPrompt


def suspects(num_sequences: int) -> list[SequenceState]:
    made = []
    for sequence_id in range(num_sequences):
        request = Request(
            request_id=str(sequence_id),
            prompt=TokensPrompt(token_ids=[1]),
            sampling=SamplingParams(),
            arrival_s=0.0,
        )
        tokenized = TokenizedRequest(
            request=request,
            sequence_id=sequence_id,
            index=0,
            prompt_token_ids=array("i", [1]),
            max_output_len=4,
            stop_token_ids=frozenset(),
            seed=0,
        )
        made.append(SequenceState(tokenized, RequestTimeline(arrived_s=0.0), (0, sequence_id), 1))
        made[-1].trial_len = 1
    return made


def test_halves_are_tried_in_order_and_those_of_a_half_that_fails_before_the_other() -> None:
    tried = Suspects()
    sequences = suspects(5)
    tried.add(sequences, 100)
    assert tried.first.sequences == sequences[:3]
    tried.narrow(sequences[:3], 7)
    tried.check()
    assert (tried.first.sequences, tried.first.max_tokens) == (sequences[:2], 7)
    for sequence in sequences[:2]:
        tried.clear(sequence)
    assert tried.first.sequences == [sequences[2]]
    tried.clear(sequences[2])
    assert (tried.first.sequences, tried.first.max_tokens) == (sequences[3:], 100)


def test_those_of_a_group_that_had_no_room_in_the_step_are_tried_after_those_that_had() -> None:
    tried = Suspects()
    sequences = suspects(8)
    tried.add(sequences, 100)
    tried.narrow(sequences[:2], 100)
    assert list(tried) == sequences
    assert tried.first.sequences == [sequences[0]]
    tried.check()


def test_who_is_cleared_is_suspected_no_longer_and_cannot_be_cleared_again() -> None:
    tried = Suspects()
    (sequence,) = suspects(1)
    tried.add([sequence], 1)
    tried.clear(sequence)
    assert sequence.trial_len == 0
    assert not tried
    with pytest.raises(InvariantError):
        tried.clear(sequence)


def test_losses_of_those_who_are_let_go_are_told_once_and_not_of_those_who_are_cleared() -> None:
    tried = Suspects()
    first, second, third = suspects(3)
    tried.add([first], 1, loss=4)
    tried.add([second], 1, loss=7)
    tried.add([third], 1)
    tried.clear(first)
    tried.let_go(second)
    tried.let_go(third)
    assert not tried
    assert second.trial_len == 0
    assert tried.take_unsolved() == {7}
    assert not tried.take_unsolved()


def test_a_step_whose_sequences_have_all_ended_leaves_nobody_to_suspect() -> None:
    tried = Suspects()
    tried.add([], 1)
    tried.narrow([], 1)
    assert not tried


def test_those_of_a_step_that_lost_the_device_are_tried_one_by_one_new_ones_and_proven_ones_in_turn() -> None:
    tried = Suspects()
    sequences = suspects(6)
    for proven in sequences[:4]:
        proven.token_ids.append(2)
    tried.add(sequences, 100, loss=0)
    assert list(tried) == [sequences[each] for each in (4, 0, 5, 1, 2, 3)]
    assert tried.first.sequences == [sequences[4]]


def test_a_group_is_suspected_of_every_loss_that_it_had_a_part_in() -> None:
    tried = Suspects()
    sequences = suspects(4)
    tried.add(sequences[:2], 100, loss=0)
    tried.add(sequences[2:], 100)
    assert tried.first.losses == {0}
    tried.first.failed_alone[DeviceLost] += 1
    tried.narrow(sequences[:1], 100, loss=1)
    assert (tried.first.losses, tried.first.failed_alone[DeviceLost]) == ({0, 1}, 1)
    tried.narrow(sequences[:1], 50)
    assert (tried.first.losses, tried.first.failed_alone[DeviceLost]) == ({0, 1}, 1)
    tried.clear(sequences[0])
    assert (tried.first.losses, tried.first.failed_alone.total()) == ({0}, 0)
    tried.clear(sequences[1])
    assert tried.first.losses == frozenset()
