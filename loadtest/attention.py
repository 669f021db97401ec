"""What paged attention costs on a GPU: `python -m loadtest.attention`, run in the repository's root.

In bfloat16, for the heads of two models. Decode: µs of one layer's call, GB/s of K and V that must be read,
and their share of a copy measured in the same run; rows of equal length, and a mix. Prefill: TFLOP/s of the
scores and values that causality leaves, beside torch's scaled_dot_product_attention (cuDNN's and flash) on
the same K and V, contiguous. Times are of calls inside a CUDA graph of many, which take their blocks in turn
from a pool that exceeds the L2 cache; blocks are shuffled. Results of both are compared, too.
`--tune` times other ways to cut the work than those chosen, and prints the best first.
"""

import argparse
import datetime
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from asyncserve.gpu.kernels.paged_decode import DecodeConfig, decode_config, new_scratch, paged_decode
from asyncserve.gpu.kernels.paged_prefill import PrefillConfig, paged_prefill, prefill_configs
from asyncserve.gpu.kernels.paging import shared_bytes
from loadtest.kernels import Call, copy_gbps, device_us, num_inputs

DTYPE = torch.bfloat16
BLOCK_LEN = 16
NUM_KV_HEADS = 8
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
NUM_HEADS = {"llama-3.1-8b": 32, "qwen3-0.6b": 16}
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize

BATCHES = (1, 8, 64, 256)
CONTEXTS = (1024, 8192)
PROMPTS = ((1, 1024, 0), (1, 8192, 0), (16, 512, 0), (1, 1024, 7168))
"""Rows, queries of each, and cached tokens before them."""

TUNED_BATCHES = (1, 8, 64, 256)
DECODE_TILES = (
    *((32, 2, 3), (32, 2, 4), (32, 4, 4), (64, 1, 3), (64, 2, 3), (64, 4, 2)),
    *((64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3)),
)
"""Length, warps, stages."""

PROGRAMS_PER_SM = (2, 4, 8, 16)
PREFILL_TILES = (
    *((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 4)),
)
"""Rows, length, warps, stages."""


class Pool:
    """One layer's K and V, random, and rows that lie anywhere in it.

    Args:
        num_tokens: How many it holds.
        device: Where.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.device = device
        self.num_blocks = num_tokens // BLOCK_LEN
        shape = (self.num_blocks, NUM_KV_HEADS, BLOCK_LEN, HEAD_DIM)
        self.keys, self.values = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
        self._order = torch.randperm(self.num_blocks, device=device, dtype=torch.int32)

    def tables(self, seq_lens: Sequence[int], num_tables: int) -> list[torch.Tensor]:
        """Return block tables of rows that share no block, and neither with those of the other tables."""
        num_each = [-(-seq_len // BLOCK_LEN) for seq_len in seq_lens]
        tables = []
        for number in range(num_tables):
            table = torch.zeros(len(seq_lens), max(num_each), dtype=torch.int32, device=self.device)
            begin = number * sum(num_each)
            for row, num in enumerate(num_each):
                table[row, :num] = self._order[begin : begin + num]
                begin += num
            assert begin <= self.num_blocks
            tables.append(table)
        return tables

    def tokens(self, table: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of rows of equal length, `[num_rows, num_kv_heads, seq_len, head_dim]`."""
        k, v = (
            cache[table.long()].transpose(1, 2).flatten(2, 3)[:, :, :seq_len].contiguous()
            for cache in (self.keys, self.values)
        )
        return k, v


class Decode:
    """A decode step of one layer.

    Args:
        pool: K and V.
        num_heads: Query heads.
        seq_lens: Of the rows.
    """

    def __init__(self, pool: Pool, num_heads: int, seq_lens: Sequence[int]) -> None:
        self._pool = pool
        self.num_bytes = sum(seq_lens) * TOKEN_BYTES
        self.num_inputs = num_inputs(self.num_bytes)
        self.tables = pool.tables(seq_lens, self.num_inputs)
        self._lens = torch.tensor(seq_lens, dtype=torch.int32, device=pool.device)
        self.q = torch.randn(len(seq_lens), num_heads, HEAD_DIM, dtype=DTYPE, device=pool.device)
        self.out = torch.empty_like(self.q)

    def call(self, config: DecodeConfig) -> Call:
        """Return what runs it, with the blocks of a number."""
        scratch = new_scratch(
            num_heads=self.q.shape[1],
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            config=config,
            device=self._pool.device,
        )

        def run(number: int) -> None:
            paged_decode(
                self.q,
                self._pool.keys,
                self._pool.values,
                self.tables[number],
                self._lens,
                self.out,
                scale=SCALE,
                scratch=scratch,
                config=config,
            )

        return run

    def error(self, config: DecodeConfig, seq_len: int) -> float:
        """Return the largest difference from torch's own attention, if all rows are of that length."""
        self.call(config)(0)
        k, v = self._pool.tokens(self.tables[0][:8], seq_len)
        expected = F.scaled_dot_product_attention(self.q[:8, :, None], k, v, scale=SCALE, enable_gqa=True)
        return float((self.out[:8] - expected[:, :, 0]).abs().max())


class Prefill:
    """A prefill step of one layer.

    Args:
        pool: K and V.
        num_heads: Query heads.
        num_rows: Prompts.
        num_queries: Tokens of each.
        num_cached: Tokens before those.
    """

    def __init__(self, pool: Pool, num_heads: int, num_rows: int, num_queries: int, num_cached: int) -> None:
        self._pool = pool
        self._num_rows = num_rows
        self._seq_len = num_cached + num_queries
        (self._table,) = pool.tables([self._seq_len] * num_rows, 1)
        self._lens = torch.full((num_rows,), self._seq_len, dtype=torch.int32, device=pool.device)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32, device=pool.device) * num_queries
        shape = (num_rows * num_queries, num_heads, HEAD_DIM)
        self._q = torch.randn(shape, dtype=DTYPE, device=pool.device)
        self.out = torch.empty_like(self._q)
        num_pairs = num_rows * (num_queries * num_cached + num_queries * (num_queries + 1) // 2)
        self.num_operations = 4 * num_heads * HEAD_DIM * num_pairs

    def call(self, config: PrefillConfig) -> Call:
        """Return what runs it."""
        return lambda _: paged_prefill(
            self._q,
            self._pool.keys,
            self._pool.values,
            self._table,
            self._lens,
            self._starts,
            self.out,
            scale=SCALE,
            first_row=0,
            num_rows=self._num_rows,
            first_token=0,
            config=config,
        )

    def torch_call(self) -> Call:
        """Return what runs torch's own on contiguous K and V; only without cached tokens."""
        k, v = self._pool.tokens(self._table, self._seq_len)
        q = self._q.view(self._num_rows, -1, *self._q.shape[1:]).transpose(1, 2)
        return lambda _: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)


def decode_cases() -> Iterator[tuple[str, list[int]]]:
    """Yield names and lengths of the rows."""
    for context, batch in itertools.product(CONTEXTS, BATCHES):
        yield f"{batch} x {context}", [context] * batch
    lengths = random.Random(0)
    for batch in BATCHES[2:]:
        yield f"{batch} x 1 … 2047", [lengths.randrange(1, 2048) for _ in range(batch)]


def measure(pool: Pool, copy: float, num_sms: int) -> list[dict[str, Any]]:
    """Measure decode and prefill and print a row for each."""
    rows: list[dict[str, Any]] = []
    decode = decode_config(head_dim=HEAD_DIM, dtype=DTYPE, num_sms=num_sms)
    print(f"{decode}\n{'decode':16}{'rows':>14}{'µs':>9}{'GB/s':>8}{'% of copy':>11}{'error':>9}")
    for (shape, num_heads), (name, seq_lens) in itertools.product(NUM_HEADS.items(), decode_cases()):
        case = Decode(pool, num_heads, seq_lens)
        us = device_us(case.call(decode), case.num_inputs)
        gbps = case.num_bytes / us / 1e3
        equal = len(set(seq_lens)) == 1
        error = case.error(decode, seq_lens[0]) if equal else math.nan
        print(f"{shape:16}{name:>14}{us:9.2f}{gbps:8.0f}{100 * gbps / copy:11.1f}{error:9.4f}", flush=True)
        rows.append({"decode": name, "shape": shape, "us": us, "gbps": gbps, "share": gbps / copy})
    _, long = prefill_configs(head_dim=HEAD_DIM, dtype=DTYPE, shared_bytes=shared_bytes(pool.keys.device))
    print(f"{long}\n{'prefill':16}{'rows':>14}{'µs':>9}{'TFLOP/s':>9}{'cuDNN':>8}{'flash':>8}{'error':>9}")
    for (shape, num_heads), (num_rows, num_queries, num_cached) in itertools.product(
        NUM_HEADS.items(), PROMPTS
    ):
        prompt = Prefill(pool, num_heads, num_rows, num_queries, num_cached)
        us = device_us(prompt.call(long), 1)
        rates = {"paged": prompt.num_operations / us / 1e6}
        error = math.nan
        if not num_cached:
            plain = prompt.torch_call()
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                try:
                    with sdpa_kernel(backend):
                        rates[backend.name] = prompt.num_operations / device_us(plain, 1) / 1e6
                except RuntimeError:
                    rates[backend.name] = math.nan
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                expected = plain(0)
            assert isinstance(expected, torch.Tensor)
            error = float((prompt.out - expected.transpose(1, 2).reshape(prompt.out.shape)).abs().max())
        name = f"{num_rows} x {num_queries}" + (f" + {num_cached}" if num_cached else "")
        paged, cudnn, flash = itertools.islice(itertools.chain(rates.values(), (math.nan,) * 2), 3)
        print(f"{shape:16}{name:>14}{us:9.1f}{paged:9.0f}{cudnn:8.0f}{flash:8.0f}{error:9.4f}", flush=True)
        rows.append({"prefill": name, "shape": shape, "us": us, "tflops": rates})
    return rows


def tune(pool: Pool, num_sms: int) -> list[dict[str, Any]]:
    """Time other ways to cut the work, on the heads of the first shape; print each case's best first."""
    rows: list[dict[str, Any]] = []
    num_heads = next(iter(NUM_HEADS.values()))
    for batch in TUNED_BATCHES:
        decode = Decode(pool, num_heads, [CONTEXTS[0]] * batch)
        ways = {
            f"tile {tile} warps {warps} stages {stages} programs {per_sm}/SM": decode.call(
                DecodeConfig(tile_len=tile, num_warps=warps, num_stages=stages, num_programs=per_sm * num_sms)
            )
            for (tile, warps, stages), per_sm in itertools.product(DECODE_TILES, PROGRAMS_PER_SM)
        }
        rows.append(rank(f"decode {batch} x {CONTEXTS[0]}", ways, decode.num_inputs))
    for num_rows, num_queries, num_cached in PROMPTS[:2]:
        prefill = Prefill(pool, num_heads, num_rows, num_queries, num_cached)
        ways = {
            f"rows {tile_rows} tile {tile} warps {warps} stages {stages}": prefill.call(
                PrefillConfig(tile_rows=tile_rows, tile_len=tile, num_warps=warps, num_stages=stages)
            )
            for tile_rows, tile, warps, stages in PREFILL_TILES
        }
        rows.append(rank(f"prefill {num_rows} x {num_queries}", ways, 1))
    return rows


def rank(name: str, ways: dict[str, Call], num_inputs: int) -> dict[str, Any]:
    """Time each way, print them by time."""
    times = {}
    for way, call in ways.items():
        try:
            times[way] = device_us(call, num_inputs)
        except triton.OutOfResources:
            times[way] = math.inf
    ranked = sorted(times.items(), key=lambda item: item[1])
    print(name)
    for way, us in ranked[:12]:
        print(f"  {us:9.2f} µs  {way}", flush=True)
    return {"case": name, "us": dict(ranked)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time other ways to cut the work")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    parser.add_argument("--label", default="", help="said in the file: commit, machine")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    began_s = time.perf_counter()
    torch.manual_seed(0)
    copy = copy_gbps()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"copy {copy:.0f} GB/s"
    )
    pool = Pool(max(BATCHES) * max(CONTEXTS), torch.device("cuda"))
    rows = tune(pool, num_sms) if options.tune else measure(pool, copy, num_sms)
    print(f"{time.perf_counter() - began_s:.0f} s")
    if options.json is not None:
        content = {
            "date": datetime.date.today().isoformat(),
            "label": options.label,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_gbps": copy,
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
