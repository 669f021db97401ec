"""What every test gets: both event loops, a guard against blocking calls, fixed seeds, no hurry."""

import asyncio
import inspect
import random
from collections.abc import Callable, Iterator, Mapping

import blockbuster
import hypothesis
import pytest
import uvloop


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis judge what a property says, and not how long it takes on a busy machine."""
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("unhurried", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("unhurried")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test once on asyncio's own loop and once on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def blocking_guard() -> blockbuster.BlockBuster:
    """Patches that raise when code of asyncserve blocks the thread of a running event loop."""
    guard = blockbuster.BlockBuster(scanned_modules=["asyncserve"])
    for name in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
        # Held for microseconds only: starting or ending a pool of threads, waking a loop.
        guard.functions[name].can_block_in("concurrent/futures/thread.py", {"shutdown"})
    for name in ("io.BufferedReader.read", "io.TextIOWrapper.read"):
        # A traceback about to be logged reads its source lines.
        guard.functions[name].can_block_in("linecache.py", {"updatecache"})
    for name in ("io.BufferedReader.read", "os.listdir"):
        # /proc is memory: a scrape reads a few lines of it.
        guard.functions[name].can_block_in("prometheus_client/process_collector.py", {"collect"})
    return guard


@pytest.fixture(autouse=True)
def no_blocking_calls(
    request: pytest.FixtureRequest, blocking_guard: blockbuster.BlockBuster
) -> Iterator[None]:
    """Fail an async test whose event loop is blocked by a call of asyncserve."""
    if not inspect.iscoroutinefunction(getattr(request, "function", None)):
        yield
        return
    guard = blocking_guard
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Make what a test draws the same in every run."""
    random.seed(0)
