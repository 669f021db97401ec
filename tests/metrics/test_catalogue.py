import itertools
import re

import pytest
from prometheus_client import CollectorRegistry

from asyncserve.metrics.catalogue import (
    COMMON_LABELS,
    METRICS,
    PREFIX,
    MetricDefinition,
    MetricKind,
    Source,
    definition,
)
from asyncserve.metrics.collector import EngineCollector, OutcomeCollector
from asyncserve.metrics.http_traffic import HttpTraffic
from asyncserve.metrics.observer import PrometheusObserver
from asyncserve.metrics.vllm_names import VllmNames
from asyncserve.observer import ChannelStatistics, EngineStatistics, KVGroupStatistics
from tests.metrics.exposition import families_of

FIELD_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_max_tokens",
    "iteration_tokens_total",
    "cache_config_info",
]
"""Names on which dashboards and routers of the field rely."""


OUTCOMES = [metric.name for metric in METRICS if metric.source is Source.OUTCOMES]


def by_name(metric: MetricDefinition) -> str:
    return metric.name


def full_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    PrometheusObserver(registry, "m")
    group = KVGroupStatistics(
        group_id=0, num_blocks_used=1, num_blocks_cached=1, num_slots=4, num_slots_unused=1
    )
    statistics = EngineStatistics(
        num_blocks=4, kv_groups=[group], channels=[ChannelStatistics("arrivals", 1, 8, 3)]
    )
    registry.register(EngineCollector(lambda: statistics, "m"))
    registry.register(HttpTraffic("m", ["/v1/completions"]))
    for name in OUTCOMES:
        registry.register(OutcomeCollector(name, {"sent": lambda: 1}, "m"))
    return registry


def test_catalogue_is_what_is_exposed() -> None:
    exposed = {
        (name, family.type, family.documentation)
        for name, family in families_of(full_registry()).items()
        if name.startswith(PREFIX)
    }
    listed = {
        # The parser takes a counter's suffix off.
        (
            metric.exposed_name.removesuffix("_total")
            if metric.kind is MetricKind.COUNTER
            else metric.exposed_name,
            metric.kind.value,
            metric.meaning,
        )
        for metric in METRICS
    }
    assert exposed == listed


def test_every_sample_has_the_labels_of_its_definition() -> None:
    families = families_of(full_registry())
    for metric in METRICS:
        name = metric.exposed_name
        family = families[name.removesuffix("_total") if metric.kind is MetricKind.COUNTER else name]
        assert family.samples, metric.name
        for sample in family.samples:
            labels = set(sample.labels) - {"le"}
            if metric.name == "cache_config_info":
                labels -= {"num_gpu_blocks"}
            assert labels == set(metric.all_labels)
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0")


def test_collectors_describe_what_they_collect() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry, "m")
    for collector in (
        observer,
        EngineCollector(EngineStatistics, "m"),
        HttpTraffic("m"),
        *(OutcomeCollector(name, {"sent": lambda: 1}, "m") for name in OUTCOMES),
        VllmNames([observer, EngineCollector(EngineStatistics, "m")]),
    ):
        described = {(family.name, family.type) for family in collector.describe()}
        assert described == {(family.name, family.type) for family in collector.collect()}


def test_process_and_garbage_collector_are_exposed_beside_ours() -> None:
    families = families_of(full_registry())
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_gc_collections"} <= set(families)


def test_no_name_is_listed_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_names_of_the_field_are_kept() -> None:
    assert set(FIELD_NAMES) <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("metric", METRICS, ids=by_name)
def test_names_and_labels_are_well_formed(metric: MetricDefinition) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name)
    for label in metric.labels:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", label)
        assert label not in {*COMMON_LABELS, "le", "quantile", "job", "instance"}
    assert not metric.name.endswith(("_bucket", "_count", "_sum", "_created"))
    assert metric.meaning.endswith(".")


@pytest.mark.parametrize("metric", METRICS, ids=by_name)
def test_suffixes_say_type_and_unit(metric: MetricDefinition) -> None:
    stem = metric.name
    if metric.kind is MetricKind.COUNTER:
        assert stem.endswith("_total")
        stem = stem.removesuffix("_total")
    elif metric.name != "iteration_tokens_total":  # a histogram that the field calls so
        assert not stem.endswith("_total")
    if metric.unit == "seconds":
        assert stem.endswith("_seconds")
    assert not re.search(r"_(ms|milliseconds|microseconds|minutes|kb|mb)(_|$)", stem)


@pytest.mark.parametrize("metric", METRICS, ids=by_name)
def test_histograms_and_they_alone_have_rising_buckets(metric: MetricDefinition) -> None:
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert all(low < high for low, high in itertools.pairwise((0.0, *metric.buckets)))
    assert metric.buckets[-1:] != (float("inf"),)


@pytest.mark.parametrize(
    "metric",
    [metric for metric in METRICS if metric.kind is MetricKind.HISTOGRAM and metric.unit == "seconds"],
    ids=by_name,
)
def test_latencies_below_ten_milliseconds_are_told_apart(metric: MetricDefinition) -> None:
    assert {0.0005, 0.001, 0.002, 0.005, 0.01} <= set(metric.buckets)


def test_gauges_are_read_when_scraped() -> None:
    sources = {metric.source for metric in METRICS if metric.kind is MetricKind.GAUGE}
    assert sources == {Source.COLLECTOR, Source.HTTP}


def test_a_name_that_is_not_listed_is_refused() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        definition("nonsense", MetricKind.GAUGE)
    with pytest.raises(KeyError):
        definition("num_requests_running", MetricKind.COUNTER)
