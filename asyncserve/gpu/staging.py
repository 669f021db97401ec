"""One packed host-to-device copy per step, and the ring through which its tokens come back.

Takes the step's small index arrays (numpy), gives tensors on the device. On a GPU they travel together
through one of a few pinned buffers used in rotation, as deep as the steps in flight, so the host never
overwrites what a queued copy still reads. On a CPU the arrays are used where they are.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncserve.gpu.device import Device, Event

_ALIGNMENT_BYTES = 16
_FIRST_BYTES = 64 * 1024
_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Staging:
    """Moves host arrays to the device.

    Args:
        device: Where to.
        depth: Copies that may be queued before an upload waits for the oldest. A step makes up to seven
            (admissions, blocks to store, to zero and to load, the batch, blocks to copy, what rows inherit)
            and two steps are in flight.
    """

    def __init__(self, device: Device, *, depth: int = 14) -> None:
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * depth
        self._copied: list[Event | None] = [None] * depth
        self._next = 0

    def upload(self, arrays: Sequence[Int32Array | Int64Array]) -> list[torch.Tensor]:
        """Return the arrays as device tensors of the same shape and dtype (int32 or int64).

        On a CPU the tensors share the arrays' memory: the caller does not write to them again.
        """
        if not self._device.is_async:
            return [torch.from_numpy(array) for array in arrays]
        offsets = []
        num_bytes = 0
        for array in arrays:
            offsets.append(num_bytes)
            num_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buffer = self._free_buffer(num_bytes)
        host = buffer.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed = buffer[:num_bytes].to(self._device.torch_device, non_blocking=True)
        self._note_copy()
        return [
            packed[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def fill(self, target: torch.Tensor, values: Int32Array) -> None:
        """Copy the values to the beginning of a device tensor, behind the work queued so far.

        Args:
            target: `[≥ num] int32`.
            values: `[num]`; may be changed when this returns.
        """
        if not self._device.is_async:
            target[: len(values)].copy_(torch.from_numpy(values))
            return
        buffer = self._free_buffer(values.nbytes)
        buffer.numpy()[: values.nbytes] = values.view(np.uint8)
        target[: len(values)].view(torch.uint8).copy_(buffer[: values.nbytes], non_blocking=True)
        self._note_copy()

    def _note_copy(self) -> None:
        self._copied[self._next] = self._device.record_event()
        self._next = (self._next + 1) % len(self._buffers)

    def _free_buffer(self, num_bytes: int) -> torch.Tensor:
        copied = self._copied[self._next]
        if copied is not None:
            copied.wait()
        buffer = self._buffers[self._next]
        if buffer is None or buffer.numel() < num_bytes:
            # Doubling keeps the number of pinned allocations (a driver call each) small.
            buffer = self._device.host_buffer(
                max(num_bytes, 2 * buffer.numel() if buffer is not None else _FIRST_BYTES)
            )
            self._buffers[self._next] = buffer
        return buffer


RESULT_ROWS = 8
"""More than the steps that may be launched and not yet read."""


class ResultRing:
    """Host memory that the last kernel of a step writes its tokens to, a row per step in flight and more.

    The kernel writes over the bus itself, so there is no copy to queue: when the step's event is reached the
    tokens are here.

    Args:
        device: Which writes.
        num_slots: Most tokens of a step.

    Attributes:
        memory: `[RESULT_ROWS, num_slots] int64`, memory the device can write to.
    """

    def __init__(self, device: Device, *, num_slots: int) -> None:
        memory = device.host_buffer(RESULT_ROWS * num_slots * 8).view(torch.int64)
        self.memory = memory.view(RESULT_ROWS, num_slots)
        self._host: Int64Array = self.memory.numpy()
        self._next = 0

    def take_row(self) -> int:
        """Return the row for the next step."""
        row = self._next
        self._next = (row + 1) % len(self._host)
        return row

    def tokens(self, row: int, num: int) -> list[int]:
        """Return the first tokens of a row, once the step's event was waited for."""
        tokens: list[int] = self._host[row, :num].tolist()
        return tokens
