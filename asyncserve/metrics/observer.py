"""What is counted when it happens: latencies, tokens, reasons of ending.

Takes the engine's calls, at most a few per step, and keeps plain numbers; Prometheus' objects are made only
when someone scrapes. One observation costs a bisection, the gaps of a whole step little more. Everything
runs on the loop thread, scraping included. Knows nothing of what can be read from the engine at any time:
that is `collector.py`'s.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asyncserve.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidRequest,
    NotReady,
    Overloaded,
    PromptTooLong,
    UnknownModel,
)
from asyncserve.metrics.catalogue import (
    ENGINE,
    LOOP_STAGES,
    METRICS,
    MetricKind,
    Source,
    counter_family,
    empty_families,
    histogram_family,
)
from asyncserve.observer import RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import StepOutput, StepPlan

_REJECTIONS: tuple[tuple[type[Exception], str], ...] = (
    (Overloaded, "overloaded"),
    (DeadlineExceeded, "deadline"),
    (NotReady, "not_ready"),
    (PromptTooLong, "prompt_too_long"),
    (UnknownModel, "unknown_model"),
    (EngineStopped, "engine_stopped"),
    (InvalidRequest, "invalid"),
)
_OVERLOADS = ("queued_requests", "queued_tokens", "tenant_share")
"""What else an `Overloaded` may give as its reason: which bound of the queue it is about."""
_OTHER_REJECTION = "other"


class BucketCounts:
    """A histogram's numbers.

    Args:
        bounds: Upper bounds, rising; a value equal to a bound belongs below it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values."""
        if not values:
            return
        self._sum += sum(values)
        first, last = bisect_left(self._bounds, min(values)), bisect_left(self._bounds, max(values))
        if first == last:  # the gaps of one step are nearly alike
            self._counts[first] += len(values)
            return
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1

    def sample(self) -> tuple[list[tuple[str, float]], float]:
        """Return (upper bound as text, values up to it) with infinity last, and the sum of all values."""
        bounds = [*(repr(bound) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class PrometheusObserver(Collector):
    """An `Observer` that Prometheus can scrape; registers itself, the process and the garbage collector.

    Args:
        registry: Where it is to be found.
        model_name: Value of the label `model_name`.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._common = (model_name, ENGINE)
        self._histograms = {
            metric.name: BucketCounts(metric.buckets)
            for metric in METRICS
            if metric.source is Source.OBSERVER and metric.kind is MetricKind.HISTOGRAM
        }
        self._first_token = self._histograms["time_to_first_token_seconds"]
        self._gaps = self._histograms["inter_token_latency_seconds"]
        self._mean_gaps = self._histograms["request_time_per_output_token_seconds"]
        self._end_to_end = self._histograms["e2e_request_latency_seconds"]
        self._queue = self._histograms["request_queue_time_seconds"]
        self._prefill = self._histograms["request_prefill_time_seconds"]
        self._decode = self._histograms["request_decode_time_seconds"]
        self._inference = self._histograms["request_inference_time_seconds"]
        self._prompt_lens = self._histograms["request_prompt_tokens"]
        self._computed_lens = self._histograms["request_prefill_kv_computed_tokens"]
        self._output_lens = self._histograms["request_generation_tokens"]
        self._max_lens = self._histograms["request_params_max_tokens"]
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._step_time = self._histograms["step_time_seconds"]
        self._launch_time = self._histograms["step_launch_seconds"]
        self._lag = self._histograms["loop_lag_seconds"]
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._idle_s = 0.0
        self._stage_s = dict.fromkeys(LOOP_STAGES, 0.0)
        # Every reason is there from the start: a rate over a series that appears late misses its first event.
        self._finished = {reason.value: 0 for reason in FinishReason}
        self._rejected = dict.fromkeys(
            [*(reason for _, reason in _REJECTIONS), *_OVERLOADS, _OTHER_REJECTION], 0
        )
        registry.register(self)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Note one finished step; see `Observer`."""
        if plan.sequences:
            self._step_tokens.observe(plan.num_tokens)
            self._step_time.observe(output.device_s)
            self._launch_time.observe(output.launch_s)
        self._idle_s += output.idle_s
        self._num_output_tokens += len(inter_token_s)
        self._gaps.observe_all(inter_token_s)

    def first_token(self, timeline: RequestTimeline, num_tokens: int) -> None:
        """Note that a sequence got its first token; see `Observer`."""
        self._num_output_tokens += num_tokens
        self._note_prompt(timeline)
        if timeline.first_token_s is not None:
            self._first_token.observe(timeline.first_token_s - timeline.arrived_s)

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Note the end of a sequence, aborted and failed ones included; exactly once for each."""
        self._finished[reason.value] += 1
        self._output_lens.observe(timeline.num_output_tokens)
        if timeline.tokenized_s is not None:
            self._prompt_lens.observe(timeline.num_prompt_tokens)
            self._max_lens.observe(timeline.max_output_len)
        arrived_s, scheduled_s = timeline.arrived_s, timeline.first_scheduled_s
        first_s, last_s = timeline.first_token_s, timeline.last_token_s
        ended_s = timeline.finished_s if timeline.finished_s is not None else last_s
        if ended_s is not None:
            self._end_to_end.observe(ended_s - arrived_s)
        queued_until_s = scheduled_s if scheduled_s is not None else ended_s
        if queued_until_s is not None:
            self._queue.observe(queued_until_s - arrived_s)
        if scheduled_s is None:
            return
        self._note_prompt(timeline)
        if first_s is None:
            return
        self._prefill.observe(first_s - scheduled_s)
        if last_s is not None:
            self._decode.observe(last_s - first_s)
            self._inference.observe(last_s - scheduled_s)
            if timeline.num_output_tokens > 1:
                self._mean_gaps.observe((last_s - first_s) / (timeline.num_output_tokens - 1))

    def request_rejected(self, error: Exception) -> None:
        """Note that a request was refused before it became a sequence."""
        reason = next((reason for kind, reason in _REJECTIONS if isinstance(error, kind)), _OTHER_REJECTION)
        if isinstance(error, Overloaded) and error.reason in _OVERLOADS:
            reason = error.reason
        self._rejected[reason] += 1

    def loop_lag(self, lag_s: float) -> None:
        """Note how late the event loop ran a timer."""
        self._lag.observe(lag_s)

    def stage_ran(self, stage: str, step_id: int, began_s: float, ended_s: float) -> None:
        """Note that a stage had the event loop for a step's sake."""
        self._stage_s[stage] += ended_s - began_s

    def describe(self) -> Iterable[Metric]:
        """Name the metrics that `collect` gives."""
        return empty_families(Source.OBSERVER)

    def collect(self) -> Iterable[Metric]:
        """Give Prometheus the numbers of this moment."""
        for name, counts in self._histograms.items():
            histogram = histogram_family(name)
            histogram.add_metric(self._common, *counts.sample())
            yield histogram
        yield self._counter("prompt_tokens_total", {(): self._num_prompt_tokens})
        yield self._counter("prompt_tokens_cached_total", {(): self._num_cached_tokens})
        yield self._counter("generation_tokens_total", {(): self._num_output_tokens})
        yield self._counter("gpu_idle_seconds_total", {(): self._idle_s})
        yield self._counter("loop_stage_seconds_total", {(key,): num for key, num in self._stage_s.items()})
        yield self._counter("request_success_total", {(key,): num for key, num in self._finished.items()})
        yield self._counter("requests_rejected_total", {(key,): num for key, num in self._rejected.items()})

    def _counter(self, name: str, values: Mapping[tuple[str, ...], float]) -> CounterMetricFamily:
        counter = counter_family(name)
        for labels, value in values.items():
            counter.add_metric((*self._common, *labels), value)
        return counter

    def _note_prompt(self, timeline: RequestTimeline) -> None:
        """Count the prompt of a sequence that was started, once: its first token may never be reported."""
        if timeline.prompt_is_counted:
            return
        timeline.prompt_is_counted = True
        self._computed_lens.observe(timeline.num_prompt_tokens - timeline.num_cached_tokens)
        self._num_prompt_tokens += timeline.num_prompt_tokens
        self._num_cached_tokens += timeline.num_cached_tokens
