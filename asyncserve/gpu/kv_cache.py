"""The paged KV cache: the tensors of every KV group.

Takes sized KV groups, gives each layer its K and its V as `[num_blocks, num_kv_heads, block_len, head_dim]`
(one head's page is contiguous). Which block serves which sequence is decided by `loop/kv_pool.py`; this file
never reads a block table.

Invariant, for backends that read what is unwritten: every element is finite unless a model computed it
otherwise, because a masked position is still multiplied (by zero) and 0 * NaN would spread. Memory starts as
zeros, the null block 0 is never written, and for such a backend the runner zeroes what a step leaves
unwritten of a new block (`zero_blocks`).
"""

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import torch

from asyncserve.kv_spec import KVGroup, KVSpec


class KVCache:
    """K and V of all layers, indexed by layer id.

    Args:
        groups: Sized (`num_blocks` above 1); together they name every layer exactly once.
        device: Where the tensors live.

    Attributes:
        groups: As given.
        keys: per layer `[num_blocks, num_kv_heads, block_len, head_dim]`, dtype of the group's spec,
            contiguous.
        values: As `keys`.
        group_of_layer: per layer, the id of its group.
    """

    def __init__(self, groups: Sequence[KVGroup], *, device: torch.device) -> None:
        self.groups = tuple(groups)
        layers: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._storages: list[torch.Tensor] = []
        for group in groups:
            spec = group.spec
            storage = _zeros(
                (
                    len(group.layer_ids),
                    2,
                    group.num_blocks,
                    spec.num_kv_heads,
                    spec.block_len,
                    spec.head_dim,
                ),
                dtype=getattr(torch, spec.dtype),
                device=device,
            )
            self._storages.append(storage)
            for idx, layer_id in enumerate(group.layer_ids):
                layers[layer_id] = (storage[idx, 0], storage[idx, 1], group.group_id)
        self.keys = [layers[layer_id][0] for layer_id in range(len(layers))]
        self.values = [layers[layer_id][1] for layer_id in range(len(layers))]
        self.group_of_layer = [layers[layer_id][2] for layer_id in range(len(layers))]

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
        k, v = k.to(keys.dtype), v.to(values.dtype)
        keys.view(-1, head_dim).index_copy_(0, rows, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, rows, v.reshape(-1, head_dim))
        return k, v

    def zero_blocks(self, group_id: int, block_ids: torch.Tensor) -> None:
        """Zero whole blocks in every layer of a group.

        Args:
            group_id: The group.
            block_ids: `[num] int64`, on the cache's device.
        """
        self._storages[group_id].index_fill_(2, block_ids, 0)


def token_rows(slot_mapping: torch.Tensor, spec: KVSpec) -> torch.Tensor:
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
