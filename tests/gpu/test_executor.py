import asyncio
import dataclasses
import threading

import pytest
import torch

from asyncserve.errors import (
    ConfigError,
    EngineStopped,
    NotReady,
    OutOfDeviceMemory,
    StartupError,
    StepFailed,
)
from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.executor import ThreadExecutor
from asyncserve.gpu.runner import ModelRunner
from asyncserve.step import Executor, ExecutorInfo, StepPlan
from tests.contracts.executor_contract import DeviceUnderTest, ExecutorContract, PlanWriter, submit
from tests.fakes.attention_model import AttentionModel, small_runner


class _FailingModel(AttentionModel):
    """Raises in the forward pass while told to."""

    fails = False

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("the device said no")
        return super().logits(hidden, out=out)


class _GatedDevice:
    """A ThreadExecutor whose steps wait at a gate, and fail in the model, when told to."""

    executor: Executor

    def __init__(self) -> None:
        self._gate = threading.Event()
        self._gate.set()
        self._failing: set[int] = set()
        self.thread_names: set[str] = set()
        self.executor = ThreadExecutor(self._start)

    def _start(self) -> tuple[ModelRunner, ExecutorInfo]:
        device = self
        model = _FailingModel({})

        class GatedRunner(ModelRunner):
            def run(self, plan: StepPlan) -> PendingOutput:
                device.thread_names.add(threading.current_thread().name)
                device._gate.wait()
                model.fails = plan.step_id in device._failing
                return super().run(plan)

        device.thread_names.add(threading.current_thread().name)
        runner, info = small_runner(model=model, num_slots=2, num_blocks=16, runner_class=GatedRunner)
        return runner, dataclasses.replace(info, max_num_batched_tokens=8)

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def fail_step(self, step_id: int) -> None:
        self._failing.add(step_id)


class TestThreadExecutor(ExecutorContract):
    def make_device(self) -> DeviceUnderTest:
        return _GatedDevice()


async def test_startup_and_steps_run_on_the_one_device_thread() -> None:
    device = _GatedDevice()
    writer = PlanWriter(await device.executor.start())
    await device.executor.submit(writer.admit(0))
    await device.executor.stop()
    assert device.thread_names == {"asyncserve-device"}
    assert not any(thread.name == "asyncserve-device" for thread in threading.enumerate())


async def test_failed_step_keeps_what_the_device_said() -> None:
    device = _GatedDevice()
    device.fail_step(0)
    writer = PlanWriter(await device.executor.start())
    with pytest.raises(StepFailed, match="the device said no") as caught:
        await device.executor.submit(writer.admit(0))
    await device.executor.stop()
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_step_that_runs_while_stopping_finishes_and_the_one_behind_it_does_not_run() -> None:
    device = _GatedDevice()
    writer = PlanWriter(await device.executor.start())
    first = await device.executor.submit(writer.admit(0))
    device.hold()
    running, waiting = submit(device, writer.decode(0)), submit(device, writer.decode(0))
    stopping = asyncio.ensure_future(device.executor.stop())
    await asyncio.sleep(0)
    device.release()
    await stopping
    answers = await asyncio.gather(running, waiting, return_exceptions=True)
    assert isinstance(answers[1], EngineStopped)
    assert first.step_id == 0


async def test_graphs_are_captured_while_no_step_waits_and_every_step_is_answered() -> None:
    order: list[str] = []
    captured = threading.Event()

    class CapturingRunner(ModelRunner):
        num_left = 3

        @property
        def graphs_pending(self) -> int:
            return self.num_left

        def capture_next(self) -> None:
            self.num_left -= 1
            order.append("capture")
            if not self.num_left:
                captured.set()

        def run(self, plan: StepPlan) -> PendingOutput:
            order.append("step")
            return super().run(plan)

    executor = ThreadExecutor(lambda: small_runner(num_slots=2, runner_class=CapturingRunner))
    writer = PlanWriter(await executor.start())
    await asyncio.to_thread(captured.wait)
    await executor.submit(writer.admit(0))
    await executor.submit(writer.decode(0))
    assert executor.graphs_pending == 0
    await executor.stop()
    assert order == ["capture"] * 3 + ["step"] * 2


async def test_a_step_that_waits_goes_before_the_capture_of_a_graph() -> None:
    order: list[str] = []

    class CapturingRunner(ModelRunner):
        @property
        def graphs_pending(self) -> int:
            return 1

        def capture_next(self) -> None:
            order.append("capture")

        def run(self, plan: StepPlan) -> PendingOutput:
            if plan.step_id == 0:
                may_run.wait()
            order.append(f"step {plan.step_id}")
            return super().run(plan)

    may_run = threading.Event()
    executor = ThreadExecutor(lambda: small_runner(num_slots=2, runner_class=CapturingRunner))
    writer = PlanWriter(await executor.start())
    assert executor.graphs_pending == 1
    steps = [executor.submit(writer.admit(0)), executor.submit(writer.decode(0))]
    may_run.set()
    await asyncio.gather(*steps)
    await executor.stop()
    assert order[order.index("step 0") : order.index("step 1") + 1] == ["step 0", "step 1"]


async def test_submit_before_start_is_refused() -> None:
    device = _GatedDevice()
    with pytest.raises(NotReady):
        await device.executor.submit(StepPlan(step_id=0, sequences=()))
    await device.executor.stop()
    with pytest.raises(EngineStopped):
        await device.executor.start()


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (ConfigError("lower it"), ConfigError, "lower it"),
        (torch.OutOfMemoryError("tried to allocate"), OutOfDeviceMemory, "max-model-len"),
        (MemoryError(), OutOfDeviceMemory, "ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfDeviceMemory, "ran out of memory"),
        (RuntimeError("bad kernel"), StartupError, "RuntimeError: bad kernel"),
    ],
)
async def test_startup_failure_is_one_of_our_errors(
    raised: Exception, expected: type[Exception], message: str
) -> None:
    def start() -> tuple[ModelRunner, ExecutorInfo]:
        raise raised

    executor = ThreadExecutor(start)
    with pytest.raises(expected, match=message) as caught:
        await executor.start()
    assert caught.value is raised or caught.value.__cause__ is raised
    await executor.stop()


async def test_start_that_nobody_awaits_any_more_still_lets_the_executor_stop() -> None:
    entered, gate = threading.Event(), threading.Event()

    def start() -> tuple[ModelRunner, ExecutorInfo]:
        entered.set()
        gate.wait()
        return small_runner()

    executor = ThreadExecutor(start)
    starting = asyncio.ensure_future(executor.start())
    await asyncio.to_thread(entered.wait)
    starting.cancel()
    stopping = asyncio.ensure_future(executor.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    gate.set()
    await stopping
