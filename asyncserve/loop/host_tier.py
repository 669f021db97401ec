"""Blocks in the host's memory: of preempted sequences that will come back, and of prefixes the pool evicted.

Takes device blocks that are about to lose their content and gives the transfers of the next plan. Both kinds
lie in one pool of host blocks: those of a swapped sequence are held until it comes back; all that are full
are known by their digest, and those nobody holds are given out again, the longest unused first. Does not know
the tables of running sequences or when anything is preempted.

Why a host block holds what it is said to:
* a store is in the plan that is made next, before that plan's step can write the device block;
* a host block that a plan loads is held until that plan is made, so none of its stores overwrites it, and
  the device keeps the order of plans;
* what a failed step and those behind it in flight were to move is not known to have been moved
  (`lose_transfers`).

Evicted blocks are stored as far as the bus keeps up, and a little further where steps are long: what is
beyond that would hold up the plan's step, with all that decode in it, and is forgotten instead
(`_forget_excess`).
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncserve.errors import InvariantError
from asyncserve.loop.kv_pool import KVBlockPool
from asyncserve.loop.swap_cost import SwapCost
from asyncserve.observer import EngineStatistics
from asyncserve.step import BlockTransfer, StepPlan

_STAGED_S = 0.01
"""Seconds of the bus that staging memory on the device holds (512 MiB at 50 GB/s): so much of the evicted
blocks of a plan is copied beside its step; more, before it begins."""
_WAITED_SHARE = 0.125
"""Of the last step's time: so much longer the bus may take for a plan's evicted blocks, and hold up its step.
With a model of 8B on an H200, a step that computes prompts for 0.2 s evicts twice what staging holds, and a
block found again saves ten times what its copy takes."""


class SwappedBlock(NamedTuple):
    """A block of a swapped sequence: where it lies, and its digest if it is full and has one."""

    host_block: int
    digest: bytes | None


class SwappedSequence(NamedTuple):
    """What is kept of a preempted sequence.

    Args:
        tables: Per group, its blocks in order; None where it needs none.
        num_tokens: Positions whose KV they hold.
    """

    tables: Sequence[Sequence[SwappedBlock | None]]
    num_tokens: int

    @property
    def host_blocks(self) -> list[int]:
        """The host blocks of all groups."""
        return [block.host_block for table in self.tables for block in table if block is not None]


class BlockToSwap(NamedTuple):
    """A block of a sequence that is preempted; `digest` if it is full and has one."""

    device_block: int
    digest: bytes | None


@dataclass(slots=True)
class HostCounts:
    """What was done so far; it outlives a tier, which is lost with its device.

    Args:
        num_stored_blocks: That plans were to store.
        num_loaded_blocks: That plans were to load.
        num_swaps: Times a preempted sequence's blocks were kept.
        num_looked_up: Tokens of admitted sequences that were not cached on the device.
        num_found: Of those, tokens cached on the host.
    """

    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_swaps: int = 0
    num_looked_up: int = 0
    num_found: int = 0


class HostTier:
    """Gives out host blocks.

    Args:
        num_blocks: Host blocks, block 0 (never given out) included.
        num_swap_blocks: How many swapped sequences may hold.
        num_groups: KV groups.
        cost: Says what is worth swapping.
        counts: Kept up to date.
    """

    def __init__(
        self, *, num_blocks: int, num_swap_blocks: int, num_groups: int, cost: SwapCost, counts: HostCounts
    ) -> None:
        self._pool = KVBlockPool(num_blocks, num_groups)
        self._num_swap_blocks = num_swap_blocks
        self._keeps_evicted = num_swap_blocks < num_blocks - 1
        self._cost = cost
        self._counts = counts
        self._swapped: dict[int, SwappedSequence] = {}
        # Of the plan in the making; by host block, for what is stored last in one is what it holds.
        self._stores: dict[int, int] = {}
        self._loads: list[BlockTransfer] = []
        self._storable_s = _STAGED_S  # of the bus, which carries what was stored while steps run

    @property
    def num_used(self) -> int:
        """Host blocks that swapped sequences hold, or that the next plan loads."""
        return self._pool.num_usable - self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Host blocks that nobody holds and whose content can be found."""
        return self._pool.num_cached

    @property
    def swapped_ids(self) -> Collection[int]:
        """Sequences that wait with their blocks on the host."""
        return self._swapped.keys()

    def fill_statistics(self, statistics: EngineStatistics, bytes_per_block: int) -> None:
        """Write this part of the engine's state."""
        counts = self._counts
        statistics.num_host_blocks = self._pool.num_usable
        statistics.num_host_blocks_used = self.num_used
        statistics.num_host_blocks_cached = self.num_cached
        statistics.num_swapped = len(self._swapped)
        statistics.num_swaps = counts.num_swaps
        statistics.host_stored_bytes = counts.num_stored_blocks * bytes_per_block
        statistics.host_loaded_bytes = counts.num_loaded_blocks * bytes_per_block
        statistics.host_cache_queries = counts.num_looked_up
        statistics.host_cache_hits = counts.num_found

    # Cached prefixes

    def find(self, digest: bytes, group_id: int) -> int | None:
        """Return the host block with this content in a group, or None."""
        return self._pool.find(digest, group_id)

    def keep_evicted(self, device_block: int, digest: bytes, group_id: int) -> None:
        """Take a cached block of the device that is being given out anew."""
        if not self._keeps_evicted:
            return
        host_block = self._pool.find(digest, group_id)
        if host_block is not None:
            # It is there already, and was of use lately.
            self._pool.acquire(host_block)
        elif self._pool.num_free:
            (host_block,) = self._pool.allocate(1, group_id)
            self._pool.register(host_block, digest)
            self._stores[host_block] = device_block
        else:
            return
        self._pool.release([host_block])

    def load(self, host_block: int, device_block: int) -> None:
        """Let the next plan fill a new device block; the host block must be held, by `hold`."""
        self._loads.append(BlockTransfer(device_block, host_block))

    def note_lookup(self, num_looked_up: int, num_found: int) -> None:
        """Count tokens that the device had not cached, and those of them that are loaded from here."""
        self._counts.num_looked_up += num_looked_up
        self._counts.num_found += num_found

    def hold(self, host_block: int) -> None:
        """Keep a host block that was found until the next plan is made, so that it can be loaded."""
        self._pool.acquire(host_block)

    # Swapped sequences

    def swap_out(
        self, sequence_id: int, tables: Sequence[Sequence[BlockToSwap | None]], num_tokens: int
    ) -> bool:
        """Keep a preempted sequence's blocks, if there is room and it is worth it.

        Args:
            sequence_id: Of the sequence, which gives its device blocks back now.
            tables: Per group, its blocks as far as their content is needed; None where none is.
            num_tokens: Positions they hold.

        Returns:
            Whether they are kept; if so, until `drop`.
        """
        blocks = [
            (group_id, block) for group_id, table in enumerate(tables) for block in table if block is not None
        ]
        found = [
            None if block.digest is None else self._pool.find(block.digest, group_id)
            for group_id, block in blocks
        ]
        num_new = sum(host_block is None or self._pool.is_free(host_block) for host_block in found)
        if self.num_used + num_new > self._num_swap_blocks or not self._cost.prefers_swap(
            len(blocks), num_tokens
        ):
            return False
        # First hold what is there, so that it is not given out as new.
        for host_block in found:
            if host_block is not None:
                self._pool.acquire(host_block)
        places = iter(found)
        kept = [
            [None if block is None else self._keep(block, group_id, next(places)) for block in table]
            for group_id, table in enumerate(tables)
        ]
        self._swapped[sequence_id] = SwappedSequence(kept, num_tokens)
        self._counts.num_swaps += 1
        return True

    def _keep(self, block: BlockToSwap, group_id: int, host_block: int | None) -> SwappedBlock:
        if host_block is None:
            (host_block,) = self._pool.allocate(1, group_id)
            if block.digest is not None:
                self._pool.register(host_block, block.digest)
            self._stores[host_block] = block.device_block
        return SwappedBlock(host_block, block.digest)

    def swapped(self, sequence_id: int) -> SwappedSequence | None:
        """Return what is kept of a sequence; None for nothing."""
        return self._swapped.get(sequence_id)

    def drop(self, sequence_id: int) -> None:
        """Give up what is kept of a sequence, if anything is; full blocks stay findable."""
        swapped = self._swapped.pop(sequence_id, None)
        if swapped is not None:
            self._release(swapped.host_blocks)

    # Plans

    def take_transfers(self) -> tuple[tuple[BlockTransfer, ...], tuple[BlockTransfer, ...]]:
        """Return the stores and the loads of the plan that is made now."""
        self._forget_excess()
        stores = tuple(
            BlockTransfer(device_block, host_block) for host_block, device_block in self._stores.items()
        )
        loads = tuple(self._loads)
        self._stores.clear()
        self._loads.clear()
        self._release([transfer.host_block for transfer in loads])
        self._counts.num_stored_blocks += len(stores)
        self._counts.num_loaded_blocks += len(loads)
        return stores, loads

    def note_step(self, num_tokens: int, num_decodes: int, device_s: float) -> None:
        """Note how long a step took; see `SwapCost`."""
        self._cost.note_step(num_tokens, num_decodes, device_s)
        # Of a step of unknown length the bus is taken to have kept up.
        most_s = _STAGED_S + _WAITED_SHARE * device_s
        self._storable_s = min(most_s, self._storable_s + (device_s or _STAGED_S))

    def prefers_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether host blocks that were found are worth loading; see `SwapCost`."""
        return self._cost.prefers_load(num_blocks, num_tokens)

    def _forget_excess(self) -> None:
        """Store no more evicted blocks in this plan than the bus has time for: the last that were evicted.

        They are the most use: a sequence's tail is evicted before its head. What a swapped sequence holds,
        or a load of this plan, is stored in any case.
        """
        transfer_s = self._cost.transfer_s
        num_storable = max(0, math.ceil(self._storable_s / transfer_s)) if transfer_s else len(self._stores)
        if (num_excess := len(self._stores) - num_storable) > 0:
            for host_block in [each for each in self._stores if self._pool.is_free(each)][:num_excess]:
                del self._stores[host_block]
                self._pool.unregister(host_block)
        self._storable_s -= len(self._stores) * transfer_s

    # Failures

    def lose_transfers(self, plans: Iterable[StepPlan]) -> set[int]:
        """Forget what a failed step and those behind it were to move.

        Returns:
            The device blocks that may not hold what they were to be loaded with.
        """
        lost: set[int] = set()
        unknown: set[int] = set()
        for plan in plans:
            unknown.update(transfer.host_block for transfer in plan.block_stores)
            lost.update(transfer.device_block for transfer in plan.block_loads)
        for host_block in unknown:
            self._pool.unregister(host_block)
        for sequence_id, swapped in list(self._swapped.items()):
            if not unknown.isdisjoint(swapped.host_blocks):
                self.drop(sequence_id)
        return lost

    def forget(self, digest: bytes, group_id: int) -> None:
        """Make a block unfindable: what it holds is not to be trusted."""
        host_block = self._pool.find(digest, group_id)
        if host_block is not None:
            self._pool.unregister(host_block)

    def check(self) -> None:
        """Verify the pool against who holds its blocks.

        Raises:
            InvariantError: An invariant does not hold.
        """
        held = [swapped.host_blocks for swapped in self._swapped.values()]
        self._pool.check([*held, [transfer.host_block for transfer in self._loads]])
        if len({block for blocks in held for block in blocks}) > self._num_swap_blocks:
            raise InvariantError("swapped sequences hold more host blocks than they may")
        if any(not 0 < host_block <= self._pool.num_usable for host_block in self._stores):
            raise InvariantError("a store goes to a host block that does not exist")

    def _release(self, host_blocks: Sequence[int]) -> None:
        # One by one: they are of several groups.
        for host_block in reversed(host_blocks):
            self._pool.release([host_block])
