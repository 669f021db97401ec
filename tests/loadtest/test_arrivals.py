import asyncio
import math

import pytest

from loadtest.arrivals import arrival_times, run


def test_without_a_rate_everything_arrives_at_once() -> None:
    assert arrival_times(3, rate=math.inf) == [0.0, 0.0, 0.0]


def test_poisson_arrivals_repeat_with_their_seed() -> None:
    assert arrival_times(50, rate=2.0, seed=1) == arrival_times(50, rate=2.0, seed=1)
    assert arrival_times(50, rate=2.0, seed=1) != arrival_times(50, rate=2.0, seed=2)


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential_distribution() -> None:
    times = arrival_times(20_000, rate=4.0)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert times == sorted(times)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(0.25, rel=0.03)


def test_bursts_arrive_together_and_keep_the_mean_rate() -> None:
    times = arrival_times(10_001, rate=4.0, burst_size=5)
    assert len(times) == 10_001
    assert len(set(times)) == 2001
    assert times[0] == times[4] != times[5]
    assert times[-1] == pytest.approx(2500, rel=0.08)


async def test_no_more_than_the_concurrency_is_out_and_results_keep_their_order() -> None:
    out = 0
    most = 0

    async def send(item: int) -> int:
        nonlocal out, most
        out += 1
        most = max(most, out)
        for _ in range(item):
            await asyncio.sleep(0)
        out -= 1
        return item * 10

    results, duration_s = await run([5, 1, 3, 2, 4], [0.0] * 5, send, concurrency=2)
    assert results == [50, 10, 30, 20, 40]
    assert most == 2
    assert duration_s > 0


async def test_nothing_is_sent_before_its_time() -> None:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    sent: list[float] = []

    async def send(item: float) -> None:
        sent.append(loop.time() - started_s - item)

    times = [0.0, 0.01, 0.03]
    await run(times, times, send)
    assert all(late >= -0.002 for late in sent)
