import asyncio
import functools
import threading

import pytest
import torch

from asyncserve.errors import DeviceLost, StepFailed
from asyncserve.gpu.completion import CompletionQueue, PendingOutput
from asyncserve.gpu.device import CpuDevice
from asyncserve.step import StepOutput
from tests.fakes.device import FakeDevice


def _note(ended: list[int], idx: int, _: "asyncio.Future[StepOutput]") -> None:
    ended.append(idx)


def pending(device: FakeDevice | CpuDevice, step_id: int, token_id: int) -> PendingOutput:
    source = torch.tensor([token_id])
    copies, event = device.copy_out([source])
    return PendingOutput(
        step_id=step_id,
        event=event,
        sources=[source],
        finish=lambda: StepOutput(step_id=step_id, token_ids=copies[0].tolist()),
    )


async def test_result_is_read_only_after_the_device_copied_it() -> None:
    device = FakeDevice(holds=True)
    loop = asyncio.get_running_loop()
    queue = CompletionQueue(device, loop)
    future: asyncio.Future[StepOutput] = loop.create_future()
    queue.deliver(pending(device, 0, 7), future)
    await asyncio.sleep(0)
    assert not future.done()
    device.finish()
    assert list((await future).token_ids) == [7]
    await asyncio.to_thread(queue.close)


async def test_failure_of_a_later_step_does_not_overtake_an_earlier_result() -> None:
    device = FakeDevice(holds=True)
    loop = asyncio.get_running_loop()
    queue = CompletionQueue(device, loop)
    futures: list[asyncio.Future[StepOutput]] = [loop.create_future() for _ in range(2)]
    ended: list[int] = []
    for idx, future in enumerate(futures):
        future.add_done_callback(functools.partial(_note, ended, idx))
    queue.deliver(pending(device, 0, 7), futures[0])
    queue.deliver(StepFailed("no", step_id=1), futures[1])
    device.finish()
    await asyncio.gather(*futures, return_exceptions=True)
    assert ended == [0, 1]
    await asyncio.to_thread(queue.close)


@pytest.mark.parametrize("device", [FakeDevice(), CpuDevice(num_threads=1)])
async def test_error_that_surfaces_while_waiting_fails_that_step(device: FakeDevice | CpuDevice) -> None:
    def finish() -> StepOutput:
        raise RuntimeError("an invalid argument\nsecond line")

    loop = asyncio.get_running_loop()
    queue = CompletionQueue(device, loop)
    future: asyncio.Future[StepOutput] = loop.create_future()
    event = device.record_event()
    queue.deliver(PendingOutput(step_id=3, event=event, sources=(), finish=finish), future)
    with pytest.raises(StepFailed, match=r"^step 3 failed: RuntimeError: an invalid argument$"):
        await future
    await asyncio.to_thread(queue.close)


@pytest.mark.parametrize("device", [FakeDevice(), CpuDevice(num_threads=1)])
async def test_after_an_error_that_loses_the_device_no_step_is_answered_otherwise(
    device: FakeDevice | CpuDevice,
) -> None:
    def finish() -> StepOutput:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nsecond line")

    loop = asyncio.get_running_loop()
    queue = CompletionQueue(device, loop)
    futures: list[asyncio.Future[StepOutput]] = [loop.create_future() for _ in range(3)]
    event = device.record_event()
    queue.deliver(PendingOutput(step_id=3, event=event, sources=(), finish=finish), futures[0])
    queue.deliver(pending(device, 4, 7), futures[1])
    queue.deliver(StepFailed("no", step_id=5), futures[2])
    for future in futures:
        with pytest.raises(DeviceLost, match=r"^step 3 lost the device: RuntimeError: CUDA error: an ill"):
            await future
    await asyncio.to_thread(queue.close)
    assert queue.lost is not None


async def test_a_waiting_thread_that_something_unforeseen_ends_leaves_no_step_unanswered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def finish() -> StepOutput:
        raise SystemExit

    loop = asyncio.get_running_loop()
    device = FakeDevice()
    queue = CompletionQueue(device, loop)
    futures: list[asyncio.Future[StepOutput]] = [loop.create_future() for _ in range(2)]
    event = device.record_event()
    queue.deliver(PendingOutput(step_id=0, event=event, sources=(), finish=finish), futures[0])
    queue.deliver(pending(device, 1, 7), futures[1])
    for future in futures:
        with pytest.raises(DeviceLost, match="SystemExit"):
            await future
    await asyncio.to_thread(queue.close)
    assert [record.message for record in caplog.records] == ["waiting for step 0 ended"]


@pytest.fixture
def cpu() -> CpuDevice:
    return CpuDevice(num_threads=1)


async def test_cpu_needs_no_waiting_thread(cpu: CpuDevice) -> None:
    loop = asyncio.get_running_loop()
    before = set(threading.enumerate())
    queue = CompletionQueue(cpu, loop)
    future: asyncio.Future[StepOutput] = loop.create_future()
    queue.deliver(pending(cpu, 0, 5), future)
    assert set(threading.enumerate()) <= before
    assert list((await future).token_ids) == [5]
    queue.close()


async def test_close_delivers_what_was_handed_over() -> None:
    device = FakeDevice()
    loop = asyncio.get_running_loop()
    queue = CompletionQueue(device, loop)
    futures: list[asyncio.Future[StepOutput]] = [loop.create_future() for _ in range(3)]
    for idx, future in enumerate(futures):
        queue.deliver(pending(device, idx, idx), future)
    await asyncio.to_thread(queue.close)
    assert [list((await future).token_ids) for future in futures] == [[0], [1], [2]]


async def test_cancelled_future_is_left_alone() -> None:
    device = FakeDevice()
    loop = asyncio.get_running_loop()
    queue = CompletionQueue(device, loop)
    futures: list[asyncio.Future[StepOutput]] = [loop.create_future() for _ in range(2)]
    futures[0].cancel()
    for idx, future in enumerate(futures):
        queue.deliver(pending(device, idx, idx), future)
    assert list((await futures[1]).token_ids) == [1]
    assert futures[0].cancelled()
    await asyncio.to_thread(queue.close)


def test_sources_live_until_the_copy_is_done() -> None:
    device = FakeDevice(holds=True)
    output = pending(device, 0, 9)
    assert output._sources
    device.finish()
    assert list(output.wait().token_ids) == [9]
    assert not output._sources


def test_loop_that_is_closed_meanwhile_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    queue = CompletionQueue(CpuDevice(num_threads=1), loop)
    future: asyncio.Future[StepOutput] = loop.create_future()
    loop.close()
    queue.deliver(pending(CpuDevice(num_threads=1), 0, 5), future)
    assert not future.done()
