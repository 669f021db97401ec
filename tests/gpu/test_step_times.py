"""When steps pass through the device side: by the real executor, over a device that works behind its back."""

import asyncio
import json
import threading
from pathlib import Path

import torch

from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.executor import ThreadExecutor
from asyncserve.gpu.runner import ModelRunner
from asyncserve.step import StepOutput, StepPlan
from asyncserve.tracing.steps import DEVICE, DEVICE_THREAD, StepTrace
from tests.contracts.executor_contract import PlanWriter
from tests.fakes.attention_model import small_runner
from tests.fakes.device import FakeDevice


async def two_steps() -> list[tuple[StepPlan, StepOutput]]:
    """Run two steps, the second launched while the device still works on the first."""
    launched = threading.Semaphore(0)
    device = FakeDevice()

    class NotingRunner(ModelRunner):
        def run(self, plan: StepPlan) -> PendingOutput:
            pending = super().run(plan)
            launched.release()
            return pending

    executor = ThreadExecutor(lambda: small_runner(device=device, runner_class=NotingRunner))
    writer = PlanWriter(await executor.start())
    device.holds = True
    plans = [writer.admit(0), writer.admit(1)]
    futures = [executor.submit(plan) for plan in plans]
    for _ in plans:
        await asyncio.to_thread(launched.acquire)
    with torch.inference_mode():
        device.finish()
    outputs = [await future for future in futures]
    device.holds = False
    await executor.stop()
    return list(zip(plans, outputs, strict=True))


async def test_a_step_tells_when_each_thread_had_it() -> None:
    for _, output in await two_steps():
        times = output.times
        assert times is not None
        assert 0 < times.launch_begin_s < times.launch_end_s
        assert times.launch_begin_s < times.wait_begin_s <= times.done_s
        assert output.launch_s == times.launch_end_s - times.launch_begin_s


async def test_the_timeline_shows_the_launch_of_a_step_below_the_work_on_the_one_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "steps.json"
    steps = await two_steps()

    def write() -> list[dict[str, float | str]]:
        trace = StepTrace(path)
        for plan, output in steps:
            trace.step_applied(plan, output, (), 0.0)
        trace.close()
        return list(json.loads(path.read_bytes()))

    events = await asyncio.to_thread(write)
    launches, works = (
        [each for each in events if each["ph"] == "X" and each["tid"] == row and each["name"] != "idle"]
        for row in (DEVICE_THREAD, DEVICE)
    )
    assert float(launches[1]["ts"]) < float(works[0]["ts"]) + float(works[0]["dur"])
    # Written in whole nanoseconds.
    assert float(works[1]["ts"]) >= float(works[0]["ts"]) + float(works[0]["dur"]) - 0.01
