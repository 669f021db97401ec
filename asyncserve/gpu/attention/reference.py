"""Paged attention in plain torch: right on any device, the measure of every other backend.

Decode rows are attended in groups of similar length: a group's pages are gathered into one padded
`[rows, kv_heads, len, head_dim]` and the query heads that share a KV head take the place of the query length,
so K and V are never repeated. Prefill rows go one by one: straight over their own fresh k and v if the prompt
has no cached beginning, else over gathered pages, in tiles of queries. Groups and tiles bound the memory a
step takes, whatever its rows. Accumulates as torch's scaled_dot_product_attention does (float32 for
bfloat16).
"""

from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.nn.functional as F

from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.gpu.attention.row_groups import passed_pages, similar_rows
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import DTYPE_BYTES, FullAttention, KVSpec, RecurrentState, SlidingWindow


@dataclass(slots=True, kw_only=True)
class _DecodeGroup:
    """Rows of one token, attended together.

    Args:
        rows: `[num] int64`, which rows of the step; None if they are the first `num`, in order.
        num_rows: How many.
        page_rows: `[num, num_kv_heads, num_pages] int64` into the cache seen as rows of pages.
        seq_lens: `[num] int32`.
        is_ragged: Whether some row is shorter than the padded length.
        masks: window_len to `[num, 1, 1, padded_len] bool`, True where attended; made when first asked.
    """

    rows: torch.Tensor | None
    num_rows: int
    page_rows: torch.Tensor
    seq_lens: torch.Tensor
    is_ragged: bool
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Prefill:
    """One row that computes several tokens.

    Args:
        begin: Its first token in the step.
        end: One past its last.
        seq_len: Tokens of the sequence once the step is done, but for pages that a window has passed;
            `seq_len - (end - begin)` are cached.
        page_rows: `[num_kv_heads, num_blocks] int64` into the cache as rows of pages; None without a
            cached beginning.
        masks: window_len to `[end - begin, seq_len] bool`, True where attended; made when first asked, and
            kept only if the row is one tile.
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
        decodes: The leading rows of one token.
        prefills: The other rows.
    """

    decodes: list[_DecodeGroup]
    prefills: list[_Prefill]


class ReferenceAttention:
    """The backend; it has no state.

    Args:
        most_gathered_bytes: Most bytes of K (and as many of V) gathered for a group of decode rows, unless
            one row alone has more.
        free_padding_bytes: Bytes of K in a group that may be padding before another group pays: gathering
            them costs about what launching the kernels of a group does.
        most_scores: Most scores of a tile of a prompt with a cached beginning, all heads together.
    """

    name = "reference"
    reads_unwritten = True

    def __init__(
        self,
        *,
        most_gathered_bytes: int = 128 * 1024 * 1024,
        free_padding_bytes: int = 16 * 1024 * 1024,
        most_scores: int = 1 << 29,
    ) -> None:
        self._most_gathered_bytes = most_gathered_bytes
        self._free_padding_bytes = free_padding_bytes
        self._most_scores = most_scores

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None for any attention, with or without a window: it serves that everywhere."""
        return "it serves layers of attention only" if isinstance(spec, RecurrentState) else None

    def plan(self, batch: Batch, kv_cache: KVCache) -> list[_GroupStep]:
        """Compute which pages the step's rows read, per KV group."""
        return [self._plan_group(batch, group.group_id, group.attention) for group in kv_cache.groups]

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

        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in step.decodes:
            if group.rows is None:
                out[: group.num_rows] = _decode(layer, q[: group.num_rows], keys, values, group)
            else:
                attended = _decode(layer, q.index_select(0, group.rows), keys, values, group)
                out.index_copy_(0, group.rows, attended)
        for row in step.prefills:
            if row.page_rows is None:
                row_k = k[row.begin : row.end].transpose(0, 1)
                row_v = v[row.begin : row.end].transpose(0, 1)
            else:
                row_k = _gather_pages(keys, row.page_rows)[:, : row.seq_len]
                row_v = _gather_pages(values, row.page_rows)[:, : row.seq_len]
            self._prefill(layer, q[row.begin : row.end], row_k, row_v, row, out[row.begin : row.end])
        return out.view(q.shape[0], -1)

    def _plan_group(self, batch: Batch, group_id: int, spec: FullAttention) -> _GroupStep:
        num_kv_heads, block_len = spec.num_kv_heads, spec.block_len
        block_table = batch.block_tables[group_id].to(torch.int64)
        heads = torch.arange(num_kv_heads, device=block_table.device)

        num_decode = batch.num_decode_rows
        passed = passed_pages(batch, spec)
        seq_lens, device_lens = batch.seq_lens_host, batch.seq_lens
        if any(passed):
            # As if the sequences began with the first page that is seen. Made of what is on the device
            # already, or the host would wait for the step before.
            assert isinstance(spec, SlidingWindow)
            query_lens = batch.query_start[1:] - batch.query_start[:-1]
            first = (device_lens - query_lens - (spec.window_len - 1)).clamp_(min=0) // block_len
            columns = first[:, None] + torch.arange(block_table.shape[1], device=block_table.device)
            block_table = block_table.gather(1, columns.clamp_(max=block_table.shape[1] - 1))
            device_lens = device_lens - first * block_len
            seq_lens = tuple(
                seq_len - pages * block_len for seq_len, pages in zip(seq_lens, passed, strict=True)
            )
        num_pages = [-(-seq_len // block_len) for seq_len in seq_lens]
        page_bytes = num_kv_heads * block_len * spec.head_dim * DTYPE_BYTES[spec.dtype]
        groups = similar_rows(
            num_pages[:num_decode],
            free_padding=self._free_padding_bytes // page_bytes,
            most_pages=self._most_gathered_bytes // page_bytes,
        )
        picks: list[torch.Tensor | None] = [None] * len(groups)
        if len(groups) > 1:
            order = torch.tensor(list(chain.from_iterable(groups)), pin_memory=block_table.is_cuda)
            # From pinned memory, or the host would wait for the step before.
            on_device = order.to(block_table.device, non_blocking=True)
            picks = list(on_device.split_with_sizes([len(rows) for rows in groups]))
        decodes = []
        for rows, picked in zip(groups, picks, strict=True):
            pages = max(num_pages[row] for row in rows)
            if picked is None:
                table, lens = block_table[:num_decode, :pages], device_lens[:num_decode]
            else:
                table, lens = block_table[picked, :pages], device_lens[picked]
            decodes.append(
                _DecodeGroup(
                    rows=picked,
                    num_rows=len(rows),
                    # Seen as rows of whole pages, (block, head) is row block * num_kv_heads + head.
                    page_rows=table[:, None] * num_kv_heads + heads[:, None],
                    seq_lens=lens,
                    is_ragged=any(seq_lens[row] != pages * block_len for row in rows),
                )
            )
        prefills = []
        begin = num_decode
        for row in range(num_decode, batch.num_rows):
            end = begin + batch.query_lens_host[row]
            if end == begin:
                continue
            seq_len = seq_lens[row]
            page_rows = None
            if seq_len > end - begin:
                blocks = block_table[row, : num_pages[row]]
                page_rows = blocks * num_kv_heads + heads[:, None]
            prefills.append(_Prefill(begin=begin, end=end, seq_len=seq_len, page_rows=page_rows))
            begin = end
        return _GroupStep(decodes=decodes, prefills=prefills)

    def _prefill(
        self,
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
            q: `[num, num_heads, head_dim]`.
            k: `[num_kv_heads, seq_len, head_dim]`.
            v: As `k`.
            row: The row.
            out: As `q`, written.
        """
        num_queries = q.shape[0]
        is_causal = (
            layer.is_plain
            and row.page_rows is None
            and (layer.window_len is None or layer.window_len >= row.seq_len)
        )
        tile_len = num_queries
        if not is_causal:
            tile_len = min(num_queries, max(1, self._most_scores // (layer.num_heads * row.seq_len)))
        k, v = k.to(q.dtype)[None], v.to(q.dtype)[None]
        for begin in range(0, num_queries, tile_len):
            end = min(begin + tile_len, num_queries)
            mask = None
            if not is_causal:
                mask = row.masks.get(layer.window_len)
                if mask is None:
                    mask = _prefill_mask(row, layer.window_len, begin, end, q.device)
                    if tile_len == num_queries:
                        row.masks[layer.window_len] = mask
            tile = q[begin:end].transpose(0, 1)[None]
            if layer.is_plain:
                attended = F.scaled_dot_product_attention(
                    tile,
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=is_causal,
                    scale=layer.scale,
                    enable_gqa=layer.num_heads != layer.num_kv_heads,
                )
            else:
                group_len = layer.num_heads // layer.num_kv_heads
                attended = _attend(
                    layer,
                    tile,
                    k.repeat_interleave(group_len, 1),
                    v.repeat_interleave(group_len, 1),
                    mask,
                    None if layer.sinks is None else layer.sinks[:, None, None],
                )
            out[begin:end] = attended[0].transpose(0, 1)


def _decode(
    layer: AttentionLayer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _DecodeGroup
) -> torch.Tensor:
    """Attend for rows of one token: q `[rows, num_heads, head_dim]`, result alike."""
    num_rows = q.shape[0]
    padded_len = group.page_rows.shape[-1] * keys.shape[2]
    mask = None
    if group.is_ragged or (layer.window_len is not None and layer.window_len < padded_len):
        mask = group.masks.get(layer.window_len)
        if mask is None:
            positions = torch.arange(padded_len, device=q.device)
            seq_lens = group.seq_lens[:, None]
            mask = positions < seq_lens
            if layer.window_len is not None:
                mask &= positions >= seq_lens - layer.window_len
            mask = mask[:, None, None, :]
            group.masks[layer.window_len] = mask
    heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    grouped = q.view(num_rows, *heads, layer.head_dim)
    k = _gather_pages(keys, group.page_rows).to(q.dtype)
    v = _gather_pages(values, group.page_rows).to(q.dtype)
    if layer.is_plain:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=layer.scale)
    else:
        sinks = None if layer.sinks is None else layer.sinks.view(*heads, 1)
        out = _attend(layer, grouped, k, v, mask, sinks)
    return out.reshape(q.shape)


def _attend(
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with what torch's own attention does not know: capped scores, sinks. In float32.

    Args:
        layer: The layer that asks.
        q: `[rows, heads, queries, head_dim]`.
        k: `[rows, heads, positions, head_dim]`.
        v: As `k`.
        mask: Broadcasts to `[rows, heads, queries, positions] bool`, True where attended; None: everywhere.
        sinks: Broadcasts to `[rows, heads, queries, 1]`; None: there are none.

    Returns:
        As `q`.
    """
    scores = (q.float() @ k.float().transpose(-2, -1)) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    return ((scores - total).exp() @ v.float()).to(q.dtype)


def _prefill_mask(
    row: _Prefill, window_len: int | None, begin: int, end: int, device: torch.device
) -> torch.Tensor:
    """Return which positions the row's queries `begin … end - 1` see: `[end - begin, seq_len] bool`."""
    positions = torch.arange(row.seq_len, device=device)
    first = row.seq_len - (row.end - row.begin)
    query_positions = positions[first + begin : first + end, None]
    mask = positions <= query_positions
    if window_len is not None:
        mask &= positions > query_positions - window_len
    return mask


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
