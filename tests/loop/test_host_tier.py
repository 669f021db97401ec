"""Host blocks: what is said to be there is there, whatever is stored, found, swapped, dropped or lost."""

from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncserve.errors import InvariantError
from asyncserve.loop.host_tier import BlockToSwap, HostCounts, HostTier, SwappedBlock
from asyncserve.loop.kv_pool import KVBlockPool
from asyncserve.loop.swap_cost import SwapCost
from asyncserve.step import BlockTransfer, StepPlan


def make_tier(*, num_blocks: int = 7, num_swap_blocks: int = 3, cost: SwapCost | None = None) -> HostTier:
    return HostTier(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        num_groups=2,
        cost=cost or SwapCost(0.0),
        counts=HostCounts(),
    )


def test_an_evicted_block_is_stored_in_the_next_plan_and_found_in_its_group() -> None:
    tier = make_tier()
    tier.keep_evicted(9, b"x", 1)
    host_block = tier.find(b"x", 1)
    assert host_block is not None
    assert tier.find(b"x", 0) is None
    assert tier.take_transfers() == ((BlockTransfer(9, host_block),), ())
    assert tier.take_transfers() == ((), ())
    assert (tier.num_used, tier.num_cached) == (0, 1)


def test_a_block_that_is_there_is_not_stored_again_but_stays_longer() -> None:
    tier = make_tier(num_blocks=3, num_swap_blocks=0)
    tier.keep_evicted(1, b"x", 0)
    tier.keep_evicted(2, b"y", 0)
    tier.take_transfers()
    tier.keep_evicted(3, b"x", 0)
    assert tier.take_transfers() == ((), ())
    tier.keep_evicted(4, b"z", 0)
    assert tier.find(b"x", 0) is not None
    assert tier.find(b"y", 0) is None


def test_what_is_stored_last_in_a_host_block_is_what_the_plan_stores() -> None:
    tier = make_tier(num_blocks=2, num_swap_blocks=0)
    tier.keep_evicted(5, b"x", 0)
    tier.keep_evicted(6, b"y", 0)
    assert tier.take_transfers() == ((BlockTransfer(6, 1),), ())
    assert tier.find(b"x", 0) is None


def test_a_block_to_be_loaded_is_not_overwritten_by_the_same_plan() -> None:
    tier = make_tier(num_blocks=2, num_swap_blocks=0)
    tier.keep_evicted(5, b"x", 0)
    tier.take_transfers()
    tier.hold(1)
    tier.load(1, 8)
    tier.keep_evicted(6, b"y", 0)  # no room
    assert tier.take_transfers() == ((), (BlockTransfer(8, 1),))
    tier.check()
    tier.keep_evicted(6, b"y", 0)
    assert tier.take_transfers() == ((BlockTransfer(6, 1),), ())


def test_without_room_for_evicted_blocks_none_is_stored() -> None:
    tier = make_tier(num_blocks=4, num_swap_blocks=3)
    tier.keep_evicted(5, b"x", 0)
    assert tier.find(b"x", 0) is None
    assert tier.take_transfers() == ((), ())


def test_a_swapped_sequence_keeps_all_its_blocks_and_stores_only_those_that_are_not_there() -> None:
    tier = make_tier()
    tier.keep_evicted(1, b"x", 0)
    tier.take_transfers()
    tables = [[BlockToSwap(2, b"x"), BlockToSwap(3, None)], [None, BlockToSwap(4, b"x")]]
    assert tier.swap_out(7, tables, 5)
    stores, _ = tier.take_transfers()
    assert [store.device_block for store in stores] == [3, 4]
    swapped = tier.swapped(7)
    assert swapped is not None
    assert swapped.num_tokens == 5
    assert swapped.tables == [
        [SwappedBlock(1, b"x"), SwappedBlock(stores[0].host_block, None)],
        [None, SwappedBlock(stores[1].host_block, b"x")],
    ]
    assert (tier.num_used, len(tier.swapped_ids)) == (3, 1)
    # Others may not take its blocks.
    for device_block in range(10, 20):
        tier.keep_evicted(device_block, bytes([device_block]), 0)
    assert tier.find(b"x", 0) == 1
    tier.check()
    tier.drop(7)
    tier.drop(7)
    assert (tier.num_used, len(tier.swapped_ids)) == (0, 0)
    assert tier.find(b"x", 1) is not None


def test_more_than_the_swap_space_is_not_swapped() -> None:
    tier = make_tier(num_swap_blocks=3)
    assert tier.swap_out(1, [[BlockToSwap(1, None), BlockToSwap(2, None)], []], 8)
    assert not tier.swap_out(2, [[BlockToSwap(3, None), BlockToSwap(4, None)], []], 8)
    assert tier.swapped(2) is None
    assert tier.swap_out(3, [[BlockToSwap(3, None)], []], 4)
    tier.check()


def test_cached_blocks_count_once_a_swapped_sequence_holds_them() -> None:
    tier = make_tier(num_swap_blocks=3)
    digests = [b"a", b"b", b"c", b"d"]
    for device_block, digest in enumerate(digests, start=1):
        tier.keep_evicted(device_block, digest, 0)
    assert not tier.swap_out(1, [[BlockToSwap(9, digest) for digest in digests], []], 8)
    assert tier.swap_out(1, [[BlockToSwap(9, digest) for digest in digests[1:]], []], 8)


def test_what_is_cheaper_to_compute_is_not_swapped() -> None:
    cost = SwapCost(block_s=1.0)
    tier = make_tier(cost=cost)
    tier.note_step(100, 0, 1.0)
    assert not tier.swap_out(1, [[BlockToSwap(1, None)], []], 99)
    assert tier.swap_out(1, [[BlockToSwap(1, None)], []], 101)


def test_what_a_failed_step_was_to_move_is_not_found_and_its_sequence_not_swapped() -> None:
    tier = make_tier()
    tier.keep_evicted(1, b"kept", 0)
    tier.swap_out(1, [[BlockToSwap(2, None)], []], 3)
    tier.take_transfers()
    kept = tier.find(b"kept", 0)
    assert kept is not None
    tier.hold(kept)
    tier.load(kept, 5)
    tier.keep_evicted(3, b"lost", 0)
    tier.swap_out(2, [[BlockToSwap(4, None)], []], 3)
    stores, loads = tier.take_transfers()
    plan = StepPlan(step_id=0, sequences=(), block_stores=stores, block_loads=loads)
    assert tier.lose_transfers([plan]) == {5}
    assert tier.find(b"lost", 0) is None
    assert tier.find(b"kept", 0) == kept
    assert tier.swapped(2) is None
    assert tier.swapped(1) is not None
    tier.check()


def evict(tier: HostTier, num: int, first: int = 1) -> list[bytes]:
    digests = [bytes([block_id]) for block_id in range(first, first + num)]
    for block_id, digest in enumerate(digests, first):
        tier.keep_evicted(block_id, digest, 0)
    return digests


def test_what_the_bus_does_not_carry_beside_steps_is_forgotten_the_tails_first() -> None:
    tier = make_tier(num_blocks=30, num_swap_blocks=0, cost=SwapCost(block_s=0.005))  # four in 10 ms
    digests = evict(tier, 6)
    stores, loads = tier.take_transfers()
    assert [store.device_block for store in stores] == [3, 4, 5, 6]
    assert not loads
    assert [tier.find(digest, 0) is not None for digest in digests] == [False] * 2 + [True] * 4
    # Nothing more until steps have given the bus time; then as much as they took, and no more than at first,
    # but for an eighth of a step's time.
    evict(tier, 2, first=10)
    assert tier.take_transfers() == ((), ())
    tier.note_step(1, 1, 0.005)
    evict(tier, 4, first=20)
    assert [store.device_block for store in tier.take_transfers()[0]] == [22, 23]
    tier.note_step(1, 1, 0.02)
    evict(tier, 6, first=30)
    assert len(tier.take_transfers()[0]) == 5
    tier.note_step(1, 1, 0.0)  # of unknown length
    evict(tier, 6, first=40)
    assert len(tier.take_transfers()[0]) == 4
    tier.check()


def test_what_somebody_holds_is_stored_whatever_the_bus_carries() -> None:
    tier = make_tier(num_blocks=30, num_swap_blocks=10, cost=SwapCost(block_s=1.0))
    evict(tier, 2)
    loaded = tier.find(bytes([1]), 0)
    assert loaded is not None
    tier.hold(loaded)
    tier.load(loaded, 9)
    assert tier.swap_out(5, [[BlockToSwap(6, None), BlockToSwap(7, b"x")]], 3)
    stores, loads = tier.take_transfers()
    assert [store.device_block for store in stores] == [1, 6, 7]  # instead of one
    assert loads == (BlockTransfer(9, loaded),)
    tier.check()


def test_what_is_not_to_be_trusted_is_not_found() -> None:
    tier = make_tier()
    tier.keep_evicted(1, b"x", 0)
    tier.keep_evicted(2, b"x", 1)
    tier.forget(b"x", 0)
    tier.forget(b"y", 0)
    assert tier.find(b"x", 0) is None
    assert tier.find(b"x", 1) is not None


def test_check_notices_blocks_that_nobody_knows_of() -> None:
    tier = make_tier()
    tier.hold(1)
    with pytest.raises(InvariantError, match="references"):
        tier.check()


class Plan(NamedTuple):
    """A plan and what its step writes: device block → content."""

    plan: StepPlan
    writes: dict[int, bytes]


NUM_DEVICE_BLOCKS = 8
GARBAGE = b"?"


class TierAndPool(RuleBasedStateMachine):
    """A pool that evicts to the host, sequences that hold blocks, and a device that does what plans say.

    A sequence is a list of (device block, content); the content of full blocks is their digest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier(num_blocks=6, num_swap_blocks=3)
        self.pool = KVBlockPool(NUM_DEVICE_BLOCKS, 1, note_evicted=self.tier.keep_evicted)
        self.running: list[list[tuple[int, bytes]]] = []
        self.swapped: dict[int, list[bytes]] = {}
        self.writes: dict[int, bytes] = {}
        self.in_flight: deque[Plan] = deque()
        self.on_device: dict[int, bytes] = dict.fromkeys(range(NUM_DEVICE_BLOCKS), GARBAGE)
        self.on_host: dict[int, bytes] = {}
        self.num_contents = 0
        self.num_ids = 0

    def new_content(self, *, full: bool) -> bytes:
        self.num_contents += 1
        return f"{'full' if full else 'part'} {self.num_contents}".encode()

    def compute(self, num: int, table: list[tuple[int, bytes]]) -> None:
        """Give a sequence new blocks, all but the last full, written by the next step."""
        for place, block_id in enumerate(self.pool.allocate(num, 0)):
            content = self.new_content(full=place < num - 1)
            if content.startswith(b"full"):
                self.pool.register(block_id, content)
            self.writes[block_id] = content
            table.append((block_id, content))

    @rule(num=st.integers(1, 4))
    def begin(self, num: int) -> None:
        if num <= self.pool.num_free:
            table: list[tuple[int, bytes]] = []
            self.compute(num, table)
            self.running.append(table)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), swaps=st.booleans())
    def leave(self, data: st.DataObject, swaps: bool) -> None:
        """A sequence ends or is preempted, once no step in flight mentions it."""
        self.make_plan()
        while self.in_flight:
            self.apply()
        table = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if swaps:
            self.num_ids += 1
            blocks = [
                BlockToSwap(block_id, content if content.startswith(b"full") else None)
                for block_id, content in table
            ]
            if self.tier.swap_out(self.num_ids, [blocks], 1):
                self.swapped[self.num_ids] = [content for _, content in table]
        self.pool.release([block_id for block_id, _ in table])

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.swapped)))
        swapped = self.tier.swapped(sequence_id)
        contents = self.swapped[sequence_id]
        if swapped is None:
            del self.swapped[sequence_id]
            return
        if len(contents) > self.pool.num_free:
            return
        (blocks,) = swapped.tables
        table = []
        for block, content in zip(blocks, contents, strict=True):
            assert block is not None
            self.tier.hold(block.host_block)
            (block_id,) = self.pool.allocate(1, 0)
            self.tier.load(block.host_block, block_id)
            table.append((block_id, content))
        self.tier.drop(sequence_id)
        del self.swapped[sequence_id]
        self.running.append(table)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.swapped)))
        self.tier.drop(sequence_id)
        del self.swapped[sequence_id]

    @rule(number=st.integers(1, 40))
    def find(self, number: int) -> None:
        """A sequence asks for what an earlier one computed, and is given it from the device or the host."""
        content = f"full {number}".encode()
        block_id = self.pool.find(content, 0)
        if block_id is not None:
            self.pool.acquire(block_id)
            self.running.append([(block_id, content)])
        elif (host_block := self.tier.find(content, 0)) is not None and self.pool.num_free:
            self.tier.hold(host_block)
            (block_id,) = self.pool.allocate(1, 0)
            self.pool.register(block_id, content)
            self.tier.load(host_block, block_id)
            self.running.append([(block_id, content)])

    @rule()
    def make_plan(self) -> None:
        stores, loads = self.tier.take_transfers()
        assert len({store.host_block for store in stores}) == len(stores)
        plan = StepPlan(step_id=self.num_contents, sequences=(), block_stores=stores, block_loads=loads)
        self.in_flight.append(Plan(plan, self.writes))
        self.writes = {}

    @precondition(lambda self: self.in_flight)
    @rule()
    def apply(self) -> None:
        self.run(self.in_flight.popleft())

    def run(self, step: Plan) -> None:
        self.on_host |= {host: self.on_device[block] for block, host in step.plan.block_stores}
        self.on_device |= {block: self.on_host[host] for block, host in step.plan.block_loads}
        self.on_device |= step.writes

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self) -> None:
        """The oldest step fails, and what it was to move and to write is garbage; later ones run with it."""
        self.make_plan()
        plans = list(self.in_flight)
        failed = self.in_flight.popleft()
        self.on_host |= {host: GARBAGE for _, host in failed.plan.block_stores}
        self.on_device |= {block: GARBAGE for block, _ in failed.plan.block_loads}
        self.on_device |= dict.fromkeys(failed.writes, GARBAGE)
        lost = self.tier.lose_transfers([each.plan for each in plans])
        while self.in_flight:
            self.apply()
        wrong = lost | {block_id for each in plans for block_id in each.writes}
        for block_id in wrong:
            self.pool.unregister(block_id)
        # Whoever holds such a block is set back, and begins anew.
        for table in [table for table in self.running if any(block_id in wrong for block_id, _ in table)]:
            self.running.remove(table)
            self.pool.release([block_id for block_id, _ in table])

    @invariant()
    def pools_agree_with_who_holds_blocks(self) -> None:
        self.tier.check()
        self.pool.check([[block_id for block_id, _ in table] for table in self.running])

    @invariant()
    def what_is_said_to_be_there_will_be_there(self) -> None:
        """Let everything planned be run, on copies, and look."""
        on_device, on_host = dict(self.on_device), dict(self.on_host)
        writes = [each.writes for each in self.in_flight] + [self.writes]
        stores = [each.plan.block_stores for each in self.in_flight]
        loads = [each.plan.block_loads for each in self.in_flight]
        stores.append(tuple(BlockTransfer(block, host) for host, block in self.tier._stores.items()))
        loads.append(tuple(self.tier._loads))
        for stored, loaded, written in zip(stores, loads, writes, strict=True):
            on_host |= {host: on_device[block] for block, host in stored}
            on_device |= {block: on_host[host] for block, host in loaded}
            on_device |= written
        for number in range(1, self.num_contents + 1):
            content = f"full {number}".encode()
            block_id, host_block = self.pool.find(content, 0), self.tier.find(content, 0)
            assert block_id is None or on_device[block_id] == content
            assert host_block is None or on_host[host_block] == content
        for table in self.running:
            assert all(on_device[block_id] == content for block_id, content in table)
        for sequence_id, contents in self.swapped.items():
            swapped = self.tier.swapped(sequence_id)
            if swapped is not None:
                assert [on_host[host_block] for host_block in swapped.host_blocks] == contents


TierAndPool.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestTierAndPool = TierAndPool.TestCase
