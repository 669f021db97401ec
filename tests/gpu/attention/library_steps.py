"""Steps that every backend of a library is put through where the library is."""

import torch

from asyncserve.gpu.attention.interface import AttentionBackend, AttentionLayer
from tests.contracts.attention_contract import Shape, Simulation
from tests.gpu.kernels.machine import DEVICE
from tests.gpu.synchronization import waits_are_errors


def hundreds_of_positions(backend: AttentionBackend, *, block_len: int) -> None:
    """Hold prompts over many tiles, with the heads of a real model, against the plain reference."""
    shape = Shape(
        num_heads=4, num_kv_heads=1, head_dim=128, block_len=block_len, num_layers=1, dtype="bfloat16"
    )
    simulation = Simulation(backend, DEVICE, shape)
    first, second = simulation.add_sequence(), simulation.add_sequence()
    simulation.step([(first, 300), (second, 65)])
    simulation.step([(first, 1), (second, 290)])
    simulation.step([(first, 1), (second, 1)])


def a_step_that_waits_for_nothing(backend: AttentionBackend, *, head_dim: int) -> None:
    """Run a mixed step twice, the second time with an error wherever the host waits for the device."""
    simulation = Simulation(backend, DEVICE, Shape(num_layers=1, dtype="bfloat16", head_dim=head_dim))
    sequences = [simulation.add_sequence() for _ in range(3)]
    batch = simulation.batch([(sequences[0], 1), (sequences[1], 6), (sequences[2], 40)], [0, 0, 0])
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=1.0)
    q, k, v = (torch.randn(47, heads, head_dim, device=DEVICE).bfloat16() for heads in (4, 2, 2))
    kv_cache = simulation.kv_cache

    def step() -> None:
        backend.run(layer, q, k, v, batch, kv_cache, backend.plan(batch, kv_cache))

    step()
    with waits_are_errors():
        step()
