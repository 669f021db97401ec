"""Prefill by FlashInfer (the package `flashinfer-python`) in steps launched anew, all else by Triton.

It cuts the work of a step on the host, from lengths that a padded batch does not tell: so steps that a CUDA
graph holds stay with Triton. Each step's cut goes to the device from memory that the host may write again
only once it has arrived; so there are several such places (`_Places`), and in practice nobody waits.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.gpu.attention.library_prefill import LibraryPrefill, require_parameters
from asyncserve.gpu.attention.triton import TritonStep
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVSpec

_HEAD_DIMS = (64, 128, 256)

_KERNELS = "fa3"
"""Those for compute capability 9.0. Left to itself, the library takes others for some steps, and has nvcc
compile them when the first such step comes."""

_SPLIT_BYTES = 128 * 1024 * 1024
"""What the library recommends for partial results."""

_MOST_PLACES = 8
"""Each takes 8 MiB of the device and as many of pinned memory. There are two steps in flight at most, and few
models have layers of more than one kind."""

_PLAN_PARAMETERS = {
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads"),
    *("num_kv_heads", "head_dim_qk", "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type"),
}


@dataclass(slots=True)
class _Place:
    """Where one cut is kept.

    Args:
        wrapper: The library's object that makes a cut and runs by it.
        sent: When its last cut had arrived on the device.
    """

    wrapper: Any
    sent: torch.cuda.Event


class _Places:
    """Places for the cuts of steps, taken for a step and given back when the next one begins."""

    def __init__(self, wrapper_class: Any) -> None:
        self._wrapper_class = wrapper_class
        self._split_memory: torch.Tensor | None = None
        self._free: list[_Place] = []
        self._taken: list[_Place] = []

    def begin_step(self) -> None:
        """Give back what the step before took: all its layers are launched."""
        self._free += self._taken
        self._taken.clear()

    def take(self, device: torch.device) -> _Place:
        """Return a place whose last cut has arrived; waits only if there are too many that have not."""
        place = next((place for place in self._free if _is_over(place.sent)), None)
        if place is not None:
            self._free.remove(place)
        elif len(self._free) + len(self._taken) < _MOST_PLACES or not self._free:
            if self._split_memory is None:
                self._split_memory = torch.empty(_SPLIT_BYTES, dtype=torch.uint8, device=device)
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            wrapper = self._wrapper_class(self._split_memory, "HND", backend=_KERNELS)
            place = _Place(wrapper, sent)
        else:
            place = self._free.pop(0)
            place.sent.synchronize()
        self._taken.append(place)
        return place


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


class _Kind(NamedTuple):
    """Layers that one cut serves."""

    group_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype


class FlashInfer(LibraryPrefill):
    """The backend. Plain layers without a window are served, if the host knows the step's lengths.

    Raises:
        ModuleNotFoundError: The package, or something it needs, is missing.
        ConfigError: Another version of it is installed.
    """

    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        require_parameters(BatchPrefillWithPagedKVCacheWrapper.plan, _PLAN_PARAMETERS, "flashinfer-python")
        self._places = _Places(BatchPrefillWithPagedKVCacheWrapper)

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None for heads of 64, 128 and 256, where the base does."""
        reason = super().supports(spec, device)
        if reason is None and isinstance(spec, FullAttention):
            reason = unserved_heads(spec)
        return reason

    def plan(self, batch: Batch, kv_cache: KVCache) -> TritonStep:
        """As the base; a cut is made when the first layer of its kind asks."""
        self._places.begin_step()
        return super().plan(batch, kv_cache)

    def serves(self, layer: AttentionLayer, step: TritonStep) -> bool:
        """Return whether it is plain, in a step whose lengths the host knows."""
        return layer.is_plain and isinstance(step.first_prefill_row, int)

    def attend_by_library(
        self, layer: AttentionLayer, q: torch.Tensor, batch: Batch, kv_cache: KVCache, step: TritonStep
    ) -> torch.Tensor:
        """Cut the step if no layer of the kind has been there, and launch one kernel."""
        kind = _Kind(
            kv_cache.group_of_layer[layer.layer_id],
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.scale,
            q.dtype,
        )
        place: _Place | None = step.kept.get(kind)
        if place is None:
            place = step.kept[kind] = self._places.take(q.device)
            block_len = kv_cache.keys[layer.layer_id].shape[2]
            try:
                _cut(place.wrapper, kind, batch, step, block_len)
            finally:  # part of it may be under way
                place.sent.record()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first = step.first_prefill_token
        cache = (kv_cache.keys[layer.layer_id], kv_cache.values[layer.layer_id])
        if first < q.shape[0]:
            place.wrapper.run(q[first:], cache, out=out[first:])
        return out


def unserved_heads(spec: FullAttention) -> str | None:
    """Return why heads of such a cache are not served; None if they are."""
    if spec.head_dim not in _HEAD_DIMS:
        return f"head_dim is {spec.head_dim}; it serves {', '.join(map(str, _HEAD_DIMS))}"
    return None


def page_numbers(block_table: torch.Tensor, num_pages: Sequence[int]) -> torch.Tensor:
    """Return the pages of all rows, one after the other, without waiting for the device.

    Args:
        block_table: `[num_rows, max_blocks] int32`.
        num_pages: Of each row, on the host.

    Returns:
        `[sum(num_pages)] int32`, where the table is.
    """
    # Counts go over as they are, which is less than places would be; pageable, so no memory is held.
    counts = torch.tensor(num_pages).to(block_table.device, non_blocking=True)
    total = sum(num_pages)
    begins = counts.cumsum(0) - counts
    rows = torch.repeat_interleave(counts, output_size=total)
    columns = torch.arange(total, device=block_table.device) - begins[rows]
    return block_table[rows, columns]


def _cut(wrapper: Any, kind: _Kind, batch: Batch, step: TritonStep, block_len: int) -> None:
    first = step.first_prefill_row
    assert isinstance(first, int)
    seq_lens, query_lens = batch.seq_lens_host[first:], batch.query_lens_host[first:]
    num_pages = [-(-seq_len // block_len) for seq_len in seq_lens]
    wrapper.plan(
        qo_indptr=_bounds(query_lens),
        paged_kv_indptr=_bounds(num_pages),
        paged_kv_indices=page_numbers(batch.block_tables[kind.group_id][first:], num_pages),
        paged_kv_last_page_len=torch.tensor(
            [(seq_len - 1) % block_len + 1 for seq_len in seq_lens], dtype=torch.int32
        ),
        num_qo_heads=kind.num_heads,
        num_kv_heads=kind.num_kv_heads,
        head_dim_qk=kind.head_dim,
        page_size=block_len,
        causal=True,
        sm_scale=kind.scale,
        q_data_type=kind.dtype,
        kv_data_type=kind.dtype,
    )


def _bounds(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
