from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncserve.errors import ConfigError, InvariantError
from asyncserve.loop.queue_bounds import Load
from asyncserve.loop.sequence import SequenceState
from asyncserve.loop.waiting import OUTPUT_WEIGHT, FairQueue, WaitingQueue, waiting_queue
from asyncserve.observer import RequestTimeline
from asyncserve.request import Request, SamplingParams, TokenizedRequest, TokensPrompt


def arrive(
    queue: WaitingQueue, sequence_id: int, priority: int = 0, *, tenant: str = "", prompt_len: int = 1
) -> SequenceState:
    tokenized = TokenizedRequest(
        request=Request(
            request_id=str(sequence_id),
            prompt=TokensPrompt(token_ids=[1] * prompt_len),
            sampling=SamplingParams(),
            arrival_s=0.0,
            priority=priority,
            tenant=tenant,
        ),
        sequence_id=sequence_id,
        index=0,
        prompt_token_ids=array("i", [1] * prompt_len),
        max_output_len=1,
        stop_token_ids=frozenset(),
        seed=0,
    )
    sequence = SequenceState(tokenized, RequestTimeline(arrived_s=0.0), queue.take_order(priority), 1)
    queue.push(sequence)
    return sequence


def start(queue: WaitingQueue, sequence: SequenceState) -> None:
    """What the scheduler does with a sequence that it gives a slot."""
    sequence.slot = 0
    sequence.last_step_id = 0
    queue.start(sequence)
    queue.check()


def put_back(queue: WaitingQueue, sequence: SequenceState) -> None:
    sequence.slot = -1
    queue.push(sequence)
    queue.check()


def ids(queue: WaitingQueue) -> list[int]:
    return [sequence.sequence_id for sequence in queue]


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority() -> None:
    queue = waiting_queue("fcfs")
    for sequence_id, priority in enumerate([3, 1, 2]):
        arrive(queue, sequence_id, priority)
    assert ids(queue) == [0, 1, 2]


def test_priority_serves_lower_numbers_first_then_in_order_of_arrival() -> None:
    queue = waiting_queue("priority")
    for sequence_id, priority in enumerate([1, 0, 1, -5]):
        arrive(queue, sequence_id, priority)
    assert ids(queue) == [3, 1, 0, 2]


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", [0, 2, 1, 3]), ("priority", [2, 0, 1, 3])])
def test_a_sequence_that_comes_back_stands_at_the_front_of_its_class(
    policy: str, expected: list[int]
) -> None:
    queue = waiting_queue(policy)
    first = arrive(queue, 0, priority=1)
    second = arrive(queue, 2, priority=0)
    queue.remove(first)
    queue.remove(second)
    arrive(queue, 1, priority=1)
    arrive(queue, 3, priority=1)
    queue.push(first)
    queue.push(second)
    assert ids(queue) == expected


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_removing_a_sequence_that_does_not_wait_is_refused(policy: str) -> None:
    queue = waiting_queue(policy)
    first, second = arrive(queue, 0), arrive(queue, 1)
    queue.remove(first)
    with pytest.raises(InvariantError, match="sequence 0 is not waiting"):
        queue.remove(first)
    queue.remove(second)
    with pytest.raises(InvariantError, match="sequence 1 is not waiting"):
        queue.remove(second)
    assert len(queue) == queue.num_tokens == 0


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'random' is unknown; known: fcfs, priority, fair"):
        waiting_queue("random")


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_tokens_that_wait_are_counted_outputs_of_preempted_ones_too(policy: str) -> None:
    queue = waiting_queue(policy)
    first = arrive(queue, 0, prompt_len=5)
    arrive(queue, 1, prompt_len=7)
    assert queue.num_tokens == 12
    start(queue, first)
    assert queue.num_tokens == 7
    first.token_ids.append(9)
    put_back(queue, first)
    assert queue.num_tokens == 13


# ---- fair ----------------------------------------------------------------------------------------------


def test_the_tenant_that_was_given_least_goes_first_prompts_and_outputs_counted() -> None:
    queue = FairQueue()
    first = arrive(queue, 0, tenant="a", prompt_len=3)
    arrive(queue, 1, tenant="a", prompt_len=3)
    second = arrive(queue, 2, tenant="b", prompt_len=4)
    arrive(queue, 3, tenant="b", prompt_len=4)
    assert ids(queue) == [0, 1, 2, 3], "equal so far, and nothing is started: by age"
    start(queue, first)
    start(queue, second)
    assert (queue.served("a"), queue.served("b")) == (3, 4)
    assert ids(queue) == [1, 3]
    queue.note_outputs([first])
    assert queue.served("a") == 3 + OUTPUT_WEIGHT
    assert ids(queue) == [3, 1]


def test_one_scan_shares_alike_among_those_it_starts() -> None:
    queue = FairQueue()
    for number in range(4):
        arrive(queue, number, tenant="greedy", prompt_len=10)
    for number in range(4, 8):
        arrive(queue, number, tenant="modest", prompt_len=5)
    started = []
    for sequence in queue:
        sequence.slot = 0
        started.append(sequence.sequence_id)
    assert started == [0, 4, 5, 1, 6, 7, 2, 3], "two short prompts for each long one"


def test_what_a_scan_passes_over_does_not_count() -> None:
    queue = FairQueue()
    arrive(queue, 0, tenant="a", prompt_len=100)
    arrive(queue, 1, tenant="a", prompt_len=100)
    arrive(queue, 2, tenant="b", prompt_len=1)
    assert ids(queue) == [0, 1, 2], "nothing was started, so nobody was given anything"
    assert ids(queue) == [0, 1, 2]


def test_a_newcomer_is_lifted_to_the_least_of_those_that_wait_and_owes_nothing_for_its_past() -> None:
    queue = FairQueue()
    for number in range(3):
        start(queue, arrive(queue, number, tenant="a", prompt_len=100))
    arrive(queue, 3, tenant="a", prompt_len=100)
    assert queue.served("a") == 300
    arrive(queue, 4, tenant="b")
    assert queue.served("b") == 300, "its absence earned it nothing"
    arrive(queue, 5, tenant="b")
    assert queue.served("b") == 300


def test_idle_time_of_all_earns_nobody_anything() -> None:
    queue = FairQueue()
    start(queue, arrive(queue, 0, tenant="a", prompt_len=100))
    assert len(queue) == 0
    arrive(queue, 1, tenant="b")
    assert queue.served("b") == 100, "as much as the last one that left"


def test_a_tenant_with_more_than_the_others_keeps_its_count() -> None:
    queue = FairQueue()
    start(queue, arrive(queue, 0, tenant="a", prompt_len=100))
    arrive(queue, 1, tenant="b")
    start(queue, arrive(queue, 2, tenant="c", prompt_len=50))
    arrive(queue, 3, tenant="c")
    assert queue.served("c") == 150
    assert ids(queue) == [1, 3]


def test_a_sequence_that_was_started_comes_back_before_all_and_is_not_charged_again() -> None:
    queue = FairQueue()
    late = arrive(queue, 0, tenant="a", prompt_len=100)
    start(queue, late)
    arrive(queue, 1, tenant="b")
    put_back(queue, late)
    assert ids(queue) == [0, 1]
    start(queue, late)
    assert queue.served("a") == 100
    put_back(queue, late)
    queue.remove(late)
    assert ids(queue) == [1]


def test_requests_without_a_key_are_one_tenant_served_in_order_of_arrival() -> None:
    queue = FairQueue()
    for number in range(4):
        arrive(queue, number, priority=-number, prompt_len=10 - number)
    assert ids(queue) == [0, 1, 2, 3]


def test_the_load_of_a_tenant_is_told_apart_only_where_shares_are() -> None:
    fair, plain = FairQueue(), waiting_queue("fcfs")
    for queue in (fair, plain):
        arrive(queue, 0, tenant="a", prompt_len=5)
        arrive(queue, 1, tenant="b", prompt_len=7)
    assert (fair.load_of("a"), fair.load_of("c")) == (Load(1, 5), Load(0, 0))
    assert plain.load_of("a") == Load(2, 12)


MAX_PROMPT_LEN = 12
MAX_OUTPUT_LEN = 6
NUM_SLOTS = 3

lengths = st.tuples(st.integers(1, MAX_PROMPT_LEN), st.integers(1, MAX_OUTPUT_LEN))


class Server:
    """As many slots as may run at once; each step starts what it can and gives each a token."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.running: dict[int, tuple[SequenceState, int]] = {}
        self.num_arrived = 0
        self.given: dict[str, int] = {}

    def arrive(self, tenant: str, prompt_len: int, output_len: int) -> None:
        sequence = arrive(self.queue, self.num_arrived, tenant=tenant, prompt_len=prompt_len)
        sequence.max_len = prompt_len + output_len
        self.num_arrived += 1

    def num_waiting_of(self, tenant: str) -> int:
        return self.queue.load_of(tenant).num_sequences

    def step(self) -> None:
        started: list[SequenceState] = []
        for sequence in self.queue:
            if len(self.running) == NUM_SLOTS:
                break
            sequence.slot = sequence.last_step_id = len(started)
            started.append(sequence)
            self.running[sequence.sequence_id] = (sequence, sequence.max_len - sequence.prompt_len)
        for sequence in started:
            self.queue.start(sequence)
            self._give(sequence, sequence.prompt_len)
        assert len(self.running) == NUM_SLOTS or len(self.queue) == 0, "somebody waits beside a free slot"
        self.queue.note_outputs([sequence for sequence, _ in self.running.values()])
        for sequence_id, (sequence, left) in list(self.running.items()):
            self._give(sequence, OUTPUT_WEIGHT)
            self.running[sequence_id] = (sequence, left - 1)
            if left == 1:
                del self.running[sequence_id]
        self.queue.check()

    def _give(self, sequence: SequenceState, amount: int) -> None:
        tenant = sequence.tokenized.request.tenant
        self.given[tenant] = self.given.get(tenant, 0) + amount


@given(
    asked=st.lists(st.tuples(st.sampled_from("abc"), lengths), min_size=1, max_size=30),
    gaps=st.lists(st.integers(0, 3), min_size=30, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_no_slot_is_free_while_anything_waits_and_everybody_is_served_in_the_end(
    asked: Sequence[tuple[str, tuple[int, int]]], gaps: Sequence[int]
) -> None:
    server = Server()
    for (tenant, (prompt_len, output_len)), gap in zip(asked, gaps, strict=False):
        server.arrive(tenant, prompt_len, output_len)
        for _ in range(gap):
            server.step()
    for _ in range(len(asked) * MAX_OUTPUT_LEN):
        server.step()
    assert len(server.queue) == len(server.running) == 0


@given(
    ours=st.lists(lengths, min_size=1, max_size=5),
    theirs=st.lists(lengths, min_size=1, max_size=5),
    head_start=st.integers(0, 10),
)
@settings(max_examples=60, deadline=None)
def test_two_tenants_that_always_wait_are_given_alike_within_what_runs_at_once(
    ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]], head_start: int
) -> None:
    """Whatever the sizes of their requests, and however long one of them had the server to itself."""
    server = Server()

    def fill(tenant: str, sizes: Sequence[tuple[int, int]]) -> None:
        for number in range(2 * NUM_SLOTS):
            if server.num_waiting_of(tenant) < 2 * NUM_SLOTS:
                server.arrive(tenant, *sizes[(server.num_arrived + number) % len(sizes)])

    for _ in range(head_start):
        fill("a", ours)
        server.step()
    server.given.clear()
    bound = 2 * NUM_SLOTS * (MAX_PROMPT_LEN + OUTPUT_WEIGHT * MAX_OUTPUT_LEN)
    for _ in range(60):
        fill("a", ours)
        fill("b", theirs)
        server.step()
        assert abs(server.given["a"] - server.given.get("b", 0)) <= bound
