from typing import Any

import pytest
import torch

from tests.gpu.kernels.machine import DEVICE, DTYPES, FP8_DTYPES, MARKS, ON_GPU, random
from tests.gpu.kernels.paged_rows import Rows, assert_queries_are_cut_and_nan_stays

pytest.importorskip("triton")
from asyncserve.gpu.kernels.paged_prefill import PrefillConfig, paged_prefill, prefill_config
from asyncserve.gpu.kernels.paging import shared_bytes

pytestmark = MARKS

# (tokens, queries): whole prompts and chunks, around a block, around a tile.
RAGGED = [(1, 1), (15, 15), (16, 3), (17, 17), (40, 1), (33, 32), (90, 40), (64, 16)]
if ON_GPU:
    RAGGED += [(130, 70), (1000, 1000), (4096, 700), (5001, 1), (3000, 2999)]


def small_config(**changes: int) -> PrefillConfig:
    """Return a way to cut that takes the smallest rows apart."""
    return PrefillConfig(**({"tile_rows": 32, "tile_len": 16, "num_warps": 4, "num_stages": 2} | changes))


def attend(rows: Rows, config: PrefillConfig, *, first_row: int = 0) -> None:
    """Serve a row and all behind it, as a step does whose rows the host knows."""
    serve(
        rows,
        config,
        first_row=first_row,
        num_rows=len(rows.seq_lens) - first_row,
        first_token=sum(rows.query_lens[:first_row]),
    )


def serve(rows: Rows, config: PrefillConfig, **which: Any) -> None:
    paged_prefill(
        rows.q,
        rows.keys,
        rows.values,
        rows.block_table,
        rows.lens,
        rows.query_start,
        rows.out,
        scale=rows.scale,
        config=config,
        window_len=rows.window_len,
        softcap=rows.softcap,
        sinks=rows.sinks,
        scales=rows.scales,
        **which,
    )


def prefill_rows(lens: list[tuple[int, int]], **shape: Any) -> Rows:
    return Rows(seq_lens=[both[0] for both in lens], query_lens=[both[1] for both in lens], **shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_see_the_positions_up_to_their_own(dtype: torch.dtype) -> None:
    rows = prefill_rows(RAGGED, dtype=dtype)
    attend(rows, small_config())
    rows.check()


@pytest.mark.parametrize("first_row", [1, 2, 5])
def test_rows_before_the_first_are_left_alone(first_row: int) -> None:
    rows = prefill_rows([(9, 1), (20, 1), (5, 1), (8, 8), (30, 4), (17, 16)])
    attend(rows, small_config(), first_row=first_row)
    rows.check(first_row=first_row)


@pytest.mark.parametrize("first_row", [2, 3, 5])
def test_the_first_row_may_be_known_on_the_device_alone(first_row: int) -> None:
    rows = prefill_rows([(9, 1), (20, 1), (5, 1), (8, 8), (30, 4)])
    on_device = torch.tensor([first_row], dtype=torch.int32, device=DEVICE)
    # More rows than there are: the host knows a bound.
    serve(rows, small_config(), first_row=on_device, num_rows=16)
    rows.check(first_row=first_row)


def test_no_row_is_served_if_the_first_is_behind_the_last() -> None:
    rows = prefill_rows([(9, 1), (20, 1)])
    on_device = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    serve(rows, small_config(), first_row=on_device, num_rows=3)
    assert rows.out.isnan().all()


def test_rows_of_one_token_can_be_left_to_the_decode_kernel_and_padding_has_none() -> None:
    rows = prefill_rows([(9, 1), (20, 7), (5, 1), (8, 8), (0, 0), (0, 0)])
    serve(rows, small_config(), first_row=0, num_rows=6, skips_single=True)
    singles = [0, 8]
    assert rows.out[singles].isnan().all()
    others = [token for token in range(17) if token not in singles]
    assert rows.out[others].isfinite().all()
    served = rows.out.clone()
    attend(rows, small_config())
    rows.check()
    assert torch.equal(rows.out[others], served[others])


@pytest.mark.parametrize("leftover", [torch.nan, torch.inf])
@pytest.mark.parametrize("window_len", [None, 20])
def test_what_somebody_left_in_a_block_is_not_read(window_len: int | None, leftover: float) -> None:
    rows = prefill_rows([(21, 21), (35, 3), (1, 1)], leftover=leftover, window_len=window_len, head_dim=24)
    assert not rows.values[rows.block_table[1, 2].long(), :, -1].isfinite().any()
    attend(rows, small_config())
    rows.check()


@pytest.mark.slow
def test_a_tile_finds_its_row_among_more_than_are_looked_at_together() -> None:
    # Padding does not stand before other rows, but a kernel cannot tell, and interpreted it costs less.
    lens = [(3, 2), *[(0, 0)] * 254, (5, 5), (20, 19), (1, 1), (17, 17)]
    rows = prefill_rows(lens, num_heads=1, num_kv_heads=1, head_dim=16)
    attend(rows, small_config(tile_rows=16))
    rows.check()


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 16, 37] if ON_GPU else [1, 2, 3, 7, 18])
def test_each_tile_finds_its_row_among_any_number(num_rows: int) -> None:
    lens = [((5 * row) % 23 + 2, (3 * row) % 20 + 1) for row in range(num_rows)]
    rows = prefill_rows(
        [(max(seq_len, queries), queries) for seq_len, queries in lens], num_heads=2, num_kv_heads=1
    )
    attend(rows, small_config(tile_rows=16))
    rows.check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (2, 1), (8, 2), (7, 1), (8, 1), (34, 2)])
def test_any_number_of_query_heads_shares_a_kv_head(num_heads: int, num_kv_heads: int) -> None:
    rows = prefill_rows([(6, 6), (19, 3)], num_heads=num_heads, num_kv_heads=num_kv_heads)
    attend(rows, small_config())
    rows.check()


@pytest.mark.parametrize(
    ("head_dim", "block_len"), [(8, 16), (64, 16), (80, 16), (96, 32), (128, 5), (256, 16), (32, 1), (80, 5)]
)
def test_heads_and_blocks_of_any_size(head_dim: int, block_len: int) -> None:
    rows = prefill_rows([(20, 20), (19, 4)], head_dim=head_dim, block_len=block_len)
    attend(rows, small_config())
    rows.check()


@pytest.mark.slow
@pytest.mark.parametrize("window_len", [1, 5, 16, 17, 40, 1000])
def test_a_window_hides_what_lies_further_back(window_len: int) -> None:
    rows = prefill_rows(
        [(1, 1), (17, 17), (60, 20), (50, 50)], num_heads=2, num_kv_heads=1, window_len=window_len
    )
    attend(rows, small_config())
    rows.check()


@pytest.mark.parametrize("window_len", [None, 6])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_scores_are_capped_and_a_sink_takes_its_share(
    softcap: float | None, has_sinks: bool, window_len: int | None
) -> None:
    sinks = random(4, dtype=torch.float32, seed=5) if has_sinks else None
    rows = prefill_rows([(33, 20), (10, 10)], softcap=softcap, sinks=sinks, scale=1.0, window_len=window_len)
    attend(rows, small_config())
    rows.check()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
def test_a_cache_of_another_dtype_is_taken_in_the_dtype_of_the_queries(cache_dtype: torch.dtype) -> None:
    dtype = torch.float16 if cache_dtype == torch.float32 else torch.float32
    rows = prefill_rows([(3, 2), (50, 50)], dtype=dtype, cache_dtype=cache_dtype)
    attend(rows, small_config())
    rows.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(torch.float32, FP8_DTYPES[0]), (torch.bfloat16, FP8_DTYPES[1])]
)
def test_a_cache_of_8_bits_is_read_with_its_scales(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    scales = (torch.tensor([0.3, 2.0], device=DEVICE), torch.tensor([1.7, 0.05], device=DEVICE))
    sinks = random(4, dtype=torch.float32, seed=5)
    rows = prefill_rows(
        RAGGED, dtype=dtype, cache_dtype=cache_dtype, sinks=sinks, softcap=5.0, window_len=50, scales=scales
    )
    attend(rows, small_config())
    rows.check()


# numpy's, in the interpreter
@pytest.mark.filterwarnings(
    "ignore:All-NaN slice encountered", "ignore:invalid value encountered in subtract"
)
def test_queries_beyond_what_a_product_with_8_bits_holds_are_cut_and_nan_stays() -> None:
    rows = prefill_rows([(40, 1), (9, 9)], dtype=torch.bfloat16, cache_dtype=FP8_DTYPES[0])
    assert_queries_are_cut_and_nan_stays(rows, lambda: attend(rows, small_config()))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_with_the_configuration_of_the_device(dtype: torch.dtype, head_dim: int) -> None:
    seq_len = 1100 if ON_GPU else 200
    memory = shared_bytes(torch.empty(0, device=DEVICE).device)
    rows = prefill_rows(
        [(seq_len, 90), (7, 7)], num_heads=4, num_kv_heads=1, head_dim=head_dim, dtype=dtype, scale=0.1
    )
    attend(rows, prefill_config(head_dim=head_dim, dtype=dtype, shared_bytes=memory))
    rows.check()


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_keys_and_values_fit_the_memory_of_the_device(
    dtype: torch.dtype, head_dim: int, shared_kib: int
) -> None:
    config = prefill_config(head_dim=head_dim, dtype=dtype, shared_bytes=shared_kib * 1024)
    rows = config.tile_rows + 2 * config.tile_len * config.num_stages
    assert rows * head_dim * dtype.itemsize <= shared_kib * 1024
