from typing import Any

import pytest
import torch

from tests.gpu.kernels.machine import DEVICE, DTYPES, MARKS, ON_GPU, random
from tests.gpu.kernels.paged_rows import Rows

pytest.importorskip("triton")
from asyncserve.gpu.kernels.paged_decode import (
    DecodeConfig,
    count_splits,
    decode_config,
    new_scratch,
    paged_decode,
)

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


def attend(rows: Rows, config: DecodeConfig, *, is_mixed: bool = False) -> None:
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
        rows.q,
        rows.keys,
        rows.values,
        rows.block_table,
        rows.lens,
        rows.out,
        scale=rows.scale,
        scratch=scratch,
        config=config,
        num_rows=len(rows.seq_lens),
        query_start=rows.query_start if is_mixed else None,
        window_len=rows.window_len,
        softcap=rows.softcap,
        sinks=rows.sinks,
    )
    if not (ON_GPU and torch.cuda.is_current_stream_capturing()):
        assert not scratch.arrived.any(), "the next launch would count on"


def decode_rows(seq_lens: list[int], **shape: Any) -> Rows:
    return Rows(seq_lens=seq_lens, query_lens=[1] * len(seq_lens), **shape)


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
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_row_beside_short_ones_with_the_configuration_of_the_device(dtype: torch.dtype) -> None:
    rows = decode_rows(
        [2500 if ON_GPU else 400, 1, 64], num_heads=4, num_kv_heads=1, head_dim=128, dtype=dtype, scale=0.1
    )
    attend(rows, decode_config(head_dim=128, dtype=dtype, num_sms=132))
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
    config = decode_config(head_dim=128, dtype=torch.bfloat16, num_sms=132)
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
