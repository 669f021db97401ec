import random

from prometheus_client import CollectorRegistry

from asyncserve.errors import InvalidRequest, Overloaded
from asyncserve.metrics.collector import EngineCollector
from asyncserve.metrics.observer import PrometheusObserver
from asyncserve.metrics.vllm_names import HISTOGRAMS, SIMPLE, VllmNames
from asyncserve.observer import EngineStatistics, RequestTimeline
from asyncserve.request import FinishReason
from tests.metrics.exposition import families_of

STATE = EngineStatistics(
    num_running=3,
    num_waiting=5,
    num_blocks=40,
    num_blocks_used=10,
    prefix_cache_queries=90,
    prefix_cache_hits=60,
    num_preemptions=2,
)


def exposed(*, load: int = 0) -> dict[str, dict[tuple[str, ...], float]]:
    """Return sample name → labels apart from the common ones → value, after some requests."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry, "m")
    state = EngineCollector(lambda: STATE, "m", {"block_size": 16})
    registry.register(state)
    registry.register(VllmNames([observer, state]))
    draw = random.Random(7)
    for _ in range(load):
        at_s = [draw.expovariate(0.3) for _ in range(6)]
        arrived, tokenized, scheduled, first, last, finished = (sum(at_s[:n]) for n in range(6))
        timeline = RequestTimeline(
            arrived_s=arrived,
            tokenized_s=tokenized,
            first_scheduled_s=scheduled,
            first_token_s=first,
            last_token_s=last,
            finished_s=finished,
            num_prompt_tokens=draw.randrange(1, 3000),
            num_output_tokens=draw.randrange(1, 300),
            max_output_len=300,
        )
        observer.first_token(timeline, 1)
        observer.request_finished(timeline, FinishReason.STOP)
    observer.request_rejected(Overloaded("full", retry_after_s=1.0))
    observer.request_rejected(InvalidRequest("bad"))
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in families_of(registry).values():
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith(("asyncserve:", "vllm:")):
                assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
            values.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return values


def test_what_autoscalers_and_endpoint_pickers_read_is_there() -> None:
    values = exposed()
    assert values["vllm:num_requests_running"] == {(): 3}
    assert values["vllm:num_requests_waiting"] == {(): 5}
    assert values["vllm:kv_cache_usage_perc"] == values["vllm:gpu_cache_usage_perc"] == {(): 0.25}
    assert values["vllm:prefix_cache_hits_total"] == values["vllm:gpu_prefix_cache_hits_total"] == {(): 60}
    assert values["vllm:cache_config_info"] == {("16", "40"): 1}
    assert "vllm:lora_requests_info" not in values


def test_every_gauge_and_counter_is_ours_by_another_name() -> None:
    values = exposed(load=5)
    for name, ours in SIMPLE.items():
        if name != "admission_rejections_total":
            assert values[f"vllm:{name}"] == values[f"asyncserve:{ours}"], name


def test_only_refusals_of_admission_are_rejections_of_admission() -> None:
    rejections = exposed()["vllm:admission_rejections_total"]
    assert rejections["overloaded",] == 1
    assert ("invalid",) not in rejections


def test_every_histogram_has_the_buckets_of_vllm_and_the_counts_of_ours() -> None:
    values = exposed(load=200)
    for name, (ours, buckets) in HISTOGRAMS.items():
        bounds = [*map(str, buckets), "+Inf"]
        counts = values[f"vllm:{name}_bucket"]
        assert [le for (le,) in counts] == bounds, name
        assert counts == {(le,): values[f"asyncserve:{ours}_bucket"][le,] for le in bounds}
        for suffix in ("count", "sum"):
            assert values[f"vllm:{name}_{suffix}"] == values[f"asyncserve:{ours}_{suffix}"]
    assert values["vllm:e2e_request_latency_seconds_count"] == {(): 200}


def test_a_server_without_the_option_has_no_such_name() -> None:
    registry = CollectorRegistry()
    PrometheusObserver(registry, "m")
    assert not [name for name in families_of(registry) if name.startswith("vllm:")]
