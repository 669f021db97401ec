from pathlib import Path

import pytest
import torch

from loadtest.figures import Rows
from loadtest.kernel_benchmark import compile_ahead, kernel_shapes, num_inputs, run_benchmark


def no_rows() -> Rows:
    raise AssertionError("there is nothing to measure on")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_it_is_said() -> None:
    with pytest.raises(SystemExit, match="there is no CUDA device"):
        run_benchmark(
            ["--sweep"],
            description="",
            search_option="--sweep",
            search_help="",
            measure=lambda _: no_rows(),
            search=no_rows,
        )


def test_kernels_are_measured_on_every_shape_in_the_order_of_names() -> None:
    llama, qwen = kernel_shapes()
    assert (llama.name, llama.has_qk_norm, llama.num_heads) == ("llama-3.1-8b", False, 32)
    assert (qwen.name, qwen.has_qk_norm, qwen.num_heads) == ("qwen3-0.6b", True, 16)


def test_inputs_together_exceed_the_cache_unless_a_graph_has_not_so_many_calls() -> None:
    assert [num_inputs(size) for size in (1, 32 * 2**20, 2**30)] == [32, 5, 1]


@pytest.mark.slow
def test_each_way_is_launched_in_a_process_of_its_own(tmp_path: Path) -> None:
    ways = [tmp_path / name for name in "abc"]
    compile_ahead(Path.touch, ways)
    assert all(way.exists() for way in ways)
    with pytest.raises(FileNotFoundError):
        compile_ahead(Path.touch, [tmp_path / "nowhere" / "a"])
