"""What drawing must know of each slot: temperature, truncation and the seed, on the host and on the device.

Written on admission, on the host, into one array; a device's kernels read a copy of it, which `upload` brings
up to date by a single transfer. On a CPU both are the same memory.
"""

import numpy as np
import torch
from torch import Tensor

from asyncserve.gpu.sampling.gumbel import seed_keys
from asyncserve.gpu.sampling.truncation import RowShapes
from asyncserve.request import SamplingParams

_BYTES_PER_SLOT = 32


class SlotValues:
    """The values of all slots.

    Args:
        num_slots: Slots are below it.
        device: Where the kernels run.

    Attributes:
        shapes: Temperature and truncation, on the host; rows are slots.
        seed_keys: `[num_slots] int64` on the host, of `gumbel.seed_keys`.
        on_device: As these, for the kernels.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._host = np.zeros(num_slots * _BYTES_PER_SLOT, np.uint8)
        host = torch.from_numpy(self._host)
        self._device = host if device.type == "cpu" else torch.zeros_like(host, device=device)
        self._is_new = False
        parts = DeviceValues(host)
        self.shapes = RowShapes(
            parts.inv_temperature.numpy(), parts.top_k.numpy(), parts.top_p.numpy(), parts.min_p.numpy()
        )
        self.seed_keys = parts.seed_keys.numpy()
        self.on_device = DeviceValues(self._device)

    def set(self, slot: int, sampling: SamplingParams, seed: int) -> None:
        """Take a sequence's parameters and its seed, of which the low 64 bits count."""
        self._is_new = True
        if sampling.is_greedy:
            self.shapes.set_greedy(slot)
            return
        self.seed_keys[slot] = seed_keys(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))[0]
        self.shapes.set(
            slot,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )

    def upload(self) -> None:
        """Let the kernels launched from now on see what was set; waits for nothing."""
        if self._is_new and self._device.device.type != "cpu":
            self._device.copy_(torch.from_numpy(self._host), non_blocking=True)
        self._is_new = False


class DeviceValues:
    """Parts of one array of bytes.

    Attributes, all `[num_slots]`: `seed_keys` int64, `top_k` int64, `top_p` float64, `inv_temperature`
    float32, `min_p` float32; as in `RowShapes`.

    Args:
        packed: `[num_slots * 32] uint8`.
    """

    def __init__(self, packed: Tensor) -> None:
        num_slots = packed.shape[0] // _BYTES_PER_SLOT
        wide, narrow = packed[: 24 * num_slots].chunk(3), packed[24 * num_slots :].chunk(2)
        self.seed_keys = wide[0].view(torch.int64)
        self.top_k = wide[1].view(torch.int64)
        self.top_p = wide[2].view(torch.float64)
        self.inv_temperature = narrow[0].view(torch.float32)
        self.min_p = narrow[1].view(torch.float32)
