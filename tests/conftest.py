"""What every test gets: both event loops, a guard against blocking calls, fixed seeds, no hurry; and no GPU.

Run by several processes at once, each of them, and each server it starts, computes in one thread.
"""

import asyncio
import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import blockbuster
import hypothesis
import pytest
import torch
import uvloop

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, which has to be chosen before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

UNMEASURED = (
    "architecture",
    "end_to_end",
    "gpu",
    "http/openapi/test_conformance.py",
    "http/parsers/test_properties.py",
    "loadtest",
)
"""Tests that run unwatched: what they cover is not measured, or covered by others too, and being watched
doubles the time that they take."""


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis judge what a property says, not how long it takes, on the same cases in every run, and
    on others with `--hypothesis-seed`; keep workers to a thread each."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    slow = [hypothesis.HealthCheck.too_slow]
    is_seeded = config.getoption("--hypothesis-seed", None) is not None
    hypothesis.settings.register_profile(
        "unhurried", deadline=None, suppress_health_check=slow, derandomize=not is_seeded
    )
    hypothesis.settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Keep coverage out of the tests that it is not measured by."""
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / place) for place in UNMEASURED):
            item.add_marker(pytest.mark.no_cover)


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
