"""Small arrays on their way to the device, without waiting for it.

A plain copy to a GPU waits until all work queued before it is done, which would end the lead of one step. An
asynchronous one of memory that is not pinned returns when the driver has taken the bytes, so the array may be
changed or freed at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on a CPU it shares the array's memory."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def upload_ids(values: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers as an int64 tensor on the device."""
    return upload(np.array(values, np.int64), device)
