"""One step on the device: rows → batch → forward → sample → write back → copy out.

Takes a `StepPlan`, gives a `PendingOutput` as soon as everything is launched. Owns the order of a step and
the changes to the persistent rows, and holds only what every request needs: a feature enters by data in the
plan and one call at a named point. Runs on the device thread. Knows no request, asyncio or text.

Invariants:
* rows change in plan order: releases, admissions, block appends, then the step;
* these changes are made even if the step then fails, so that the plans queued behind it stay valid;
* a position is attended only after the block that holds it was written or zeroed since it was handed out.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asyncserve.gpu.attention.interface import AttentionBackend, StepAttention
from asyncserve.gpu.batch import Batch, build_batch
from asyncserve.gpu.block_tables import BlockTable
from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.device import Device, Event
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.models.interface import Model
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Staging
from asyncserve.kv_spec import KVGroup
from asyncserve.request import TokenLogprobs
from asyncserve.step import StepOutput, StepPlan

_PROMPT_LOGITS_BYTES = 32 * 1024 * 1024
"""Most bytes of float32 logits made at once when a prompt is scored."""


class ModelRunner:
    """Runs plans, in order, on one device.

    Args:
        model: With weights loaded.
        device: Activated on the calling thread.
        kv_cache: Sized for the groups the plans speak of.
        attention: Backend that serves the cache on this device.
        sampler: With as many slots as `num_slots`.
        num_slots: Most sequences at once.
        max_model_len: Most tokens of a sequence.

    Attributes:
        device: As given.
    """

    def __init__(
        self,
        *,
        model: Model,
        device: Device,
        kv_cache: KVCache,
        attention: AttentionBackend,
        sampler: Sampler,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self.device = device
        self._kv_cache = kv_cache
        self._attention = attention
        self._sampler = sampler
        self._staging = Staging(device)
        self._slots = SlotTable(num_slots=num_slots, max_model_len=max_model_len, device=device)
        self._block_tables = [
            BlockTable(
                group_id=group.group_id,
                num_slots=num_slots,
                max_model_len=max_model_len,
                block_len=group.spec.block_len,
                num_blocks=group.num_blocks,
            )
            for group in kv_cache.groups
        ]
        self._last_end: Event | None = None

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups that plans may speak of."""
        return self._kv_cache.groups

    def run(self, plan: StepPlan) -> PendingOutput:
        """Launch one step.

        Raises:
            InvariantError: The plan breaks a rule of `step.py`.
            RuntimeError: From torch; the rows are as the plan asked, its tokens were not sampled.
        """
        with torch.inference_mode():
            try:
                return self._run(plan)
            except BaseException:
                # Nobody knows when the failed step ended: the next one tells no idle time.
                self._last_end = None
                raise

    def _run(self, plan: StepPlan) -> PendingOutput:
        began_s = time.perf_counter()
        was_running = self._update_rows(plan)
        if not plan.sequences:
            output = StepOutput(step_id=plan.step_id, token_ids=())
            event = self.device.record_event()
            return PendingOutput(step_id=plan.step_id, event=event, sources=(), finish=lambda: output)
        batch, write_back = build_batch(plan, self._slots, self._block_tables, self._staging)
        planned = self._attention.plan(batch, self._kv_cache)
        start = self.device.record_event()
        prepared_s = time.perf_counter()

        hidden = self._model.forward(batch, StepAttention(self._attention, batch, self._kv_cache, planned))
        prompt_logprobs = self._score_prompts(plan, batch, hidden) if self._slots.num_prompt_logprobs else {}
        sources: list[torch.Tensor] = []
        slots: list[int] = []
        logprobs = None
        if batch.sample_tokens.shape[0]:
            rows = [
                (sequence.slot, sequence.start + sequence.num_tokens)
                for sequence in plan.sequences
                if sequence.samples
            ]
            slots = [slot for slot, _ in rows]
            logits = self._model.logits(hidden.index_select(0, batch.sample_tokens))
            sampled = self._sampler.sample(logits, slots, [position for _, position in rows], self._slots)
            self._slots.write(write_back, sampled.token_ids)
            self._sampler.record(slots, sampled.token_ids)
            sources.append(sampled.token_ids)
            logprobs = sampled.logprobs
        end = self.device.record_event()
        copies, copied = self.device.copy_out(sources)
        if copies:
            self._sampler.expect(slots, copies[0], copied)
        launched_s = time.perf_counter() if self.device.is_async else prepared_s
        last_end, self._last_end = self._last_end, end

        def finish() -> StepOutput:
            idle_s = start.seconds_since(last_end) if was_running and last_end is not None else 0.0
            return StepOutput(
                step_id=plan.step_id,
                token_ids=copies[0].tolist() if copies else (),
                logprobs=dict(logprobs) if logprobs is not None else {},
                prompt_logprobs=prompt_logprobs,
                device_s=end.seconds_since(start),
                launch_s=launched_s - began_s,
                idle_s=idle_s,
            )

        return PendingOutput(step_id=plan.step_id, event=copied, sources=sources, finish=finish)

    def _update_rows(self, plan: StepPlan) -> bool:
        """Apply releases, admissions and appends; return whether sequences were running before the plan."""
        for slot in plan.released_slots:
            self._slots.release(slot)
            self._sampler.release(slot)
            for table in self._block_tables:
                table.release(slot)
        was_running = self._slots.num_occupied > 0
        if plan.admitted:
            self._slots.admit(plan.admitted, self._staging)
            for assignment in plan.admitted:
                self._sampler.admit(assignment)
        for append in plan.block_appends:
            self._block_tables[append.group_id].append(append)
        for table in self._block_tables:
            unclean = table.take_unclean(plan.sequences)
            if unclean:
                (block_ids,) = self._staging.upload([np.array(unclean, dtype=np.int64)])
                self._kv_cache.zero_blocks(table.group_id, block_ids)
        return was_running

    def _score_prompts(
        self, plan: StepPlan, batch: Batch, hidden: torch.Tensor
    ) -> Mapping[int, Sequence[TokenLogprobs]]:
        """Return log-probabilities of the step's prompt tokens for the slots that asked."""
        scored: dict[int, Sequence[TokenLogprobs]] = {}
        max_rows = max(1, _PROMPT_LOGITS_BYTES // (4 * self._model.vocab_size))
        begin = 0
        for sequence in plan.sequences:
            slot = sequence.slot
            num_logprobs = self._slots.num_prompt_logprobs.get(slot)
            if num_logprobs is not None:
                # The hidden state at position p speaks of the token at p + 1.
                first = sequence.start + 1
                stop = min(first + sequence.num_tokens, self._slots.prompt_lens[slot])
                entries: list[TokenLogprobs] = []
                for chunk in range(first, stop, max_rows):
                    chunk_stop = min(chunk + max_rows, stop)
                    row = begin + chunk - first
                    logits = self._model.logits(hidden[row : row + chunk_stop - chunk])
                    targets = self._slots.tokens(slot, chunk, chunk_stop).to(torch.int64)
                    entries += self._sampler.prompt_logprobs(logits, targets, num_logprobs)
                if entries:
                    scored[slot] = entries
            begin += sequence.num_tokens
        return scored
