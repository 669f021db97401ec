from prometheus_client import CollectorRegistry

from asyncserve.metrics.collector import EngineCollector, OutcomeCollector
from asyncserve.observer import ChannelStatistics, EngineStatistics, KVGroupStatistics
from tests.metrics.exposition import samples_of, value_of


def registry_of(
    statistics: EngineStatistics, cache_config: dict[str, object] | None = None
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: statistics, "m", cache_config))
    return registry


def test_values_are_those_of_the_engine() -> None:
    registry = registry_of(
        EngineStatistics(
            num_running=3,
            num_waiting=5,
            num_blocks=40,
            num_blocks_used=10,
            num_blocks_cached=25,
            num_blocks_saved=6,
            num_copied_blocks=11,
            num_unapplied_steps=2,
            prefix_cache_queries=1000,
            prefix_cache_hits=400,
            num_preemptions=7,
            num_host_blocks=20,
            num_host_blocks_used=4,
            num_host_blocks_cached=9,
            host_cache_queries=300,
            host_cache_hits=120,
            host_stored_bytes=5000,
            host_loaded_bytes=4000,
            num_swapped=2,
            num_swaps=6,
            num_window_blocks_freed=11,
            kv_groups=[
                KVGroupStatistics(
                    group_id=group_id,
                    num_blocks_used=used,
                    num_blocks_cached=cached,
                    num_slots=4 * used,
                    num_slots_unused=group_id + 1,
                )
                for group_id, (used, cached) in enumerate([(7, 20), (3, 5)])
            ],
            graphs_pending=9,
            channels=[ChannelStatistics("arrivals", 4, 8, 6), ChannelStatistics("deltas", 0, 8, 1)],
        )
    )
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.25,
        "kv_blocks_saved": 6,
        "copied_kv_blocks_total": 11,
        "unapplied_steps": 2,
        "prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 400,
        "num_preemptions_total": 7,
        "external_prefix_cache_queries_total": 300,
        "external_prefix_cache_hits_total": 120,
        "kv_offload_store_bytes_total": 5000,
        "kv_offload_load_bytes_total": 4000,
        "num_requests_swapped": 2,
        "num_swaps_total": 6,
        "kv_window_blocks_freed_total": 11,
        "graphs_pending": 9,
    }
    assert {name: value_of(registry, name) for name in expected} == expected
    blocks = {sample.labels["state"]: sample.value for sample in samples_of(registry, "kv_blocks")}
    assert blocks == {"used": 10, "cached": 25, "free": 5}
    blocks = {sample.labels["state"]: sample.value for sample in samples_of(registry, "host_kv_blocks")}
    assert blocks == {"used": 4, "cached": 9, "free": 7}
    slots = {each.labels["state"]: each.value for each in samples_of(registry, "kv_allocated_slots")}
    assert slots == {"filled": 37, "unused": 3}
    by_group = {
        (each.labels["group"], each.labels["state"]): each.value
        for each in samples_of(registry, "kv_group_blocks")
    }
    assert by_group == {("0", "used"): 7, ("0", "cached"): 20, ("1", "used"): 3, ("1", "cached"): 5}
    for name, values in (("channel_depth", [4, 0]), ("channel_peak", [6, 1])):
        assert [value_of(registry, name, channel=channel) for channel in ("arrivals", "deltas")] == values


def test_values_are_read_anew_at_every_scrape() -> None:
    statistics = EngineStatistics(num_running=1)
    registry = registry_of(statistics)
    assert value_of(registry, "num_requests_running") == 1
    statistics.num_running = 2
    assert value_of(registry, "num_requests_running") == 2


def test_an_engine_without_blocks_uses_none() -> None:
    assert value_of(registry_of(EngineStatistics()), "kv_cache_usage_perc") == 0


def test_engine_is_not_asked_before_a_scrape() -> None:
    def not_started() -> EngineStatistics:
        raise AssertionError("asked")

    CollectorRegistry().register(EngineCollector(not_started, "m"))


def test_cache_config_stands_in_labels() -> None:
    registry = registry_of(EngineStatistics(num_blocks=40), {"block_size": 16, "enable_prefix_caching": True})
    (sample,) = samples_of(registry, "cache_config_info")
    assert sample.value == 1
    assert sample.labels == {
        "model_name": "m",
        "engine": "0",
        "block_size": "16",
        "enable_prefix_caching": "True",
        "num_gpu_blocks": "40",
    }


def test_outcomes_are_asked_at_each_scrape() -> None:
    counts = {"exported": 5, "dropped": 2}
    registry = CollectorRegistry()
    outcomes = {"exported": lambda: counts["exported"], "dropped": lambda: counts["dropped"]}
    registry.register(OutcomeCollector("traced_requests_total", outcomes, "m"))
    for _ in range(2):
        samples = samples_of(registry, "traced_requests_total")
        assert {sample.labels["outcome"]: sample.value for sample in samples} == counts
        counts["dropped"] += 4
