"""Blocks of the KV cache in the host's memory: copies of device blocks, made and taken back by plans.

Takes the `BlockTransfer`s of a plan and queues the copies; which block lies where is decided by
`loop/host_tier.py`. A block's pieces, one or two per layer, are gathered into an area of staging memory on
the device, so that only whole blocks cross the bus, and neighbours in one copy.

Why nothing is overwritten too early or read too early:
* gathering from blocks and scattering into them is work of the main stream, in the order of the plans. So a
  stored block may be written by the very step of its plan, and no block needs a fence of its own;
* an area is used anew when the copy out of it, or the scattering from it, is done: the main stream waits for
  the former, the stream of the loads for the latter;
* the main stream waits for the copy of a load where that is scattered, just before the step that reads it;
  the copy itself runs beside the steps before, as soon as the plan is known;
* a host block is read when the store that filled it is done. It is not written again before a load has read
  it: a store's copy follows its gathering, and that follows the load on the main stream.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.device import Device, Event, HostCopy
from asyncserve.gpu.kv_cache import in_words
from asyncserve.gpu.staging import Staging
from asyncserve.step import BlockTransfer

STAGING_BYTES = 512 * 1024 * 1024
"""Most memory of the device for all areas: what is stored beyond it holds up the step until the bus has
caught up."""
NUM_MEASURED = 3
"""How often the time of transfers is taken, of which the least counts."""
_NUM_AREAS = 8
_SLAB_BYTES = 256 * 1024 * 1024
"""Of host memory that is allocated at once, or a little less: torch rounds pinned memory up to a power of
two."""


class _Area:
    """Staging memory for some blocks: `[area_blocks, …]` on the device."""

    __slots__ = ("pages", "used")

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        self.used: Event | None = None  # reached when it can be used anew


class HostBlocks:
    """Host memory for blocks, and the copies to it and from it.

    Args:
        pages: The cache by block, as `KVCache.pages` gives it.
        num_blocks: Host blocks, block 0 (never used) included.
        device: Of the cache.
        staging: Takes block ids to the device.
    """

    def __init__(self, pages: torch.Tensor, *, num_blocks: int, device: Device, staging: Staging) -> None:
        pages = self._pages = in_words(pages)
        self._num_blocks = num_blocks
        self._device = device
        self._staging = staging
        bytes_per_block = pages[0].numel() * pages.element_size()
        self._slab_blocks = slab_blocks = min(num_blocks, max(1, _SLAB_BYTES // bytes_per_block))
        self._slabs = []
        for begin in range(0, num_blocks, slab_blocks):
            num_here = min(slab_blocks, num_blocks - begin)
            slab = device.host_buffer(num_here * bytes_per_block)
            self._slabs.append(slab.view(pages.dtype).view(num_here, *pages.shape[1:]))
        self._area_blocks = area_blocks(bytes_per_block, num_blocks)
        self._areas = [
            _Area(pages.new_empty((self._area_blocks, *pages.shape[1:]))) for _ in range(_NUM_AREAS)
        ]
        self._next_area = 0
        self._stored: dict[int, Event] = {}  # host block → end of the copy that filled it

    def store(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy device blocks to host blocks, as they are before the work queued next."""
        for part, block_ids in self._parts(transfers):
            area = self._take_area()
            if area.used is not None:
                self._device.wait_for(area.used)
            torch.index_select(self._pages, 0, block_ids, out=area.pages[: len(part)])
            gathered = self._device.record_event()
            area.used = self._device.copy_to_host(self._copies(part, area), (gathered,))
            for transfer in part:
                self._stored[transfer.host_block] = area.used

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy host blocks to device blocks, for the work queued next."""
        for part, block_ids in self._parts(transfers):
            area = self._take_area()
            stored = [self._stored.get(transfer.host_block) for transfer in part]
            if None in stored:
                raise InvariantError("a host block is loaded that nothing was stored in")
            after = list({id(event): event for event in stored if event is not None}.values())
            if area.used is not None:
                after.append(area.used)
            copied = self._device.copy_from_host(self._copies(part, area), after)
            self._device.wait_for(copied)
            self._pages.index_copy_(0, block_ids, area.pages[: len(part)])
            area.used = self._device.record_event()

    def measure(self) -> float:
        """Return the seconds that a block takes to the host and back, when many go; while nothing runs.

        Blocks keep their content.
        """
        num = min(self._area_blocks * _NUM_AREAS, self._num_blocks - 1, len(self._pages) - 1)
        transfers = [BlockTransfer(block_id, block_id) for block_id in range(1, num + 1)]
        least_s = math.inf
        # The first time kernels are loaded and memory is touched that never was; later ones may be disturbed
        # by what else the machine does, and the figure stays for good.
        for _ in range(NUM_MEASURED):
            self._device.synchronize()
            began_s = time.perf_counter()
            self.store(transfers)
            self._device.synchronize()  # both ways at once take less than one after the other
            self.load(transfers)
            self._device.synchronize()
            least_s = min(least_s, time.perf_counter() - began_s)
        return least_s / num

    def _parts(
        self, transfers: Sequence[BlockTransfer]
    ) -> Iterator[tuple[Sequence[BlockTransfer], torch.Tensor]]:
        """Cut transfers into what an area takes, neighbours in host memory together.

        Returns:
            Each part and its device blocks, `[num] int64` on the device.
        """
        ordered = sorted(transfers, key=lambda transfer: transfer.host_block)
        if not 0 < ordered[0].host_block <= ordered[-1].host_block < self._num_blocks:
            raise InvariantError(
                f"host blocks {ordered[0].host_block} … {ordered[-1].host_block} of {self._num_blocks}"
            )
        ids = np.array([transfer.device_block for transfer in ordered], dtype=np.int64)
        (block_ids,) = self._staging.upload([ids])
        for begin in range(0, len(ordered), self._area_blocks):
            end = begin + self._area_blocks
            yield ordered[begin:end], block_ids[begin:end]

    def _take_area(self) -> _Area:
        area = self._areas[self._next_area]
        self._next_area = (self._next_area + 1) % len(self._areas)
        return area

    def _copies(self, part: Sequence[BlockTransfer], area: _Area) -> list[HostCopy]:
        """Return the copies between an area and the host blocks of a part, one for each run of neighbours."""
        host_blocks = [transfer.host_block for transfer in part]
        begins = [0]
        for idx, (left, right) in enumerate(pairwise(host_blocks), start=1):
            if right != left + 1 or right % self._slab_blocks == 0:
                begins.append(idx)
        copies = []
        for begin, end in pairwise([*begins, len(host_blocks)]):
            slab, row = divmod(host_blocks[begin], self._slab_blocks)
            copies.append(HostCopy(self._slabs[slab][row : row + end - begin], area.pages[begin:end]))
        return copies


def area_blocks(bytes_per_block: int, num_blocks: int) -> int:
    """Return the blocks that one area of staging memory takes."""
    return max(1, min(STAGING_BYTES // _NUM_AREAS // bytes_per_block, num_blocks))


def staging_bytes(bytes_per_block: int, num_blocks: int) -> int:
    """Return the memory that staging takes on the device, for so many host blocks; 0 for none."""
    return _NUM_AREAS * area_blocks(bytes_per_block, num_blocks) * bytes_per_block if num_blocks else 0
