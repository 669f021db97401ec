import pytest
import torch

pytest.importorskip("triton")
from loadtest import linears
from loadtest.model_shapes import Shape, known_shapes


@pytest.mark.parametrize("shape", known_shapes(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("num_tokens", linears.SWEPT_TOKENS)
def test_every_product_has_other_ways_and_they_differ(shape: Shape, num_tokens: int) -> None:
    for product in linears.products(shape):
        ways = linears.other_configs(product, num_tokens)
        assert len(ways) >= 6
        assert len({linears.named(way) for way in ways}) == len(ways)
        if num_tokens > 1:
            assert all(way.tile_len >= 16 * way.num_warps for way in ways)


def test_a_layer_reads_the_weights_of_its_four_products() -> None:
    (qwen,) = known_shapes(["qwen3-0.6b"])
    products = linears.products(qwen)
    assert [product.name for product in products] == ["qkv", "o", "gate_up", "down", "head"]
    assert sum(product.num_rows * product.in_features for product in products[:4]) == (
        1024 * (4096 + 2 * 3072) + 2048 * 1024 + 3072 * 1024
    )


def test_without_a_gpu_the_program_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="there is no CUDA device"):
        linears.main([])
