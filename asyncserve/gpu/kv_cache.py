"""The paged KV cache: the tensors of every KV group.

Takes sized KV groups, gives each layer its K and its V as `[num_blocks, num_kv_heads, block_len, head_dim]`
(one head's page is contiguous). Which block serves which sequence is decided by `loop/kv_pool.py`; this file
never reads a block table.

Invariant, for backends that read what is unwritten: every element is finite unless a model computed it
otherwise, because a masked position is still multiplied (by zero) and 0 * NaN would spread. Memory starts as
zeros, the null block 0 is never written, and for such a backend the runner zeroes what a step leaves
unwritten of a new block (`zero_blocks`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asyncserve.gpu.kv_scales import KVScales, as_bytes, as_cached
from asyncserve.kv_spec import KVGroup, KVSpec

_ALIGNMENT_BYTES = 64


class KVCache:
    """K and V of all layers, indexed by layer id.

    Args:
        groups: Sized (`num_blocks` above 1); together they name every layer exactly once.
        device: Where the tensors live.
        scales: By layer id, what an 8-bit cache's values are multiplied by; a layer left out has none.

    Attributes:
        groups: As given.
        keys: per layer `[num_blocks, num_kv_heads, block_len, head_dim]`, dtype of the group's spec,
            contiguous.
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
        self.scales: list[KVScales | None] = [None] * len(layers)
        for layer_id, of_layer in (scales or {}).items():
            assert self.keys[layer_id].dtype.itemsize == 1, "wider dtypes need no scales"
            self.scales[layer_id] = KVScales(*(scale.to(device) for scale in of_layer))

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

    def zero_blocks(self, group_id: int, block_ids: torch.Tensor) -> None:
        """Zero whole blocks in every layer of a group.

        Args:
            group_id: The group.
            block_ids: `[num] int64`, on the cache's device.
        """
        as_bytes(self._storages[group_id]).index_fill_(2, block_ids, 0)


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
    # numpy's zeros come from calloc, so a page is resident only once it is written; torch.zeros would write
    # the whole pool. torch's kernels want 64-byte aligned rows.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(raw[skip : skip + num_bytes]).view(dtype).view(shape)
