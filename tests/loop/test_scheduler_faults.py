"""Failed steps, their culprits and lost devices: innocents get exactly what an undisturbed run gives them."""

import math
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncserve.errors import DeviceHung, DeviceLost, StepFailed, StepOutOfMemory
from asyncserve.loop.sequence import SequenceState
from asyncserve.loop.step_failures import FAILED_ALONE_LIMIT
from asyncserve.loop.step_limit import STEPS_KEPT_SMALL
from asyncserve.observer import EngineStatistics, RequestTimeline
from asyncserve.request import FinishReason, TokenDelta
from asyncserve.step import StepPlan
from tests.fakes.executor import fake_continuation, fake_info
from tests.loop.scheduling import Bench

VOCAB = 512


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % VOCAB for i in range(num_tokens)]


def expected(ids: Sequence[int], num_tokens: int) -> list[int]:
    return fake_continuation(ids, num_tokens, VOCAB)


def crowd(num_sequences: int, **options: object) -> Bench:
    """A bench with so many sequences, all of which fit into one step."""
    info = fake_info(num_slots=num_sequences, num_blocks=16 * num_sequences, max_num_batched_tokens=4096)
    bench = Bench(info, **options)  # type: ignore[arg-type]
    for sequence_id in range(num_sequences):
        bench.add(prompt(5, sequence_id), max_tokens=8)
    return bench


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_sequences", [1, 2, 7, 32])
def test_a_culprit_is_found_in_twice_log2_steps_and_one_and_ends_alone(
    num_sequences: int, caching: bool, ahead: bool
) -> None:
    for culprit in {0, num_sequences // 2, num_sequences - 1}:
        bench = crowd(num_sequences, enable_prefix_caching=caching, async_scheduling=ahead)
        bench.culprits = {culprit: 7}  # two of its tokens are out by then
        bench.run()
        for sequence_id, received in bench.received.items():
            if sequence_id == culprit:
                assert received.finish_reason is FinishReason.ERROR
                assert received.token_ids == expected(prompt(5, sequence_id), 3)
            else:
                assert received.finish_reason is FinishReason.LENGTH
                assert received.token_ids == expected(prompt(5, sequence_id), 8)
        depth = math.ceil(math.log2(num_sequences))
        statistics = bench.statistics()
        # The step of all, the one behind it, one for each time that a half is halved, and one more.
        assert statistics.num_failed_steps <= 1 + ahead + depth + 1
        assert statistics.num_retried_steps <= 2 * depth + 1
        assert statistics.num_failed_sequences == 1


def test_a_step_that_fails_once_ends_nobody_not_even_a_sequence_that_is_alone() -> None:
    for num_sequences in (1, 2, 5):
        bench = crowd(num_sequences)
        bench.step()
        bench.must_plan()
        bench.fail()
        bench.run()
        for sequence_id in range(num_sequences):
            assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)


def test_a_sequence_whose_step_alone_fails_once_is_given_another() -> None:
    bench = crowd(2)
    bench.step()
    bench.must_plan()
    bench.fail()
    plan = bench.must_plan()
    assert bench.sequence_ids(plan) == {0}
    assert bench.fail() == []
    plan = bench.must_plan()
    assert bench.sequence_ids(plan) == {0}
    bench.run()
    for sequence_id in (0, 1):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)


def test_what_good_steps_computed_before_is_not_computed_again() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=64))
    bench.add(prompt(41), max_tokens=8)
    for _ in range(3):
        bench.step()
    bench.must_plan()
    bench.fail()
    plan = bench.must_plan()
    assert [(each.start, each.num_tokens) for each in plan.sequences] == [(40, 4)]


def test_a_prompt_whose_second_chunk_fails_goes_on_behind_the_first() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16))
    bench.add(prompt(40), max_tokens=3)
    bench.step()
    bench.must_plan()
    bench.fail()
    plan = bench.must_plan()
    assert plan.sequences[0].start == 16
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(40), 3)


def test_prompt_logprobs_that_were_partly_gathered_come_once_and_whole() -> None:
    bench = Bench(fake_info(max_num_batched_tokens=16))
    bench.add(prompt(40), max_tokens=3, num_prompt_logprobs=1)
    bench.step()
    bench.must_plan()
    bench.fail()
    bench.lose_device()
    bench.run()
    assert [[each.token_id for each in scored] for scored in bench.received[0].prompt_logprobs] == [
        prompt(40)[1:]
    ]


def test_nobody_is_admitted_and_nobody_else_computed_while_suspects_are_tried() -> None:
    bench = crowd(4)
    bench.step()
    newcomer = bench.add(prompt(3, 99), max_tokens=2)
    bench.must_plan()
    bench.fail()
    tried: list[set[int]] = []
    for _ in range(2):
        plan, _ = bench.step()
        tried.append(bench.sequence_ids(plan))
    assert tried == [{0, 1}, {2, 3}]
    bench.run()
    assert bench.tokens_of(newcomer) == expected(prompt(3, 99), 2)


def test_a_step_behind_the_one_that_failed_that_fails_too_accuses_only_whom_it_alone_held() -> None:
    bench = crowd(2)
    bench.must_plan()
    bench.add(prompt(5, 300), max_tokens=4)
    bench.must_plan()
    bench.fail()
    bench.fail()
    tried = []
    while bench.statistics().num_retried_steps < 2:
        plan, _ = bench.step()
        tried.append(bench.sequence_ids(plan))
    assert tried == [{0}, {1}]
    bench.run()
    assert bench.statistics().num_failed_sequences == 0


@pytest.mark.parametrize("num_tried", [0, 1])
def test_a_suspect_may_be_aborted_while_it_waits_and_while_it_is_tried(num_tried: int) -> None:
    bench = crowd(3)
    bench.step()
    bench.must_plan()
    bench.fail()
    for _ in range(num_tried):
        bench.must_plan()
    for sequence_id in (0, 1, 2):
        bench.abort(sequence_id)
    newcomer = bench.add(prompt(5, 200), max_tokens=4)
    bench.run()
    assert bench.tokens_of(newcomer) == expected(prompt(5, 200), 4)


def test_a_step_of_two_of_which_one_has_been_aborted_proves_nothing_about_the_other() -> None:
    bench = crowd(4)
    bench.step()
    bench.must_plan()
    bench.fail()
    plan = bench.must_plan()
    assert bench.sequence_ids(plan) == {0, 1}
    bench.abort(0)
    assert bench.fail() == []
    plan = bench.must_plan()
    assert bench.sequence_ids(plan) == {1}
    bench.run()
    assert bench.tokens_of(1) == expected(prompt(5, 1), 8)


@pytest.mark.parametrize("when", ["in the failed step", "while it waits", "while it is tried"])
def test_a_suspect_that_is_paused_rests_and_goes_on_when_it_is_resumed(when: str) -> None:
    bench = crowd(2)
    bench.step()
    bench.must_plan()
    if when == "in the failed step":
        bench.scheduler.pause(0)
    bench.fail()
    if when == "while it is tried":
        bench.must_plan()
    bench.scheduler.pause(0)
    bench.scheduler.check()
    bench.run()
    assert bench.tokens_of(1) == expected(prompt(5, 1), 8)
    assert len(bench.tokens_of(0)) < 8
    assert bench.scheduler.resume(0)
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(5, 0), 8)


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_a_suspect_that_was_paused_and_resumed_while_it_is_tried_is_not_blamed_for_that_step(
    num_sequences: int,
) -> None:
    bench = crowd(num_sequences)
    bench.step()
    bench.must_plan()
    bench.fail()
    assert 0 in bench.sequence_ids(bench.must_plan())
    bench.scheduler.pause(0)
    bench.scheduler.resume(0)
    bench.scheduler.check()
    assert bench.fail() == []
    bench.run()
    for sequence_id in range(num_sequences):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)


# Too little memory


def fails_above(bench: Bench, max_tokens: int) -> list[StepPlan]:
    """Run a device that has memory for steps of so many tokens; return the plans."""
    plans = []
    while bench.has_work:
        while (plan := bench.plan()) is not None:
            plans.append(plan)
        if bench.in_flight[0].num_tokens > max_tokens:
            bench.fail(StepOutOfMemory)
        else:
            bench.apply()
    return plans


@pytest.mark.parametrize("chunked", [True, False])
def test_steps_that_lack_memory_become_smaller_until_they_fit_and_nobody_ends(chunked: bool) -> None:
    bench = crowd(32, enable_chunked_prefill=chunked)
    long = bench.add(prompt(100, 77), max_tokens=4)
    plans = fails_above(bench, 20)
    for sequence_id in range(32):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)
    assert bench.tokens_of(long) == expected(prompt(100, 77), 4)
    assert bench.statistics().num_failed_sequences == 0
    assert sum(plan.num_tokens > 20 for plan in plans) == bench.num_failed_steps < 12


def test_all_streams_get_their_tokens_in_turn_while_steps_are_kept_small() -> None:
    bench = crowd(24)
    bench.step()
    bench.must_plan()
    bench.fail(StepOutOfMemory)
    while bench.statistics().num_retried_steps < 4 or bench.in_flight:
        if bench.plan() is None:
            bench.apply()
    for _ in range(4):
        plan, _ = bench.step()
        assert plan.num_tokens == 16
    while bench.in_flight:
        bench.apply()
    lens = [len(bench.tokens_of(sequence_id)) for sequence_id in range(24)]
    assert max(lens) - min(lens) <= 1


def test_one_token_that_does_not_fit_ends_its_sequence() -> None:
    bench = crowd(1)
    fails_above(bench, 0)
    end = bench.received[0].end
    assert end is not None
    assert isinstance(end.error, StepOutOfMemory)


def test_steps_grow_again_when_enough_of_them_went_well() -> None:
    info = fake_info(max_num_batched_tokens=64, num_blocks=512, max_model_len=1024)
    bench = Bench(info, async_scheduling=False)
    bench.add(prompt(3), max_tokens=STEPS_KEPT_SMALL + 10)
    bench.add(prompt(70, 50), max_tokens=1)
    bench.must_plan()
    bench.fail(StepOutOfMemory)
    while bench.received[1].finish_reason is None:
        plan, _ = bench.step()
        assert plan.num_tokens <= 32
    while bench.statistics().num_running:
        bench.step()
    bench.add(prompt(100, 200), max_tokens=1)
    plan, _ = bench.step()
    assert plan.num_tokens == 64


# The device


def test_a_device_that_fails_every_step_is_blamed_when_enough_sequences_failed_alone() -> None:
    bench = crowd(32)
    num_ended = 0
    while not bench.scheduler.blames_device:
        if bench.plan() is None:
            num_ended += len(bench.fail())
        assert bench.num_failed_steps < 50
    assert num_ended == FAILED_ALONE_LIMIT
    bench.lose_device()
    assert not bench.scheduler.blames_device
    bench.run()
    ended = [received.finish_reason for received in bench.received.values()]
    assert ended.count(FinishReason.LENGTH) == 32 - FAILED_ALONE_LIMIT


def test_a_device_is_not_blamed_for_many_culprits_among_innocents() -> None:
    bench = crowd(32)
    bench.culprits = dict.fromkeys(range(0, 32, 2), 5)
    while bench.has_work:
        if bench.plan() is None:
            bench.advance()
        assert not bench.scheduler.blames_device
    assert bench.statistics().num_failed_sequences == 16


def test_after_a_lost_device_everybody_goes_on_from_the_known_tokens() -> None:
    bench = crowd(4)
    waiting = bench.add(prompt(5, 99), max_tokens=3)
    bench.step()
    bench.must_plan()
    bench.must_plan()
    bench.lose_device(by_step=False)
    statistics = bench.statistics()
    assert (statistics.num_running, statistics.num_blocks_used, statistics.num_blocks_cached) == (0, 0, 0)
    assert statistics.num_replayed_sequences == 4
    plan = bench.must_plan()
    assert plan.step_id == 3
    assert [len(each.token_ids) for each in plan.admitted] == [6, 6, 6, 6]
    bench.run()
    for sequence_id in range(4):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)
    assert bench.tokens_of(waiting) == expected(prompt(5, 99), 3)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("num_sequences", [1, 2, 9, 32])
def test_who_loses_the_device_whenever_it_is_computed_ends_after_three_losses_and_nobody_else(
    num_sequences: int, ahead: bool
) -> None:
    for culprit in {0, num_sequences // 2, num_sequences - 1}:
        bench = crowd(num_sequences, async_scheduling=ahead)
        bench.loses_device = True
        bench.culprits = {culprit: 7}
        waiting = bench.add(prompt(5, 99), max_tokens=3)
        bench.run()
        for sequence_id in range(num_sequences):
            is_culprit = sequence_id == culprit
            reason = FinishReason.ERROR if is_culprit else FinishReason.LENGTH
            assert bench.received[sequence_id].finish_reason is reason
            assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 3 if is_culprit else 8)
        assert bench.tokens_of(waiting) == expected(prompt(5, 99), 3)
        assert bench.num_losses <= 3
        assert bench.statistics().num_failed_sequences == 1


@pytest.mark.parametrize("is_in_flight", [True, False])
@pytest.mark.parametrize("leave", ["abort", "pause"])
def test_a_loss_whose_cause_may_have_left_is_told_with_the_explained(leave: str, is_in_flight: bool) -> None:
    bench = crowd(3)
    bench.step()
    if is_in_flight:
        bench.must_plan()
        getattr(bench.scheduler, leave)(2)
        bench.lose_device()
    else:
        bench.must_plan()
        bench.lose_device()
        assert bench.explained == set()
        getattr(bench.scheduler, leave)(2)
        bench.lose_device(by_step=False)
    assert bench.explained == {0}


@pytest.mark.parametrize("ahead", [True, False])
def test_the_losses_of_a_culprit_are_explained_by_its_end_and_no_others(ahead: bool) -> None:
    bench = crowd(5, async_scheduling=ahead)
    bench.step()
    bench.must_plan()
    bench.lose_device()
    for _ in range(5):
        bench.step()
    bench.lose_device(by_step=False)
    assert bench.explained == set()
    bench.loses_device = True
    bench.culprits = {1: 8, 3: 8}
    bench.run()
    assert bench.num_losses == 2 + 1 + 2 + 2
    assert bench.explained == set(range(2, 7))


def test_newcomers_to_a_step_that_lost_the_device_are_tried_first_and_others_between_them() -> None:
    bench = crowd(6)
    for sequence_id in (3, 4, 5):
        bench.abort(sequence_id)
    bench.step()
    newcomers = [bench.add(prompt(5, first), max_tokens=4) for first in (50, 60)]
    bench.must_plan()
    bench.lose_device()
    tried = [bench.sequence_ids(bench.step()[0]) for _ in range(5)]
    assert tried == [{newcomers[0]}, {0}, {newcomers[1]}, {1}, {2}]
    bench.run()


Failure = type[StepFailed] | type[DeviceLost]


def strike(bench: Bench, kind: Failure) -> list[TokenDelta]:
    """Let the step in flight fail in some way."""
    return bench.lose_device(kind) if issubclass(kind, DeviceLost) else bench.fail(kind)


def in_trial(bench: Bench, num_sequences: int) -> None:
    """Let a step of so many sequences fail, and plan a trial of the first alone."""
    assert num_sequences == bench.info.num_slots
    bench.step()
    bench.must_plan()
    bench.lose_device(by_step=True)
    assert bench.sequence_ids(bench.must_plan()) == {0}


@pytest.mark.parametrize(
    "kinds",
    [
        (StepFailed, DeviceLost),
        (DeviceLost, StepFailed),
        (StepFailed, DeviceHung),
        (DeviceHung, DeviceHung),
        (DeviceHung, DeviceLost),
        (DeviceLost, DeviceHung),
    ],
    ids=lambda kinds: " ".join(kind.__name__ for kind in kinds),
)
def test_unrelated_faults_that_strike_a_trial_one_after_the_other_end_nobody(
    kinds: tuple[Failure, ...],
) -> None:
    bench = crowd(3)
    in_trial(bench, 3)
    for kind in kinds:
        assert strike(bench, kind) == []
        assert bench.sequence_ids(bench.must_plan()) == {0}
    bench.run()
    for sequence_id in range(3):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)
    assert bench.explained == set()


@pytest.mark.parametrize(
    "kinds",
    [
        (StepFailed, StepFailed),
        (DeviceLost, DeviceLost),
        (DeviceHung, DeviceHung, DeviceHung),
        (DeviceHung, DeviceLost, DeviceHung),
        (StepFailed, DeviceLost, StepFailed),
        (StepFailed, DeviceHung, DeviceLost),
    ],
    ids=lambda kinds: " ".join(kind.__name__ for kind in kinds),
)
def test_who_fails_alone_again_and_again_in_one_way_or_in_many_ends(kinds: tuple[Failure, ...]) -> None:
    bench = crowd(3)
    in_trial(bench, 3)
    for kind in kinds:
        assert bench.received[0].end is None
        strike(bench, kind)
        bench.plan()
    bench.run()
    assert bench.received[0].finish_reason is FinishReason.ERROR
    for sequence_id in (1, 2):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)


def test_a_trial_that_goes_well_clears_a_sequence_of_all_that_was_before() -> None:
    bench = crowd(2)
    in_trial(bench, 2)
    for _ in range(4):
        assert bench.lose_device() == []
        bench.step()  # its trial
        bench.step()  # that of the other
        bench.must_plan()
        assert bench.lose_device() == []
        assert bench.sequence_ids(bench.must_plan()) == {0}
    bench.run()
    assert bench.statistics().num_failed_sequences == 0


def test_lacking_memory_for_one_token_once_and_losing_the_device_once_ends_nobody() -> None:
    bench = crowd(1)
    bench.step()
    bench.must_plan()
    assert bench.fail(StepOutOfMemory) == []
    bench.must_plan()
    assert bench.lose_device() == []
    bench.run()
    assert bench.tokens_of(0) == expected(prompt(5, 0), 8)


def test_a_device_that_is_lost_once_costs_nobody_anything_but_a_step_of_its_own() -> None:
    bench = crowd(3)
    bench.step()
    bench.must_plan()
    bench.must_plan()
    assert bench.lose_device() == []
    tried = []
    for _ in range(3):
        plan, _ = bench.step()
        tried.append(bench.sequence_ids(plan))
    assert tried == [{0}, {1}, {2}]
    bench.run()
    for sequence_id in range(3):
        assert bench.tokens_of(sequence_id) == expected(prompt(5, sequence_id), 8)


def test_a_half_of_suspects_that_loses_the_device_is_tried_one_by_one_before_the_others() -> None:
    bench = crowd(4)
    bench.step()
    bench.must_plan()
    bench.fail()
    assert bench.sequence_ids(bench.must_plan()) == {0, 1}
    bench.lose_device()
    tried = []
    for _ in range(3):
        plan, _ = bench.step()
        tried.append(bench.sequence_ids(plan))
    assert tried == [{0}, {1}, {2, 3}]
    bench.run()


def test_who_runs_gives_way_to_suspects_that_find_no_room() -> None:
    """Nobody is admitted before they have been tried: they waited until somebody who ran had ended."""
    info = fake_info(num_slots=4, num_blocks=13, block_len=4, max_model_len=32, max_num_batched_tokens=64)
    bench = Bench(info, enable_prefix_caching=False)
    suspect = bench.add(prompt(14), max_tokens=8)
    bench.step()
    bench.must_plan()
    for first in (50, 100):
        bench.add(prompt(14, first), max_tokens=8)
    bench.must_plan()
    bench.fail()
    # What suspects had shared they may need for themselves now: somebody takes as much as that.
    other = SequenceState(bench.tokenized[suspect], RequestTimeline(arrived_s=0.0), (9, 9), 1)
    bench.apply()
    allocator = bench.scheduler._live.allocator
    assert allocator.take(other, allocator.match_prefix(other), 0)
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert [each.token_ids[0] for each in plan.admitted] == [prompt(14)[0]]
    statistics = EngineStatistics()
    bench.scheduler.fill_statistics(statistics)
    assert (statistics.num_retried_steps, statistics.num_preemptions, statistics.num_running) == (1, 1, 2)


def test_what_was_aborted_or_paused_when_the_device_was_lost_stays_so() -> None:
    bench = crowd(3)
    bench.step()
    bench.must_plan()
    bench.abort(0)
    bench.scheduler.pause(1)
    bench.lose_device()
    bench.run()
    assert len(bench.tokens_of(0)) == len(bench.tokens_of(1)) == 1
    bench.scheduler.resume(1)
    bench.run()
    assert bench.tokens_of(1) == expected(prompt(5, 1), 8)


def test_suspects_are_suspects_still_when_the_device_was_lost_over_them() -> None:
    bench = crowd(4)
    bench.step()
    bench.must_plan()
    bench.fail()
    bench.must_plan()
    bench.lose_device(by_step=False)
    plan, _ = bench.step()
    assert bench.sequence_ids(plan) == {0, 1}
    bench.run()


# Everything together


class Faults(RuleBasedStateMachine):
    """Any order of arrivals, failures, losses, pauses and aborts, on a device with little room."""

    def __init__(self) -> None:
        super().__init__()
        self.bench: Bench | None = None
        self.paused: set[int] = set()

    @precondition(lambda self: self.bench is None)
    @rule(
        num_slots=st.integers(1, 5),
        block_len=st.sampled_from([1, 4]),
        budget=st.sampled_from([2, 8, 64]),
        caching=st.booleans(),
        ahead=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        num_host_blocks=st.sampled_from([0, 6, 80]),
    )
    def open(
        self,
        num_slots: int,
        block_len: int,
        budget: int,
        caching: bool,
        ahead: bool,
        policy: str,
        num_host_blocks: int,
    ) -> None:
        info = fake_info(
            num_slots=num_slots,
            num_blocks=64 // block_len + 1,
            block_len=block_len,
            max_model_len=40,
            max_num_batched_tokens=budget,
            num_host_blocks=num_host_blocks,
            num_swap_blocks=num_host_blocks // 2,
        )
        self.bench = Bench(info, policy=policy, enable_prefix_caching=caching, async_scheduling=ahead)

    @precondition(lambda self: self.bench is not None and len(self.bench.received) < 12)
    @rule(
        first=st.sampled_from([0, 0, 100]),
        num_tokens=st.integers(1, 24),
        max_tokens=st.integers(1, 12),
        culprit_at=st.one_of(st.none(), st.none(), st.integers(0, 30)),
        scored=st.booleans(),
        loses_device=st.booleans(),
    )
    def add(
        self,
        first: int,
        num_tokens: int,
        max_tokens: int,
        culprit_at: int | None,
        scored: bool,
        loses_device: bool,
    ) -> None:
        assert self.bench is not None
        self.bench.loses_device = loses_device
        sequence_id = self.bench.add(
            prompt(num_tokens, first), max_tokens=max_tokens, num_prompt_logprobs=1 if scored else None
        )
        if culprit_at is not None:
            self.bench.culprits[sequence_id] = culprit_at

    @precondition(lambda self: self.bench is not None)
    @rule()
    def plan(self) -> None:
        assert self.bench is not None
        self.bench.plan()

    @precondition(lambda self: self.bench is not None and self.bench.in_flight)
    @rule()
    def advance(self) -> None:
        assert self.bench is not None
        self.bench.advance()

    @precondition(lambda self: self.bench is not None and self.bench.in_flight)
    @rule(kind=st.sampled_from([StepFailed, StepOutOfMemory]))
    def fail(self, kind: type[StepFailed]) -> None:
        assert self.bench is not None
        for delta in self.bench.fail(kind):
            self.bench.culprits.setdefault(delta.sequence_id, 0)  # it has failed alone

    @precondition(lambda self: self.bench is not None)
    @rule(by_step=st.booleans())
    def lose(self, by_step: bool) -> None:
        assert self.bench is not None
        for delta in self.bench.lose_device(by_step=by_step):
            self.bench.culprits.setdefault(delta.sequence_id, 0)  # it has lost the device alone

    @precondition(lambda self: self.bench is not None and self.bench.received)
    @rule(data=st.data(), what=st.sampled_from(["abort", "pause", "resume"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        assert self.bench is not None
        sequence_id = data.draw(st.sampled_from(sorted(self.bench.received)))
        if what == "abort":
            if self.bench.received[sequence_id].end is None:
                self.bench.abort(sequence_id)
        elif what == "pause":
            self.bench.scheduler.pause(sequence_id)
            self.paused.add(sequence_id)
        else:
            self.bench.scheduler.resume(sequence_id)

    @invariant()
    def holds(self) -> None:
        if self.bench is not None:
            self.bench.scheduler.check()

    def teardown(self) -> None:
        """Let everything come to its end: every innocent got what it should, and nothing is left."""
        if self.bench is None:
            return
        for sequence_id in self.paused:
            self.bench.scheduler.resume(sequence_id)
        self.bench.run()
        for sequence_id, received in self.bench.received.items():
            tokenized = self.bench.tokenized[sequence_id]
            whole = expected(list(tokenized.prompt_token_ids), tokenized.max_output_len)
            assert array("i", received.token_ids) == array("i", whole[: len(received.token_ids)])
            if sequence_id not in self.bench.aborted and sequence_id not in self.bench.culprits:
                assert received.finish_reason is FinishReason.LENGTH
                assert len(received.token_ids) == len(whole)


Faults.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestFaults = pytest.mark.slow(Faults.TestCase)
