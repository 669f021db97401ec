"""Prefill by FlashAttention 4 (the package `flash-attn-4`, module `flash_attn.cute`), all else by Triton.

Its function for rows of any lengths takes block tables, and lengths on the device, so that a CUDA graph can
hold it. It wants pages as `[num_blocks, block_len, num_kv_heads, head_dim]` in any strides, which a view
gives. It compiles a kernel for each kind of layer when one first asks, at start-up; none of what it compiles
for follows from the lengths of a batch.
"""

from typing import NamedTuple

import torch

from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.gpu.attention.library_prefill import LibraryPrefill, require_parameters
from asyncserve.gpu.attention.triton import TritonStep
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVSpec

_MOST_ROWS = 256
"""For more it takes another kernel, which start-up would have to compile, too."""

_MOST_BLOCK_LEN = 32
"""A block as long as its tiles it reads whole, unwritten positions included; no tile is as short as this."""

_HEAD_DIM_STEP = 16

_PARAMETERS = {
    "cu_seqlens_q",
    "seqused_k",
    "page_table",
    "softmax_scale",
    "causal",
    "softcap",
    "learnable_sink",
}


class _LongRows(NamedTuple):
    """The rows that it attends for.

    Args:
        query_start: `[num + 1] int32`.
        seq_lens: `[num] int32`.
        block_table: `[num, max_blocks] int32`.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class FlashAttention(LibraryPrefill):
    """The backend. Layers with softcaps and sinks are served, with windows not; blocks are short.

    Raises:
        ModuleNotFoundError: The package is missing.
        ConfigError: Another version of it is installed.
    """

    name = "flash_attn"

    def __init__(self) -> None:
        super().__init__()
        from flash_attn.cute import flash_attn_varlen_func

        require_parameters(flash_attn_varlen_func, _PARAMETERS, "flash-attn-4")
        self._attend = flash_attn_varlen_func

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None for short blocks and heads of a multiple of 16, where the base does."""
        reason = super().supports(spec, device)
        if reason is None and isinstance(spec, FullAttention):
            reason = unserved_shape(spec)
        return reason

    def serves(self, layer: AttentionLayer, step: TritonStep) -> bool:
        """Return whether there are no more rows than its kernels are compiled for."""
        return step.num_prefill_rows <= _MOST_ROWS

    def attend_by_library(
        self, layer: AttentionLayer, q: torch.Tensor, batch: Batch, kv_cache: KVCache, step: TritonStep
    ) -> torch.Tensor:
        """Launch one kernel over all tokens' queries, of which it reads and writes those of the long rows."""
        group_id = kv_cache.group_of_layer[layer.layer_id]
        rows: _LongRows | None = step.kept.get(group_id)
        if rows is None:
            rows = step.kept[group_id] = _long_rows(batch, batch.block_tables[group_id], step)
        out, _ = self._attend(
            q,
            kv_cache.keys[layer.layer_id].transpose(1, 2),
            kv_cache.values[layer.layer_id].transpose(1, 2),
            cu_seqlens_q=rows.query_start,
            seqused_k=rows.seq_lens,
            page_table=rows.block_table,
            softmax_scale=layer.scale,
            causal=True,
            softcap=layer.softcap or 0.0,
            learnable_sink=layer.sinks,
        )
        assert isinstance(out, torch.Tensor)
        return out


def unserved_shape(spec: FullAttention) -> str | None:
    """Return why blocks or heads of such a cache are not served; None if they are."""
    if spec.block_len > _MOST_BLOCK_LEN:
        return f"block_len is {spec.block_len}; it serves at most {_MOST_BLOCK_LEN}"
    if spec.head_dim % _HEAD_DIM_STEP:
        return f"head_dim is {spec.head_dim}; it serves multiples of {_HEAD_DIM_STEP}"
    return None


def _long_rows(batch: Batch, block_table: torch.Tensor, step: TritonStep) -> _LongRows:
    first, num_rows = step.first_prefill_row, step.num_prefill_rows
    if isinstance(first, int):
        end = first + num_rows
        return _LongRows(
            batch.query_start[first : end + 1], batch.seq_lens[first:end], block_table[first:end]
        )
    # Behind the batch's rows there may be none left: those that are too many begin and end at its end.
    bounds = (first + torch.arange(num_rows + 1, device=first.device)).clamp_(max=batch.num_rows)
    rows = bounds[:-1].clamp(max=batch.num_rows - 1)
    return _LongRows(
        batch.query_start.index_select(0, bounds),
        batch.seq_lens.index_select(0, rows),
        block_table.index_select(0, rows),
    )
