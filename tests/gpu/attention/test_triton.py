import dataclasses

import pytest
import torch
import torch.nn.functional as F

from asyncserve.gpu.attention.interface import AttentionLayer, StepAttention
from asyncserve.kv_spec import FullAttention
from tests.contracts.attention_contract import AttentionContract, Shape, Simulation
from tests.gpu.attention.padding import padded
from tests.gpu.kernels.machine import DEVICE, MARKS, ON_GPU
from tests.gpu.synchronization import waits_are_errors

pytest.importorskip("triton")
from asyncserve.gpu.attention.triton import TritonAttention, lacking_capability
from asyncserve.gpu.kernels.paged_decode import DecodeConfig
from asyncserve.gpu.kernels.paged_prefill import PrefillConfig

# In the interpreter a program takes milliseconds, and the contract makes thousands.
pytestmark = [*MARKS, pytest.mark.slow]


class TritonInPieces(TritonAttention):
    """With tiles and splits so small that the smallest rows are taken apart."""

    def __init__(self) -> None:
        super().__init__(
            decode=DecodeConfig(tile_len=16, num_warps=4, num_stages=3, num_programs=8),
            prefill=PrefillConfig(tile_rows=16, tile_len=16, num_warps=4, num_stages=2),
        )


class TestTritonInPieces(AttentionContract):
    backend_class = TritonInPieces
    device = DEVICE
    is_exact = not ON_GPU  # the interpreter's cast to 8 bits loses what it carries

    def simulate(self, shape: Shape) -> Simulation:
        # It keeps nothing for a step's later layers, so that in the interpreter one is enough for each group.
        if not ON_GPU and shape.num_groups == 1:
            shape = dataclasses.replace(shape, num_layers=1)
        return super().simulate(shape)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
class TestTriton(AttentionContract):
    backend_class = TritonAttention
    device = DEVICE


def test_long_prompts_in_chunks_beside_decoding_rows() -> None:
    simulation = Simulation(TritonInPieces(), DEVICE, Shape(num_layers=1, head_dim=32))
    first, second, third = (simulation.add_sequence() for _ in range(3))
    simulation.step([(first, 50)])
    simulation.step([(first, 1), (second, 20), (third, 2)])
    simulation.step([(first, 1), (second, 33), (third, 1)])
    simulation.step([(third, 1), (first, 1), (second, 17)])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
@pytest.mark.parametrize("window_len", [None, 100])
def test_hundreds_of_positions_with_the_heads_of_a_real_model(window_len: int | None) -> None:
    shape = Shape(
        num_heads=4,
        num_kv_heads=1,
        head_dim=128,
        block_len=16,
        num_layers=1,
        window_len=window_len,
    )
    simulation = Simulation(TritonAttention(), DEVICE, shape)
    first, second = simulation.add_sequence(), simulation.add_sequence()
    simulation.step([(first, 150), (second, 65)])
    simulation.step([(first, 1), (second, 90)])
    simulation.step([(first, 1), (second, 1)])


@pytest.mark.parametrize(
    ("query_lens", "num_long_rows"),
    [([1, 1, 1], 0), ([1, 1, 1], 2), ([1, 6, 1, 20], 3), ([1, 1, 5], 1), ([3, 4], 2)],
)
def test_a_padded_step_gives_what_the_same_rows_alone_give(query_lens: list[int], num_long_rows: int) -> None:
    backend = TritonInPieces()
    simulation = Simulation(backend, DEVICE, Shape(num_layers=1))
    sequences = [simulation.add_sequence() for _ in query_lens]
    simulation.step([(sequence, 7 + 9 * sequence) for sequence in sequences])
    rows = list(zip(sequences, query_lens, strict=True))
    batch = simulation.batch(rows, [7 + 9 * sequence for sequence in sequences])
    num_tokens = batch.num_tokens
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)
    q, k, v = (torch.randn(num_tokens, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    planned = backend.plan(batch, simulation.kv_cache)
    alone = StepAttention(backend, batch, simulation.kv_cache, planned).run(layer, q, k, v)
    any_block = simulation.free[0]
    for tensor in (*simulation.kv_cache.keys, *simulation.kv_cache.values):
        tensor[any_block] = torch.nan
    # As many tokens as rows if each has one: then token i is the one of row i.
    more = padded(
        batch,
        num_rows=6,
        num_tokens=num_tokens + 6 - len(query_lens),
        num_long_rows=num_long_rows,
        any_block=any_block,
    )
    q, k, v = (F.pad(tensor, (0, 0, 0, 0, 0, more.num_tokens - num_tokens)) for tensor in (q, k, v))
    planned = backend.plan(more, simulation.kv_cache)
    attended = StepAttention(backend, more, simulation.kv_cache, planned).attend(layer, q, k, v)
    torch.testing.assert_close(attended[:num_tokens], alone, rtol=0, atol=1e-5)


def test_what_it_does_not_serve_is_said() -> None:
    spec = FullAttention(block_len=16, num_kv_heads=1, head_dim=512, dtype="bfloat16")
    assert TritonAttention().supports(spec, DEVICE) == "head_dim is 512; it serves at most 256"


@pytest.mark.parametrize(
    ("capability", "dtype", "lack"),
    [
        ((9, 0), "float8_e4m3fn", None),
        ((8, 9), "float8_e4m3fn", None),
        (
            (8, 6),
            "float8_e4m3fn",
            "for float8_e4m3fn (fp8_e5m2 would do) it needs compute capability 8.9, the device has 8.6",
        ),
        ((8, 0), "float8_e5m2", None),
        ((7, 5), "bfloat16", "it needs compute capability 8.0, the device has 7.5"),
        ((7, 5), "float8_e4m3fn", "it needs compute capability 8.9, the device has 7.5"),
    ],
)
def test_what_a_device_lacks_for_a_dtype_is_said(
    capability: tuple[int, int], dtype: str, lack: str | None
) -> None:
    assert lacking_capability(capability, dtype) == lack


def test_the_steps_own_k_and_v_are_read_from_the_cache() -> None:
    backend = TritonAttention()
    simulation = Simulation(backend, DEVICE, Shape(num_layers=1))
    sequences = [simulation.add_sequence() for _ in range(2)]
    batch = simulation.batch([(sequences[0], 1), (sequences[1], 6)], [0, 0])
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)
    q, k, v = (torch.randn(7, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    planned = backend.plan(batch, simulation.kv_cache)
    attention = StepAttention(backend, batch, simulation.kv_cache, planned)
    whole = attention.run(layer, q, k, v)
    assert torch.equal(attention.attend(layer, q, k.fill_(torch.nan), v.fill_(torch.nan)), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU")
def test_the_host_waits_for_nothing() -> None:
    backend = TritonAttention()
    simulation = Simulation(backend, DEVICE, Shape(num_layers=1))
    sequences = [simulation.add_sequence() for _ in range(3)]
    batch = simulation.batch([(sequences[0], 1), (sequences[1], 6), (sequences[2], 40)], [0, 0, 0])
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)
    q, k, v = (torch.randn(47, heads, 16, device=DEVICE) for heads in (4, 2, 2))

    def step() -> None:
        backend.run(layer, q, k, v, batch, simulation.kv_cache, backend.plan(batch, simulation.kv_cache))

    step()
    with waits_are_errors():
        step()
