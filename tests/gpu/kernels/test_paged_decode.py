from typing import Any

import pytest
import torch

from tests.gpu.kernels.machine import DEVICE, DTYPES, FP8_DTYPES, MARKS, ON_GPU, random
from tests.gpu.kernels.paged_rows import Rows, assert_queries_are_cut_and_nan_stays

pytest.importorskip("triton")
from asyncserve.gpu.kernels.paged_decode import (
    DecodeConfig,
    HeadRotation,
    count_splits,
    decode_config,
    new_scratch,
    paged_decode,
)
from asyncserve.gpu.kernels.rotary import QKNorm, make_rotation, rotate_and_write

pytestmark = MARKS

# Around a block, around a tile, empty splits, several tiles a split; on a GPU long ones, too.
LENGTHS = [1, 15, 16, 17, 33, 150]
SPLITS = [1, 8]
if ON_GPU:
    LENGTHS += [1000, 4096, 10_001, *range(1, 130)]
    SPLITS += [2]


def small_config(**changes: Any) -> DecodeConfig:
    """Return a way to cut that takes the smallest rows apart."""
    sizes = {"tile_len": 16, "num_warps": 4, "num_stages": 3, "num_programs": 16} | changes
    return DecodeConfig(**sizes)


def attend(
    rows: Rows,
    config: DecodeConfig,
    *,
    is_mixed: bool = False,
    q: torch.Tensor | None = None,
    rotation: HeadRotation | None = None,
) -> None:
    scratch = new_scratch(
        num_heads=rows.num_heads,
        num_kv_heads=rows.num_kv_heads,
        head_dim=rows.head_dim,
        config=config,
        device=DEVICE,
    )
    scratch.partials.fill_(torch.nan)
    scratch.logsumexps.fill_(torch.nan)
    paged_decode(
        rows.q if q is None else q,
        rows.keys,
        rows.values,
        rows.block_table,
        rows.lens,
        rows.out,
        scale=rows.scale,
        scratch=scratch,
        config=config,
        num_rows=len(rows.lens),
        query_start=rows.query_start if is_mixed else None,
        rotation=rotation,
        window_len=rows.window_len,
        softcap=rows.softcap,
        sinks=rows.sinks,
        scales=rows.scales,
    )
    if not (ON_GPU and torch.cuda.is_current_stream_capturing()):
        assert not scratch.arrived.any(), "the next launch would count on"


def decode_rows(seq_lens: list[int], **shape: Any) -> Rows:
    return Rows(seq_lens=seq_lens, query_lens=[1] * len(seq_lens), **shape)


def scales() -> tuple[torch.Tensor, torch.Tensor]:
    """Return some for two KV heads."""
    return torch.tensor([0.3, 2.0], device=DEVICE), torch.tensor([1.7, 0.05], device=DEVICE)


def num_programs(rows: Rows, num_splits: int) -> int:
    return len(rows.seq_lens) * rows.num_kv_heads * num_splits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", SPLITS)
def test_every_row_attends_to_its_own_positions(num_splits: int, dtype: torch.dtype) -> None:
    rows = decode_rows(LENGTHS, dtype=dtype)
    config = small_config(num_programs=num_programs(rows, num_splits))
    assert count_splits(len(LENGTHS), rows.num_kv_heads, config) == num_splits
    attend(rows, config)
    rows.check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (2, 1), (8, 2), (7, 1), (8, 1), (34, 2)])
def test_any_number_of_query_heads_shares_a_kv_head(num_heads: int, num_kv_heads: int) -> None:
    rows = decode_rows([5, 20], num_heads=num_heads, num_kv_heads=num_kv_heads)
    attend(rows, small_config())
    rows.check()


@pytest.mark.parametrize(
    ("head_dim", "block_len"), [(8, 16), (64, 16), (80, 16), (96, 32), (128, 5), (256, 16), (32, 1), (80, 5)]
)
def test_heads_and_blocks_of_any_size(head_dim: int, block_len: int) -> None:
    rows = decode_rows([1, 6, 33], head_dim=head_dim, block_len=block_len)
    attend(rows, small_config())
    rows.check()


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window_len", [1, 7, 16, 17, 100])
def test_a_window_hides_what_lies_further_back(window_len: int, num_splits: int) -> None:
    rows = decode_rows([1, 7, 16, 17, 120], num_heads=2, num_kv_heads=1, window_len=window_len)
    attend(rows, small_config(num_programs=num_programs(rows, num_splits)))
    rows.check()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_scores_are_capped_and_a_sink_takes_its_share(
    softcap: float | None, has_sinks: bool, num_splits: int
) -> None:
    sinks = random(4, dtype=torch.float32, seed=5) if has_sinks else None
    rows = decode_rows([1, 16, 90], softcap=softcap, sinks=sinks, scale=1.0)
    attend(rows, small_config(num_programs=num_programs(rows, num_splits)))
    rows.check()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
def test_a_cache_of_another_dtype_is_taken_in_the_dtype_of_the_queries(cache_dtype: torch.dtype) -> None:
    dtype = torch.float16 if cache_dtype == torch.float32 else torch.float32
    rows = decode_rows([3, 50], dtype=dtype, cache_dtype=cache_dtype)
    attend(rows, small_config())
    rows.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_splits", "cache_dtype"),
    [(torch.float32, 4, FP8_DTYPES[0]), (torch.bfloat16, 1, FP8_DTYPES[1])],
)
def test_a_cache_of_8_bits_is_read_with_its_scales(
    dtype: torch.dtype, num_splits: int, cache_dtype: torch.dtype
) -> None:
    sinks = random(4, dtype=torch.float32, seed=5)
    rows = decode_rows(
        LENGTHS,
        dtype=dtype,
        cache_dtype=cache_dtype,
        sinks=sinks,
        softcap=5.0,
        window_len=100,
        scales=scales(),
    )
    attend(rows, small_config(num_programs=num_programs(rows, num_splits)))
    rows.check()


# numpy's, in the interpreter
@pytest.mark.filterwarnings(
    "ignore:All-NaN slice encountered", "ignore:invalid value encountered in subtract"
)
def test_queries_beyond_what_a_product_with_8_bits_holds_are_cut_and_nan_stays() -> None:
    rows = decode_rows([40, 9], dtype=torch.bfloat16, cache_dtype=FP8_DTYPES[0])
    assert_queries_are_cut_and_nan_stays(rows, lambda: attend(rows, small_config()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_row_beside_short_ones_with_the_configuration_of_the_device(dtype: torch.dtype) -> None:
    rows = decode_rows(
        [2500 if ON_GPU else 400, 1, 64], num_heads=4, num_kv_heads=1, head_dim=128, dtype=dtype, scale=0.1
    )
    attend(rows, decode_config(head_dim=128, dtype=dtype, cached=dtype, num_sms=132))
    rows.check()


@pytest.mark.parametrize("leftover", [torch.nan, torch.inf])
@pytest.mark.parametrize("window_len", [None, 5])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_what_somebody_left_in_a_block_is_not_read(
    num_splits: int, window_len: int | None, leftover: float
) -> None:
    rows = decode_rows([1, 18, 47], leftover=leftover, window_len=window_len, head_dim=24)
    assert not rows.values[rows.block_table[2, 2].long(), :, -1].isfinite().any()
    attend(rows, small_config(num_programs=num_programs(rows, num_splits)))
    rows.check()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_of_several_tokens_or_none_are_left_alone(num_splits: int) -> None:
    rows = Rows(seq_lens=[40, 9, 33, 0, 70, 0], query_lens=[1, 3, 1, 0, 1, 0])
    attend(rows, small_config(num_programs=num_programs(rows, num_splits)), is_mixed=True)
    assert rows.out[1:4].isnan().all()
    single = decode_rows([40, 33, 70])
    single.keys, single.values = rows.keys, rows.values
    single.block_table = rows.block_table[[0, 2, 4]]
    single.q, single.out = rows.q[[0, 4, 5]], rows.out[[0, 4, 5]]
    single.check()


def test_a_row_is_joined_again_with_the_same_memory() -> None:
    rows = decode_rows([70, 3, 33], num_heads=2, num_kv_heads=1)
    config = small_config(num_programs=num_programs(rows, 4))
    scratch = new_scratch(num_heads=2, num_kv_heads=1, head_dim=32, config=config, device=DEVICE)
    for _ in range(2):
        rows.out.fill_(torch.nan)
        paged_decode(
            rows.q,
            rows.keys,
            rows.values,
            rows.block_table,
            rows.lens,
            rows.out,
            scale=rows.scale,
            scratch=scratch,
            config=config,
        )
        rows.check()


@pytest.mark.slow
@pytest.mark.parametrize(("num_heads", "most_splits"), [(2, 32), (16, 32), (16, 5), (24, 3)])
def test_splits_are_joined_in_as_many_turns_as_fit_the_registers(num_heads: int, most_splits: int) -> None:
    rows = decode_rows([380], num_heads=num_heads, num_kv_heads=1, head_dim=64)
    attend(rows, small_config(num_warps=1, num_programs=32, most_splits=most_splits))
    rows.check()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_padding_row_of_length_zero_gives_zeros(num_splits: int) -> None:
    rows = decode_rows([20, 1, 3])
    rows.lens[1] = 0
    attend(rows, small_config(num_programs=num_programs(rows, num_splits)))
    assert (rows.out[1] == 0).all()
    rows.out[1] = torch.nan
    padded, rows.seq_lens, rows.query_lens = rows.out, [20], [1]
    rows.check()
    assert padded[2].isfinite().all()


def test_splits_depend_on_the_number_of_rows_and_fit_the_scratch() -> None:
    config = decode_config(head_dim=128, dtype=torch.bfloat16, cached=torch.bfloat16, num_sms=132)
    for num_kv_heads in (1, 2, 5, 8, 64):
        scratch = new_scratch(
            num_heads=2 * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=8,
            config=config,
            device=torch.device("cpu"),
        )
        splits = [count_splits(num_rows, num_kv_heads, config) for num_rows in range(1, 1025)]
        assert splits == sorted(splits, reverse=True)
        assert splits[-1] == 1
        pairs_split = [
            (num_rows * num_kv_heads, num) for num_rows, num in enumerate(splits, start=1) if num > 1
        ]
        needed = max(2 * pairs * num for pairs, num in pairs_split)
        assert needed <= len(scratch.partials) == len(scratch.logsumexps)
        assert max(pairs for pairs, _ in pairs_split) <= len(scratch.arrived)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
@pytest.mark.parametrize("num_warps", [1, 2, 4])
def test_the_order_in_which_splits_end_does_not_show(num_warps: int) -> None:
    rows = decode_rows(
        [1000 + 7 * row for row in range(16)],
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
    )
    config = small_config(tile_len=32, num_warps=num_warps, num_programs=num_programs(rows, 16))
    attend(rows, config)
    rows.check()
    first = rows.out.clone()
    for _ in range(200):
        rows.out.fill_(torch.nan)
        attend(rows, config)
        assert torch.equal(rows.out, first)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
@pytest.mark.parametrize("num_splits", [1, 8])
def test_a_captured_step_follows_the_lengths_on_the_device(num_splits: int) -> None:
    rows = decode_rows([700, 33, 1, 1500], num_heads=8, head_dim=128, dtype=torch.bfloat16)
    config = small_config(tile_len=64, num_programs=num_programs(rows, num_splits))
    attend(rows, config)
    lens = rows.lens.clone()
    rows.lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(rows, config)
    rows.lens.copy_(lens)
    rows.out.fill_(torch.nan)
    graph.replay()
    rows.check()


class Projected:
    """A step of decode rows whose last token is a projection still, and the two kernels that came before.

    Args:
        rows: What is in their caches at the last position is overwritten; a length of 0 is padding.
        has_norm: Whether heads are normalized.
        widen: Elements beside the projection in memory.
    """

    def __init__(self, rows: Rows, *, has_norm: bool = True, widen: int = 0) -> None:
        self.rows = rows
        num_tokens, head_dim = len(rows.seq_lens), rows.head_dim
        width = (rows.num_heads + 2 * rows.num_kv_heads) * head_dim
        self.qkv = random(num_tokens, width + 2 * widen, dtype=rows.dtype, seed=11)[:, widen : widen + width]
        positions = (rows.lens - 1).clamp(min=0).long()
        frequencies = 100.0 ** (-torch.arange(head_dim // 2, device=DEVICE) * 2 / head_dim)
        self.rotation = make_rotation(positions, torch.cat((-frequencies, frequencies)), 1.0)
        block = rows.block_table.gather(1, (positions // rows.block_len)[:, None]).squeeze(1).long()
        slots = block * rows.block_len + positions % rows.block_len
        self.slots = torch.where(rows.lens > 0, slots, -1)
        self.norm: QKNorm | None = None
        if has_norm:
            weights = [random(head_dim, dtype=rows.dtype, seed=seed) for seed in (12, 13)]
            self.norm = QKNorm(weights[0], weights[1], 1e-6)
        for cache in (rows.keys, rows.values):
            for slot in self.slots[self.slots >= 0].tolist():
                cache[slot // rows.block_len, :, slot % rows.block_len] = torch.nan

    def compose(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, and K and V of the cache, as `rotate_and_write` makes them."""
        qkv, keys, values = self.qkv.clone(), self.rows.keys.clone(), self.rows.values.clone()
        num_heads = self.rows.num_heads
        rotate_and_write(
            qkv,
            *self.rotation,
            keys,
            values,
            self.slots,
            self.rows.scales,
            num_heads=num_heads,
            qk_norm=self.norm,
        )
        return qkv.view(len(qkv), -1, self.rows.head_dim)[:, :num_heads], keys, values

    def run(self, config: DecodeConfig) -> None:
        attend(
            self.rows,
            config,
            q=self.qkv.view(len(self.qkv), -1, self.rows.head_dim),
            rotation=HeadRotation(*self.rotation, self.slots, self.norm),
        )

    def check(self, config: DecodeConfig) -> None:
        """Run, and hold cache and attention against the composition, the latter in float64."""
        before = self.qkv.clone()
        q, keys, values = self.compose()
        self.run(config)
        assert torch.equal(self.qkv, before)
        # A sum in another order may round a value another way, once in a long while.
        unit = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[self.rows.dtype]
        if keys.dtype.itemsize == 1:
            unit = torch.finfo(keys.dtype).eps
        torch.testing.assert_close(self.rows.keys.float(), keys.float(), rtol=unit, atol=unit, equal_nan=True)
        torch.testing.assert_close(self.rows.values.float(), values.float(), rtol=0, atol=0, equal_nan=True)
        self.rows.q, self.rows.keys, self.rows.values = q, keys, values
        self.rows.check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_projection_is_rotated_written_and_attended_to(num_splits: int, dtype: torch.dtype) -> None:
    lengths = LENGTHS if ON_GPU else [1, 2, 16, 17, 18, 70]
    rows = decode_rows(lengths, dtype=dtype)
    config = small_config(num_programs=num_programs(rows, num_splits))
    Projected(rows).check(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_len"),
    [(1, 1, 8, 16), (2, 1, 80, 16), (7, 1, 32, 5), (34, 2, 12, 1), (4, 2, 128, 32), (2, 2, 256, 16)],
)
def test_a_projection_of_any_heads_and_blocks(
    num_heads: int, num_kv_heads: int, head_dim: int, block_len: int
) -> None:
    rows = decode_rows(
        [1, 6, 33], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_len=block_len
    )
    Projected(rows, has_norm=head_dim != 12, widen=head_dim).check(small_config())


@pytest.mark.slow
@pytest.mark.parametrize("window_len", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_projection_sees_its_window(num_splits: int, window_len: int) -> None:
    rows = decode_rows([1, 2, 17, 18, 34, 70], num_heads=2, num_kv_heads=1, window_len=window_len)
    Projected(rows).check(small_config(num_programs=num_programs(rows, num_splits)))


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_projections_scores_are_capped_and_a_sink_takes_its_share(num_splits: int) -> None:
    sinks = random(4, dtype=torch.float32, seed=5)
    rows = decode_rows([1, 16, 50], softcap=2.0, sinks=sinks, scale=1.0)
    config = small_config(num_programs=num_programs(rows, num_splits))
    Projected(rows, has_norm=False).check(config)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
def test_a_projection_is_attended_to_as_the_cache_holds_it(cache_dtype: torch.dtype) -> None:
    dtype = torch.float16 if cache_dtype == torch.float32 else torch.float32
    rows = decode_rows([3, 50, 1], dtype=dtype, cache_dtype=cache_dtype)
    step = Projected(rows)
    q, keys, values = step.compose()
    step.run(small_config())
    torch.testing.assert_close(rows.keys, keys, rtol=2**-7, atol=2**-9, equal_nan=True)
    rows.q, rows.keys, rows.values = q, keys, values
    rows.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_splits", "cache_dtype"),
    [(torch.float32, 4, FP8_DTYPES[0]), (torch.bfloat16, 1, FP8_DTYPES[1])],
)
def test_a_projection_is_written_to_a_cache_of_8_bits_and_attended_to_as_it_stands_there(
    dtype: torch.dtype, num_splits: int, cache_dtype: torch.dtype
) -> None:
    lengths = LENGTHS if ON_GPU else [1, 16, 18, 70]
    rows = decode_rows(lengths, dtype=dtype, cache_dtype=cache_dtype, scales=scales())
    Projected(rows).check(small_config(num_programs=num_programs(rows, num_splits)))


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", [1, 4])
def test_padding_is_written_nowhere_and_gives_zeros(num_splits: int) -> None:
    rows = decode_rows([20, 0, 3, 0])
    step = Projected(rows)
    step.qkv[1::2] = torch.nan
    caches = [rows.keys.clone(), rows.values.clone()]
    step.run(small_config(num_programs=num_programs(rows, num_splits)))
    assert (rows.out[1::2] == 0).all()
    assert rows.out[::2].isfinite().all()
    for before, after in zip(caches, (rows.keys, rows.values), strict=True):
        written = after.isfinite() & ~before.isfinite()
        assert int(written.any(-1).any(1).sum()) == 2
        assert torch.equal(after[~written].nan_to_num(), before[~written].nan_to_num())


def test_a_token_without_a_slot_is_written_nowhere_though_its_row_attends() -> None:
    rows = decode_rows([20, 7])
    step = Projected(rows)
    step.slots[1] = -1
    # A block of its own before the caches, where a slot of -1 would lie.
    guarded = [torch.cat((torch.zeros_like(cache[:1]), cache)) for cache in (rows.keys, rows.values)]
    rows.keys, rows.values = (cache[1:] for cache in guarded)
    before = [cache.clone() for cache in guarded]
    step.run(small_config(num_programs=num_programs(rows, 1)))
    assert rows.out.isfinite().all()
    block, offset = divmod(int(step.slots[0]), rows.block_len)
    for cache, old in zip(guarded, before, strict=True):
        assert cache[1 + block, :, offset].isfinite().all()
        cache[1 + block, :, offset] = old[1 + block, :, offset]
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())


@pytest.mark.slow
def test_a_batch_gives_a_projection_what_it_gets_alone() -> None:
    lengths = [40, 3, 17]
    together = decode_rows(lengths)
    together_step = Projected(together)
    table, qkv = together.block_table, together_step.qkv
    config = small_config(num_programs=num_programs(together, 2))
    together_step.run(config)
    for row, length in enumerate(lengths):
        alone = decode_rows(lengths)
        step = Projected(alone)
        keep = slice(row, row + 1)
        alone.block_table, alone.lens, alone.out = table[keep], alone.lens[keep], alone.out[keep]
        step.qkv, step.slots = qkv[keep], step.slots[keep]
        step.rotation = (step.rotation[0][keep], step.rotation[1][keep])
        step.run(small_config(num_programs=2 * alone.num_kv_heads))
        assert torch.equal(alone.out[0], together.out[row]), length
