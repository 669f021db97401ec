"""The seam of attention: what a layer asks, and what a backend must do.

A backend attends over everything the sequences have in the paged cache. It is told the step once (`plan`)
and then called by every layer (`run`), when the step's own K and V are in the cache already. They are written
before it is called, in one place each: `StepAttention.run` for a layer that hands over rotated heads, the
layer itself, in the kernel that rotates them, if it calls `StepAttention.attend`. A backend may also take the
projections of a decode step as they are, and rotate and write them itself (`RotatingBackend`).
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache, token_rows
from asyncserve.kv_spec import KVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What one attention layer is; the same at every step.

    Args:
        layer_id: Index of the layer in the model.
        num_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Heads of K and V.
        head_dim: Elements per head.
        scale: Factor on the scores, usually `head_dim ** -0.5`.
        window_len: A token attends to at most this many positions, itself included; None for all.
        softcap: A score s, scaled, becomes `softcap * tanh(s / softcap)`; None leaves it.
        sinks: `[num_heads] float32` on the device, a score of each head that takes its share of the
            probability and gives no value; None: there are none.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_len: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether its weights are the softmax of the scaled scores, as torch's own attention has it."""
        return self.softcap is None and self.sinks is None


class AttentionBackend(Protocol):
    """One way to do paged attention.

    Attributes:
        name: Its own.
        reads_unwritten: Whether it multiplies what lies in a sequence's blocks where nothing was written
            since they were handed out (by zero, but zero times NaN is NaN), so that somebody must zero it.
    """

    name: str
    reads_unwritten: bool

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None if it can serve such a cache on such a device, else the reason why not."""

    def plan(self, batch: Batch, kv_cache: KVCache) -> object:
        """Prepare one step; the result is handed back to `run` for every layer of the step."""

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        kv_cache: KVCache,
        planned: object,
    ) -> torch.Tensor:
        """Attend; the step's k and v are in the cache already, and it is not written here.

        Args:
            layer: The layer that asks.
            q: `[num_tokens, num_heads, head_dim]`, rotated.
            k: `[num_tokens, num_kv_heads, head_dim]`, rotated: what the cache holds of this step, in its
                dtype, for whom it is quicker to read here than page by page.
            v: As `k`, not rotated.
            batch: The step.
            kv_cache: The paged cache of all layers.
            planned: What `plan` returned for this step.

        Returns:
            `[num_tokens, num_heads * head_dim]`, dtype of `q`.
        """


class Projected(NamedTuple):
    """What an attention layer's projection gives, and what is left to be done to it.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`: the heads of q, those of k, those of
            v, neither normalized nor rotated.
        cos: `[num_tokens, 1, head_dim] float32`.
        sin: As `cos`, its first half negated.
        qk_norm: Weights of the norms on each head of q and of k, `[head_dim]` each, and their epsilon; None:
            there are none.
    """

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """A backend that in decode steps (`Batch.is_decode`) also normalizes, rotates and writes."""

    def run_projected(
        self, layer: AttentionLayer, projected: Projected, batch: Batch, kv_cache: KVCache
    ) -> torch.Tensor:
        """Do all that follows a projection in a decode step; padding (slot -1) is not written.

        Args:
            layer: The layer that asks.
            projected: It may be changed.
            batch: The step.
            kv_cache: The paged cache of all layers; the step's k and v are written.

        Returns:
            As `run`.
        """


class LayerCache(NamedTuple):
    """Where one layer's K and V of a step go.

    Args:
        keys: `[num_blocks, num_kv_heads, block_len, head_dim]`, contiguous.
        values: As `keys`.
        slot_mapping: `[num_tokens] int64`, `block_id * block_len + offset`; -1 is padding, which the layer
            does not write. Only a padded batch has any, and `StepAttention.run` takes none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention bound to one step: what a model's layers call, once each.

    A layer that has a kernel for rotation offers its projection first (`run_projected`), and rotates and
    calls `attend` where that is not taken; one without calls `run`.

    Args:
        backend: Who attends.
        batch: The step.
        kv_cache: The paged cache of all layers.
        planned: What the backend's `plan` returned for the step.
        rows: Per KV group, where its tokens stand (`token_rows`); filled when a layer of the group is run.
    """

    backend: AttentionBackend
    batch: Batch
    kv_cache: KVCache
    planned: object
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def run(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v into the layer's cache and attend; shapes as in `AttentionBackend.run`. No padding.

        Args:
            layer: The layer that asks.
            q: Rotated.
            k: Rotated; in any dtype.
            v: As `k`, not rotated.
        """
        assert self.batch.padded is None, "padding has no place in the cache to be written to"
        group_id = self.kv_cache.group_of_layer[layer.layer_id]
        rows = self.rows.get(group_id)
        if rows is None:
            rows = token_rows(self.batch.slot_mapping[group_id], self.kv_cache.groups[group_id].attention)
            self.rows[group_id] = rows
        k, v = self.kv_cache.write(layer.layer_id, rows, k, v)
        return self.backend.run(layer, q, k, v, self.batch, self.kv_cache, self.planned)

    def cache_of(self, layer: AttentionLayer) -> LayerCache:
        """Return where a layer writes k and v that then calls `attend`."""
        kv_cache, layer_id = self.kv_cache, layer.layer_id
        slot_mapping = self.batch.slot_mapping[kv_cache.group_of_layer[layer_id]]
        return LayerCache(kv_cache.keys[layer_id], kv_cache.values[layer_id], slot_mapping)

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend for a layer that wrote k and v into its cache itself; otherwise as `run`."""
        dtype = self.kv_cache.keys[layer.layer_id].dtype
        k, v = k.to(dtype), v.to(dtype)
        return self.backend.run(layer, q, k, v, self.batch, self.kv_cache, self.planned)

    def run_projected(self, layer: AttentionLayer, projected: Projected) -> torch.Tensor | None:
        """Do all that follows a projection, if the backend does that in this step; else return None."""
        backend = self.backend
        if not self.batch.is_decode or not isinstance(backend, RotatingBackend):
            return None
        return backend.run_projected(layer, projected, self.batch, self.kv_cache)
