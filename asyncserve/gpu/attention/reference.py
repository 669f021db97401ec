"""Paged attention in plain torch: right on any device, the measure of every other backend.

Decode rows are attended together: their pages are gathered into one padded `[rows, kv_heads, len, head_dim]`
and the query heads that share a KV head take the place of the query length, so K and V are never repeated.
Prefill rows go one by one: straight over their own fresh k and v if the prompt has no cached beginning,
else over gathered pages. Accumulates as torch's scaled_dot_product_attention does (float32 for bfloat16).
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVSpec


@dataclass(slots=True, kw_only=True)
class _Prefill:
    """One row that computes several tokens.

    Args:
        begin: Its first token in the step.
        end: One past its last.
        seq_len: Tokens of the sequence once the step is done; `seq_len - (end - begin)` are cached.
        page_rows: `[num_kv_heads, num_blocks] int64` into the cache as rows of pages; None without a
            cached beginning.
        masks: window_len to `[end - begin, seq_len] bool`, True where attended; made when first asked.
    """

    begin: int
    end: int
    seq_len: int
    page_rows: torch.Tensor | None
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _GroupStep:
    """What one step needs in one KV group.

    Args:
        write_rows: `[num_tokens * num_kv_heads] int64`, rows of the cache seen as `[…, head_dim]`.
        num_decode_rows: Leading rows of one token.
        decode_page_rows: `[num_decode_rows, num_kv_heads, max_blocks] int64`.
        decode_seq_lens: `[num_decode_rows] int32`.
        is_ragged: Whether some decode row is shorter than the padded length.
        decode_masks: window_len to `[num_decode_rows, 1, 1, padded_len] bool`; made when first asked.
        prefills: The other rows.
    """

    write_rows: torch.Tensor
    num_decode_rows: int
    decode_page_rows: torch.Tensor
    decode_seq_lens: torch.Tensor
    is_ragged: bool
    decode_masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    prefills: list[_Prefill] = field(default_factory=list)


class ReferenceAttention:
    """The backend; it has no state."""

    name = "reference"

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None: it serves full attention (with or without a window) everywhere."""
        return None

    def plan(self, batch: Batch, kv_cache: KVCache) -> list[_GroupStep]:
        """Compute where the step's K and V go and which pages its rows read, per KV group."""
        return [_plan_group(batch, group.group_id, group.spec) for group in kv_cache.groups]

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
        """Write k and v into the cache and attend; shapes as in `AttentionBackend.run`."""
        assert isinstance(planned, list)
        step: _GroupStep = planned[kv_cache.group_of_layer[layer.layer_id]]
        keys = kv_cache.keys[layer.layer_id]
        values = kv_cache.values[layer.layer_id]
        head_dim = layer.head_dim
        # Rounded to the cache's dtype first, so that a prompt gives the same whole or in chunks.
        k = k.to(keys.dtype)
        v = v.to(values.dtype)
        keys.view(-1, head_dim).index_copy_(0, step.write_rows, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, step.write_rows, v.reshape(-1, head_dim))

        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_decode_rows = step.num_decode_rows
        if num_decode_rows:
            out[:num_decode_rows] = _decode(layer, q[:num_decode_rows], keys, values, step)
        for row in step.prefills:
            if row.page_rows is None:
                row_k = k[row.begin : row.end].transpose(0, 1)
                row_v = v[row.begin : row.end].transpose(0, 1)
            else:
                row_k = _gather_pages(keys, row.page_rows)[:, : row.seq_len]
                row_v = _gather_pages(values, row.page_rows)[:, : row.seq_len]
            out[row.begin : row.end] = _prefill(layer, q[row.begin : row.end], row_k, row_v, row)
        return out.view(q.shape[0], -1)


def _plan_group(batch: Batch, group_id: int, spec: FullAttention) -> _GroupStep:
    num_kv_heads, block_len = spec.num_kv_heads, spec.block_len
    block_table = batch.block_tables[group_id].to(torch.int64)
    heads = torch.arange(num_kv_heads, device=block_table.device)

    # The cache is [num_blocks, num_kv_heads, block_len, head_dim]: seen as rows of head_dim, position
    # (block, head, offset) is row (block * num_kv_heads + head) * block_len + offset.
    slot_mapping = batch.slot_mapping[group_id]
    block_ids = torch.div(slot_mapping, block_len, rounding_mode="floor")
    first_head = slot_mapping + block_ids * ((num_kv_heads - 1) * block_len)
    write_rows = (first_head[:, None] + heads * block_len).view(-1)

    num_decode = batch.num_decode_rows
    seq_lens = batch.seq_lens_host
    max_len = max(seq_lens[:num_decode], default=0)
    num_blocks = -(-max_len // block_len)
    step = _GroupStep(
        write_rows=write_rows,
        num_decode_rows=num_decode,
        # Seen as rows of whole pages, (block, head) is row block * num_kv_heads + head.
        decode_page_rows=block_table[:num_decode, None, :num_blocks] * num_kv_heads + heads[:, None],
        decode_seq_lens=batch.seq_lens[:num_decode],
        is_ragged=any(seq_len != num_blocks * block_len for seq_len in seq_lens[:num_decode]),
    )
    begin = num_decode
    for row in range(num_decode, batch.num_rows):
        end = begin + batch.query_lens_host[row]
        seq_len = seq_lens[row]
        page_rows = None
        if seq_len > end - begin:
            blocks = block_table[row, : -(-seq_len // block_len)]
            page_rows = blocks * num_kv_heads + heads[:, None]
        step.prefills.append(_Prefill(begin=begin, end=end, seq_len=seq_len, page_rows=page_rows))
        begin = end
    return step


def _decode(
    layer: AttentionLayer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: _GroupStep
) -> torch.Tensor:
    """Attend for all rows of one token: q `[rows, num_heads, head_dim]`, result alike."""
    num_rows = q.shape[0]
    padded_len = step.decode_page_rows.shape[-1] * keys.shape[2]
    mask = None
    if step.is_ragged or (layer.window_len is not None and layer.window_len < padded_len):
        mask = step.decode_masks.get(layer.window_len)
        if mask is None:
            positions = torch.arange(padded_len, device=q.device)
            seq_lens = step.decode_seq_lens[:, None]
            mask = positions < seq_lens
            if layer.window_len is not None:
                mask &= positions >= seq_lens - layer.window_len
            mask = mask[:, None, None, :]
            step.decode_masks[layer.window_len] = mask
    out = F.scaled_dot_product_attention(
        q.view(num_rows, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim),
        _gather_pages(keys, step.decode_page_rows).to(q.dtype),
        _gather_pages(values, step.decode_page_rows).to(q.dtype),
        attn_mask=mask,
        scale=layer.scale,
    )
    return out.reshape(q.shape)


def _prefill(
    layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: _Prefill
) -> torch.Tensor:
    """Attend for one row: q `[num, num_heads, head_dim]`, k and v `[num_kv_heads, seq_len, head_dim]`."""
    num_queries = q.shape[0]
    is_causal = row.page_rows is None and (layer.window_len is None or layer.window_len >= row.seq_len)
    mask = None
    if not is_causal:
        mask = row.masks.get(layer.window_len)
        if mask is None:
            positions = torch.arange(row.seq_len, device=q.device)
            query_positions = positions[row.seq_len - num_queries :, None]
            mask = positions <= query_positions
            if layer.window_len is not None:
                mask &= positions > query_positions - layer.window_len
            row.masks[layer.window_len] = mask
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.to(q.dtype)[None],
        v.to(q.dtype)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )
    return out[0].transpose(0, 1)


def _gather_pages(cache: torch.Tensor, page_rows: torch.Tensor) -> torch.Tensor:
    """Return pages side by side.

    Args:
        cache: `[num_blocks, num_kv_heads, block_len, head_dim]`.
        page_rows: `[…, num_blocks_of_row] int64`, rows of the cache seen as `[…, block_len * head_dim]`.

    Returns:
        `[…, num_blocks_of_row * block_len, head_dim]`.
    """
    block_len, head_dim = cache.shape[2:]
    pages = cache.view(-1, block_len * head_dim).index_select(0, page_rows.reshape(-1))
    return pages.view(*page_rows.shape[:-1], page_rows.shape[-1] * block_len, head_dim)
