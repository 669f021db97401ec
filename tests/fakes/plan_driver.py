"""Drives a `ModelRunner` without a scheduler: makes plans that keep the rules of `step.py`.

Sequences are named by their slot. Each step says how many tokens each slot computes; admissions, block
appends and starts follow. Blocks of a released slot are handed out again, most recently freed first.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.runner import ModelRunner
from asyncserve.grammar import Grammar
from asyncserve.request import SamplingParams
from asyncserve.step import BlockAppend, ExecutorInfo, ScheduledSequence, SlotAssignment, StepOutput, StepPlan
from tests.contracts.plan_rules import PlanRules


class PlanDriver:
    """Makes plans, runs them and keeps what the host knows of each slot."""

    def __init__(self, runner: ModelRunner, info: ExecutorInfo) -> None:
        self.runner = runner
        self.info = info
        self.rules = PlanRules(info)
        self.block_len = info.kv_groups[0].spec.block_len
        self.free = list(range(1, info.kv_groups[0].num_blocks))
        self.known_lens: dict[int, int] = {}
        self.assigned_lens: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.next_step_id = 0
        self._admitted: list[SlotAssignment] = []
        self._appends: list[BlockAppend] = []
        self._released: list[int] = []

    def admit(
        self,
        token_ids: Sequence[int],
        *,
        prompt_len: int | None = None,
        shares_blocks_of: int | None = None,
        num_shared: int = 0,
        seed: int = 0,
        slot: int | None = None,
        grammar: Grammar | None = None,
        **sampling: Any,
    ) -> int:
        """Let a sequence enter with the next plan; greedy unless told otherwise. Returns its slot."""
        if slot is None:
            slot = next(i for i in range(self.info.num_slots) if i not in self.tables)
        self._admitted.append(
            SlotAssignment(
                slot=slot,
                token_ids=array("i", token_ids),
                prompt_len=len(token_ids) if prompt_len is None else prompt_len,
                sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
                seed=seed,
                stop_token_ids=frozenset() if grammar is None else grammar.stop_token_ids,
                grammar=grammar,
            )
        )
        self.known_lens[slot] = self.assigned_lens[slot] = len(token_ids)
        self.starts[slot] = num_shared * self.block_len
        self.tables[slot] = [[] for _ in self.info.kv_groups]
        if shares_blocks_of is not None:
            for group_id, table in enumerate(self.tables[shares_blocks_of]):
                self._append(group_id, slot, table[:num_shared])
        return slot

    def release(self, slot: int, *, keep_blocks: bool = False) -> None:
        """Let a slot go with the next plan, and its blocks unless another slot shares them."""
        self._released.append(slot)
        for table in self.tables.pop(slot):
            if not keep_blocks:
                self.free = table + self.free

    def plan(self, num_tokens: Mapping[int, int]) -> StepPlan:
        """Return the next plan: slot → tokens to compute. Its sampled tokens count as known from now on."""
        sequences = []
        for slot, num in num_tokens.items():
            start = self.starts[slot]
            for group_id, table in enumerate(self.tables[slot]):
                num_missing = -(-(start + num) // self.block_len) - len(table)
                if num_missing > 0:
                    self._append(group_id, slot, [self.free.pop(0) for _ in range(num_missing)])
            samples = start + num == self.known_lens[slot]
            sequences.append(ScheduledSequence(slot, start, num, samples))
            self.starts[slot] = start + num
            self.known_lens[slot] += samples
        plan = StepPlan(
            step_id=self.next_step_id,
            sequences=tuple(sequences),
            admitted=tuple(self._admitted),
            released_slots=tuple(self._released),
            block_appends=tuple(self._appends),
        )
        self.next_step_id += 1
        self._admitted, self._released, self._appends = [], [], []
        self.rules.check(plan)
        return plan

    def launch(self, num_tokens: Mapping[int, int]) -> PendingOutput:
        """Run the next plan without reading what it gave."""
        return self.runner.run(self.plan(num_tokens))

    def step(self, num_tokens: Mapping[int, int]) -> StepOutput:
        """Run the next plan and return what it gave."""
        return self.launch(num_tokens).wait()

    def generate(self, slots: Sequence[int], num_tokens: int, *, chunk: int | None = None) -> list[list[int]]:
        """Prefill the slots together, `chunk` tokens a step, then decode; return each slot's tokens."""
        outputs: dict[int, list[int]] = {slot: [] for slot in slots}
        while any(len(tokens) < num_tokens for tokens in outputs.values()):
            remaining = {slot: self.known_lens[slot] - self.starts[slot] for slot in slots}
            if chunk is not None:
                remaining = {slot: min(num, chunk) for slot, num in remaining.items()}
            rows = {slot: num for slot, num in remaining.items() if len(outputs[slot]) < num_tokens}
            rows = dict(
                sorted(rows.items(), key=lambda item: self.starts[item[0]] < self.assigned_lens[item[0]])
            )
            plan = self.plan(rows)
            sampled = self.runner.run(plan).wait().token_ids
            slots_sampled = [sequence.slot for sequence in plan.sequences if sequence.samples]
            for slot, token_id in zip(slots_sampled, sampled, strict=True):
                outputs[slot].append(token_id)
        return [outputs[slot] for slot in slots]

    def _append(self, group_id: int, slot: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.tables[slot][group_id] += block_ids
            self._appends.append(BlockAppend(group_id, slot, tuple(block_ids)))
