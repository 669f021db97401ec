"""What is read when scraped: queues, blocks, caches, channels.

Takes a callable that gives the engine's state and asks it once per scrape, so these values are never stale
and cost nothing between scrapes. Knows nothing of what happened in between: that is `observer.py`'s.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asyncserve.metrics.catalogue import ENGINE, Source, counter_family, empty_families, gauge_family
from asyncserve.observer import EngineStatistics


class OutcomeCollector(Collector):
    """Exposes a counter by outcome that somebody else keeps; the caller registers it.

    Args:
        name: Of the metric.
        outcomes: Each one's number, asked at each scrape.
        model_name: Value of the label `model_name`.
    """

    def __init__(self, name: str, outcomes: Mapping[str, Callable[[], int]], model_name: str) -> None:
        self._name = name
        self._outcomes = outcomes
        self._common = (model_name, ENGINE)

    def describe(self) -> Iterable[Metric]:
        """Name the metric that `collect` gives."""
        return [counter_family(self._name)]

    def collect(self) -> Iterable[Metric]:
        """Give Prometheus the numbers of this moment."""
        counter = counter_family(self._name)
        for outcome, count in self._outcomes.items():
            counter.add_metric((*self._common, outcome), count())
        yield counter


class EngineCollector(Collector):
    """Exposes the engine's state; the caller registers it.

    Args:
        statistics: Gives the state of this moment; called on the thread that scrapes.
        model_name: Value of the label `model_name`.
        cache_config: Further labels of `cache_config_info`, such as `block_size`; `num_gpu_blocks` is added.
    """

    def __init__(
        self,
        statistics: Callable[[], EngineStatistics],
        model_name: str,
        cache_config: Mapping[str, object] | None = None,
    ) -> None:
        self._statistics = statistics
        self._common = (model_name, ENGINE)
        self._cache_config = {name: str(value) for name, value in (cache_config or {}).items()}

    def describe(self) -> Iterable[Metric]:
        """Name the metrics that `collect` gives."""
        return empty_families(Source.COLLECTOR)

    def collect(self) -> Iterable[Metric]:
        """Give Prometheus the state of this moment."""
        now = self._statistics()
        num_used, num_cached = now.num_blocks_used, now.num_blocks_cached
        yield self._gauge("num_requests_running", {(): now.num_running})
        yield self._gauge("num_requests_waiting", {(): now.num_waiting})
        yield self._gauge("num_waiting_tokens", {(): now.num_waiting_tokens})
        yield self._gauge("num_requests_paused", {(): now.num_paused})
        yield self._gauge("kv_cache_usage_perc", {(): num_used / now.num_blocks if now.num_blocks else 0.0})
        num_free = now.num_blocks - num_used - num_cached
        yield self._gauge("kv_blocks", {("used",): num_used, ("cached",): num_cached, ("free",): num_free})
        yield self._gauge("kv_blocks_saved", {(): now.num_blocks_saved})
        yield self._counter("copied_kv_blocks_total", now.num_copied_blocks)
        by_group: dict[tuple[str, ...], float] = {}
        num_unused = num_slots = 0
        for group in now.kv_groups:
            by_group[str(group.group_id), "used"] = group.num_blocks_used
            by_group[str(group.group_id), "cached"] = group.num_blocks_cached
            num_slots += group.num_slots
            num_unused += group.num_slots_unused
        yield self._gauge("kv_group_blocks", by_group)
        num_filled = num_slots - num_unused
        yield self._gauge("kv_allocated_slots", {("filled",): num_filled, ("unused",): num_unused})
        yield self._counter("kv_window_blocks_freed_total", now.num_window_blocks_freed)
        yield self._gauge("unapplied_steps", {(): now.num_unapplied_steps})
        yield self._gauge("graphs_pending", {(): now.graphs_pending})
        yield self._gauge("channel_depth", {(channel.name,): channel.depth for channel in now.channels})
        yield self._gauge("channel_peak", {(channel.name,): channel.peak for channel in now.channels})
        yield self._counter("prefix_cache_queries_total", now.prefix_cache_queries)
        yield self._counter("prefix_cache_hits_total", now.prefix_cache_hits)
        num_used, num_cached = now.num_host_blocks_used, now.num_host_blocks_cached
        num_free = now.num_host_blocks - num_used - num_cached
        yield self._gauge(
            "host_kv_blocks", {("used",): num_used, ("cached",): num_cached, ("free",): num_free}
        )
        yield self._counter("external_prefix_cache_queries_total", now.host_cache_queries)
        yield self._counter("external_prefix_cache_hits_total", now.host_cache_hits)
        yield self._counter("kv_offload_store_bytes_total", now.host_stored_bytes)
        yield self._counter("kv_offload_load_bytes_total", now.host_loaded_bytes)
        yield self._gauge("num_requests_swapped", {(): now.num_swapped})
        yield self._counter("num_swaps_total", now.num_swaps)
        yield self._counter("num_preemptions_total", now.num_preemptions)
        yield self._counter("failed_steps_total", now.num_failed_steps)
        yield self._counter("retried_steps_total", now.num_retried_steps)
        yield self._counter("replayed_sequences_total", now.num_replayed_sequences)
        yield self._counter("failed_sequences_total", now.num_failed_sequences)
        yield self._counter("device_restarts_total", now.num_device_restarts)
        yield self._counter("explained_device_losses_total", now.num_explained_losses)
        yield self._gauge("device_is_lost", {(): float(now.device_is_lost)})
        yield self._counter("num_pauses_total", now.num_pauses)
        yield self._counter("deadlines_missed_total", now.num_deadlines_missed)
        cache = self._cache_config | {"num_gpu_blocks": str(now.num_blocks)}
        info = gauge_family("cache_config_info", further_labels=tuple(cache))
        info.add_metric((*self._common, *cache.values()), 1)
        yield info

    def _gauge(self, name: str, values: Mapping[tuple[str, ...], float]) -> Metric:
        gauge = gauge_family(name)
        for labels, value in values.items():
            gauge.add_metric((*self._common, *labels), value)
        return gauge

    def _counter(self, name: str, value: float) -> Metric:
        counter = counter_family(name)
        counter.add_metric(self._common, value)
        return counter
