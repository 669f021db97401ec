"""What paged attention costs on a GPU: `python -m loadtest.attention`, run in the repository's root.

In bfloat16, for the heads of two models. Decode: µs of one layer's call, GB/s of K and V that must be read,
and their share of a copy measured in the same run; rows of equal length, and a mix. Then all that a layer
does between its projections (norms of the heads, rotation, the write of K and V, attention), in two launches
and in the one that decode steps take. Prefill: TFLOP/s of the scores and values that causality leaves, beside
torch's scaled_dot_product_attention (cuDNN's and flash) on the same K and V, contiguous, and the backends of
libraries that are installed, on the same blocks. Times are of calls inside a CUDA graph of many, which take
their blocks in turn from a pool that exceeds the L2 cache; blocks are shuffled. Results of both are compared,
too. Decode is measured over a cache of 8 bits as well.
`--prefill` measures prefill alone. `--tune` times other ways to cut the work than those chosen, and prints
the best first, those chosen marked.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from asyncserve.errors import ConfigError
from asyncserve.gpu.attention.interface import AttentionBackend, AttentionLayer
from asyncserve.gpu.attention.registry import load_attention
from asyncserve.gpu.batch import Batch, SampleRows
from asyncserve.gpu.kernels.paged_decode import (
    DecodeConfig,
    HeadRotation,
    Scratch,
    count_splits,
    decode_config,
    new_scratch,
    paged_decode,
)
from asyncserve.gpu.kernels.paged_prefill import (
    PrefillConfig,
    paged_prefill,
    prefill_config,
)
from asyncserve.gpu.kernels.paging import shared_bytes
from asyncserve.gpu.kernels.rotary import QKNorm, make_rotation, rotate_and_write
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import FullAttention, KVGroup
from loadtest.figures import Row, Rows
from loadtest.kernel_benchmark import DTYPE, EPS, Call, compile_ahead, device_us, kernel_shapes, run_benchmark
from loadtest.kernel_benchmark import num_inputs as inputs_beyond_cache
from loadtest.model_shapes import Shape

BLOCK_LEN = 16
NUM_KV_HEADS = 8
HEAD_DIM = 128
"""As in every shape: one pool of K and V serves them all."""
SCALE = HEAD_DIM**-0.5
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
LIBRARIES = ("flash_attn", "flashinfer")
"""Backends that leave prefill to a library."""
MOST_DIFFERENCE = 0.03
"""Between what two of them give in bfloat16."""

BATCHES = (1, 8, 64, 256)
CONTEXTS = (1024, 8192)
PROMPTS = ((1, 1024, 0), (1, 8192, 0), (16, 512, 0), (1, 1024, 7168))
"""Rows, queries of each, and cached tokens before them."""

TUNED_SPLITS = {1: (8, 16, 32, 64), 8: (4, 8, 16, 32), 64: (1, 2, 4), 256: (1, 2)}
"""Into how many each row is cut, by the number of rows; beyond these nothing new begins or all is full."""

DECODE_TILES = (
    *((16, 1, 4), (32, 1, 3), (32, 1, 4), (32, 2, 3), (32, 2, 4), (32, 2, 6), (32, 4, 4), (64, 1, 3)),
    *((64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 3)),
)
"""Length, warps, stages."""

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
        dtype: Of both.
    """

    def __init__(self, num_tokens: int, device: torch.device, dtype: torch.dtype = DTYPE) -> None:
        self.device = device
        self.token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
        self.num_blocks = num_tokens // BLOCK_LEN
        spec = FullAttention(
            block_len=BLOCK_LEN,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=str(dtype).removeprefix("torch."),
        )
        group = KVGroup(group_id=0, spec=spec, layer_ids=(0,), num_blocks=self.num_blocks)
        self.kv_cache = KVCache((group,), device=device)
        self.keys, self.values = self.kv_cache.keys[0], self.kv_cache.values[0]
        for cache in (self.keys, self.values):
            cache.copy_(torch.randn(cache.shape, dtype=DTYPE, device=device))
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
            cache[table.long()].to(DTYPE).transpose(1, 2).flatten(2, 3)[:, :, :seq_len].contiguous()
            for cache in (self.keys, self.values)
        )
        return k, v


class Decode:
    """A decode step of one layer.

    Args:
        pool: K and V.
        num_heads: Query heads.
        seq_lens: Of the rows.
        num_inputs: How many sets of blocks take turns; None: so many that none is left in the L2 cache.
    """

    def __init__(
        self, pool: Pool, num_heads: int, seq_lens: Sequence[int], *, num_inputs: int | None = None
    ) -> None:
        self._pool = pool
        self.num_bytes = sum(seq_lens) * pool.token_bytes
        self.num_inputs = num_inputs or inputs_beyond_cache(self.num_bytes)
        self.tables = pool.tables(seq_lens, self.num_inputs)
        self._lens = torch.tensor(seq_lens, dtype=torch.int32, device=pool.device)
        self.qkv = torch.randn(
            len(seq_lens), num_heads + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=pool.device
        )
        self.q = self.qkv[:, :num_heads]
        self.out = torch.empty(self.q.shape, dtype=DTYPE, device=pool.device)

    def _scratch(self, config: DecodeConfig) -> Scratch:
        return new_scratch(
            num_heads=self.q.shape[1],
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            config=config,
            device=self._pool.device,
        )

    def projection_calls(self, config: DecodeConfig, *, has_norm: bool) -> tuple[Call, Call]:
        """Return what does all that a layer does between its projections: in two launches, and in one."""
        scratch, keys, values = self._scratch(config), self._pool.keys, self._pool.values
        positions = self._lens.long() - 1
        frequencies = torch.linspace(0.01, 1, HEAD_DIM // 2, device=self._pool.device)
        cos, sin = make_rotation(positions, torch.cat((-frequencies, frequencies)), 1.0)
        weight = torch.ones(HEAD_DIM, dtype=DTYPE, device=self._pool.device)
        norm = QKNorm(weight, weight, EPS) if has_norm else None
        last = (positions // BLOCK_LEN)[:, None]
        slots = [
            table.gather(1, last)[:, 0].long() * BLOCK_LEN + positions % BLOCK_LEN for table in self.tables
        ]
        attend, qkv = self.call(config), self.qkv.flatten(1)

        def compose(number: int) -> None:
            rotate_and_write(
                qkv, cos, sin, keys, values, slots[number], num_heads=self.q.shape[1], qk_norm=norm
            )
            attend(number)

        def run(number: int) -> None:
            paged_decode(
                self.qkv,
                keys,
                values,
                self.tables[number],
                self._lens,
                self.out,
                scale=SCALE,
                scratch=scratch,
                config=config,
                rotation=HeadRotation(cos, sin, slots[number], norm),
            )

        return compose, run

    def call(self, config: DecodeConfig) -> Call:
        """Return what runs it, with the blocks of a number."""
        scratch = self._scratch(config)

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

    def backend_call(self, backend: AttentionBackend) -> Call:
        """Return what runs it by a backend, the step's plan aside; what that gives is in `out`."""
        num_tokens, num_heads, _ = self._q.shape
        num_queries = num_tokens // self._num_rows
        rows = torch.arange(self._num_rows, device=self._pool.device)
        batch = Batch(
            input_ids=torch.zeros(num_tokens, dtype=torch.int32, device=self._pool.device),
            positions=torch.arange(num_tokens, device=self._pool.device),
            query_start=self._starts,
            seq_lens=self._lens,
            slot_mapping=(torch.zeros(num_tokens, dtype=torch.int64, device=self._pool.device),),
            block_tables=(self._table,),
            sample_tokens=self._starts[1:].long() - 1,
            sample_rows=SampleRows(slots=rows.int(), positions=rows, write_back=rows, result_row=None),
            query_lens_host=(num_queries,) * self._num_rows,
            seq_lens_host=(self._seq_len,) * self._num_rows,
            num_decode_rows=0,
        )
        layer = AttentionLayer(
            layer_id=0, num_heads=num_heads, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, scale=SCALE
        )
        kv_cache, q = self._pool.kv_cache, self._q
        planned = backend.plan(batch, kv_cache)

        def run(_: int) -> None:
            self.out = backend.run(layer, q, q, q, batch, kv_cache, planned).view(q.shape)

        return run

    def torch_call(self) -> Call:
        """Return what runs torch's own on contiguous K and V; only without cached tokens."""
        k, v = self._pool.tokens(self._table, self._seq_len)
        q = self._q.view(self._num_rows, -1, *self._q.shape[1:]).transpose(1, 2)
        return lambda _: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)


def mixed_lengths(batch: int) -> list[int]:
    """Return lengths that differ as those of a busy server do; the same each time."""
    lengths = random.Random(batch)
    return [lengths.randrange(1, 2048) for _ in range(batch)]


def decode_cases() -> Iterator[tuple[str, list[int]]]:
    """Yield names and lengths of the rows."""
    for context, batch in itertools.product(CONTEXTS, BATCHES):
        yield f"{batch} x {context}", [context] * batch
    for batch in BATCHES[1:]:
        yield f"{batch} x 1 … 2047", mixed_lengths(batch)


def new_pool(dtype: torch.dtype = DTYPE) -> tuple[Pool, int]:
    """Return the K and V of the largest case, and how many multiprocessors the device has."""
    torch.manual_seed(0)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Pool(max(BATCHES) * max(CONTEXTS), torch.device("cuda"), dtype), num_sms


def measure_decode(pool: Pool, config: DecodeConfig, shapes: Sequence[Shape], copy: float) -> Iterator[Row]:
    """Measure decode over one pool, print and yield a row for each case.

    Args:
        pool: K and V.
        config: How rows are cut.
        shapes: Whose heads ask.
        copy: GB/s of a copy.
    """
    dtype = str(pool.keys.dtype).removeprefix("torch.")
    print(f"{config}\n{f'decode, {dtype}':24}{'rows':>14}{'µs':>9}{'GB/s':>8}{'% of copy':>11}{'error':>9}")
    for shape, (name, seq_lens) in itertools.product(shapes, decode_cases()):
        case = Decode(pool, shape.num_heads, seq_lens)
        us = device_us(case.call(config), case.num_inputs)
        gbps = case.num_bytes / us / 1e3
        equal = len(set(seq_lens)) == 1
        error = case.error(config, seq_lens[0]) if equal else math.nan
        print(
            f"{shape.name:24}{name:>14}{us:9.2f}{gbps:8.0f}{100 * gbps / copy:11.1f}{error:9.4f}", flush=True
        )
        yield {
            "decode": name,
            "shape": shape.name,
            "cache": dtype,
            "us": us,
            "gbps": gbps,
            "share": gbps / copy,
        }


def measure(copy: float) -> Rows:
    """Measure decode and prefill and print a row for each."""
    pool, num_sms = new_pool()
    rows: Rows = []
    decode = decode_config(head_dim=HEAD_DIM, dtype=DTYPE, cached=DTYPE, num_sms=num_sms)
    shapes = kernel_shapes()
    rows += measure_decode(pool, decode, shapes, copy)
    print(f"{'between projections':16}{'rows':>11}{'two launches µs':>17}{'one µs':>9}")
    for shape, batch in itertools.product(shapes, BATCHES):
        case = Decode(pool, shape.num_heads, [CONTEXTS[0]] * batch)
        two, one = (
            device_us(call, case.num_inputs)
            for call in case.projection_calls(decode, has_norm=shape.has_qk_norm)
        )
        name = f"{batch} x {CONTEXTS[0]}"
        print(f"{shape.name:16}{name:>14}{two:17.2f}{one:9.2f}", flush=True)
        rows.append({"between": name, "shape": shape.name, "two_launches_us": two, "one_launch_us": one})
    rows += measure_prefill(pool)
    for dtype in FP8_DTYPES:
        pool, _ = new_pool(dtype)
        decode = decode_config(head_dim=HEAD_DIM, dtype=DTYPE, cached=dtype, num_sms=num_sms)
        rows += measure_decode(pool, decode, shapes, copy)
    return rows


def libraries(pool: Pool) -> dict[str, AttentionBackend]:
    """Return the backends of `LIBRARIES` that serve here; say why the others do not."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = load_attention(name, pool.kv_cache.groups, pool.device)
        except ConfigError as error:
            print(error)
    return found


def measure_prefill(pool: Pool) -> Iterator[Row]:
    """Measure prefill, print and yield a row for each case: TFLOP/s, ours, torch's and the libraries'."""
    config = prefill_config(head_dim=HEAD_DIM, dtype=DTYPE, shared_bytes=shared_bytes(pool.keys.device))
    backends = libraries(pool)
    names = "".join(f"{name:>12}" for name in ("cuDNN", "flash", *backends))
    print(f"{config}\n{'prefill':16}{'rows':>14}{'µs':>9}{'TFLOP/s':>9}{'error':>9}{names}")
    for shape, (num_rows, num_queries, num_cached) in itertools.product(kernel_shapes(), PROMPTS):
        prompt = Prefill(pool, shape.num_heads, num_rows, num_queries, num_cached)
        us = device_us(prompt.call(config), 1)
        ours = prompt.out
        rates = {"paged": prompt.num_operations / us / 1e6}
        error = math.nan
        if not num_cached:
            torch_rates, expected = measure_torch(prompt)
            rates |= torch_rates
            error = float((ours - expected).abs().max())
        for name, backend in backends.items():
            rates[name] = prompt.num_operations / device_us(prompt.backend_call(backend), 1) / 1e6
            difference = float((prompt.out - ours).abs().max())
            if not difference < MOST_DIFFERENCE:
                print(f"{name} differs by {difference:.4f}")
        name = f"{num_rows} x {num_queries}" + (f" + {num_cached}" if num_cached else "")
        others = ("CUDNN_ATTENTION", "FLASH_ATTENTION", *backends)
        columns = "".join(f"{rates.get(other, math.nan):12.0f}" for other in others)
        print(f"{shape.name:16}{name:>14}{us:9.1f}{rates['paged']:9.0f}{error:9.4f}{columns}", flush=True)
        yield {"prefill": name, "shape": shape.name, "us": us, "tflops": rates}


def measure_torch(prompt: Prefill) -> tuple[Mapping[str, float], torch.Tensor]:
    """Return TFLOP/s of torch's own kernels, by name, and what they give, laid out as ours."""
    plain = prompt.torch_call()
    rates = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                rates[backend.name] = prompt.num_operations / device_us(plain, 1) / 1e6
        except RuntimeError:
            rates[backend.name] = math.nan
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = plain(0)
    assert isinstance(expected, torch.Tensor)
    return rates, expected.transpose(1, 2).reshape(prompt.out.shape)


def tuned_config(tile: Sequence[int], batch: int, num_splits: int) -> DecodeConfig:
    """Return the way that cuts each of so many rows into so many splits."""
    tile_len, num_warps, num_stages = tile
    return DecodeConfig(
        tile_len=tile_len,
        num_warps=num_warps,
        num_stages=num_stages,
        num_programs=batch * NUM_KV_HEADS * num_splits,
        most_splits=max(itertools.chain.from_iterable(TUNED_SPLITS.values())),
    )


def compile_tile(way: tuple[str, int, tuple[int, ...]]) -> None:
    """Launch decode or prefill once on one short row: (which, query heads, tile)."""
    which, num_heads, tile = way
    dtype = FP8_DTYPES[0] if which == "decode of 8 bits" else DTYPE
    pool = Pool(4 * BLOCK_LEN, torch.device("cuda"), dtype)
    try:
        if which != "prefill":
            Decode(pool, num_heads, [BLOCK_LEN], num_inputs=1).call(tuned_config(tile, 1, 1))(0)
        else:
            Prefill(pool, num_heads, 1, BLOCK_LEN, 0).call(PrefillConfig(**prefill_sizes(tile)))(0)
    except triton.OutOfResources:
        pass  # said when it is timed


def prefill_sizes(tile: Sequence[int]) -> dict[str, int]:
    """Return what a tile of `PREFILL_TILES` means."""
    return dict(zip(("tile_rows", "tile_len", "num_warps", "num_stages"), tile, strict=True))


def tuned_decode_cases() -> Iterator[tuple[Shape, str, list[int]]]:
    """Yield shape, name, and lengths of the rows."""
    first, second = kernel_shapes()
    for batch in TUNED_SPLITS:
        yield first, f"{batch} x {CONTEXTS[0]}", [CONTEXTS[0]] * batch
    yield first, f"1 x {CONTEXTS[1]}", [CONTEXTS[1]]
    yield first, "64 x 1 … 2047", mixed_lengths(64)
    for batch in (1, 8):
        yield second, f"{batch} x {CONTEXTS[0]}", [CONTEXTS[0]] * batch


def tune() -> Rows:
    """Time other ways to cut the work; print each case's best first."""
    first, second = (shape.num_heads for shape in kernel_shapes())
    compile_ahead(
        compile_tile,
        [
            *(("prefill", first, tile) for tile in PREFILL_TILES),
            *(
                (which, num_heads, tile)
                for which in ("decode", "decode of 8 bits")
                for num_heads in (first, second)
                for tile in DECODE_TILES
            ),
        ],
    )
    pool, num_sms = new_pool()
    rows: Rows = []
    for dtype in (DTYPE, FP8_DTYPES[0]):
        chosen = decode_config(head_dim=HEAD_DIM, dtype=DTYPE, cached=dtype, num_sms=num_sms)
        rows += tune_decode(pool if dtype == DTYPE else new_pool(dtype)[0], tuned_decode_cases(), chosen)
    suits = prefill_config(head_dim=HEAD_DIM, dtype=DTYPE, shared_bytes=shared_bytes(pool.keys.device))
    for num_rows, num_queries, num_cached in PROMPTS[:3]:
        prefill = Prefill(pool, first, num_rows, num_queries, num_cached)
        ways = {}
        for tile in PREFILL_TILES:
            config = PrefillConfig(**prefill_sizes(tile))
            mark = ", chosen" if config == suits else ""
            ways[f"rows {tile[0]} tile {tile[1]} warps {tile[2]} stages {tile[3]}{mark}"] = prefill.call(
                config
            )
        rows.append(rank(f"prefill {num_rows} x {num_queries}", ways, 1))
    return rows


def tune_decode(
    pool: Pool, cases: Iterable[tuple[Shape, str, list[int]]], chosen: DecodeConfig
) -> Iterator[Row]:
    """Time other ways to cut decode rows over one pool; yield a row for each case."""
    dtype = str(pool.keys.dtype).removeprefix("torch.")
    for shape, name, seq_lens in cases:
        batch = len(seq_lens)
        decode = Decode(pool, shape.num_heads, seq_lens)
        ways = {
            f"tile {tile[0]} warps {tile[1]} stages {tile[2]} splits {num_splits}": decode.call(
                tuned_config(tile, batch, num_splits)
            )
            for tile, num_splits in itertools.product(DECODE_TILES, TUNED_SPLITS[batch])
        }
        splits = count_splits(batch, NUM_KV_HEADS, chosen)
        ways[f"{chosen}: splits {splits}, chosen"] = decode.call(chosen)
        yield rank(f"decode {name} {shape.name} {dtype}", ways, decode.num_inputs)


def rank(name: str, ways: dict[str, Call], num_inputs: int) -> Row:
    """Time each way, print them by time."""
    times = {}
    for way, call in ways.items():
        try:
            times[way] = device_us(call, num_inputs)
        except triton.OutOfResources:
            times[way] = math.inf
    ranked = sorted(times.items(), key=lambda item: item[1])
    print(name)
    for place, (way, us) in enumerate(ranked):
        if place < 12 or way.endswith("chosen"):
            print(f"  {us:9.2f} µs  {way}", flush=True)
    return {"case": name, "us": dict(ranked)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    run_benchmark(
        arguments,
        description=__doc__,
        search_option="--tune",
        search_help="time other ways to cut the work",
        measure=measure,
        search=tune,
        part_option="--prefill",
        part_help="measure prefill alone",
        part=lambda: list(measure_prefill(new_pool()[0])),
    )


if __name__ == "__main__":
    main()
