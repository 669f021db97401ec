import dataclasses
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from asyncserve.errors import ConfigError
from asyncserve.gpu.attention.interface import AttentionLayer, StepAttention
from asyncserve.kv_spec import FullAttention
from tests.contracts.attention_contract import AttentionContract, Shape, Simulation
from tests.gpu.attention.library_stand_ins import flash_attn_varlen_func
from tests.gpu.attention.library_steps import a_step_that_waits_for_nothing, hundreds_of_positions
from tests.gpu.attention.padding import padded
from tests.gpu.kernels.machine import DEVICE, ON_GPU

pytest.importorskip("triton")
from asyncserve.gpu.attention.flash_attn import FlashAttention, unserved_shape
from asyncserve.gpu.attention.triton import TritonStep

HAS_LIBRARY = ON_GPU and importlib.util.find_spec("flash_attn") is not None
NEEDS_LIBRARY = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_LIBRARY, reason="there is no GPU, or no flash-attn-4"),
    pytest.mark.filterwarnings("default"),  # of the library's compiler
]
CPU_ONLY = pytest.mark.skipif(ON_GPU, reason="with a GPU the library itself is tested")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[FlashAttention]:
    """Return the backend over a library that is not there."""
    library, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    return FlashAttention


def served(shape: Shape) -> Shape:
    """Return the shape with the dtype and the heads that come nearest among those that are served."""
    dtype = "bfloat16" if shape.dtype == "float32" else shape.dtype
    return dataclasses.replace(shape, dtype=dtype, head_dim=-(-shape.head_dim // 16) * 16)


class TestFlashAttention(AttentionContract):
    pytestmark = NEEDS_LIBRARY
    backend_class = FlashAttention
    device = DEVICE

    def simulate(self, shape: Shape) -> Simulation:
        return super().simulate(served(shape))


def mixed_steps(simulation: Simulation) -> None:
    first, second, third = (simulation.add_sequence() for _ in range(3))
    simulation.step([(first, 20)])
    simulation.step([(first, 1), (second, 9), (third, 0), (third, 2)])
    simulation.step([(first, 1), (second, 3), (third, 1)])
    simulation.step([(third, 1), (first, 1)])


# Not bfloat16, which the interpreter cuts off.
SHAPES = [
    Shape(num_layers=2, num_groups=2, dtype="float16"),
    Shape(num_layers=1, softcap=0.5, has_sinks=True, dtype="float16"),
    Shape(num_layers=1, window_len=5, frees_passed_blocks=True, dtype="float16"),
    Shape(num_layers=1, dtype="float32", cache_dtype="float16"),
]


@CPU_ONLY
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_one_token_and_of_several_meet_in_one_step(
    shape: Shape, stand_in: type[FlashAttention]
) -> None:
    mixed_steps(Simulation(stand_in(), DEVICE, shape))


def check_padded(backend: FlashAttention, query_lens: list[int], num_long_rows: int) -> None:
    """Hold a step with room for more against the same rows alone."""
    simulation = Simulation(backend, DEVICE, Shape(num_layers=1, dtype="float16"))
    sequences = [simulation.add_sequence() for _ in query_lens]
    simulation.step([(sequence, 7 + 9 * sequence) for sequence in sequences])
    rows = list(zip(sequences, query_lens, strict=True))
    batch = simulation.batch(rows, [7 + 9 * sequence for sequence in sequences])
    num_tokens = batch.num_tokens
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)
    q, k, v = (torch.randn(num_tokens, heads, 16, device=DEVICE).half() for heads in (4, 2, 2))
    kv_cache = simulation.kv_cache
    alone = StepAttention(backend, batch, kv_cache, backend.plan(batch, kv_cache)).run(layer, q, k, v)
    any_block = simulation.free[0]
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor[any_block] = torch.nan
    more = padded(
        batch, num_rows=6, num_tokens=num_tokens + 5, num_long_rows=num_long_rows, any_block=any_block
    )
    q, k, v = (F.pad(tensor, (0, 0, 0, 0, 0, 5)) for tensor in (q, k, v))

    def step() -> torch.Tensor:
        return StepAttention(backend, more, kv_cache, backend.plan(more, kv_cache)).attend(layer, q, k, v)

    attended = step()
    torch.testing.assert_close(attended[:num_tokens], alone, rtol=0, atol=3e-3)
    if not ON_GPU:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    held.zero_()
    graph.replay()
    torch.testing.assert_close(held[:num_tokens], alone, rtol=0, atol=3e-3)


PADDED = pytest.mark.parametrize(
    ("query_lens", "num_long_rows"),
    [([1, 1, 1], 2), ([1, 6, 1, 20], 3), ([1, 1, 5], 4), ([3, 4], 2), ([1, 1, 1, 1, 4, 3], 4)],
)


@CPU_ONLY
@pytest.mark.slow
@PADDED
def test_a_padded_step_gives_what_the_same_rows_alone_give(
    query_lens: list[int], num_long_rows: int, stand_in: type[FlashAttention]
) -> None:
    check_padded(stand_in(), query_lens, num_long_rows)


def test_more_rows_than_its_kernels_are_compiled_for_are_not_served(stand_in: type[FlashAttention]) -> None:
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)

    def is_served(num_rows: int) -> bool:
        step = TritonStep(
            num_decode_rows=0,
            num_prefill_rows=num_rows,
            first_prefill_row=0,
            first_prefill_token=0,
            is_mixed=False,
        )
        return stand_in().serves(layer, step)

    assert is_served(256)
    assert not is_served(257)


class TestOnGPU:
    pytestmark = NEEDS_LIBRARY

    @PADDED
    def test_a_graph_holds_a_padded_step(self, query_lens: list[int], num_long_rows: int) -> None:
        check_padded(FlashAttention(), query_lens, num_long_rows)

    @pytest.mark.parametrize("block_len", [16, 32])
    def test_hundreds_of_positions_with_the_heads_of_a_real_model(self, block_len: int) -> None:
        hundreds_of_positions(FlashAttention(), block_len=block_len)

    def test_the_host_waits_for_nothing(self) -> None:
        a_step_that_waits_for_nothing(FlashAttention(), head_dim=16)


def test_a_library_that_takes_no_block_tables_is_another_version(
    stand_in: type[FlashAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(q: torch.Tensor, cu_seqlens_q: torch.Tensor, softmax_scale: float, causal: bool) -> None:
        """Take less."""

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", older)
    with pytest.raises(ConfigError, match="takes no learnable_sink, page_table, seqused_k, softcap"):
        stand_in()


@pytest.mark.parametrize(
    ("block_len", "head_dim", "reason"),
    [
        (16, 128, None),
        (32, 16, None),
        (128, 128, "block_len is 128; it serves at most 32"),
        (16, 24, "head_dim is 24; it serves multiples of 16"),
    ],
)
def test_shapes_that_are_not_served_are_said(block_len: int, head_dim: int, reason: str | None) -> None:
    spec = FullAttention(block_len=block_len, num_kv_heads=1, head_dim=head_dim, dtype="bfloat16")
    assert unserved_shape(spec) == reason
