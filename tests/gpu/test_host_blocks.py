"""Blocks go to the host and come back whole, whenever the copies are done."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu import host_blocks
from asyncserve.gpu.device import CpuDevice, Device, open_device
from asyncserve.gpu.host_blocks import HostBlocks, area_blocks, staging_bytes
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.staging import Staging
from asyncserve.kv_spec import FullAttention, KVGroup
from asyncserve.step import BlockTransfer
from tests.fakes.device import FakeDevice

NUM_BLOCKS = 24
NUM_HOST_BLOCKS = 40


def devices() -> list[object]:
    return [
        pytest.param(lambda: CpuDevice(num_threads=1), id="cpu"),
        pytest.param(FakeDevice, id="at once"),
        pytest.param(lambda: FakeDevice(late_copies=True), id="late"),
        pytest.param(
            lambda: open_device("cuda"),
            id="cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
            ],
        ),
    ]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened: Device = request.param()
    opened.activate()
    yield opened
    opened.synchronize()


def make_pages(device: Device) -> torch.Tensor:
    """Return the pages of a cache of two layers, block `b` full of the number `b`."""
    spec = FullAttention(block_len=2, num_kv_heads=2, head_dim=3, dtype="float32")
    group = KVGroup(group_id=0, spec=spec, layer_ids=(0, 1), num_blocks=NUM_BLOCKS)
    pages = KVCache([group], device=device.torch_device).pages
    pages.copy_(torch.arange(NUM_BLOCKS, dtype=torch.float32).view(-1, *[1] * (pages.dim() - 1)))
    return pages


def fill(pages: torch.Tensor, block_id: int, value: float) -> None:
    """Write a whole block, as a step does."""
    pages[block_id].fill_(value)


def content(pages: torch.Tensor, block_id: int) -> float:
    """Return what a whole block holds."""
    values = pages[block_id].reshape(-1)
    assert (values == values[0]).all(), f"block {block_id} is torn"
    return float(values[0])


def small_areas(monkeypatch: pytest.MonkeyPatch, pages: torch.Tensor, *, slab_blocks: int) -> None:
    """Let an area take two blocks, and a slab a few."""
    per_block = pages[0].numel() * pages.element_size()
    monkeypatch.setattr(host_blocks, "STAGING_BYTES", 2 * 8 * per_block)
    monkeypatch.setattr(host_blocks, "_SLAB_BYTES", slab_blocks * per_block)


def test_a_stored_block_comes_back_into_another(device: Device) -> None:
    pages = make_pages(device)
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    blocks.store([BlockTransfer(3, 1), BlockTransfer(5, 39)])
    blocks.load([BlockTransfer(7, 39), BlockTransfer(8, 1)])
    assert [content(pages, block_id) for block_id in (3, 5, 7, 8)] == [3, 5, 5, 3]


def test_a_block_that_is_written_in_the_same_step_is_stored_as_it_was_before(device: Device) -> None:
    pages = make_pages(device)
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    blocks.store([BlockTransfer(3, 1)])
    fill(pages, 3, 99.0)
    blocks.load([BlockTransfer(4, 1)])
    assert content(pages, 4) == 3.0


def test_what_is_stored_while_all_staging_is_in_use_waits_for_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = make_pages(device)
    small_areas(monkeypatch, pages, slab_blocks=7)
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    everything = [BlockTransfer(block_id, block_id + 10) for block_id in range(1, NUM_BLOCKS)]
    for round_ in range(3):
        blocks.store(everything)
        for block_id in range(1, NUM_BLOCKS):
            fill(pages, block_id, -1.0)
        # Backwards, so that the first to come back is the last that went.
        blocks.load([BlockTransfer(NUM_BLOCKS - block_id, block_id + 10) for block_id, _ in everything])
        expected = range(NUM_BLOCKS - 1, 0, -1) if round_ % 2 == 0 else range(1, NUM_BLOCKS)
        assert [content(pages, block_id) for block_id in range(1, NUM_BLOCKS)] == list(expected)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_stores_and_loads_moves_what_was_there(
    device: Device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    pages = make_pages(device)
    small_areas(monkeypatch, pages, slab_blocks=rng.choice([1, 4, 100]))
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    on_device = {block_id: float(block_id) for block_id in range(1, NUM_BLOCKS)}
    on_host: dict[int, float] = {}
    for step in range(60):
        num = rng.randint(1, 15)
        sources = rng.sample(sorted(on_device), num)
        if rng.random() < 0.5:
            targets = rng.sample(range(1, NUM_HOST_BLOCKS), num)
            blocks.store(list(map(BlockTransfer, sources, targets)))
            on_host |= {host: on_device[block] for block, host in zip(sources, targets, strict=True)}
        elif len(on_host) >= num:
            hosts = rng.sample(sorted(on_host), num)
            blocks.load(list(map(BlockTransfer, sources, hosts)))
            on_device |= {block: on_host[host] for block, host in zip(sources, hosts, strict=True)}
        for block_id in rng.sample(sorted(on_device), 3):
            on_device[block_id] = 100.0 + step
            fill(pages, block_id, on_device[block_id])
        assert {block_id: content(pages, block_id) for block_id in on_device} == on_device


def test_a_load_is_copied_beside_the_steps_before_it_and_only_its_own_step_waits() -> None:
    device = FakeDevice(late_copies=True)
    pages = make_pages(device)
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    blocks.store([BlockTransfer(3, 1)])
    (store,) = [event for event in device.events if not event.reached.is_set()]
    before = device.record_event()
    blocks.load([BlockTransfer(4, 1)])
    # The store it reads from had to be done; nothing else of the main stream is waited for by the copy.
    assert store.reached.is_set()
    assert before not in device.waited_for
    assert store in device.waited_for


def test_a_store_holds_nobody_up_while_there_is_room_in_staging() -> None:
    device = FakeDevice(late_copies=True)
    pages = make_pages(device)
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    for block_id in range(1, 9):
        blocks.store([BlockTransfer(block_id, block_id)])
        fill(pages, block_id, 0.0)
    assert device.num_pending_copies == 8
    blocks.store([BlockTransfer(9, 9)])
    assert device.num_pending_copies == 8  # the oldest had to be done for the ninth
    device.finish()


def test_staging_is_filled_from_the_host_again_when_it_was_scattered() -> None:
    device = FakeDevice(late_copies=True)
    pages = make_pages(device)
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    for _ in range(7):
        blocks.store([BlockTransfer(3, 1)])
    blocks.load([BlockTransfer(4, 1)])
    scattered = device.events[-1]
    for _ in range(7):
        blocks.load([BlockTransfer(4, 1)])
    assert scattered not in device.waited_for
    blocks.load([BlockTransfer(4, 1)])
    assert scattered in device.waited_for


def test_neighbours_on_the_host_go_in_one_copy() -> None:
    device = FakeDevice(late_copies=True)
    pages = make_pages(device)
    blocks = HostBlocks(pages, num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device))
    blocks.store([BlockTransfer(*pair) for pair in ((4, 12), (9, 11), (2, 10), (7, 20))])
    assert [len(host) for host, _ in device.pending_copies()] == [3, 1]
    device.finish()


def test_measuring_says_how_long_a_block_takes_and_leaves_the_cache_as_it_was(device: Device) -> None:
    pages = make_pages(device)
    blocks = HostBlocks(pages, num_blocks=5, device=device, staging=Staging(device))
    assert 0 < blocks.measure() < 10
    assert [content(pages, block_id) for block_id in range(NUM_BLOCKS)] == list(range(NUM_BLOCKS))


def test_what_disturbs_a_measurement_does_not_count(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    took_s = iter((9.0, 1.0, 5.0))
    times_s = iter([time_s for took in took_s for time_s in (0.0, took)])
    monkeypatch.setattr(host_blocks, "time", SimpleNamespace(perf_counter=lambda: next(times_s)))
    blocks = HostBlocks(make_pages(device), num_blocks=5, device=device, staging=Staging(device))
    assert blocks.measure() == 1.0 / 4


@pytest.mark.parametrize("host_block", [0, NUM_HOST_BLOCKS, -1])
def test_a_host_block_that_does_not_exist_is_refused(host_block: int) -> None:
    device = FakeDevice()
    blocks = HostBlocks(
        make_pages(device), num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device)
    )
    with pytest.raises(InvariantError, match="host block"):
        blocks.store([BlockTransfer(1, host_block)])


def test_a_host_block_without_content_is_not_loaded() -> None:
    device = FakeDevice()
    blocks = HostBlocks(
        make_pages(device), num_blocks=NUM_HOST_BLOCKS, device=device, staging=Staging(device)
    )
    blocks.store([BlockTransfer(1, 5)])
    with pytest.raises(InvariantError, match="nothing was stored"):
        blocks.load([BlockTransfer(2, 5), BlockTransfer(3, 6)])


def test_staging_takes_no_more_than_its_bound_and_no_more_than_the_host_holds() -> None:
    assert staging_bytes(1000, 0) == 0
    assert staging_bytes(1000, 5) == 8 * 5 * 1000
    assert staging_bytes(2**20, 10**6) == host_blocks.STAGING_BYTES
    assert area_blocks(2**40, 10) == 1
