import asyncio
import itertools

from prometheus_client import CollectorRegistry, generate_latest

from asyncserve.metrics.collector import EngineCollector
from asyncserve.metrics.exposition import new_registry, render
from asyncserve.metrics.observer import PrometheusObserver
from asyncserve.observer import ChannelStatistics, EngineStatistics, RequestTimeline
from asyncserve.request import FinishReason


def full_registry() -> CollectorRegistry:
    registry = new_registry()
    observer = PrometheusObserver(registry, "a/model")
    statistics = EngineStatistics(num_blocks=4, channels=[ChannelStatistics("arrivals", 1, 8, 3)])
    registry.register(EngineCollector(lambda: statistics, "a/model", {"block_size": 16}))
    observer.loop_lag(0.25)
    observer.request_finished(RequestTimeline(arrived_s=1.0, finished_s=2.5), FinishReason.ABORT)
    return registry


def steady(text: bytes) -> list[bytes]:
    """Return the lines that do not change from one moment to the next."""
    return [line for line in text.splitlines() if not line.startswith((b"process_", b"python_gc"))]


async def test_the_text_is_what_the_library_writes() -> None:
    registry = full_registry()
    rendered, expected = await render(registry), generate_latest(registry)
    assert rendered.count(b"\n") == expected.count(b"\n")
    assert rendered.endswith(b"\n")
    assert steady(rendered) == steady(expected)


async def test_the_loop_runs_between_two_metrics_that_take_long() -> None:
    registry = full_registry()
    num_metrics = len(list(registry.collect()))
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    await render(registry, clock=map(float, itertools.count()).__next__)
    assert turns >= num_metrics
    turns = 0
    await render(registry, clock=lambda: 0.0)
    assert turns == 0
    others.cancel()


async def test_two_scrapes_at_once_get_a_whole_text_each() -> None:
    registry = full_registry()
    one, two = await asyncio.gather(render(registry), render(registry))
    assert steady(one) == steady(two) == steady(generate_latest(registry))
