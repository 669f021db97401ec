import random

import torch

from asyncserve.gpu.attention.cpu import CPUAttention, _similar_rows
from tests.contracts.attention_contract import AttentionContract, Shape, Simulation


class TestCPU(AttentionContract):
    backend_class = CPUAttention
    device = torch.device("cpu")


def test_grouped_rows_are_each_row_once_with_bounded_padding() -> None:
    rng = random.Random(3)
    for _ in range(200):
        num_pages = [int(1.5 ** rng.randrange(1, 18)) for _ in range(rng.randrange(0, 40))]
        groups = _similar_rows(num_pages)
        assert sorted(row for group in groups for row in group) == list(range(len(num_pages)))
        for group in groups:
            pages = [num_pages[row] for row in group]
            assert max(pages) * len(pages) - sum(pages) <= max(32, sum(pages) // 3)


def test_rows_of_very_different_lengths_are_attended_in_groups() -> None:
    simulation = Simulation(CPUAttention(), torch.device("cpu"), Shape(block_len=2, num_layers=1))
    long, *short = [simulation.add_sequence() for _ in range(9)]
    simulation.step([(long, 100), *((sequence, 3) for sequence in short)])
    assert len(_similar_rows([51, *[2] * 8])) == 2
    for _ in range(3):
        simulation.step([(short[0], 1), (long, 1), *((sequence, 1) for sequence in short[1:])])


def test_long_prompts_are_attended_tile_by_tile() -> None:
    for window_len in (None, 150):
        shape = Shape(block_len=8, num_layers=1, window_len=window_len)
        simulation = Simulation(CPUAttention(), torch.device("cpu"), shape)
        sequence = simulation.add_sequence()
        simulation.step([(sequence, 300)])
        simulation.step([(sequence, 290)])
