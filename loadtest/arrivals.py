"""When requests are sent: closed loop, Poisson, bursts.

`arrival_times` gives seconds from the start for each request; `run` sends them then, never more than
`concurrency` at once. A closed loop is the case where all arrive at time 0 and the concurrency is
limited. Knows no request.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def arrival_times(num_requests: int, *, rate: float, burst_size: int = 1, seed: int | str = 0) -> list[float]:
    """Draw when each request arrives.

    Args:
        num_requests: How many.
        rate: Mean requests per second, `inf` for all at once.
        burst_size: Requests that arrive together; the bursts themselves are a Poisson process.
        seed: The same seed gives the same times.

    Returns:
        Seconds from the start, ascending.
    """
    if rate == math.inf:
        return [0.0] * num_requests
    source = random.Random(seed)
    times: list[float] = []
    now_s = 0.0
    while len(times) < num_requests:
        now_s += source.expovariate(rate / burst_size)
        times += [now_s] * burst_size
    return times[:num_requests]


async def run(
    items: Sequence[Item],
    times: Sequence[float],
    send: Callable[[Item], Awaitable[Result]],
    *,
    concurrency: int | None = None,
) -> tuple[list[Result], float]:
    """Send every item at its time.

    Args:
        items: What to send.
        times: Seconds from the start for each, ascending.
        send: Sends one and returns what came of it; must not raise.
        concurrency: Most at once; an item that is due while as many are out waits. None for no limit.

    Returns:
        The results in the order of the items, and the seconds from the start until the last.
    """
    permits = asyncio.Semaphore(concurrency) if concurrency is not None else None
    started_s = time.perf_counter()

    async def limited(item: Item) -> Result:
        try:
            return await send(item)
        finally:
            if permits is not None:
                permits.release()

    tasks = []
    for item, due_s in zip(items, times, strict=True):
        wait_s = started_s + due_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if permits is not None:
            await permits.acquire()
        tasks.append(asyncio.ensure_future(limited(item)))
    results = await asyncio.gather(*tasks)
    return list(results), time.perf_counter() - started_s
