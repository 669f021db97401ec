"""One sampler for all viewers: when it runs, what each of them gets."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from asyncserve.errors import Overloaded
from asyncserve.http.live_page.recorder import NUM_STEPS, PipelineRecorder
from asyncserve.http.live_page.sampler import MAX_FAILED_LOOKS, MAX_VIEWERS, PipelineSampler
from asyncserve.observer import ChannelStatistics, EngineStatistics
from tests.http.live import until
from tests.http.live_page.test_recorder import Clock, output, plan


class Scene:
    """A sampler with all it asks; it looks as often as the loop lets it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.recorder = PipelineRecorder(self.clock)
        self.statistics = EngineStatistics(num_blocks=10, num_blocks_used=3, num_blocks_cached=2)
        self.statistics.channels = (ChannelStatistics("plans", 1, 2, 2),)
        self.phase = "ready"
        self.num_looks = 0
        self.sampler = PipelineSampler(
            self.recorder,
            statistics=self.look,
            facts=lambda: {"model": "m"},
            phase=lambda: self.phase,
            clock=self.clock,
            interval_s=0.0,
        )

    def look(self) -> EngineStatistics:
        self.num_looks += 1
        return self.statistics

    async def looks(self, count: int) -> None:
        """Wait until so many looks more have begun."""
        target = self.num_looks + count
        await until(lambda: self.num_looks >= target)

    def step(self) -> None:
        self.recorder.step_applied(plan([1]), output(), (0.01,), self.clock.now_s)


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def next_with_steps(events: AsyncGenerator[bytes, None]) -> tuple[str, dict[str, Any]]:
    """Return the next event that tells of a step."""
    async for event in events:
        name, data = parsed(event)
        if data["steps"]:
            return name, data
    raise AssertionError("the events ended")


async def test_a_snapshot_comes_first_and_then_what_is_new() -> None:
    scene = Scene()
    scene.step()
    async with aclosing(scene.sampler.watch()) as events:
        name, snapshot = parsed(await anext(events))
        assert (name, snapshot["model"]) == ("snapshot", "m")
        assert [row[0] for row in snapshot["steps"]] == [1]
        assert snapshot["step_fields"][0] == "number"
        assert snapshot["state"]["blocks"] == [3, 2, 5]
        assert snapshot["state"]["channels"] == [["plans", 1, 2, 2]]
        assert len(snapshot["total_fields"]) == len(snapshot["state"]["totals"])
        scene.step()
        scene.clock.now_s += 2.0
        name, update = await next_with_steps(events)
        assert (name, [row[0] for row in update["steps"]]) == ("update", [2])
        assert [row[0] for row in update["seconds"]] == [0, 1]
        assert "model" not in update
        assert all(len(row) == len(snapshot["second_fields"]) for row in update["seconds"])


async def test_nobody_is_looked_for_while_nobody_watches() -> None:
    scene = Scene()
    assert not scene.sampler.is_running
    async with aclosing(scene.sampler.watch()) as first, aclosing(scene.sampler.watch()) as second:
        await anext(first)
        await anext(second)
        assert (scene.sampler.num_viewers, scene.sampler.is_running) == (2, True)
        await anext(first)
        await second.aclose()
        assert (scene.sampler.num_viewers, scene.sampler.is_running) == (1, True)
        await anext(first)
    assert (scene.sampler.num_viewers, scene.sampler.is_running) == (0, False)
    await asyncio.sleep(0)
    num_looks = scene.num_looks
    for _ in range(5):
        await asyncio.sleep(0)
    assert scene.num_looks == num_looks
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "live-page-sampler"]
    async with aclosing(scene.sampler.watch()) as again:
        assert parsed(await anext(again))[0] == "snapshot"
        assert parsed(await anext(again))[0] == "update"


async def test_an_event_is_made_once_for_all_viewers() -> None:
    scene = Scene()
    generators = [scene.sampler.watch() for _ in range(10)]
    for each in generators:
        await anext(each)
    num_looks = scene.num_looks
    events = await asyncio.gather(*(anext(each) for each in generators))
    # The very same object: made, hence looked at the engine, once.
    assert len({id(event) for event in events}) == 1
    assert scene.num_looks < num_looks + 10
    for each in generators:
        await each.aclose()


async def test_a_viewer_that_missed_events_gets_everything_again() -> None:
    scene = Scene()
    async with aclosing(scene.sampler.watch()) as slow, aclosing(scene.sampler.watch()) as quick:
        await anext(slow)
        await anext(quick)
        for _ in range(3):
            scene.step()
            await anext(quick)
        name, everything = parsed(await anext(slow))
        assert (name, [row[0] for row in everything["steps"]]) == ("snapshot", [1, 2, 3])
        assert parsed(await anext(slow))[0] == "update"


async def test_an_event_has_no_more_steps_than_are_kept() -> None:
    scene = Scene()
    async with aclosing(scene.sampler.watch()) as events:
        await anext(events)
        for _ in range(3 * NUM_STEPS):
            scene.step()
        _, update = await next_with_steps(events)
        numbers = [row[0] for row in update["steps"]]
        assert numbers == list(range(2 * NUM_STEPS + 1, 3 * NUM_STEPS + 1))


async def test_when_the_engine_gets_ready_everybody_hears_of_the_model() -> None:
    scene = Scene()
    scene.phase = "loading"
    async with aclosing(scene.sampler.watch()) as events:
        assert parsed(await anext(events))[1]["state"]["phase"] == "loading"
        assert parsed(await anext(events))[0] == "update"
        scene.phase = "ready"
        name, everything = parsed(await anext(events))
        assert (name, everything["state"]["phase"]) == ("snapshot", "ready")


async def test_viewers_beyond_the_bound_are_refused_until_one_leaves() -> None:
    scene = Scene()
    generators = [scene.sampler.watch() for _ in range(MAX_VIEWERS)]
    for each in generators:
        await anext(each)
    with pytest.raises(Overloaded, match=r"viewers watch the pipeline already"):
        await anext(scene.sampler.watch())
    await generators.pop().aclose()
    async with aclosing(scene.sampler.watch()) as events:
        await anext(events)
    for each in generators:
        await each.aclose()
    assert not scene.sampler.is_running


async def test_closing_ends_everybodys_events_and_new_ones_too() -> None:
    scene = Scene()
    async with aclosing(scene.sampler.watch()) as events:
        await anext(events)
        scene.sampler.close()
        assert [event async for event in events] == []
    assert len([event async for event in scene.sampler.watch()]) == 1
    assert not scene.sampler.is_running


async def test_a_look_that_fails_is_told_once_and_the_feed_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    sound = scene.statistics
    async with aclosing(scene.sampler.watch()) as events:
        await anext(events)
        for _ in range(2):
            scene.statistics = None  # type: ignore[assignment]
            scene.step()
            await scene.looks(3)
            scene.statistics = sound
            _, update = await next_with_steps(events)
            assert len(update["steps"]) == 1, "nothing is lost or told twice"
    assert caplog.text.count("the live page cannot be shown what is new") == 1


async def test_a_snapshot_that_fails_is_made_up_for() -> None:
    scene = Scene()
    sound = scene.statistics
    async with aclosing(scene.sampler.watch()) as events:
        await anext(events)
        scene.phase, scene.statistics = "failed", None  # type: ignore[assignment]
        await scene.looks(2)
        scene.statistics = sound
        assert parsed(await anext(events))[0] == "snapshot"


async def test_a_sampler_that_fails_on_and_on_lets_its_viewers_go_but_not_those_who_come_later() -> None:
    scene = Scene()
    sound = scene.statistics
    async with aclosing(scene.sampler.watch()) as events:
        await anext(events)
        failed_at = scene.num_looks
        scene.statistics = None  # type: ignore[assignment]
        assert [event async for event in events] == []
        assert scene.num_looks - failed_at == MAX_FAILED_LOOKS
        scene.statistics = sound
        async with aclosing(scene.sampler.watch()) as later:
            await anext(later)
            scene.step()
            await next_with_steps(later)
    assert not scene.sampler.is_running
