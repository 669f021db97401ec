"""Libraries of attention in torch: what is called of them, as they document it, for where there is no GPU."""

from dataclasses import dataclass

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return causal attention of the last queries of one row; heads stand in the middle."""
    num_queries, num_heads, _ = q.shape
    k, v = (each.repeat_interleave(num_heads // each.shape[1], 1) for each in (k, v))
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), k.float())
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.ones(num_queries, k.shape[0], dtype=torch.bool).triu(k.shape[0] - num_queries + 1)
    scores = scores.masked_fill(behind, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, num_queries, 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """FlashAttention's: pages are `[num_pages, page_len, num_kv_heads, head_dim]`."""
    assert causal
    assert q.dtype == k.dtype == v.dtype
    assert page_table.shape[0] == seqused_k.shape[0] == cu_seqlens_q.shape[0] - 1
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    bounds = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seqused_k.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if begin == end:
            continue
        pages = page_table[row, : -(-seq_len // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:seq_len] for cache in (k, v))
        out[begin:end] = attend(
            q[begin:end], keys, values, scale=softmax_scale, softcap=softcap, sinks=learnable_sink
        )
    return out, None


@dataclass
class Cut:
    """What was planned last."""

    qo_indptr: list[int]
    kv_indptr: list[int]
    pages: torch.Tensor
    last_page_len: list[int]
    scale: float


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's: pages are `[num_pages, num_kv_heads, page_len, head_dim]`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert kv_layout == "HND"
        assert backend == "fa3"
        self.cut: Cut | None = None

    def plan(
        self,
        *,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Take note of it."""
        assert causal
        assert {each.dtype for each in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)} == {torch.int32}
        assert paged_kv_indices.dtype == torch.int32
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        self.cut = Cut(
            qo_indptr.tolist(),
            paged_kv_indptr.tolist(),
            paged_kv_indices.clone(),
            paged_kv_last_page_len.tolist(),
            sm_scale,
        )

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Attend by what was planned."""
        cut = self.cut
        assert cut is not None
        assert q.shape[0] == cut.qo_indptr[-1]
        for row, last_len in enumerate(cut.last_page_len):
            begin, end = cut.qo_indptr[row : row + 2]
            pages = cut.pages[cut.kv_indptr[row] : cut.kv_indptr[row + 1]].long()
            page_len = paged_kv_cache[0].shape[2]
            seq_len = (len(pages) - 1) * page_len + last_len
            k, v = (cache[pages].transpose(1, 2).flatten(0, 1)[:seq_len] for cache in paged_kv_cache)
            out[begin:end] = attend(q[begin:end], k, v, scale=cut.scale, softcap=0.0, sinks=None)
        return out
