import pytest

from asyncserve.step import ScheduledSequence, StepOutput, StepPlan
from loadtest.gpu.step_record import Step, StepRecorder, decode_steps, summarize


def step(num_sequences: int, applied_s: float, *, num_tokens: int | None = None, idle_s: float = 0.0) -> Step:
    return Step(num_tokens or num_sequences, num_sequences, 0.003, 0.001, idle_s, applied_s)


def test_every_step_that_computes_is_kept() -> None:
    recorder = StepRecorder()
    sequences = (ScheduledSequence(0, 5, 1, True), ScheduledSequence(1, 0, 7, True))
    output = StepOutput(step_id=0, token_ids=(1, 2), device_s=0.5, launch_s=0.1, idle_s=0.2)
    recorder.step_applied(StepPlan(step_id=0, sequences=sequences), output, (), 3.0)
    recorder.step_applied(StepPlan(step_id=1, sequences=()), StepOutput(step_id=1, token_ids=()), (), 4.0)
    assert recorder.steps == [Step(8, 2, 0.5, 0.1, 0.2, 3.0)]
    assert not recorder.steps[0].is_decode


def test_the_longest_run_of_full_decode_steps_counts_without_its_first() -> None:
    full = [step(4, float(i)) for i in range(6)]
    prefill = step(4, 6.0, num_tokens=9)
    more = [step(4, 7.0), step(4, 8.0)]
    fewer = [step(3, 9.0)]
    assert decode_steps([*more, prefill, *full, *fewer, *more], 4) == full[1:]
    assert decode_steps([prefill], 4) == []


def test_figures_are_medians_and_the_idle_share_is_of_all_the_devices_time() -> None:
    figures = summarize([step(1, 0.0), step(1, 0.004, idle_s=0.001), step(1, 0.008), step(1, 0.108)])
    assert figures is not None
    assert figures.num_steps == 4
    assert figures.interval_ms == pytest.approx(4.0)
    assert figures.interval_p99_ms == pytest.approx(4.0 + 0.98 * 96.0)
    assert figures.device_ms == pytest.approx(3.0)
    assert figures.launch_ms == pytest.approx(1.0)
    assert figures.idle_share == pytest.approx(1 / 13)


def test_a_single_step_has_no_interval_and_none_no_figures() -> None:
    figures = summarize([step(1, 0.0)])
    assert figures is not None
    assert figures.interval_ms is None
    assert summarize([]) is None
