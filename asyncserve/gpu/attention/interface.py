"""The seam of attention: what a layer asks, and what a backend must do.

A backend writes the step's K and V into the paged cache and attends over everything the sequences have
there. It is told the step once (`plan`) and then called by every layer (`run`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
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
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_len: int | None = None


class AttentionBackend(Protocol):
    """One way to do paged attention."""

    name: str

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
        """Write k and v into the cache and attend.

        Args:
            layer: The layer that asks.
            q: `[num_tokens, num_heads, head_dim]`, rotated.
            k: `[num_tokens, num_kv_heads, head_dim]`, rotated.
            v: `[num_tokens, num_kv_heads, head_dim]`.
            batch: The step.
            kv_cache: The paged cache of all layers.
            planned: What `plan` returned for this step.

        Returns:
            `[num_tokens, num_heads * head_dim]`, dtype of `q`.
        """


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention bound to one step: what a model's layers call."""

    backend: AttentionBackend
    batch: Batch
    kv_cache: KVCache
    planned: object

    def run(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend for one layer; shapes as `AttentionBackend.run`."""
        return self.backend.run(layer, q, k, v, self.batch, self.kv_cache, self.planned)
