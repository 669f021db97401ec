"""Every metric once: name, type, unit, labels, buckets, meaning.

Names, labels and types are those users of inference servers already have on their dashboards, under our
prefix; latency buckets are theirs with finer ones below 10 ms added. Every metric also carries the labels
of `COMMON_LABELS`. A *sequence* is one choice of a request: a request with `n` = 3 counts three times.
Whoever exposes a metric takes it from here, by name, and a test compares both.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

PREFIX = "asyncserve:"
COMMON_LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the label `engine`: there is one in a process."""

LOOP_STAGES = ("apply", "plan", "submit", "detokenize")
"""What the event loop does for every step."""


class MetricKind(enum.Enum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(enum.Enum):
    """Who exposes a metric."""

    OBSERVER = "observer"
    COLLECTOR = "collector"
    HTTP = "http"
    OUTCOMES = "outcomes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDefinition:
    """One metric.

    Args:
        name: As exposed, prefix apart; a counter's ends in `_total`.
        kind: Its type.
        unit: What its value counts: seconds, tokens, steps and so on; "" for a ratio or a fact.
        meaning: Its help text.
        source: Who exposes it.
        labels: Labels beside the common ones.
        buckets: Upper bounds of a histogram, rising, without infinity.
    """

    name: str
    kind: MetricKind
    unit: str
    meaning: str
    source: Source
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name with prefix."""
        return PREFIX + self.name

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The common labels and its own, in the order of its samples."""
        return (*COMMON_LABELS, *self.labels)


# fmt: off
FIRST_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_GAP_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
STEP_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0,
    2.0, 5.0, 10.0,
)
SHORT_BUCKETS = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0,
)
LEN_BUCKETS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0,
    100000.0, 200000.0, 500000.0, 1000000.0,
)
STEP_TOKEN_BUCKETS = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)
# fmt: on


def _counter(
    name: str, unit: str, meaning: str, source: Source, labels: tuple[str, ...] = ()
) -> MetricDefinition:
    return MetricDefinition(
        name=name, kind=MetricKind.COUNTER, unit=unit, meaning=meaning, source=source, labels=labels
    )


def _gauge(
    name: str,
    unit: str,
    meaning: str,
    labels: tuple[str, ...] = (),
    *,
    source: Source = Source.COLLECTOR,
) -> MetricDefinition:
    return MetricDefinition(
        name=name,
        kind=MetricKind.GAUGE,
        unit=unit,
        meaning=meaning,
        source=source,
        labels=labels,
    )


def _histogram(name: str, unit: str, meaning: str, buckets: tuple[float, ...]) -> MetricDefinition:
    return MetricDefinition(
        name=name,
        kind=MetricKind.HISTOGRAM,
        unit=unit,
        meaning=meaning,
        source=Source.OBSERVER,
        buckets=buckets,
    )


METRICS: tuple[MetricDefinition, ...] = (
    # What users feel.
    _histogram(
        "time_to_first_token_seconds",
        "seconds",
        "From the arrival of a request to a sequence's first token.",
        FIRST_TOKEN_BUCKETS,
    ),
    _histogram(
        "inter_token_latency_seconds",
        "seconds",
        "Between two consecutive tokens of a sequence.",
        TOKEN_GAP_BUCKETS,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "seconds",
        "Mean time between tokens of a sequence, over sequences of two tokens or more.",
        TOKEN_GAP_BUCKETS,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "seconds",
        "From the arrival of a request to the end of a sequence, however it ended.",
        REQUEST_BUCKETS,
    ),
    # Where the time of a sequence went.
    _histogram(
        "request_queue_time_seconds",
        "seconds",
        "From the arrival of a request until a sequence was first scheduled, or ended unscheduled.",
        REQUEST_BUCKETS,
    ),
    _histogram(
        "request_prefill_time_seconds",
        "seconds",
        "From first being scheduled to the first token, of sequences that got one.",
        REQUEST_BUCKETS,
    ),
    _histogram(
        "request_decode_time_seconds",
        "seconds",
        "From the first token to the last, of sequences that got one.",
        REQUEST_BUCKETS,
    ),
    _histogram(
        "request_inference_time_seconds",
        "seconds",
        "From first being scheduled to the last token, of sequences that got one.",
        REQUEST_BUCKETS,
    ),
    # How much there is of it.
    _histogram("request_prompt_tokens", "tokens", "Prompt tokens of a tokenized sequence.", LEN_BUCKETS),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "tokens",
        "Prompt tokens of a sequence that were computed, not found in the prefix cache nor shared with"
        " another choice.",
        LEN_BUCKETS,
    ),
    _histogram("request_generation_tokens", "tokens", "Tokens generated for a sequence.", LEN_BUCKETS),
    _histogram(
        "request_params_max_tokens",
        "tokens",
        "Most tokens a sequence was allowed: its max_tokens, or what the context leaves.",
        LEN_BUCKETS,
    ),
    _counter(
        "prompt_tokens_total",
        "tokens",
        "Prompt tokens of sequences that were started, those found in the prefix cache included.",
        Source.OBSERVER,
    ),
    _counter(
        "prompt_tokens_cached_total",
        "tokens",
        "Of the prompt tokens, those found in the prefix cache or shared with another choice.",
        Source.OBSERVER,
    ),
    _counter(
        "generation_tokens_total",
        "tokens",
        "Tokens generated, those of aborted sequences included.",
        Source.OBSERVER,
    ),
    _counter(
        "request_success_total",
        "sequences",
        "Sequences ended, by reason: stop, length, abort (the client left, or its time was over), error or"
        " missing (a beam search found fewer texts than it has rows).",
        Source.OBSERVER,
        ("finished_reason",),
    ),
    _counter(
        "requests_rejected_total",
        "requests",
        "Generating requests refused before they became a sequence, by reason; wrong keys aside.",
        Source.OBSERVER,
        ("reason",),
    ),
    # The scheduler and the KV cache.
    _gauge("num_requests_running", "sequences", "Sequences that hold a device row."),
    _gauge("num_requests_waiting", "sequences", "Sequences waiting for a device row, preempted ones too."),
    _gauge(
        "num_waiting_tokens",
        "tokens",
        "Tokens of the waiting sequences, estimated where a prompt is not encoded yet.",
    ),
    _gauge(
        "num_requests_paused",
        "sequences",
        "Sequences that hold no device row since their client does not read.",
    ),
    _counter(
        "num_pauses_total",
        "pauses",
        "Times a sequence was paused since its client did not read.",
        Source.COLLECTOR,
    ),
    _counter(
        "deadlines_missed_total",
        "requests",
        "Requests ended because the time allowed for their answer was over; not those refused at once.",
        Source.COLLECTOR,
    ),
    _gauge("kv_cache_usage_perc", "", "Share of the KV blocks held by sequences; 1 means all of them."),
    _gauge(
        "kv_blocks",
        "blocks",
        "KV blocks: used by a sequence, cached (free, content reusable) or free.",
        ("state",),
    ),
    _gauge(
        "kv_blocks_saved",
        "blocks",
        "KV blocks that would be used beyond those that are, if sequences shared none.",
    ),
    _counter(
        "copied_kv_blocks_total",
        "blocks",
        "KV blocks copied for choices of a request that went on from a common prompt.",
        Source.COLLECTOR,
    ),
    _gauge(
        "kv_group_blocks",
        "blocks",
        "KV blocks of each group of layers: used by a sequence, or cached. Free ones are any group's.",
        ("group", "state"),
    ),
    _gauge(
        "kv_allocated_slots",
        "tokens",
        "Token slots of used KV blocks, in all groups: filled, or unused (behind a sequence's last token).",
        ("state",),
    ),
    _counter(
        "kv_window_blocks_freed_total",
        "blocks",
        "KV blocks that running sequences gave back, since a sliding window had passed them.",
        Source.COLLECTOR,
    ),
    _gauge("cache_config_info", "", "Always 1; the labels tell how the KV cache is set up."),
    _counter(
        "prefix_cache_queries_total",
        "tokens",
        "Prompt tokens looked up in the prefix cache.",
        Source.COLLECTOR,
    ),
    _counter(
        "prefix_cache_hits_total",
        "tokens",
        "Prompt tokens found in the prefix cache.",
        Source.COLLECTOR,
    ),
    _gauge(
        "host_kv_blocks",
        "blocks",
        "KV blocks in the host's memory: used by preempted sequences that will come back, cached (content"
        " loadable) or free.",
        ("state",),
    ),
    _counter(
        "external_prefix_cache_queries_total",
        "tokens",
        "Tokens of started sequences that were not cached on the device and were looked up on the host.",
        Source.COLLECTOR,
    ),
    _counter(
        "external_prefix_cache_hits_total",
        "tokens",
        "Tokens found on the host, and loaded from there.",
        Source.COLLECTOR,
    ),
    _counter(
        "kv_offload_store_bytes_total",
        "bytes",
        "Bytes of KV blocks that were stored in the host's memory.",
        Source.COLLECTOR,
    ),
    _counter(
        "kv_offload_load_bytes_total",
        "bytes",
        "Bytes of KV blocks that were loaded from the host's memory.",
        Source.COLLECTOR,
    ),
    _gauge(
        "num_requests_swapped", "sequences", "Waiting sequences whose KV blocks are in the host's memory."
    ),
    _counter(
        "num_swaps_total",
        "swaps",
        "Times the KV blocks of a preempted sequence were kept in the host's memory.",
        Source.COLLECTOR,
    ),
    _counter(
        "num_preemptions_total",
        "preemptions",
        "Times a running sequence was put back to waiting for lack of KV blocks.",
        Source.COLLECTOR,
    ),
    # Faults.
    _counter("failed_steps_total", "steps", "Steps that raised.", Source.COLLECTOR),
    _counter(
        "retried_steps_total",
        "steps",
        "Steps that computed again, by halves, what failed ones should have.",
        Source.COLLECTOR,
    ),
    _counter(
        "replayed_sequences_total",
        "sequences",
        "Times a sequence was set back to its known tokens by a failed step or a lost device.",
        Source.COLLECTOR,
    ),
    _counter(
        "failed_sequences_total",
        "sequences",
        "Sequences of requests that ended because a step of one of them alone failed or lost the device.",
        Source.COLLECTOR,
    ),
    _counter("device_restarts_total", "restarts", "Times a lost device was opened anew.", Source.COLLECTOR),
    _counter(
        "explained_device_losses_total",
        "losses",
        "Losses of the device by the fault of one request, which has ended, or perhaps of one that left.",
        Source.COLLECTOR,
    ),
    _gauge("device_is_lost", "", "1 while a lost device is being opened anew, else 0."),
    # The step.
    _histogram(
        "iteration_tokens_total",
        "tokens",
        "Tokens computed in a step, prefill and decode together.",
        STEP_TOKEN_BUCKETS,
    ),
    _histogram("step_time_seconds", "seconds", "Time the device worked on a step.", STEP_BUCKETS),
    _histogram(
        "step_launch_seconds",
        "seconds",
        "Time the device thread took to prepare and launch a step.",
        SHORT_BUCKETS,
    ),
    _counter(
        "gpu_idle_seconds_total",
        "seconds",
        "Time the device had nothing to do while sequences were running.",
        Source.OBSERVER,
    ),
    _gauge("unapplied_steps", "steps", "Steps submitted to the device whose results are not applied yet."),
    _gauge("graphs_pending", "graphs", "CUDA graphs that are captured when the device is idle next."),
    # The HTTP server.
    _counter(
        "http_requests_total",
        "requests",
        "HTTP requests answered, by route (none: no such path, or bad HTTP) and class of status;"
        " client_left: gone before the answer was.",
        Source.HTTP,
        ("handler", "status"),
    ),
    _gauge(
        "http_requests_in_progress",
        "requests",
        "HTTP requests not answered to their end, open streams among them.",
        source=Source.HTTP,
    ),
    _gauge(
        "http_connections", "connections", "Open connections of clients, idle ones too.", source=Source.HTTP
    ),
    _counter(
        "http_connections_refused_total",
        "connections",
        "Connections refused because there were as many as the server takes.",
        Source.HTTP,
    ),
    # The event loop.
    _histogram("loop_lag_seconds", "seconds", "How late the event loop ran a timer.", SHORT_BUCKETS),
    _counter(
        "loop_stage_seconds_total",
        "seconds",
        "Time the event loop spent on steps, by stage: apply and plan (the scheduler), submit, detokenize"
        " (writing to streams included).",
        Source.OBSERVER,
        ("stage",),
    ),
    _gauge("channel_depth", "items", "Items waiting in a channel between two stages.", ("channel",)),
    _gauge("channel_peak", "items", "Most items that ever waited in a channel.", ("channel",)),
    # Traces: only with --otlp-traces-endpoint.
    _counter(
        "traced_requests_total",
        "requests",
        "Requests whose trace was sent to the collector (exported) or was not (dropped), as it did not answer"
        " or too many waited.",
        Source.OUTCOMES,
        ("outcome",),
    ),
    # Events of the prefix cache: only with --kv-events-config.
    _counter(
        "kv_event_batches_total",
        "batches",
        "Batches of KV events that were published (sent) or were left to be asked for, as too many waited"
        " (left_out). What a subscriber misses because it reads too slowly shows in its numbers alone.",
        Source.OUTCOMES,
        ("outcome",),
    ),
)


def definition(name: str, kind: MetricKind) -> MetricDefinition:
    """Return the metric of this name (without prefix).

    Raises:
        KeyError: There is none of this kind.
    """
    for metric in METRICS:
        if metric.name == name and metric.kind is kind:
            return metric
    raise KeyError(f"no {kind.value} {name!r} in the catalogue")


def counter_family(name: str) -> CounterMetricFamily:
    """Return a counter without samples."""
    metric = definition(name, MetricKind.COUNTER)
    return CounterMetricFamily(metric.exposed_name, metric.meaning, labels=metric.all_labels)


def gauge_family(name: str, *, further_labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    """Return a gauge without samples; `further_labels` are those known only when the server runs."""
    metric = definition(name, MetricKind.GAUGE)
    return GaugeMetricFamily(
        metric.exposed_name, metric.meaning, labels=(*metric.all_labels, *further_labels)
    )


def histogram_family(name: str) -> HistogramMetricFamily:
    """Return a histogram without samples."""
    metric = definition(name, MetricKind.HISTOGRAM)
    return HistogramMetricFamily(metric.exposed_name, metric.meaning, labels=metric.all_labels)


def empty_families(source: Source) -> list[Metric]:
    """Return every metric of one source without samples."""
    makers: dict[MetricKind, Callable[[str], Metric]] = {
        MetricKind.COUNTER: counter_family,
        MetricKind.GAUGE: gauge_family,
        MetricKind.HISTOGRAM: histogram_family,
    }
    return [makers[metric.kind](metric.name) for metric in METRICS if metric.source is source]
