"""A paged cache filled with random sequences, and attention over it in float64, one row at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.gpu.kernels.machine import DEVICE, ON_GPU, random

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest error relative to the largest value: weights and result are each rounded once."""


@dataclass(kw_only=True)
class Rows:
    """The last tokens of sequences whose K and V are all in a cache, and nothing else.

    Args:
        seq_lens: Tokens of each sequence.
        query_lens: How many of them ask.
        num_heads: Query heads.
        num_kv_heads: K and V heads.
        head_dim: Elements per head.
        block_len: Positions per block.
        dtype: Of q.
        cache_dtype: Of the cache; None for that of q.
        scales: What K and V of the cache are multiplied by, by KV head.
        leftover: What the cache holds where none of these sequences has a position that it sees.
    """

    seq_lens: list[int]
    query_lens: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_len: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    scale: float = 0.2
    window_len: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    leftover: float = torch.nan

    def __post_init__(self) -> None:
        cache_dtype = self.cache_dtype or self.dtype
        num_blocks = [-(-seq_len // self.block_len) for seq_len in self.seq_lens]
        # Shuffled blocks, and more of them than are used; a table behind its blocks shows the null block.
        order = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(7)) + 1
        table = torch.zeros(len(num_blocks), max(num_blocks) + 2, dtype=torch.int32)
        taken = 0
        for row, num in enumerate(num_blocks):
            table[row, :num] = order[taken : taken + num]
            taken += num
        shape = (len(order) + 1, self.num_kv_heads, self.block_len, self.head_dim)
        is_position = torch.zeros(len(order) + 1, self.block_len, dtype=torch.bool)
        for row, seq_len in enumerate(self.seq_lens):
            first = 0
            if self.window_len is not None:
                # What all windows have passed belongs to others.
                first = max(0, seq_len - self.query_lens[row] - self.window_len + 1)
            for position in range(first, seq_len):
                block = table[row, position // self.block_len]
                is_position[block, position % self.block_len] = True
        unwritten = ~is_position[:, None, :, None].to(DEVICE)
        self.keys, self.values = (
            random(*shape, dtype=torch.float32, seed=seed)
            .masked_fill_(unwritten, self.leftover)
            .to(cache_dtype)
            for seed in (1, 2)
        )
        self.block_table = table.to(DEVICE)
        self.lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=DEVICE)
        num_tokens = sum(self.query_lens)
        starts = torch.tensor([0, *self.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.query_start = starts.to(DEVICE)
        # A slice of a wider tensor, as a fused projection gives it.
        fused = random(num_tokens, self.num_heads + 3, self.head_dim, dtype=self.dtype, seed=3)
        self.q = fused[:, : self.num_heads]
        # What a kernel leaves unwritten shows.
        self.out = torch.full((num_tokens, self.num_heads, self.head_dim), torch.nan, device=DEVICE)
        self.out = self.out.to(self.dtype)

    def check(self, *, first_row: int = 0) -> None:
        """Hold `out` against float64, from a row on; what is before it must be untouched."""
        first_token = sum(self.query_lens[:first_row])
        assert self.out[:first_token].isnan().all()
        for row in range(first_row, len(self.seq_lens)):
            begin, end = self.query_start[row : row + 2].tolist()
            if begin == end:
                continue
            expected = self._exact(row, self.q[begin:end])
            error = (self.out[begin:end].double() - expected).abs().max()
            # The interpreter cuts bfloat16 off where a GPU rounds it.
            factor = 2 if self.dtype == torch.bfloat16 and not ON_GPU else 1
            allowed = factor * TOLERANCE[self.dtype] * max(1.0, float(expected.abs().max()))
            assert float(error) <= allowed, f"row {row}: off by {error:.3g}, allowed {allowed:.3g}"

    def _exact(self, row: int, q: torch.Tensor) -> torch.Tensor:
        seq_len, num_queries = self.seq_lens[row], q.shape[0]
        blocks = self.block_table[row, : -(-seq_len // self.block_len)].long()
        shared = self.num_heads // self.num_kv_heads
        k, v = (
            # The products are in q's dtype, as the plain reference's are.
            cache[blocks].to(self.dtype).double().transpose(1, 2).flatten(0, 1)[:seq_len]
            for cache in (self.keys, self.values)
        )
        if self.scales is not None:
            k, v = (x * scale.double()[:, None] for x, scale in zip((k, v), self.scales, strict=True))
        if self.window_len is not None:
            k[: max(0, seq_len - num_queries - self.window_len + 1)] = 0
            v[: max(0, seq_len - num_queries - self.window_len + 1)] = 0
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        positions = torch.arange(seq_len, device=DEVICE)
        query_positions = positions[seq_len - num_queries :, None]
        is_seen = positions <= query_positions
        if self.window_len is not None:
            is_seen &= positions > query_positions - self.window_len
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, num_queries, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., :seq_len]
        return torch.einsum("hnl,lhd->nhd", weights, v)


def assert_queries_are_cut_and_nan_stays(rows: Rows, attend: Callable[[], None]) -> None:
    """Hold a kernel to it, with bfloat16 queries and a cache of 8 bits: what it multiplies is float16."""
    rows.q[0] = 1e6  # float16 ends at 65,504
    attend()
    assert rows.out.isfinite().all()
    rows.q[0, 0, 3] = torch.nan
    attend()
    assert rows.out[0, 0].isnan().all()
    assert rows.out[1:].isfinite().all()
