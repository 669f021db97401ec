import pytest

pytest.importorskip("triton")
from loadtest import attention
from loadtest.kernel_benchmark import kernel_shapes


def test_one_pool_of_k_and_v_serves_every_shape() -> None:
    for shape in kernel_shapes():
        assert (shape.num_kv_heads, shape.head_dim) == (attention.NUM_KV_HEADS, attention.HEAD_DIM)


def test_other_ways_to_cut_are_timed_for_both_numbers_of_heads() -> None:
    found = list(attention.tuned_decode_cases())
    assert {shape.name for shape, _, _ in found} == {shape.name for shape in kernel_shapes()}
    assert all(len(seq_lens) in attention.TUNED_SPLITS for _, _, seq_lens in found)
