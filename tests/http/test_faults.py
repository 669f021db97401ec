"""What an HTTP client sees of a step that fails, and what probes see of a device that is lost."""

import asyncio
from typing import Any

import pytest

from asyncserve.errors import DeviceLost
from asyncserve.http.failures import failure_of
from asyncserve.step import ExecutorInfo
from tests.fakes.executor import FakeExecutor
from tests.http.live import live_server, spell, until

TEXT = "xyz" * 10


def streamed_text(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event != "[DONE]")


@pytest.mark.parametrize("fault", ["failed step", "lost device", "hung step"])
async def test_a_stream_goes_on_over_a_fault(fault: str) -> None:
    async with live_server(next_token=spell(TEXT), engine_options={"step_timeout_s": 0.05}) as live:
        if fault == "failed step":
            live.executor.fail(7)
        elif fault == "lost device":
            live.executor.lose_device_at(7)
        streaming = asyncio.create_task(live.complete(stream=True, max_tokens=40))
        if fault == "hung step":
            await until(lambda: live.executor.num_completed_steps > 3)
            live.executor.hold()
        answer = await streaming
    assert answer.events[-1] == "[DONE]"
    assert streamed_text(answer.events) == TEXT


async def test_the_culprit_gets_its_error_and_others_their_answers() -> None:
    async with live_server(next_token=spell(TEXT)) as live:
        live.executor.fail_with(ord("!"), "the device choked")
        answers = await asyncio.gather(
            live.complete(prompt="good", stream=True, max_tokens=40),
            live.complete(prompt="! whole", max_tokens=40),
            live.complete(prompt="! streamed", stream=True, max_tokens=40),
            live.complete(prompt="fine", max_tokens=40),
        )
    good, whole, streamed, fine = answers
    assert streamed_text(good.events) == fine.json["choices"][0]["text"] == TEXT
    assert (whole.status, whole.error["code"]) == (500, "step_failed")
    assert "the device choked" in whole.error["message"]
    if streamed.status == 200:  # the error is an event if the answer had begun
        assert streamed.events[-1]["error"]["code"] == "step_failed"
    else:
        assert (streamed.status, streamed.error["code"]) == (500, "step_failed")


async def test_while_a_lost_device_is_opened_anew_the_server_is_live_but_neither_healthy_nor_ready() -> None:
    gate = asyncio.Event()

    class SlowExecutor(FakeExecutor):
        async def restart(self) -> ExecutorInfo:
            await gate.wait()
            return await super().restart()

    async with live_server(next_token=spell(TEXT), executor_class=SlowExecutor) as live:
        live.executor.lose_device_at(3)
        running = asyncio.create_task(live.complete(max_tokens=40))
        await until(lambda: live.engine.statistics().device_is_lost)
        during = {path: await live.call(path) for path in ("/health", "/ready", "/live")}
        late = asyncio.create_task(live.complete(max_tokens=40))
        gate.set()
        for answer in (await running, await late):
            assert answer.json["choices"][0]["text"] == TEXT
        after = {path: await live.call(path) for path in ("/health", "/ready", "/live")}
    assert {path: answer.status for path, answer in during.items()} == {
        "/health": 503,
        "/ready": 503,
        "/live": 200,
    }
    assert "opened anew" in during["/health"].error["message"]
    assert {answer.status for answer in after.values()} == {200}
    health = after["/health"].json
    assert (health["status"], health["num_device_restarts"]) == ("ok", 1)


async def test_health_tells_what_it_was_judged_by() -> None:
    async with live_server(next_token=spell(TEXT)) as live:
        live.executor.hold()
        running = asyncio.create_task(live.complete(max_tokens=40))
        await live.until_step_waits()
        health = (await live.call("/health")).json
        live.executor.resume()
        await running
    assert (health["num_running"], health["num_waiting"], health["num_unapplied_steps"]) == (1, 0, 2)
    assert health["seconds_without_progress"] >= 0.0


def test_a_lost_device_is_an_error_of_ours_that_may_be_tried_again() -> None:
    failure = failure_of(DeviceLost("gone"))
    assert (failure.status, failure.kind, failure.code) == (503, "server_error", "device_lost")
