"""The rules every stream of `StepPlan`s keeps, as an object that follows the stream.

The rules are those of `asyncserve/step.py`. A plan that breaks one raises `PlanRuleBroken` naming the plan,
the rule and the values. Knows what a device would know (slots, tables, tokens), never the scheduler's side.
"""

import dataclasses
import pickle
from array import array

from asyncserve.kv_spec import RecurrentState, SlidingWindow
from asyncserve.step import ExecutorInfo, SlotAssignment, StepPlan


class PlanRuleBroken(AssertionError):
    """A plan that the device could not have served."""


class _Row:
    """What the device knows of one admitted slot."""

    __slots__ = ("assigned_len", "beam", "known_len", "next_start", "tables", "token_ids")

    def __init__(self, assignment: SlotAssignment, num_groups: int) -> None:
        self.token_ids = assignment.token_ids
        self.beam = assignment.beam
        self.assigned_len = self.known_len = len(self.token_ids)
        self.next_start: int | None = None
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]


class PlanRules:
    """Checks plans in the order they are submitted."""

    def __init__(self, info: ExecutorInfo) -> None:
        self._info = info
        self._rows: dict[int, _Row] = {}
        self._next_step_id = 0
        self._least_step_id: int | None = None  # of the first plan after a restart
        self._stored: set[int] = set()  # host blocks

    @property
    def held_slots(self) -> frozenset[int]:
        """Slots admitted and not released by the plans seen so far."""
        return frozenset(self._rows)

    def reopened(self) -> "PlanRules":
        """Return the rules of plans after the device was opened anew: its rows are gone, step ids go on.

        Those of plans that never came to it are missing.
        """
        rules = PlanRules(self._info)
        rules._least_step_id = self._next_step_id
        return rules

    def check(self, plan: StepPlan) -> None:
        """Take note of the next plan.

        Raises:
            PlanRuleBroken: It breaks a rule; the checker is of no use afterwards.
        """
        info = self._info
        if self._least_step_id is not None:
            self._next_step_id = max(self._least_step_id, plan.step_id)
            self._least_step_id = None
        self._require(plan, plan.step_id == self._next_step_id, f"step_id should be {self._next_step_id}")
        self._next_step_id += 1
        self._require(plan, len(plan.sequences) > 0, "a plan schedules at least one sequence")
        self._check_releases_and_admissions(plan)
        self._check_appends(plan)
        self._check_transfers(plan)
        self._check_copies(plan)
        slots = [sequence.slot for sequence in plan.sequences]
        self._require(plan, len(set(slots)) == len(slots), f"slots are distinct: {slots}")
        self._require(
            plan,
            plan.num_tokens <= info.max_num_batched_tokens,
            f"num_tokens {plan.num_tokens} is within the budget {info.max_num_batched_tokens}",
        )
        seen_prefill = False
        origin: int | None = None  # slot of the last row that computes something, if it samples
        for slot, start, num_tokens, samples in plan.sequences:
            row = self._rows.get(slot)
            if row is None:
                raise PlanRuleBroken(f"step {plan.step_id}: slot {slot} is used while not admitted")
            end = start + num_tokens
            if num_tokens == 0:
                self._check_branch(plan, slot, origin)
                row.next_start = start
                row.known_len += 1
                self._require(plan, samples, f"branch {slot} samples")
                self._require(plan, start == row.assigned_len, f"branch {slot} knows {start} tokens")
                continue
            self._require(plan, num_tokens >= 1, f"slot {slot} computes at least one token")
            origin = slot if samples else None
            if row.next_start is None:
                self._require(
                    plan,
                    0 <= start < row.assigned_len,
                    f"slot {slot} starts in its tokens, not at {start}",
                )
            else:
                self._require(
                    plan, start == row.next_start, f"slot {slot} continues at {row.next_start}, not {start}"
                )
            is_prefill = start < row.assigned_len
            self._require(plan, is_prefill or num_tokens == 1, f"slot {slot} decodes one token")
            self._require(plan, is_prefill or not seen_prefill, "decode steps stand before prefill chunks")
            seen_prefill = seen_prefill or is_prefill
            self._require(
                plan, end <= row.known_len, f"slot {slot} computes {end} of {row.known_len} known tokens"
            )
            self._require(
                plan, end <= info.max_model_len, f"slot {slot} stays within the context: {end} tokens"
            )
            self._require(
                plan,
                samples == (end == row.known_len),
                f"slot {slot} samples exactly when it reaches its last token ({end} of {row.known_len})",
            )
            self._check_tables(plan, slot, start, end)
            row.next_start = end
            row.known_len += samples
        self._check_searches(plan)
        self._check_writes(plan)
        bare = dataclasses.replace(
            plan, admitted=tuple(dataclasses.replace(each, grammar=None) for each in plan.admitted)
        )
        self._require(plan, pickle.loads(pickle.dumps(bare)) == bare, "equal to its own pickle round trip")

    def _check_releases_and_admissions(self, plan: StepPlan) -> None:
        info = self._info
        for slot in plan.released_slots:
            self._require(plan, slot in self._rows, f"released slot {slot} was admitted")
            del self._rows[slot]
        for assignment in plan.admitted:
            slot = assignment.slot
            self._require(plan, 0 <= slot < info.num_slots, f"slot {slot} is below {info.num_slots}")
            self._require(plan, slot not in self._rows, f"admitted slot {slot} was free")
            tokens = assignment.token_ids
            self._require(
                plan, type(tokens) is array and tokens.typecode == "i", "token_ids is an array('i')"
            )
            self._require(plan, len(tokens) >= 1, f"slot {slot} has at least one token")
            self._require(
                plan, min(tokens) >= 0 and max(tokens) < info.vocab_size, "tokens are in the vocabulary"
            )
            self._require(
                plan, 1 <= assignment.prompt_len <= len(tokens), f"prompt_len of slot {slot} is in its tokens"
            )
            self._rows[slot] = _Row(assignment, len(info.kv_groups))

    def _check_appends(self, plan: StepPlan) -> None:
        groups = self._info.kv_groups
        for group_id, slot, block_ids in plan.block_appends:
            self._require(plan, 0 <= group_id < len(groups), f"group {group_id} exists")
            self._require(plan, slot in self._rows, f"blocks go to an admitted slot, not {slot}")
            num_blocks = groups[group_id].num_blocks
            self._require(plan, len(block_ids) >= 1, "an append holds at least one block")
            table = self._rows[slot].tables[group_id]
            num_null = 0
            if not table and isinstance(groups[group_id].spec, SlidingWindow):
                num_null = next((idx for idx, block_id in enumerate(block_ids) if block_id), len(block_ids))
            self._require(
                plan,
                all(1 <= block_id < num_blocks for block_id in block_ids[num_null:]),
                f"block ids are in 1 … {num_blocks - 1}: {block_ids}",
            )
            table.extend(block_ids)

    def _check_transfers(self, plan: StepPlan) -> None:
        """Check that blocks go to host blocks that exist, one to each, and come back into new blocks."""
        num_blocks, num_host_blocks = self._info.kv_groups[0].num_blocks, self._info.num_host_blocks
        moved = (*plan.block_stores, *plan.block_loads)
        self._require(
            plan,
            all(0 < block < num_blocks and 0 < host < num_host_blocks for block, host in moved),
            f"blocks and host blocks exist: {moved}",
        )
        stored = [host_block for _, host_block in plan.block_stores]
        self._require(plan, len(set(stored)) == len(stored), f"a host block is stored once: {stored}")
        self._stored.update(stored)
        loaded = [device_block for device_block, _ in plan.block_loads]
        self._require(plan, len(set(loaded)) == len(loaded), f"a block is loaded once: {loaded}")
        new = {block_id for append in plan.block_appends for block_id in append.block_ids}
        self._require(plan, new.issuperset(loaded), f"blocks are loaded for who is given them: {loaded}")
        self._require(
            plan,
            all(host_block in self._stored for _, host_block in plan.block_loads),
            f"a host block is loaded after it was stored: {plan.block_loads}",
        )

    def _check_tables(self, plan: StepPlan, slot: int, start: int, end: int) -> None:
        """Check that a sequence has a block of its own wherever this step reads or writes."""
        live: list[int] = []
        for group in self._info.kv_groups:
            table, spec = self._rows[slot].tables[group.group_id], group.spec
            self._require(
                plan,
                len(table) >= spec.blocks_for(end),
                f"table of slot {slot} covers {end} positions with {len(table)} blocks",
            )
            seen = table[spec.num_unseen(start) :]
            self._require(plan, all(seen), f"slot {slot} sees no null block from {start} on: {table}")
            live += seen
        # What the device has given a row of a beam search since, and taken from it, is not in the plans.
        self._require(
            plan,
            len(set(live)) == len(live) or self._rows[slot].beam is not None,
            f"slot {slot} has no block twice: {live}",
        )

    def _check_writes(self, plan: StepPlan) -> None:
        """Check that no block is written for two rows: rows of a step are computed side by side."""
        writers: dict[int, int] = {}
        for slot, start, num_tokens, _ in plan.sequences:
            for group in self._info.kv_groups:
                spec = group.spec
                if not num_tokens or isinstance(spec, RecurrentState):
                    continue
                table = self._rows[slot].tables[group.group_id]
                for block_id in table[start // spec.block_len : spec.blocks_for(start + num_tokens)]:
                    other = writers.setdefault(block_id, slot) if block_id else slot
                    self._require(
                        plan,
                        other == slot,
                        f"block {block_id} is written for one of the slots {other}, {slot}",
                    )

    def _check_searches(self, plan: StepPlan) -> None:
        """Hold the rows of beam searches that sample against those that were admitted."""
        searches: dict[int, int] = {}
        for slot, _, _, samples in plan.sequences:
            beam = self._rows[slot].beam
            if beam is not None and samples:
                searches[beam.search_id] = searches.get(beam.search_id, 0) + 1
        for row in self._rows.values():
            beam = row.beam
            if beam is not None and beam.search_id in searches:
                self._require(
                    plan,
                    searches[beam.search_id] == beam.width,
                    f"all {beam.width} rows of search {beam.search_id} sample together",
                )

    def _check_copies(self, plan: StepPlan) -> None:
        num_blocks = self._info.kv_groups[0].num_blocks
        for ids in zip(*plan.block_copies, strict=True):
            self._require(
                plan, all(1 <= each < num_blocks for each in ids), f"copied blocks are in the pool: {ids}"
            )
        targets = [copy.target for copy in plan.block_copies]
        self._require(plan, len(set(targets)) == len(targets), f"a block is a copy of one other: {targets}")

    def _check_branch(self, plan: StepPlan, slot: int, origin: int | None) -> None:
        """Hold a row of no tokens against the one it branches off from."""
        self._require(plan, self._rows[slot].next_start is None, f"branch {slot} has computed nothing")
        if origin is None:
            raise PlanRuleBroken(f"step {plan.step_id}: branch {slot} stands behind none that samples")
        row, source = self._rows[slot], self._rows[origin]
        self._require(
            plan,
            source.known_len == source.assigned_len + 1 and row.token_ids == source.token_ids,
            f"branch {slot} has the known tokens of slot {origin}",
        )
        copies = {(copy.source, copy.target) for copy in plan.block_copies}
        length = row.assigned_len
        self._check_tables(plan, slot, length, length)
        for group, table, from_table in zip(self._info.kv_groups, row.tables, source.tables, strict=True):
            num_full, num_unseen = length // group.spec.block_len, group.spec.num_unseen(length)
            self._require(plan, len(table) == len(from_table), f"branch {slot} has the blocks of its tokens")
            for block_idx in range(num_unseen, len(table)):
                block_id, from_id = table[block_idx], from_table[block_idx]
                self._require(
                    plan,
                    block_id == from_id or (block_idx >= num_full and (from_id, block_id) in copies),
                    f"branch {slot} shares block {from_id} of slot {origin} or has a copy",
                )

    @staticmethod
    def _require(plan: StepPlan, holds: bool, rule: str) -> None:
        if not holds:
            raise PlanRuleBroken(f"step {plan.step_id} breaks: {rule}")
