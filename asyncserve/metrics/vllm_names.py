"""The metrics under vLLM's names, for dashboards, autoscalers and routers that were made for vLLM.

Takes what the registry's other collectors give, when scraped, and says it again: the same numbers under
`vllm:`, histograms in vLLM's own buckets, which are some of ours. Counts nothing itself. Names that only
older versions of vLLM had are there too where somebody still reads them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asyncserve.metrics.catalogue import LEN_BUCKETS, PREFIX, STEP_TOKEN_BUCKETS

VLLM_PREFIX = "vllm:"

# fmt: off
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)
TOKEN_GAP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)
# fmt: on

HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", TOKEN_GAP_BUCKETS),
    "time_per_output_token_seconds": ("inter_token_latency_seconds", TOKEN_GAP_BUCKETS),  # its older name
    "request_time_per_output_token_seconds": ("request_time_per_output_token_seconds", TOKEN_GAP_BUCKETS),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds", REQUEST_BUCKETS),
    "request_queue_time_seconds": ("request_queue_time_seconds", REQUEST_BUCKETS),
    "request_inference_time_seconds": ("request_inference_time_seconds", REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("request_prefill_time_seconds", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("request_decode_time_seconds", REQUEST_BUCKETS),
    "iteration_tokens_total": ("iteration_tokens_total", STEP_TOKEN_BUCKETS),
    "request_prompt_tokens": ("request_prompt_tokens", LEN_BUCKETS),
    "request_generation_tokens": ("request_generation_tokens", LEN_BUCKETS),
    "request_max_num_generation_tokens": ("request_generation_tokens", LEN_BUCKETS),
    "request_params_max_tokens": ("request_params_max_tokens", LEN_BUCKETS),
    "request_prefill_kv_computed_tokens": ("request_prefill_kv_computed_tokens", LEN_BUCKETS),
}
"""vLLM's name, prefix apart → ours, and the buckets it has there."""

SIMPLE: Mapping[str, str] = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",  # older
    "cache_config_info": "cache_config_info",
    "prompt_tokens_total": "prompt_tokens_total",
    "prompt_tokens_cached_total": "prompt_tokens_cached_total",
    "generation_tokens_total": "generation_tokens_total",
    "num_preemptions_total": "num_preemptions_total",
    "prefix_cache_queries_total": "prefix_cache_queries_total",
    "prefix_cache_hits_total": "prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",  # older
    "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",  # older
    "external_prefix_cache_queries_total": "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total": "external_prefix_cache_hits_total",
    "kv_offload_store_bytes_total": "kv_offload_store_bytes_total",
    "kv_offload_load_bytes_total": "kv_offload_load_bytes_total",
    "num_requests_swapped": "num_requests_swapped",  # older
    "request_success_total": "request_success_total",
    "admission_rejections_total": "requests_rejected_total",
}
"""Gauges and counters: vLLM's name, prefix apart → ours; labels are the same."""


CLIENT_FAULTS = frozenset({"invalid", "prompt_too_long", "unknown_model"})
"""Reasons of refusals that are no admission control's: vLLM does not count them there."""


class VllmNames(Collector):
    """Exposes other collectors' metrics under vLLM's names; the caller registers it.

    Args:
        sources: Those whose metrics are taken.
    """

    def __init__(self, sources: Sequence[Collector]) -> None:
        self._sources = tuple(sources)
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, ours in SIMPLE.items():
            self._names[ours.removesuffix("_total")].append(name)
        for name, (ours, _) in HISTOGRAMS.items():
            self._names[ours].append(name)

    def describe(self) -> Iterable[Metric]:
        """Name the metrics that `collect` gives."""
        for name in SIMPLE:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(VLLM_PREFIX + name, name)
        for name in HISTOGRAMS:
            yield HistogramMetricFamily(VLLM_PREFIX + name, name)

    def collect(self) -> Iterable[Metric]:
        """Give Prometheus the numbers of this moment."""
        for source in self._sources:
            for family in source.collect():
                for name in self._names.get(family.name.removeprefix(PREFIX), ()):
                    if name in HISTOGRAMS:
                        yield _rebucketed(family, name, HISTOGRAMS[name][1])
                    else:
                        yield _renamed(family, name)


def _renamed(family: Metric, name: str) -> Metric:
    """Return a gauge or counter under another name."""
    renamed = Metric(VLLM_PREFIX + name.removesuffix("_total"), family.documentation, family.type)
    for sample in family.samples:
        if sample.labels.get("reason") not in CLIENT_FAULTS:
            renamed.samples.append(sample._replace(name=VLLM_PREFIX + name))
    return renamed


def _rebucketed(family: Metric, name: str, buckets: Iterable[float]) -> Metric:
    """Return a histogram under another name, with only these buckets of its own."""
    kept = {*map(repr, buckets), "+Inf"}
    renamed = Metric(VLLM_PREFIX + name, family.documentation, family.type)
    for sample in family.samples:
        if sample.labels.get("le", "+Inf") in kept:
            suffix = sample.name.removeprefix(family.name)
            renamed.samples.append(sample._replace(name=VLLM_PREFIX + name + suffix))
    return renamed
