from array import array

import pytest

from asyncserve.errors import ConfigError, InvariantError
from asyncserve.loop.sequence import SequenceState
from asyncserve.loop.waiting import WaitingQueue
from asyncserve.observer import RequestTimeline
from asyncserve.request import Request, SamplingParams, TokenizedRequest, TokensPrompt


def arrive(queue: WaitingQueue, sequence_id: int, priority: int = 0) -> SequenceState:
    tokenized = TokenizedRequest(
        request=Request(
            request_id=str(sequence_id),
            prompt=TokensPrompt(token_ids=[1]),
            sampling=SamplingParams(),
            arrival_s=0.0,
            priority=priority,
        ),
        sequence_id=sequence_id,
        index=0,
        prompt_token_ids=array("i", [1]),
        max_output_len=1,
        stop_token_ids=frozenset(),
        seed=0,
    )
    sequence = SequenceState(tokenized, RequestTimeline(arrived_s=0.0), queue.take_order(priority), 1)
    queue.push(sequence)
    return sequence


def ids(queue: WaitingQueue) -> list[int]:
    return [sequence.sequence_id for sequence in queue]


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority() -> None:
    queue = WaitingQueue("fcfs")
    for sequence_id, priority in enumerate([3, 1, 2]):
        arrive(queue, sequence_id, priority)
    assert ids(queue) == [0, 1, 2]


def test_priority_serves_lower_numbers_first_then_in_order_of_arrival() -> None:
    queue = WaitingQueue("priority")
    for sequence_id, priority in enumerate([1, 0, 1, -5]):
        arrive(queue, sequence_id, priority)
    assert ids(queue) == [3, 1, 0, 2]


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", [0, 2, 1, 3]), ("priority", [2, 0, 1, 3])])
def test_a_sequence_that_comes_back_stands_at_the_front_of_its_class(
    policy: str, expected: list[int]
) -> None:
    queue = WaitingQueue(policy)
    first = arrive(queue, 0, priority=1)
    second = arrive(queue, 2, priority=0)
    queue.remove(first)
    queue.remove(second)
    arrive(queue, 1, priority=1)
    arrive(queue, 3, priority=1)
    queue.push(first)
    queue.push(second)
    assert ids(queue) == expected


def test_removing_a_sequence_that_does_not_wait_is_refused() -> None:
    queue = WaitingQueue("fcfs")
    first, second = arrive(queue, 0), arrive(queue, 1)
    queue.remove(first)
    with pytest.raises(InvariantError, match="sequence 0 is not waiting"):
        queue.remove(first)
    queue.remove(second)
    with pytest.raises(InvariantError, match="sequence 1 is not waiting"):
        queue.remove(second)
    assert len(queue) == 0


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'random' is unknown; known: fcfs, priority"):
        WaitingQueue("random")
