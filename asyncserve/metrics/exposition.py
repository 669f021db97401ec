"""The text that Prometheus reads, written without holding up the event loop.

Takes a registry and gives what `prometheus_client.generate_latest` would: some 3 ms of formatting, which
every running stream would feel. A thread does not help, for it would hold the interpreter's lock as long.
So one metric is written after the other, and the loop runs in between; the values of one metric are of one
moment, those of two metrics may be some steps apart.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `render` returns."""
SLICE_S = 0.0001
"""After so long the loop has its turn; the longest metric takes about as long again."""


class _OneMetric(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def new_registry() -> CollectorRegistry:
    """Return an empty registry: each server has its own, so that two in one process do not mix."""
    return CollectorRegistry()


async def render(registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter) -> bytes:
    """Return everything the registry holds in Prometheus' text format; the body for `CONTENT_TYPE`.

    Args:
        registry: Its collectors are asked on the loop's thread.
        clock: Seconds.
    """
    parts = []
    turn_ends_s = clock() + SLICE_S
    for metric in registry.collect():
        parts.append(generate_latest(_OneMetric(metric)))
        if clock() >= turn_ends_s:
            await asyncio.sleep(0)
            turn_ends_s = clock() + SLICE_S
    return b"".join(parts)
