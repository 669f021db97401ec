import pickle

import pytest
import torch

from asyncserve.gpu.attention.cpu import _FREE_PADDING, CPUAttention
from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.gpu.attention.row_groups import similar_rows
from tests.contracts.attention_contract import AttentionContract, Shape, Simulation


class TestCPU(AttentionContract):
    backend_class = CPUAttention
    device = torch.device("cpu")


def test_rows_of_very_different_lengths_are_attended_in_groups() -> None:
    simulation = Simulation(CPUAttention(), torch.device("cpu"), Shape(block_len=2, num_layers=1))
    long, *short = [simulation.add_sequence() for _ in range(9)]
    simulation.step([(long, 100), *((sequence, 3) for sequence in short)])
    assert len(similar_rows([51, *[2] * 8], free_padding=_FREE_PADDING, most_pages=10**6)) == 2
    for _ in range(3):
        simulation.step([(short[0], 1), (long, 1), *((sequence, 1) for sequence in short[1:])])


@pytest.mark.slow
@pytest.mark.parametrize("window_len", [None, 50, 128, 150, 1000])
def test_long_prompts_are_attended_tile_by_tile(window_len: int | None) -> None:
    shape = Shape(block_len=8, num_layers=1, num_heads=2, num_kv_heads=1, window_len=window_len)
    simulation = Simulation(CPUAttention(), torch.device("cpu"), shape)
    sequence = simulation.add_sequence()
    simulation.step([(sequence, 300)])
    simulation.step([(sequence, 140)])


def test_a_step_over_a_long_context_keeps_nothing_as_large_as_its_scores() -> None:
    backend = CPUAttention()
    simulation = Simulation(backend, torch.device("cpu"), Shape(block_len=64, num_layers=1))
    sequence = simulation.add_sequence()
    batch = simulation.batch([(sequence, 300)], [200])
    planned = backend.plan(batch, simulation.kv_cache)
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)
    q, k = torch.randn(300, 4, 16), torch.randn(300, 2, 16)
    before = len(pickle.dumps(planned))
    backend.run(layer, q, k, k, batch, simulation.kv_cache, planned)
    assert len(pickle.dumps(planned)) == before
