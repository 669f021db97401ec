"""Paged attention by the Triton kernels: one launch for the rows of one token, one for those of several.

The first go to `kernels/paged_decode.py`, the others to `kernels/paged_prefill.py`; both read everything, the
step's own K and V included, from the cache. In a decode step the first takes the projections, and rotates and
writes them, too. Lengths, tables and where rows begin are read on the device. What is launched follows from
shapes and, unless the batch is padded, from how many rows lead with one token; the host waits for nothing, so
a CUDA graph can hold it. Needs a CUDA device; in Triton's interpreter, which is for tests, it takes tensors
of a CPU.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from asyncserve.gpu.attention.interface import AttentionLayer, Projected
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kernels.paged_decode import (
    DecodeConfig,
    HeadRotation,
    Scratch,
    decode_config,
    new_scratch,
    paged_decode,
)
from asyncserve.gpu.kernels.paged_prefill import PrefillConfig, paged_prefill, prefill_config
from asyncserve.gpu.kernels.paging import IS_INTERPRETED, shared_bytes
from asyncserve.gpu.kernels.rotary import QKNorm
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import KVSpec, RecurrentState

_MOST_HEAD_DIM = 256
_LEAST_CAPABILITY = (8, 0)
"""Copies that pass the registers by, and bfloat16 in tensor cores."""

_E4M3_CAPABILITY = (8, 9)
"""Conversions of float8_e4m3fn."""

_INTERPRETED_SMS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonStep:
    """What is launched in one step.

    Args:
        num_decode_rows: Of the decode kernel, from the first row on.
        num_prefill_rows: Of the prefill kernel, at most.
        first_prefill_row: The first of these; on the device if the host does not know.
        first_prefill_token: Theirs are not before it.
        is_mixed: Whether both kernels look for their rows among the same ones.
        kept: What a backend built on this one has made for the step, by what it is for.
    """

    num_decode_rows: int
    num_prefill_rows: int
    first_prefill_row: int | torch.Tensor
    first_prefill_token: int
    is_mixed: bool
    kept: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Kind:
    """How layers of one shape are served.

    Args:
        decode: How decode rows are cut.
        scratch: One for all layers: they run one after the other.
        prefill: How the other rows are.
    """

    decode: DecodeConfig
    scratch: Scratch
    prefill: PrefillConfig


def lacking_capability(found: tuple[int, int], cache_dtype: str) -> str | None:
    """Return what a device lacks for a cache of a dtype; None if nothing.

    Args:
        found: Its compute capability.
        cache_dtype: A key of `DTYPE_BYTES`.
    """
    needed = _E4M3_CAPABILITY if cache_dtype == "float8_e4m3fn" else _LEAST_CAPABILITY
    if found >= needed:
        return None
    subject = "it"
    if found >= _LEAST_CAPABILITY:
        subject = "for float8_e4m3fn (fp8_e5m2 would do) it"
    return f"{subject} needs compute capability {needed[0]}.{needed[1]}, the device has {found[0]}.{found[1]}"


class TritonAttention:
    """The backend. Its only state is scratch memory; it serves one step at a time.

    Args:
        decode: How decode rows are cut; None for what suits the device.
        prefill: How the other rows are cut; None for what suits heads and dtype.
    """

    name = "triton"
    reads_unwritten = False
    takes_scales = True

    def __init__(self, *, decode: DecodeConfig | None = None, prefill: PrefillConfig | None = None) -> None:
        self._decode = decode
        self._prefill = prefill
        self._kinds: dict[tuple[int, int, int, int | None, torch.dtype, torch.dtype], _Kind] = {}

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None on a CUDA device that is new enough, if the heads are not too long."""
        if isinstance(spec, RecurrentState):
            return "it serves layers of attention only"
        if device.type != "cuda" and not (IS_INTERPRETED and device.type == "cpu"):
            return "it needs a CUDA device"
        if device.type == "cuda":
            lack = lacking_capability(torch.cuda.get_device_capability(device), spec.dtype)
            if lack is not None:
                return lack
        if spec.head_dim > _MOST_HEAD_DIM:
            return f"head_dim is {spec.head_dim}; it serves at most {_MOST_HEAD_DIM}"
        return None

    def plan(self, batch: Batch, kv_cache: KVCache) -> TritonStep:
        """Say which rows each kernel is launched for; nothing is launched."""
        if batch.padded is not None:
            num_long = batch.padded.num_long_rows
            return TritonStep(
                num_decode_rows=batch.num_rows,
                num_prefill_rows=num_long,
                first_prefill_row=batch.padded.first_long_row,
                first_prefill_token=0,
                is_mixed=num_long > 0,
            )
        num_decode = batch.num_decode_rows
        return TritonStep(
            num_decode_rows=num_decode,
            num_prefill_rows=batch.num_rows - num_decode,
            first_prefill_row=num_decode,
            first_prefill_token=num_decode,
            is_mixed=False,
        )

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
        """Attend; shapes as in `AttentionBackend.run`. k and v are not read: they are in the cache."""
        assert isinstance(planned, TritonStep)
        if q.stride(2) != 1:
            q = q.contiguous()
        if planned.num_prefill_rows:
            out = self.attend_long_rows(layer, q, batch, kv_cache, planned)
        else:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if planned.num_decode_rows:
            keys, values = kv_cache.keys[layer.layer_id], kv_cache.values[layer.layer_id]
            kind = self._kind(layer, q, keys)
            paged_decode(
                q,
                keys,
                values,
                batch.block_tables[kv_cache.group_of_layer[layer.layer_id]],
                batch.seq_lens,
                out,
                scale=layer.scale,
                scratch=kind.scratch,
                config=kind.decode,
                num_rows=planned.num_decode_rows,
                query_start=batch.query_start if planned.is_mixed else None,
                window_len=layer.window_len,
                softcap=layer.softcap,
                sinks=layer.sinks,
                scales=kv_cache.scales[layer.layer_id],
            )
        return out.view(q.shape[0], -1)

    def attend_long_rows(
        self, layer: AttentionLayer, q: torch.Tensor, batch: Batch, kv_cache: KVCache, step: TritonStep
    ) -> torch.Tensor:
        """Attend for the rows that the prefill kernel is launched for.

        Args:
            layer: The layer that asks.
            q: `[num_tokens, num_heads, head_dim]`, the elements of a head side by side.
            batch: The step.
            kv_cache: The paged cache of all layers.
            step: What is launched, some prefill rows among it.

        Returns:
            As `q`, contiguous. Of rows that the decode kernel serves, anything: it writes them after this.
        """
        keys, values = kv_cache.keys[layer.layer_id], kv_cache.values[layer.layer_id]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_prefill(
            q,
            keys,
            values,
            batch.block_tables[kv_cache.group_of_layer[layer.layer_id]],
            batch.seq_lens,
            batch.query_start,
            out,
            scale=layer.scale,
            first_row=step.first_prefill_row,
            num_rows=step.num_prefill_rows,
            first_token=step.first_prefill_token,
            config=self._kind(layer, q, keys).prefill,
            skips_single=step.is_mixed,
            window_len=layer.window_len,
            softcap=layer.softcap,
            sinks=layer.sinks,
            scales=kv_cache.scales[layer.layer_id],
        )
        return out

    def run_projected(
        self, layer: AttentionLayer, projected: Projected, batch: Batch, kv_cache: KVCache
    ) -> torch.Tensor:
        """Rotate, write and attend in one launch; as `RotatingBackend.run_projected`."""
        group_id = kv_cache.group_of_layer[layer.layer_id]
        keys, values = kv_cache.keys[layer.layer_id], kv_cache.values[layer.layer_id]
        qkv, cos, sin, norm = projected
        kind = self._kind(layer, qkv, keys)
        shape = (batch.num_rows, layer.num_heads, layer.head_dim)
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        paged_decode(
            qkv.view(batch.num_rows, -1, layer.head_dim),
            keys,
            values,
            batch.block_tables[group_id],
            batch.seq_lens,
            out,
            scale=layer.scale,
            scratch=kind.scratch,
            config=kind.decode,
            rotation=HeadRotation(
                cos, sin, batch.slot_mapping[group_id], None if norm is None else QKNorm(*norm)
            ),
            window_len=layer.window_len,
            softcap=layer.softcap,
            sinks=layer.sinks,
            scales=kv_cache.scales[layer.layer_id],
        )
        return out.view(batch.num_rows, -1)

    def _kind(self, layer: AttentionLayer, q: torch.Tensor, keys: torch.Tensor) -> _Kind:
        key = (
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.window_len,
            q.dtype,
            keys.dtype,
        )
        kind = self._kinds.get(key)
        if kind is None:
            wider = max(q.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
            num_sms = _INTERPRETED_SMS
            if q.is_cuda:
                num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
            decode = self._decode or decode_config(
                head_dim=layer.head_dim, dtype=q.dtype, cached=keys.dtype, num_sms=num_sms
            )
            kind = _Kind(
                decode=decode,
                scratch=new_scratch(
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    config=decode,
                    device=q.device,
                ),
                prefill=self._prefill
                or prefill_config(head_dim=layer.head_dim, dtype=wider, shared_bytes=shared_bytes(q.device)),
            )
            self._kinds[key] = kind
        return kind
