import itertools
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from asyncserve.errors import (
    AsyncserveError,
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    NotReady,
    Overloaded,
    PromptTooLong,
    UnknownModel,
)
from asyncserve.metrics.catalogue import METRICS, MetricKind
from asyncserve.metrics.observer import BucketCounts, PrometheusObserver
from asyncserve.observer import Observer, RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import ScheduledSequence, StepOutput, StepPlan
from tests.metrics.exposition import buckets_of, samples_of, value_of


def new_observer() -> tuple[CollectorRegistry, PrometheusObserver]:
    registry = CollectorRegistry()
    return registry, PrometheusObserver(registry, "m")


def step(num_tokens: list[int]) -> StepPlan:
    sequences = tuple(ScheduledSequence(slot, 0, num, True) for slot, num in enumerate(num_tokens))
    return StepPlan(step_id=0, sequences=sequences)


def output(*, device_s: float = 0.0, launch_s: float = 0.0, idle_s: float = 0.0) -> StepOutput:
    return StepOutput(step_id=0, token_ids=(), device_s=device_s, launch_s=launch_s, idle_s=idle_s)


def counts_of(registry: CollectorRegistry) -> dict[str, float]:
    """Return how many values each histogram of sequences has."""
    return {
        name: value_of(registry, f"{name}_count")
        for name in (
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_time_per_output_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_max_tokens",
        )
    }


def finished_timeline() -> RequestTimeline:
    return RequestTimeline(
        arrived_s=100.0,
        tokenized_s=100.25,
        first_scheduled_s=100.5,
        first_token_s=101.5,
        last_token_s=103.5,
        finished_s=104.0,
        num_prompt_tokens=30,
        num_cached_tokens=16,
        num_output_tokens=5,
        max_output_len=64,
    )


def test_it_is_an_observer() -> None:
    observer: Observer = new_observer()[1]
    observer.loop_lag(0.0)


def test_phases_of_a_finished_sequence_are_measured_between_their_ends() -> None:
    registry, observer = new_observer()
    timeline = finished_timeline()
    observer.first_token(timeline, 1)
    observer.request_finished(timeline, FinishReason.LENGTH)
    expected = {
        "time_to_first_token_seconds": 1.5,
        "e2e_request_latency_seconds": 4.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 3.0,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 30,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 64,
    }
    for name, value in expected.items():
        assert value_of(registry, f"{name}_sum") == pytest.approx(value), name
        assert value_of(registry, f"{name}_count") == 1, name
    assert value_of(registry, "prompt_tokens_total") == 30
    assert value_of(registry, "prompt_tokens_cached_total") == 16


def test_a_sequence_aborted_while_running_is_counted_with_its_tokens() -> None:
    registry, observer = new_observer()
    timeline = finished_timeline()
    observer.first_token(timeline, 1)
    observer.step_applied(step([1]), output(), [0.5], 102.0)
    observer.step_applied(step([1]), output(), [0.5], 102.5)
    observer.request_finished(timeline, FinishReason.ABORT)
    assert set(counts_of(registry).values()) == {1}
    assert value_of(registry, "generation_tokens_total") == 3
    observer.first_token(finished_timeline(), 20)
    assert value_of(registry, "generation_tokens_total") == 23
    assert value_of(registry, "request_success_total", finished_reason="abort") == 1


def test_a_sequence_aborted_in_the_queue_is_counted_and_its_wait_too() -> None:
    registry, observer = new_observer()
    timeline = RequestTimeline(arrived_s=10.0, finished_s=13.0, num_prompt_tokens=9, max_output_len=8)
    observer.request_finished(timeline, FinishReason.ABORT)
    assert value_of(registry, "request_queue_time_seconds_sum") == 3.0
    assert value_of(registry, "e2e_request_latency_seconds_sum") == 3.0
    assert value_of(registry, "request_generation_tokens_count") == 1
    assert value_of(registry, "request_prefill_time_seconds_count") == 0
    assert value_of(registry, "prompt_tokens_total") == 0  # nothing was computed for it
    assert value_of(registry, "request_success_total", finished_reason="abort") == 1


def test_a_sequence_aborted_in_its_prefill_counts_its_prompt_once() -> None:
    registry, observer = new_observer()
    timeline = RequestTimeline(
        arrived_s=10.0, first_scheduled_s=11.0, finished_s=13.0, num_prompt_tokens=9, num_cached_tokens=2
    )
    observer.request_finished(timeline, FinishReason.ERROR)
    assert value_of(registry, "prompt_tokens_total") == 9
    assert value_of(registry, "prompt_tokens_cached_total") == 2
    assert value_of(registry, "request_queue_time_seconds_sum") == 1.0
    assert value_of(registry, "request_inference_time_seconds_count") == 0


def test_a_sequence_that_left_before_its_first_token_was_told_has_its_prompt_counted() -> None:
    registry, observer = new_observer()
    timeline = finished_timeline()  # the scheduler has stamped a first token; nobody reported it
    observer.request_finished(timeline, FinishReason.ABORT)
    assert value_of(registry, "prompt_tokens_total") == 30
    assert value_of(registry, "prompt_tokens_cached_total") == 16


def test_a_sequence_that_left_before_it_was_tokenized_has_no_lengths_to_count() -> None:
    registry, observer = new_observer()
    timeline = RequestTimeline(arrived_s=10.0, finished_s=13.0)
    observer.request_finished(timeline, FinishReason.ABORT)
    assert value_of(registry, "request_prompt_tokens_count") == 0
    assert value_of(registry, "request_params_max_tokens_count") == 0
    assert value_of(registry, "request_generation_tokens_count") == 1


def test_a_sequence_of_one_token_has_no_time_per_output_token() -> None:
    registry, observer = new_observer()
    timeline = finished_timeline()
    timeline.num_output_tokens, timeline.last_token_s = 1, timeline.first_token_s
    observer.first_token(timeline, 1)
    observer.request_finished(timeline, FinishReason.STOP)
    counts = counts_of(registry)
    assert counts.pop("request_time_per_output_token_seconds") == 0
    assert set(counts.values()) == {1}


def test_every_sequence_is_counted_once_under_its_reason() -> None:
    registry, observer = new_observer()
    ends = (
        [FinishReason.STOP] * 4 + [FinishReason.LENGTH] * 3 + [FinishReason.ABORT] * 2 + [FinishReason.ERROR]
    )
    for reason in ends:
        timeline = finished_timeline()
        observer.first_token(timeline, 1)
        observer.request_finished(timeline, reason)
    by_reason = {
        sample.labels["finished_reason"]: sample.value
        for sample in samples_of(registry, "request_success_total")
    }
    assert by_reason == {"stop": 4, "length": 3, "abort": 2, "error": 1, "missing": 0}
    assert set(counts_of(registry).values()) == {10}


def test_reasons_are_exposed_before_anything_happened() -> None:
    registry, _ = new_observer()
    for name in ("request_success_total", "requests_rejected_total"):
        samples = samples_of(registry, name)
        assert len(samples) >= 4
        assert {sample.value for sample in samples} == {0}


def test_steps_are_counted_with_their_tokens_times_and_gaps() -> None:
    registry, observer = new_observer()
    observer.step_applied(step([1, 1, 60]), output(device_s=0.02, launch_s=0.0003), [0.021, 0.019], 1.0)
    observer.step_applied(step([1, 1, 1]), output(device_s=0.004, idle_s=0.25), [0.005, 0.005, 0.004], 2.0)
    expected = {
        "iteration_tokens_total": (2, 65),
        "step_time_seconds": (2, 0.024),
        "step_launch_seconds": (2, 0.0003),
        "inter_token_latency_seconds": (5, 0.054),
    }
    for name, (count, total) in expected.items():
        assert value_of(registry, f"{name}_count") == count, name
        assert value_of(registry, f"{name}_sum") == pytest.approx(total), name
    assert value_of(registry, "gpu_idle_seconds_total") == 0.25
    assert value_of(registry, "generation_tokens_total") == 5


def test_a_step_that_only_releases_slots_is_no_step_of_the_device() -> None:
    registry, observer = new_observer()
    observer.step_applied(step([]), output(), [], 1.0)
    assert value_of(registry, "iteration_tokens_total_count") == 0
    assert value_of(registry, "step_time_seconds_count") == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("full", retry_after_s=1.0), "overloaded"),
        (Overloaded("full", retry_after_s=1.0, reason="queued_requests"), "queued_requests"),
        (Overloaded("full", retry_after_s=1.0, reason="queued_tokens"), "queued_tokens"),
        (Overloaded("full", retry_after_s=1.0, reason="tenant_share"), "tenant_share"),
        (Overloaded("full", retry_after_s=1.0, reason="something new"), "overloaded"),
        (DeadlineExceeded("late"), "deadline"),
        (NotReady("loading"), "not_ready"),
        (PromptTooLong("long"), "prompt_too_long"),
        (InvalidRequest("bad"), "invalid"),
        (UnknownModel("who"), "unknown_model"),
        (EngineStopped("gone"), "engine_stopped"),
        (AsyncserveError("?"), "other"),
        (ValueError("?"), "other"),
    ],
)
def test_refusals_are_counted_by_reason(error: Exception, reason: str) -> None:
    registry, observer = new_observer()
    observer.request_rejected(error)
    counted = {
        sample.labels["reason"]: sample.value for sample in samples_of(registry, "requests_rejected_total")
    }
    assert {name for name, value in counted.items() if value} == {reason}
    assert counted[reason] == 1


def test_loop_lag_is_a_histogram() -> None:
    registry, observer = new_observer()
    for lag_s in (0.00003, 0.0004, 0.3):
        observer.loop_lag(lag_s)
    buckets = dict(buckets_of(registry, "loop_lag_seconds"))
    assert (buckets[0.00005], buckets[0.0002], buckets[0.0005], buckets[0.5]) == (1, 1, 2, 3)


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.02, 5.0], ids=lambda spread: f"spread {spread}")
def test_counting_many_values_at_once_is_counting_each(spread: float) -> None:
    generator = random.Random(3)
    bounds = (0.001, 0.01, 0.012, 0.1, 1.0)
    values = [0.0101 + spread * generator.random() for _ in range(200)] + [0.012]
    one_by_one, together = BucketCounts(bounds), BucketCounts(bounds)
    for value in values:
        one_by_one.observe(value)
    together.observe_all(values)
    assert together.sample()[0] == one_by_one.sample()[0]
    assert together.sample()[1] == pytest.approx(one_by_one.sample()[1])


def test_a_value_equal_to_a_bound_belongs_below_it() -> None:
    counts = BucketCounts((1.0, 2.0))
    for value in (1.0, 2.0, 2.5):
        counts.observe(value)
    assert counts.sample() == ([("1.0", 1), ("2.0", 2), ("+Inf", 3)], 5.5)


def test_exposed_buckets_rise_and_end_in_the_count() -> None:
    registry, observer = new_observer()
    generator = random.Random(1)
    for _ in range(50):
        observer.step_applied(
            step([generator.randint(1, 40)] * 4),
            output(device_s=generator.random() / 50, launch_s=generator.random() / 1000),
            [10 ** generator.uniform(-5, 2.5) for _ in range(8)],
            0.0,
        )
        observer.loop_lag(generator.random() / 100)
    for metric in METRICS:
        if metric.kind is MetricKind.HISTOGRAM:
            buckets = buckets_of(registry, metric.name)
            assert [bound for bound, _ in buckets] == [*metric.buckets, float("inf")]
            assert all(low[1] <= high[1] for low, high in itertools.pairwise(buckets))
            assert buckets[-1][1] == value_of(registry, f"{metric.name}_count")


def test_exposition_is_text_with_help_and_type() -> None:
    registry, _ = new_observer()
    text = generate_latest(registry)
    assert b"# TYPE asyncserve:generation_tokens_total counter\n" in text
    assert b"# TYPE asyncserve:iteration_tokens_total histogram\n" in text
    assert b'asyncserve:generation_tokens_total{engine="0",model_name="m"} 0.0\n' in text
    assert b"_created" not in text


def test_the_loops_time_is_added_up_by_stage() -> None:
    registry, observer = new_observer()
    observer.stage_ran("plan", 0, 1.0, 1.25)
    observer.stage_ran("plan", 1, 2.0, 2.5)
    observer.stage_ran("detokenize", 0, 3.0, 4.0)
    seconds = {s.labels["stage"]: s.value for s in samples_of(registry, "loop_stage_seconds_total")}
    assert seconds == {"apply": 0.0, "plan": 0.75, "submit": 0.0, "detokenize": 1.0}
