from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from loadtest.kernel_benchmark import Rows, compile_ahead, run_benchmark


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
            copy_gbps=lambda: 1.0,
            measure=lambda _: no_rows(),
            search=no_rows,
        )


@pytest.mark.slow
def test_each_way_is_launched_in_a_process_of_its_own(tmp_path: Path) -> None:
    ways = [tmp_path / name for name in "abc"]
    compile_ahead(Path.touch, ways)
    assert all(way.exists() for way in ways)
    with pytest.raises(FileNotFoundError):
        compile_ahead(Path.touch, [tmp_path / "nowhere" / "a"])
