"""What the recorder keeps of steps and seconds, and how little of it."""

from collections.abc import Iterator, Sequence
from typing import Any

from asyncserve.errors import InvalidRequest
from asyncserve.http.live_page.recorder import (
    GAPS_PER_STEP,
    NUM_SECONDS,
    NUM_STEPS,
    SAMPLE_LEN,
    PipelineRecorder,
    Sample,
)
from asyncserve.observer import Observer, RequestTimeline
from asyncserve.request import FinishReason, SamplingParams
from asyncserve.step import ScheduledSequence, SlotAssignment, StepOutput, StepPlan


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def plan(num_tokens: Sequence[int], *, admits: bool = False) -> StepPlan:
    sequences = tuple(ScheduledSequence(slot, 0, num, True) for slot, num in enumerate(num_tokens))
    admitted = ()
    if admits:
        admitted = (SlotAssignment(slot=0, token_ids=(), prompt_len=0, sampling=SamplingParams(), seed=0),)  # type: ignore[arg-type]
    return StepPlan(step_id=0, sequences=sequences, admitted=admitted)


def output(*, device_s: float = 0.0, idle_s: float = 0.0) -> StepOutput:
    return StepOutput(step_id=0, token_ids=(), device_s=device_s, idle_s=idle_s)


def recorder() -> tuple[PipelineRecorder, Clock]:
    clock = Clock()
    return PipelineRecorder(clock), clock


def test_a_steps_tokens_are_told_apart_wherever_its_chunks_of_one_token_stand() -> None:
    subject, clock = recorder()
    for num_tokens, admits in (([1, 1, 1], False), ([1, 1, 30], False), ([1, 30, 1], True), ([], False)):
        subject.step_applied(plan(num_tokens, admits=admits), output(), (), clock.now_s)
    assert [(step.number, step.prefill_tokens, step.decode_tokens) for step in subject.steps] == [
        (1, 0, 3),
        (2, 30, 2),
        (3, 30, 2),
    ]


def test_a_second_has_what_happened_in_it_and_nothing_else() -> None:
    subject, clock = recorder()
    subject.step_applied(plan([1, 8]), output(device_s=0.010, idle_s=0.002), (0.020,), 1000.1)
    subject.first_token(RequestTimeline(arrived_s=1000.0, first_token_s=1000.3), 1)
    subject.step_applied(plan([1, 1]), output(device_s=0.005), (0.040, 0.040), 1000.9)
    clock.now_s = 1001.2
    subject.loop_lag(0.003)
    subject.step_applied(plan([1]), output(device_s=0.001), (0.5,), 1001.3)
    assert len(subject.seconds) == 1
    second = subject.seconds[0]
    assert (second.number, second.prefill_tokens, second.output_tokens, second.steps) == (0, 8, 4, 2)
    assert (second.device_ms, second.idle_ms, second.lag_ms) == (15.0, 2.0, None)
    assert (second.first_token_p50_ms, second.first_token_p99_ms) == (300.0, 300.0)
    assert (second.gap_p50_ms, second.gap_p99_ms) == (40.0, 40.0)
    subject.advance(1002.0)
    assert (subject.seconds[1].lag_ms, subject.seconds[1].output_tokens) == (3.0, 1)


def test_a_missed_deadline_is_not_a_client_that_left() -> None:
    subject, _ = recorder()
    subject.request_finished(RequestTimeline(arrived_s=1000.0), FinishReason.ABORT)
    subject.request_finished(RequestTimeline(arrived_s=1000.0, missed_deadline=True), FinishReason.ABORT)
    assert subject.totals().aborted == 1


def test_seconds_in_which_nothing_happened_are_there_too() -> None:
    subject, clock = recorder()
    subject.step_applied(plan([1]), output(), (0.1,), clock.now_s)
    subject.advance(clock.now_s + 3.5)
    assert [second.number for second in subject.seconds] == [0, 1, 2]
    assert [second.output_tokens for second in subject.seconds] == [1, 0, 0]
    assert subject.seconds[1].gap_p50_ms is None
    subject.advance(clock.now_s + 3.9)
    assert len(subject.seconds) == 3


def test_what_is_kept_is_bounded_however_long_the_engine_runs_or_rests() -> None:
    subject, clock = recorder()
    for number in range(3 * NUM_STEPS):
        subject.step_applied(plan([1]), output(), (0.1,), clock.now_s + number)
    assert len(subject.steps) == NUM_STEPS
    assert [second.number for second in subject.seconds] == list(
        range(3 * NUM_STEPS - 1 - NUM_SECONDS, 3 * NUM_STEPS - 1)
    )
    subject.advance(clock.now_s + 1e9)
    assert [second.number for second in subject.seconds] == list(range(10**9 - NUM_SECONDS, 10**9))


def test_of_a_step_with_many_gaps_few_are_looked_at() -> None:
    class Counted(list[float]):
        num_given = 0

        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            self.num_given += len(found) if isinstance(place, slice) else 1
            return found

        def __iter__(self) -> Iterator[float]:
            raise AssertionError("every gap is looked at")

    subject, clock = recorder()
    for num_gaps in (1, GAPS_PER_STEP, GAPS_PER_STEP + 1, 1000):
        gaps = Counted([0.01] * num_gaps)
        subject.step_applied(plan([1] * num_gaps), output(), gaps, clock.now_s)
        assert GAPS_PER_STEP // 2 < gaps.num_given <= GAPS_PER_STEP or gaps.num_given == num_gaps


def test_a_sample_stays_small_and_even() -> None:
    sample = Sample()
    for value in range(20 * SAMPLE_LEN):
        sample.offer((value / 1000.0,))
    assert len(sample._values) <= SAMPLE_LEN
    median, high = sample.percentiles_ms()
    assert median is not None
    assert high is not None
    # Evenly thinned, not a beginning or an end: within a few percent of the whole's.
    assert abs(median - 10 * SAMPLE_LEN) < 0.05 * 20 * SAMPLE_LEN
    assert high > 0.95 * 20 * SAMPLE_LEN
    assert Sample().percentiles_ms() == (None, None)


def test_totals_count_ends_by_reason_and_refusals() -> None:
    subject, clock = recorder()
    subject.step_applied(plan([1, 5]), output(), (0.1,), clock.now_s)
    subject.first_token(RequestTimeline(arrived_s=0.0), 1)
    for reason, times in (
        (FinishReason.STOP, 1),
        (FinishReason.LENGTH, 2),
        (FinishReason.ABORT, 3),
        (FinishReason.ERROR, 4),
    ):
        for _ in range(times):
            subject.request_finished(RequestTimeline(arrived_s=0.0), reason)
    for _ in range(5):
        subject.request_rejected(InvalidRequest("no"))
    assert tuple(subject.totals()) == (1, 5, 2, 1, 2, 3, 4, 5)


def test_it_is_an_observer() -> None:
    subject: Observer = recorder()[0]
    assert subject is not None
