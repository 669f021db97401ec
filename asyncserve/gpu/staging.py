"""One packed host-to-device copy per step.

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
        depth: Copies that may be queued before an upload waits for the oldest. A step makes up to three
            (admissions, blocks to zero, the batch) and two steps are in flight.
    """

    def __init__(self, device: Device, *, depth: int = 8) -> None:
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
        self._copied[self._next] = self._device.record_event()
        self._next = (self._next + 1) % len(self._buffers)
        return [
            packed[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

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
