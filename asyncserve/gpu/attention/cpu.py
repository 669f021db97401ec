"""Paged attention for CPUs, as batched matrix products.

torch's own attention kernel runs bfloat16 products at a third of the speed of its batched matrix product,
which goes to oneDNN, so attention is spelled out here as two such products round a softmax:

* decode rows are attended together, in groups of similar length, so that a short row is not padded to a long
  one. Their pages are gathered into scratch memory that is kept from step to step (fresh memory of that size
  costs more in page faults than the copy itself). The query heads that share a KV head are the rows of one
  product, so K and V are never repeated;
* a decode row alone goes to torch's own kernel, which costs less to call;
* prefill rows go one by one in tiles of queries, each over the keys it can see and no others.

Scores are rounded to the activations' dtype before the softmax, which computes in float32: what
transformers' eager attention does. What this gains was measured in docs/decisions/0002.
"""

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.gpu.attention.row_groups import passed_pages, similar_rows
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVSpec, RecurrentState

_TILE_LEN = 128
"""Most queries of a prompt attended at once: fewer waste less on masked keys, more make better products."""

_MOST_SCORES = 1 << 22
"""Most scores of a tile (all heads together), which bounds the memory of long contexts."""

_FREE_PADDING = 32
"""Pages (of all decode rows of a group together) that may be padding before a group of its own pays."""

_MOST_GATHERED = 1 << 25
"""Most elements of K gathered for a group of decode rows, unless one row alone has more."""


@dataclass(slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows of similar length, attended together.

    Args:
        rows: `[num] int64`, which rows of the step; None if they are the first `num`, in order.
        num_rows: How many.
        longest: Tokens of the longest row; in all lengths, pages that a window has passed do not count.
        page_rows: `[num * num_kv_heads * num_pages] int64` into the cache seen as rows of pages.
        seq_lens: `[num] int32`.
        padded_len: Positions of the longest row's pages.
        masks: (window_len, dtype, heads per KV head) to the additive mask
            `[num * num_kv_heads, heads per KV head, padded_len]`; made by the first layer that asks.
    """

    rows: torch.Tensor | None
    num_rows: int
    longest: int
    page_rows: torch.Tensor
    seq_lens: torch.Tensor
    padded_len: int
    masks: dict[tuple[int | None, torch.dtype, int], torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Prefill:
    """One row that computes several tokens.

    Args:
        begin: Its first token in the step.
        num_tokens: How many.
        start: How many cached positions are before its first token, but for what a window has passed.
        page_rows: `[num_kv_heads * num_pages] int64`; None without a cached beginning.
    """

    begin: int
    num_tokens: int
    start: int
    page_rows: torch.Tensor | None


@dataclass(slots=True, kw_only=True)
class _GroupStep:
    """What one step needs in one KV group."""

    decodes: list[_DecodeGroup]
    prefills: list[_Prefill]


class CPUAttention:
    """The backend. Its only state is scratch memory; it serves one step at a time."""

    name = "cpu"
    reads_unwritten = True

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None on a CPU."""
        if isinstance(spec, RecurrentState):
            return "it serves layers of attention only"
        return None if device.type == "cpu" else "it is for CPUs only"

    def plan(self, batch: Batch, kv_cache: KVCache) -> list[_GroupStep]:
        """Compute which pages the step's rows read, per KV group."""
        return [_plan_group(batch, group.group_id, group.attention) for group in kv_cache.groups]

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
        """Attend; shapes as in `AttentionBackend.run`."""
        assert isinstance(planned, list)
        step: _GroupStep = planned[kv_cache.group_of_layer[layer.layer_id]]
        keys = kv_cache.keys[layer.layer_id]
        values = kv_cache.values[layer.layer_id]
        head_dim = layer.head_dim

        if not step.prefills and len(step.decodes) == 1:
            return self._decode(layer, q, keys, values, step.decodes[0])
        out = q.new_empty(q.shape[0], layer.num_heads * head_dim)
        for group in step.decodes:
            if group.rows is None:
                num_rows = group.num_rows
                out[:num_rows] = self._decode(layer, q[:num_rows], keys, values, group)
            else:
                attended = self._decode(layer, q.index_select(0, group.rows), keys, values, group)
                out.index_copy_(0, group.rows, attended)
        for row in step.prefills:
            tokens = slice(row.begin, row.begin + row.num_tokens)
            if row.page_rows is None:
                row_k, row_v = k[tokens].transpose(0, 1), v[tokens].transpose(0, 1)
            else:
                shape = (layer.num_kv_heads, -1, head_dim)
                row_k = self._gather("k", keys, row.page_rows).view(shape)
                row_v = self._gather("v", values, row.page_rows).view(shape)
            _prefill(layer, q[tokens], row_k.to(q.dtype), row_v.to(q.dtype), row, out[tokens])
        return out

    def _decode(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: _DecodeGroup,
    ) -> torch.Tensor:
        """Attend for rows of one token: q `[num, num_heads, head_dim]` → `[num, num_heads * head_dim]`."""
        num_rows, group_len = q.shape[0], layer.num_heads // layer.num_kv_heads
        shape = (num_rows * layer.num_kv_heads, group.padded_len, layer.head_dim)
        k = self._gather("k", keys, group.page_rows).view(shape).to(q.dtype)
        v = self._gather("v", values, group.page_rows).view(shape).to(q.dtype)
        q = q.reshape(num_rows * layer.num_kv_heads, group_len, layer.head_dim)
        if num_rows == 1 and layer.is_plain:
            first = 0 if layer.window_len is None else max(0, group.longest - layer.window_len)
            seen = slice(first, group.longest)
            k, v = k[None, :, seen], v[None, :, seen]
            return F.scaled_dot_product_attention(q[None], k, v, scale=layer.scale).reshape(1, -1)
        mask = group.masks.get((layer.window_len, q.dtype, group_len))
        if mask is None:
            mask = _decode_mask(layer, group, q.dtype)
            group.masks[layer.window_len, q.dtype, group_len] = mask
        if layer.softcap is None:
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=layer.scale)
        else:
            scores = _softcapped(torch.bmm(q, k.transpose(1, 2)).mul_(layer.scale), layer.softcap).add_(mask)
        out = torch.bmm(torch.softmax(scores, -1), v)
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, layer.num_kv_heads, group_len, 1)
            out *= _left_by_sinks(scores.view(num_rows, layer.num_kv_heads, group_len, -1), sinks).view(
                -1, group_len, 1
            )
        return out.view(num_rows, layer.num_heads * layer.head_dim)

    def _gather(self, name: str, cache: torch.Tensor, page_rows: torch.Tensor) -> torch.Tensor:
        """Copy pages side by side into scratch memory.

        Args:
            name: Which scratch memory; what it held is overwritten.
            cache: `[num_blocks, num_kv_heads, block_len, head_dim]`.
            page_rows: `[num] int64`, rows of the cache seen as `[…, block_len * head_dim]`.

        Returns:
            `[num, block_len * head_dim]`.
        """
        page_len = cache.shape[2] * cache.shape[3]
        num_elements = page_rows.shape[0] * page_len
        scratch = self._scratch.get((name, cache.dtype))
        if scratch is None or scratch.shape[0] < num_elements:
            # Doubled, so that growing sequences do not ask for new memory at every block.
            scratch = cache.new_empty(2 * num_elements)
            self._scratch[name, cache.dtype] = scratch
        pages = scratch[:num_elements].view(-1, page_len)
        return torch.index_select(cache.view(-1, page_len), 0, page_rows, out=pages)


def _plan_group(batch: Batch, group_id: int, spec: FullAttention) -> _GroupStep:
    num_kv_heads, block_len = spec.num_kv_heads, spec.block_len
    heads = torch.arange(num_kv_heads)
    block_table = batch.block_tables[group_id].to(torch.int64)

    def page_rows(blocks: torch.Tensor) -> torch.Tensor:
        # Seen as rows of whole pages, (block, head) is row block * num_kv_heads + head.
        return (blocks.unsqueeze(-2) * num_kv_heads + heads[:, None]).reshape(-1)

    num_decode = batch.num_decode_rows
    passed = passed_pages(batch, spec)
    seq_lens, device_lens = batch.seq_lens_host, batch.seq_lens
    if any(passed):
        # As if the sequences began with the first page that is seen.
        seq_lens = tuple(seq_len - pages * block_len for seq_len, pages in zip(seq_lens, passed, strict=True))
        device_lens = torch.tensor(seq_lens, dtype=torch.int32)
        columns = torch.tensor(passed)[:, None] + torch.arange(block_table.shape[1])
        block_table = block_table.gather(1, columns.clamp_(max=block_table.shape[1] - 1))
    num_pages = [-(-seq_len // block_len) for seq_len in seq_lens]
    decodes = []
    most_pages = _MOST_GATHERED // (num_kv_heads * block_len * spec.head_dim)
    for rows in similar_rows(num_pages[:num_decode], free_padding=_FREE_PADDING, most_pages=most_pages):
        pages = max(num_pages[row] for row in rows)
        if len(rows) == num_decode:
            picked = None
            table, lens = block_table[:num_decode, :pages], device_lens[:num_decode]
        else:
            picked = torch.tensor(rows)
            table, lens = block_table[picked, :pages], device_lens[picked]
        decodes.append(
            _DecodeGroup(
                rows=picked,
                num_rows=len(rows),
                longest=max(seq_lens[row] for row in rows),
                page_rows=page_rows(table),
                seq_lens=lens,
                padded_len=pages * block_len,
            )
        )
    prefills = []
    begin = num_decode
    for row in range(num_decode, batch.num_rows):
        num_tokens = batch.query_lens_host[row]
        if not num_tokens:
            continue
        start = seq_lens[row] - num_tokens
        prefills.append(
            _Prefill(
                begin=begin,
                num_tokens=num_tokens,
                start=start,
                page_rows=page_rows(block_table[row, : num_pages[row]]) if start else None,
            )
        )
        begin += num_tokens
    return _GroupStep(decodes=decodes, prefills=prefills)


def _decode_mask(layer: AttentionLayer, group: _DecodeGroup, dtype: torch.dtype) -> torch.Tensor:
    positions = torch.arange(group.padded_len)
    seq_lens = group.seq_lens[:, None]
    hidden = positions >= seq_lens
    if layer.window_len is not None:
        hidden |= positions < seq_lens - layer.window_len
    mask = torch.zeros(group.num_rows, group.padded_len, dtype=dtype).masked_fill_(hidden, -torch.inf)
    heads, group_len = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
    return mask[:, None, None].expand(-1, heads, group_len, -1).reshape(-1, group_len, group.padded_len)


def _prefill(
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row: _Prefill,
    out: torch.Tensor,
) -> None:
    """Attend for one row.

    Args:
        layer: The layer that asks.
        q: `[num_tokens, num_heads, head_dim]`.
        k: `[num_kv_heads, at least start + num_tokens, head_dim]`.
        v: As `k`.
        row: The row.
        out: `[num_tokens, num_heads * head_dim]`, written.
    """
    num_kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    group_len = layer.num_heads // num_kv_heads
    num_tokens = row.num_tokens
    most = _MOST_SCORES // (layer.num_heads * (row.start + num_tokens))
    tile_len = max(1, min(_TILE_LEN, most))
    q = q.reshape(num_tokens, num_kv_heads, group_len, head_dim)
    out = out.view(num_tokens, num_kv_heads, group_len, head_dim)
    after = _upper_triangle(q.dtype)
    for begin in range(0, num_tokens, tile_len):
        num_queries = min(tile_len, num_tokens - begin)
        end = begin + num_queries
        # Keys that some query of the tile sees.
        last = row.start + end
        first = 0 if layer.window_len is None else max(0, row.start + begin + 1 - layer.window_len)
        tile = q[begin:end].permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        keys = k[:, first:last].transpose(1, 2)
        # beta=0: the first argument is not read, it only gives the result its dtype.
        scores = torch.baddbmm(after[:1, :1], tile, keys, beta=0, alpha=layer.scale)
        if layer.softcap is not None:
            _softcapped(scores, layer.softcap)
        by_query = scores.view(num_kv_heads, group_len, num_queries, last - first)
        # Only the tile's own keys, which are the last ones, come after some of its queries …
        by_query[..., -num_queries:] += after[:num_queries, :num_queries]
        if layer.window_len is not None:
            # … and only the first ones before the window of some: each query sees one fewer, from the first
            # query whose window does not reach back to key `first`.
            num_whole = first + layer.window_len - (row.start + begin) - 1
            num_cut = num_queries - num_whole
            if num_cut > 0:
                by_query[:, :, num_whole:, :num_cut] += after[:num_cut, :num_cut].T
        attended = torch.bmm(torch.softmax(scores, -1), v[:, first:last])
        if layer.sinks is not None:
            sinks = layer.sinks.view(num_kv_heads, group_len, 1, 1)
            attended *= _left_by_sinks(by_query, sinks).view(num_kv_heads, -1, 1)
        out[begin:end] = attended.view(num_kv_heads, group_len, -1, head_dim).permute(2, 0, 1, 3)


def _softcapped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Return `cap * tanh(scores / cap)`, in place of the scores, which are not masked yet."""
    return scores.div_(cap).tanh_().mul_(cap)


def _left_by_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the share of the probability that the sinks leave to the positions.

    Args:
        scores: `[…, positions]`, masked.
        sinks: `[…, 1] float32`, broadcasts to the scores.

    Returns:
        `[…, 1]` in the dtype of the scores: e^a / (e^a + e^sink), where e^a is the sum over the positions.
    """
    return torch.sigmoid(scores.float().logsumexp(-1, keepdim=True) - sinks).to(scores.dtype)


@functools.cache
def _upper_triangle(dtype: torch.dtype) -> torch.Tensor:
    """Return `[_TILE_LEN, _TILE_LEN]`: -inf above the diagonal, 0 elsewhere; its corners serve any tile."""
    return torch.full((_TILE_LEN, _TILE_LEN), -torch.inf, dtype=dtype).triu_(1)
