import gc
import weakref
from collections.abc import Iterator

import pytest

from asyncserve.garbage import OLD_BEFORE_FULL, QUIET_LOOKS, IdleCollector, settle_collector


class Knot:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_lives_when_all_is_loaded_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    knot = Knot()
    settle_collector()
    assert gc.get_freeze_count() > before
    assert knot not in gc.get_objects()


def test_the_collector_is_put_back_by_whoever_settled_it_first() -> None:
    thresholds = gc.get_threshold()
    first = settle_collector()
    second = settle_collector()
    assert gc.get_threshold() != thresholds
    second()
    assert gc.get_threshold() != thresholds
    first()
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


def test_garbage_that_outlived_a_young_collection_goes_when_nothing_runs() -> None:
    knot = Knot()
    settle_collector()
    other = Knot()
    gc.collect(0)
    ghosts = [weakref.ref(other)]
    del other, knot
    assert ghosts[0]() is not None
    IdleCollector().look()
    assert ghosts[0]() is None


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that are collected from now on."""
    seen: list[int] = []
    note = lambda phase, info: seen.append(info["generation"]) if phase == "start" else None  # noqa: E731
    settle_collector()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_what_was_looked_at_is_looked_at_again_only_now_and_then(collections: list[int]) -> None:
    collector = IdleCollector()
    for _ in range(OLD_BEFORE_FULL + 1):
        gc.collect(0)
        collector.look()
    assert collections == [0, 1] * OLD_BEFORE_FULL + [0, 2]


def test_all_is_looked_at_once_when_nothing_new_comes(collections: list[int]) -> None:
    collector = IdleCollector()
    gc.collect(0)
    collector.look()
    for _ in range(QUIET_LOOKS - 1):
        collector.look()
    assert collections == [0, 1]
    for _ in range(3):
        collector.look()
    assert collections == [0, 1, 2]


def test_nothing_is_collected_where_nothing_happened(collections: list[int]) -> None:
    collector = IdleCollector()
    for _ in range(QUIET_LOOKS + 1):
        collector.look()
    assert not collections
