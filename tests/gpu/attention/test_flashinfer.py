import dataclasses
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.kv_spec import FullAttention
from tests.contracts.attention_contract import AttentionContract, Shape, Simulation
from tests.gpu.attention.library_stand_ins import BatchPrefillWithPagedKVCacheWrapper
from tests.gpu.attention.library_steps import a_step_that_waits_for_nothing, hundreds_of_positions
from tests.gpu.attention.padding import padded
from tests.gpu.kernels.machine import DEVICE, ON_GPU

pytest.importorskip("triton")
from asyncserve.gpu.attention import flashinfer
from asyncserve.gpu.attention.flashinfer import FlashInfer, page_numbers, unserved_heads

HAS_LIBRARY = ON_GPU and importlib.util.find_spec("flashinfer") is not None
NEEDS_LIBRARY = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_LIBRARY, reason="there is no GPU, or no flashinfer-python"),
    pytest.mark.filterwarnings("default"),  # of the library
]
CPU_ONLY = pytest.mark.skipif(ON_GPU, reason="with a GPU the library itself is tested")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[FlashInfer]:
    """Return the backend over a library, and a CUDA, that are not there."""
    library = ModuleType("flashinfer")
    library.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "Event", Arrived)
    return FlashInfer


class Arrived:
    """An event of what is done at once."""

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """It has happened."""
        return True


class Underway:
    """An event of what is done only once somebody has waited for it."""

    def __init__(self) -> None:
        self.is_over = True

    def record(self) -> None:
        """Begin."""
        self.is_over = False

    def query(self) -> bool:
        """Return whether it has happened."""
        return self.is_over

    def synchronize(self) -> None:
        """Wait."""
        self.is_over = True


class TestFlashInfer(AttentionContract):
    """In the one dtype and the one length of heads that models on a GPU mostly have: it compiles for each."""

    pytestmark = NEEDS_LIBRARY
    backend_class = FlashInfer
    device = DEVICE

    def simulate(self, shape: Shape) -> Simulation:
        return super().simulate(dataclasses.replace(shape, dtype="bfloat16", head_dim=128))


@CPU_ONLY
@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_layers=4, num_groups=2),
        Shape(num_layers=1, softcap=0.5, has_sinks=True),
        Shape(num_layers=1, window_len=5, frees_passed_blocks=True),
    ],
)
def test_rows_of_one_token_and_of_several_meet_in_one_step(shape: Shape, stand_in: type[FlashInfer]) -> None:
    # Not bfloat16, which the interpreter cuts off.
    simulation = Simulation(stand_in(), DEVICE, dataclasses.replace(shape, dtype="float16"))
    first, second, third = (simulation.add_sequence() for _ in range(3))
    simulation.step([(first, 20)])
    simulation.step([(first, 1), (second, 9), (third, 0), (third, 2)])
    simulation.step([(first, 1), (second, 3), (third, 1)])
    simulation.step([(third, 1), (first, 1)])


@CPU_ONLY
def test_layers_of_a_kind_are_cut_for_once_a_step_and_places_serve_again(stand_in: type[FlashInfer]) -> None:
    backend = stand_in()
    simulation = Simulation(backend, DEVICE, Shape(dtype="float16", num_layers=3))
    sequence = simulation.add_sequence()
    for _ in range(3):
        simulation.step([(sequence, 2)])
    places = backend._places
    assert len(places._free) + len(places._taken) == 1


@CPU_ONLY
def test_a_cut_is_not_written_over_before_it_has_arrived(
    stand_in: type[FlashInfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Underway)
    monkeypatch.setattr(flashinfer, "_MOST_PLACES", 2)
    backend = stand_in()
    simulation = Simulation(backend, DEVICE, Shape(dtype="float16", num_layers=1))
    sequence = simulation.add_sequence()
    places = backend._places

    def taken() -> flashinfer._Place:
        simulation.step([(sequence, 2)])
        [place] = places._taken
        assert not place.sent.query()
        return place

    first, second = taken(), taken()
    assert first is not second
    second.sent.synchronize()
    assert taken() is second
    assert not first.sent.query(), "nobody waited"
    # Both are under way, and there are no more: the older one is waited for.
    assert taken() is first


@CPU_ONLY
@pytest.mark.slow
def test_a_step_whose_lengths_the_host_does_not_know_is_left_to_triton(stand_in: type[FlashInfer]) -> None:
    backend = stand_in()
    simulation = Simulation(backend, DEVICE, Shape(dtype="float16", num_layers=1))
    batch = simulation.batch([(simulation.add_sequence(), 5)], [0])
    more = padded(batch, num_rows=2, num_tokens=7, num_long_rows=1, any_block=0)
    layer = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=1.0)
    q = torch.randn(7, 4, 16).half()
    planned = backend.plan(more, simulation.kv_cache)
    assert backend.run(layer, q, q, q, more, simulation.kv_cache, planned)[:5].isfinite().all()
    assert not backend._places._taken


class TestOnGPU:
    pytestmark = NEEDS_LIBRARY

    def test_hundreds_of_positions(self) -> None:
        hundreds_of_positions(FlashInfer(), block_len=16)

    def test_the_host_waits_for_nothing(self) -> None:
        a_step_that_waits_for_nothing(FlashInfer(), head_dim=128)


def test_pages_of_all_rows_stand_one_after_the_other() -> None:
    table = torch.tensor([[5, 6, 7], [1, 9, 9], [9, 9, 9], [2, 3, 9]], dtype=torch.int32)
    pages = page_numbers(table, [3, 1, 0, 2])
    assert pages.tolist() == [5, 6, 7, 1, 2, 3]
    assert pages.dtype == torch.int32


@pytest.mark.parametrize(
    ("head_dim", "reason"), [(128, None), (96, "head_dim is 96; it serves 64, 128, 256")]
)
def test_heads_that_are_not_served_are_said(head_dim: int, reason: str | None) -> None:
    spec = FullAttention(block_len=16, num_kv_heads=1, head_dim=head_dim, dtype="bfloat16")
    assert unserved_heads(spec) == reason
