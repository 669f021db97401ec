import asyncio
import dataclasses
import gc
import threading
import weakref

import pytest
import torch

from asyncserve.errors import (
    ConfigError,
    DeviceLost,
    EngineStopped,
    NotReady,
    OutOfDeviceMemory,
    StartupError,
    StepFailed,
    StepOutOfMemory,
)
from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.executor import ThreadExecutor
from asyncserve.gpu.runner import ModelRunner
from asyncserve.step import Executor, ExecutorInfo, StepOutput, StepPlan
from tests.contracts.executor_contract import DeviceUnderTest, ExecutorContract, PlanWriter, submit
from tests.fakes.attention_model import AttentionModel, small_runner
from tests.fakes.device import FakeDevice


class _FailingModel(AttentionModel):
    """Raises in the forward pass what it is told to."""

    error: Exception | None = None

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().logits(hidden, out=out)


class _GatedDevice:
    """A ThreadExecutor whose steps wait at a gate, and fail in the model, when told to."""

    executor: Executor

    def __init__(self) -> None:
        self._gate = threading.Event()
        self._gate.set()
        self._failing: dict[int, Exception] = {}
        self.thread_names: set[str] = set()
        self.executor = ThreadExecutor(self._start, left_behind_after_s=0.05)

    def _start(self) -> tuple[ModelRunner, ExecutorInfo]:
        device = self
        model = _FailingModel({})

        class GatedRunner(ModelRunner):
            def run(self, plan: StepPlan) -> PendingOutput:
                device.thread_names.add(threading.current_thread().name)
                device._gate.wait()
                model.error = device._failing.get(plan.step_id)
                return super().run(plan)

        device.thread_names.add(threading.current_thread().name)
        runner, info = small_runner(model=model, num_slots=2, num_blocks=16, runner_class=GatedRunner)
        return runner, dataclasses.replace(info, max_num_batched_tokens=8)

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def fail_step(self, step_id: int) -> None:
        self._failing[step_id] = RuntimeError("the device said no")

    def lose_device_at(self, step_id: int) -> None:
        self._failing[step_id] = RuntimeError("CUDA error: device-side assert triggered")

    def lack_memory_at(self, step_id: int) -> None:
        self._failing[step_id] = torch.OutOfMemoryError("tried to allocate 7 GiB")


class TestThreadExecutor(ExecutorContract):
    def make_device(self) -> DeviceUnderTest:
        return _GatedDevice()


async def test_startup_and_steps_run_on_the_one_device_thread() -> None:
    others = _device_threads()  # also those that other tests left behind
    device = _GatedDevice()
    writer = PlanWriter(await device.executor.start())
    await device.executor.submit(writer.admit(0))
    await device.executor.stop()
    assert device.thread_names == {"asyncserve-device"}
    assert _device_threads() <= others


def _device_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "asyncserve-device"}


async def test_failed_step_keeps_what_the_device_said() -> None:
    device = _GatedDevice()
    device.fail_step(0)
    writer = PlanWriter(await device.executor.start())
    with pytest.raises(StepFailed, match="the device said no") as caught:
        await device.executor.submit(writer.admit(0))
    await device.executor.stop()
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_a_step_that_lacked_memory_says_so() -> None:
    device = _GatedDevice()
    device.lack_memory_at(0)
    writer = PlanWriter(await device.executor.start())
    with pytest.raises(StepOutOfMemory, match="7 GiB"):
        await device.executor.submit(writer.admit(0))
    await device.executor.stop()


async def _on_a_gpu(
    error: Exception | None,
    gate: threading.Event,
    entered: threading.Event | None = None,
    left_behind_after_s: float = 60.0,
) -> tuple[ThreadExecutor, PlanWriter]:
    """Return a started executor of a fake GPU, whose step 0 waits at the gate and then may raise."""

    class GpuRunner(ModelRunner):
        def run(self, plan: StepPlan) -> PendingOutput:
            if plan.step_id == 0:
                if entered is not None:
                    entered.set()
                gate.wait()
                if error is not None:
                    raise error
            return super().run(plan)

    executor = ThreadExecutor(
        lambda: small_runner(num_slots=2, device=FakeDevice(), runner_class=GpuRunner),
        left_behind_after_s=left_behind_after_s,
    )
    return executor, PlanWriter(await executor.start())


async def test_a_gpu_with_a_spoilt_context_is_left_to_the_next_process() -> None:
    gate = threading.Event()
    gate.set()
    executor, writer = await _on_a_gpu(RuntimeError("CUDA error: an illegal memory access"), gate)
    with pytest.raises(DeviceLost):
        await executor.submit(writer.admit(0))
    with pytest.raises(DeviceLost, match="only a new one can use it"):
        await executor.restart()
    await executor.stop()


async def test_a_gpu_whose_context_a_step_spoils_after_its_launch_is_left_to_the_next_process() -> None:
    def spoilt() -> StepOutput:
        raise RuntimeError("CUDA error: an illegal memory access")

    class GpuRunner(ModelRunner):
        def run(self, plan: StepPlan) -> PendingOutput:
            return PendingOutput(step_id=0, event=self.device.record_event(), sources=(), finish=spoilt)

    executor = ThreadExecutor(
        lambda: small_runner(num_slots=2, device=FakeDevice(), runner_class=GpuRunner),
        left_behind_after_s=0.05,
    )
    writer = PlanWriter(await executor.start())
    with pytest.raises(DeviceLost):
        await executor.submit(writer.admit(0))
    with pytest.raises(DeviceLost, match="only a new one can use it"):
        await executor.restart()
    await executor.stop()


async def test_a_gpu_that_does_not_answer_is_left_to_the_next_process() -> None:
    gate, entered = threading.Event(), threading.Event()
    executor, writer = await _on_a_gpu(None, gate, entered, left_behind_after_s=0.05)
    step = executor.submit(writer.admit(0))
    await asyncio.to_thread(entered.wait)
    with pytest.raises(DeviceLost, match="does not answer"):
        await executor.restart()
    with pytest.raises(DeviceLost):
        await step
    await executor.stop()  # waits no longer for it either
    gate.set()


async def test_a_gpu_that_answers_is_opened_anew_whatever_failed_on_it() -> None:
    gate = threading.Event()
    gate.set()
    executor, writer = await _on_a_gpu(RuntimeError("no kernel image is available"), gate)
    with pytest.raises(StepFailed):
        await executor.submit(writer.admit(0))
    await executor.restart()
    writer.reopen()
    assert len((await executor.submit(writer.admit(0))).token_ids) == 1
    await executor.stop()


async def test_a_device_thread_that_something_unforeseen_ends_answers_every_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class DyingRunner(ModelRunner):
        def run(self, plan: StepPlan) -> PendingOutput:
            raise SystemExit

    executor = ThreadExecutor(lambda: small_runner(num_slots=2, runner_class=DyingRunner))
    writer = PlanWriter(await executor.start())
    steps = [executor.submit(writer.admit(0)), executor.submit(writer.admit(1))]
    for step in steps:
        with pytest.raises(DeviceLost, match="SystemExit"):
            await step
    with pytest.raises(DeviceLost, match="SystemExit"):
        await executor.submit(writer.decode(0))
    await executor.stop()
    assert [record.message for record in caplog.records] == ["the device thread has ended"]


async def test_a_restart_that_fails_leaves_an_executor_that_can_be_stopped() -> None:
    num_starts = 0

    def start() -> tuple[ModelRunner, ExecutorInfo]:
        nonlocal num_starts
        num_starts += 1
        if num_starts == 2:
            raise RuntimeError("the weights are gone")
        return small_runner(num_slots=2)

    executor = ThreadExecutor(start)
    await executor.start()
    with pytest.raises(StartupError, match="the weights are gone"):
        await executor.restart()
    await executor.stop()


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


@pytest.mark.parametrize("is_sticky", [False, True])
async def test_a_graph_that_cannot_be_captured_is_no_end_of_the_device_unless_it_is(
    is_sticky: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever raised beside the capture itself ended the thread."""
    tried = threading.Event()

    class CapturingRunner(ModelRunner):
        num_left = 3

        @property
        def graphs_pending(self) -> int:
            return self.num_left

        def capture_next(self) -> None:
            tried.set()
            raise RuntimeError("CUDA error: an illegal memory access" if is_sticky else "no room for inputs")

        def give_up_capturing(self) -> None:
            self.num_left = 0

    executor = ThreadExecutor(lambda: small_runner(num_slots=2, runner_class=CapturingRunner))
    writer = PlanWriter(await executor.start())
    await asyncio.to_thread(tried.wait)
    if is_sticky:
        with pytest.raises(DeviceLost, match="capturing a graph lost the device"):
            await executor.submit(writer.admit(0))
        num_left, CapturingRunner.num_left = CapturingRunner.num_left, 0
        await executor.restart()
        CapturingRunner.num_left = num_left
        writer.reopen()
    assert len((await executor.submit(writer.admit(0))).token_ids) == 1
    assert executor.graphs_pending == 0
    await executor.stop()
    assert ("a graph could not be captured" in caplog.text) is not is_sticky
    assert "the device thread has ended" not in caplog.text


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


@pytest.mark.parametrize("end", ["orderly", "by an error"])
async def test_nothing_of_the_last_opening_is_held_when_the_device_is_opened_anew(end: str) -> None:
    things: list[weakref.ref[object]] = []
    num_alive: list[int] = []

    class EndingRunner(ModelRunner):
        def run(self, plan: StepPlan) -> PendingOutput:
            if end == "by an error" and plan.step_id == 0:
                raise SystemExit
            return super().run(plan)

    def start() -> tuple[ModelRunner, ExecutorInfo]:
        num_alive.append(sum(thing() is not None for thing in things))
        model = AttentionModel({})
        runner, info = small_runner(num_slots=2, model=model, runner_class=EndingRunner)
        things.extend(map(weakref.ref, (model, runner, runner._kv_cache)))
        return runner, info

    executor = ThreadExecutor(start)
    writer = PlanWriter(await executor.start())
    await asyncio.gather(executor.submit(writer.admit(0)), return_exceptions=True)
    gc.collect()
    gc.freeze()
    try:
        await executor.restart()
    finally:
        gc.unfreeze()
        await executor.stop()
    assert num_alive == [0, 0]
