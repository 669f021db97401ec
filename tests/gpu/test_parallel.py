import multiprocessing
from pathlib import Path

import pytest
import torch

from asyncserve.gpu.parallel import TensorParallel


def test_one_rank_gets_back_its_own_tensor_without_a_process_group() -> None:
    x = torch.randn(2, 3)
    assert TensorParallel().all_reduce(x) is x
    assert TensorParallel().all_gather(x) is x


def _rank(rank: int, store: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        parallel = TensorParallel(rank, 2)
        x = torch.full((2, 2), float(rank + 1))
        assert parallel.all_gather(x.T).tolist() == [[1, 1, 2, 2]] * 2
        assert parallel.all_reduce(x) is x
        assert x.tolist() == [[3, 3]] * 2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_sum_and_concatenate(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "store")) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
