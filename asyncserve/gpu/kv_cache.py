"""The paged KV cache: the tensors that all KV groups share.

Takes sized KV groups, gives each layer its K and its V as `[num_blocks, num_kv_heads, block_len, head_dim]`
(one head's page is contiguous). There are as many storages as the largest group has layers; the first layers
of all groups see the same one, each in the shape of its group, so a block can serve any group. Which one it
serves, and whom, is decided by `loop/kv_pool.py`; this file never reads a block table.

Invariant, for backends that read what is unwritten: every element is finite unless a model computed it
otherwise, because a masked position is still multiplied (by zero) and 0 * NaN would spread. Memory starts as
zeros, the null block 0 is never written, and for such a backend the runner zeroes what a step leaves
unwritten of a new block (`zero_blocks`).
"""

import contextlib
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.kv_scales import KVScales, as_bytes, as_cached
from asyncserve.kv_spec import FullAttention, KVGroup, KVSpec, RecurrentState

_COPY_BYTES = 64 * 1024 * 1024
"""Most bytes of blocks that are on their way at once, unless those of one storage are more."""


class KVCache:
    """K and V of all layers, indexed by layer id.

    Args:
        groups: Sized (`num_blocks` above 1, the same in all); together they name every layer exactly once.
            Blocks take the same bytes in a layer of each group.
        device: Where the tensors live.
        scales: By layer id, what an 8-bit cache's values are multiplied by; a layer left out has none.

    Attributes:
        groups: As given.
        keys: per layer `[num_blocks, num_kv_heads, block_len, head_dim]`, dtype of the group's spec,
            contiguous. Of a layer that keeps a state: `[num_blocks, bytes] uint8`, one half of its pages.
        values: As `keys`.
        group_of_layer: per layer, the id of its group.
        scales: per layer, on the device; None for 1.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        device: torch.device,
        scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        sizes = {(group.num_blocks, group.spec.bytes_per_block) for group in groups}
        if len(sizes) != 1:
            raise InvariantError(f"KV groups of (blocks, bytes per block) {sorted(sizes)} share no storages")
        num_blocks = self.groups[0].num_blocks
        num_storages = max(len(group.layer_ids) for group in groups)
        shape = (num_storages, 2, num_blocks, *_page_shape(self.groups[0].spec))
        self._storages = _zeros(shape, dtype=_dtype(self.groups[0].spec), device=device)
        layers: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        for group in groups:
            pages = self._storages.view(num_storages, 2, num_blocks, -1).view(_dtype(group.spec))
            pages = pages.view(num_storages, 2, num_blocks, *_page_shape(group.spec))
            for idx, layer_id in enumerate(group.layer_ids):
                layers[layer_id] = (pages[idx, 0], pages[idx, 1], group.group_id)
        self.keys = [layers[layer_id][0] for layer_id in range(len(layers))]
        self.values = [layers[layer_id][1] for layer_id in range(len(layers))]
        self.group_of_layer = [layers[layer_id][2] for layer_id in range(len(layers))]
        self.scales: list[KVScales | None] = [None] * len(layers)
        for layer_id, of_layer in (scales or {}).items():
            assert self.keys[layer_id].dtype.itemsize == 1, "wider dtypes need no scales"
            self.scales[layer_id] = KVScales(*(scale.to(device) for scale in of_layer))

    @property
    def pages(self) -> torch.Tensor:
        """Everything by block: a view of `[num_blocks, …]`."""
        return self._storages.movedim(2, 0)

    def write(
        self, layer_id: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a step's K and V in one layer.

        Args:
            layer_id: The layer.
            rows: `[num_tokens * num_kv_heads] int64`, of `token_rows`.
            k: `[num_tokens, num_kv_heads, head_dim]`.
            v: As `k`.

        Returns:
            k and v in the cache's dtype: who attends to them directly sees what a later step will read, so
            that a prompt gives the same whole or in chunks.
        """
        keys, values = self.keys[layer_id], self.values[layer_id]
        head_dim = keys.shape[-1]
        k, v = self.held(layer_id, k, v)
        for cache, fresh in ((keys, k), (values, v)):
            as_bytes(cache).view(-1, head_dim).index_copy_(0, rows, as_bytes(fresh.reshape(-1, head_dim)))
        return k, v

    def held(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's K and V as one layer's cache holds them; shapes as of `write`."""
        k_scale, v_scale = self.scales[layer_id] or (None, None)
        return (
            as_cached(k, self.keys[layer_id].dtype, k_scale),
            as_cached(v, self.values[layer_id].dtype, v_scale),
        )

    def zero_blocks(self, block_ids: torch.Tensor) -> None:
        """Zero whole blocks, in every storage.

        Args:
            block_ids: `[num] int64`, on the cache's device.
        """
        as_bytes(self._storages).index_fill_(2, block_ids, 0)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Give whole blocks the content of others, in every storage; as if all at once: blocks may swap.

        Args:
            sources: `[num] int64`, block ids, on the cache's device.
            targets: As `sources`, distinct.
        """
        num_bytes = len(sources) * self.groups[0].spec.bytes_per_block
        for storages in torch.split(in_words(self._storages), max(1, _COPY_BYTES // num_bytes)):
            storages.index_copy_(2, targets, storages.index_select(2, sources))


def in_words(pages: torch.Tensor) -> torch.Tensor:
    """Return the same memory in the largest integers that fit its rows: there are fewer to gather."""
    row_bytes = pages.shape[-1] * pages.element_size()
    return next(pages.view(dtype) for dtype in _WORDS if row_bytes % dtype.itemsize == 0)


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _page_shape(spec: KVSpec) -> tuple[int, ...]:
    """Return the shape of K, which is that of V, in one block of a layer."""
    if isinstance(spec, RecurrentState):
        return (spec.bytes_per_block // 2,)
    return (spec.num_kv_heads, spec.block_len, spec.head_dim)


def _dtype(spec: KVSpec) -> torch.dtype:
    if isinstance(spec, RecurrentState):
        return torch.uint8
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def token_rows(slot_mapping: torch.Tensor, spec: FullAttention) -> torch.Tensor:
    """Return where tokens stand in a layer's K (or V) seen as rows of one head: `[…, head_dim]`.

    Args:
        slot_mapping: `[num_tokens] int64`, `block_id * block_len + offset`.
        spec: Of the layer's group.

    Returns:
        `[num_tokens * num_kv_heads] int64`: (block, head, offset) is row
        `(block * num_kv_heads + head) * block_len + offset`.
    """
    block_len, num_kv_heads = spec.block_len, spec.num_kv_heads
    block_ids = torch.div(slot_mapping, block_len, rounding_mode="floor")
    first_head = slot_mapping + block_ids * ((num_kv_heads - 1) * block_len)
    heads = torch.arange(num_kv_heads, device=slot_mapping.device)
    return (first_head[:, None] + heads * block_len).view(-1)


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Pages of the kernel, each zero, and resident only once it is written. torch.zeros would write the whole
    # pool, and so would calloc in memory that was in use before: that of the device's last opening, say.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8)).view(dtype).view(shape)
