import numpy as np
import pytest
import torch

from asyncserve.gpu.device import CpuDevice, Device
from asyncserve.gpu.staging import RESULT_ROWS, Int32Array, Int64Array, ResultRing, Staging
from tests.fakes.device import FakeDevice

ARRAYS: list[Int32Array | Int64Array] = [
    np.arange(5, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros(0, dtype=np.int64),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2],
    np.array([-1, 2**40], dtype=np.int64),
]


@pytest.mark.parametrize("device", [CpuDevice(num_threads=1), FakeDevice()])
def test_arrays_arrive_with_their_shape_dtype_and_values(device: Device) -> None:
    for array, tensor in zip(ARRAYS, Staging(device).upload(ARRAYS), strict=True):
        assert tensor.shape == array.shape
        assert tensor.dtype == (torch.int32 if array.dtype == np.int32 else torch.int64)
        assert tensor.tolist() == array.tolist()


def test_arrays_of_one_step_travel_in_one_buffer() -> None:
    device = FakeDevice()
    Staging(device).upload(ARRAYS)
    assert len(device.host_buffers) == 1
    assert len(device.events) == 1


def test_buffer_is_not_overwritten_before_its_copy_was_done() -> None:
    device = FakeDevice()
    staging = Staging(device, depth=2)
    for _ in range(2):
        staging.upload([np.arange(3)])
    assert [event.num_waits for event in device.events] == [0, 0]
    staging.upload([np.arange(3)])
    assert [event.num_waits for event in device.events] == [1, 0, 0]
    assert len(device.host_buffers) == 2


def test_buffer_grows_with_what_it_must_carry() -> None:
    device = FakeDevice()
    staging = Staging(device, depth=1)
    staging.upload([np.arange(3)])
    large = np.arange(100_000)
    assert staging.upload([large])[0].tolist() == large.tolist()
    staging.upload([np.arange(3)])
    assert len(device.host_buffers) == 2


@pytest.mark.parametrize("device", [CpuDevice(num_threads=1), FakeDevice()])
def test_values_fill_the_beginning_of_a_tensor_and_may_be_changed_at_once(device: Device) -> None:
    target = torch.full((5,), 9, dtype=torch.int32)
    values = np.arange(3, dtype=np.int32)
    Staging(device).fill(target, values)
    values[:] = 7
    assert target.tolist() == [0, 1, 2, 9, 9]


def test_a_fill_does_not_overwrite_a_buffer_before_its_copy_was_done() -> None:
    device = FakeDevice()
    staging = Staging(device, depth=1)
    for _ in range(2):
        staging.fill(torch.empty(3, dtype=torch.int32), np.arange(3, dtype=np.int32))
    assert [event.num_waits for event in device.events] == [1, 0]


def test_steps_write_their_tokens_to_rows_of_their_own_in_turn() -> None:
    ring = ResultRing(FakeDevice(), num_slots=4)
    rows = [ring.take_row() for _ in range(RESULT_ROWS)]
    assert sorted(rows) == list(range(RESULT_ROWS))
    for row in rows:
        ring.memory[row] = torch.arange(4) + 10 * row
    assert [ring.tokens(row, 2) for row in rows] == [[10 * row, 10 * row + 1] for row in rows]
    assert ring.take_row() == rows[0]
