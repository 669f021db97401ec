"""One step on the device: rows → batch → forward → sample → write back → copy out.

Takes a `StepPlan`, gives a `PendingOutput` as soon as everything is launched. Owns the order of a step and
the changes to the persistent rows, and holds only what every request needs: a feature enters by data in the
plan and one call at a named point. Runs on the device thread. Knows no request, asyncio or text.

Invariants:
* rows change in plan order: releases, admissions, block appends, stores, loads, then the forward pass, block
  copies, sampled tokens, and what rows of beam searches inherit;
* these changes are made even if the step then fails, so that the plans queued behind it stay valid;
* a position is attended only after it was written since its block was handed out, unless the backend reads
  what is unwritten: then the block is zeroed first;
* what depends on lengths is on the device, so a step of a captured size is replayed and not launched anew.
"""

import functools
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.attention.interface import AttentionBackend, StepAttention
from asyncserve.gpu.batch import Batch, PlanRows, SampleRows, plan_rows
from asyncserve.gpu.block_tables import BlockTable
from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.device import Device, Event
from asyncserve.gpu.graphs import GraphPool, StepGraph
from asyncserve.gpu.host_blocks import HostBlocks
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.gpu.models.interface import Model
from asyncserve.gpu.sampling.beams import ChosenBeams
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import ResultRing, Staging
from asyncserve.gpu.step_inputs import DeviceInputs, HostInputs, StepInputs, StepSize
from asyncserve.kv_spec import KVGroup
from asyncserve.request import TokenLogprobs
from asyncserve.step import BlockCopy, StepOutput, StepPlan, StepTimes

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
        makes_inputs_on_device: Whether kernels make a step's inputs. Needs a backend that reads nothing
            unwritten.
        graph_sizes: Steps to capture as graphs when `capture_next` is called; needs the former.
        num_host_blocks: Blocks of the host's memory, block 0 (never used) included; 0 for none.

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
        makes_inputs_on_device: bool = False,
        graph_sizes: Sequence[StepSize] = (),
        num_host_blocks: int = 0,
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
        self._inputs: StepInputs = HostInputs(self._slots, self._block_tables, self._staging)
        self._results: ResultRing | None = None
        if makes_inputs_on_device:
            assert not attention.reads_unwritten, "the device's tables end where a sequence ends"
            self._inputs = DeviceInputs(self._slots, self._block_tables, self._staging, device)
            self._results = ResultRing(device, num_slots=num_slots)
        self._host_blocks: HostBlocks | None = None
        if num_host_blocks:
            self._host_blocks = HostBlocks(
                kv_cache.pages, num_blocks=num_host_blocks, device=device, staging=self._staging
            )
        self._graphs = GraphPool(graph_sizes)
        self._graph_memory = device.graph_pool()
        self._graph_rows = max((size.num_rows for size in graph_sizes), default=0)
        self._graph_logits: torch.Tensor | None = None
        self._last_end: Event | None = None

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups that plans may speak of."""
        return self._kv_cache.groups

    @property
    def num_occupied(self) -> int:
        """Slots that belong to a sequence."""
        return self._slots.num_occupied

    @property
    def graphs_pending(self) -> int:
        """Graphs that are to be captured still."""
        return self._graphs.num_pending

    def measure_transfers(self) -> float:
        """Return the seconds that a block takes to the host's memory and back; while nothing runs."""
        with torch.inference_mode():
            return self._require_host_blocks().measure()

    def capture_next(self) -> None:
        """Capture one graph more, the largest that is left; steps may be in flight."""
        with torch.inference_mode():
            num_ready = self._graphs.num_ready
            self._graphs.capture_next(self._capture)
            if self._graphs.num_ready == num_ready:
                self.device.empty_cache()  # what the failed one took

    def give_up_capturing(self) -> None:
        """Capture no more graphs: steps of the sizes that are left are launched anew."""
        self._graphs.give_up()

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
        began_s = time.monotonic()
        was_running = self._update_rows(plan)
        if not plan.sequences:
            times = StepTimes(began_s, time.monotonic())
            output = StepOutput(step_id=plan.step_id, token_ids=(), times=times)
            event = self.device.record_event()
            return PendingOutput(
                step_id=plan.step_id, event=event, sources=(), finish=lambda: output, times=times
            )
        read = plan_rows(plan)
        slots = read.slots[read.sample_rows].tolist()
        result_row = self._results.take_row() if self._results is not None else 0
        graph = self._find_graph(plan, read)
        if graph is not None and not self._inputs.take(read, graph.size, result_row=result_row):
            graph = None
        if graph is None:
            self._inputs.take(read, result_row=result_row)
        start = self.device.record_event()
        prepared_s = time.monotonic()

        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = {}
        logits: torch.Tensor | None = None
        if graph is not None:
            graph.forward()
            self._inputs.settle()
            rows = graph.rows
            if slots:
                logits = graph.logits[: len(slots)]
        else:
            batch = self._inputs.batch()
            self._inputs.settle()
            hidden = self._forward(batch)
            if self._slots.num_prompt_logprobs:
                prompt_logprobs = self._score_prompts(plan, batch, hidden)
            rows = batch.sample_rows
            if slots:
                logits = self._model.logits(hidden.index_select(0, batch.sample_tokens))

        if plan.block_copies:
            self._copy_blocks(plan.block_copies)

        copies: Sequence[torch.Tensor] = ()
        sources: list[torch.Tensor] = []
        logprobs = None
        beams: ChosenBeams | None = None
        is_plain = self._results is not None and self._sampler.is_plain(slots)
        if logits is not None and is_plain:
            truncates = self._sampler.truncates(slots)
            if graph is None:
                self._choose(logits, rows, truncates=truncates)
            elif truncates:
                graph.choose_truncated()
            else:
                graph.choose()
        elif logits is not None:
            positions = read.seq_lens[read.sample_rows].tolist()
            chosen = self._sampler.sample(logits, slots, positions, self._slots)
            beams = chosen.beams
            if beams is not None:
                self._inherit(beams, positions)
            self._slots.write(rows.write_back[: len(slots)], chosen.token_ids)
            self._sampler.record(slots, chosen.token_ids)
            sources.append(chosen.token_ids)
            if beams is not None:
                sources += (beams.pairs, beams.scores)
            logprobs = chosen.logprobs
        copied = end = self.device.record_event()
        if sources:
            copies, copied = self.device.copy_out(sources)
            self._sampler.expect(slots, copies[0], copied)
        times = StepTimes(began_s, time.monotonic())
        launched_s = times.launch_end_s if self.device.is_async else prepared_s
        last_end, self._last_end = self._last_end, end
        results = self._results

        def finish() -> StepOutput:
            idle_s = start.seconds_since(last_end) if was_running and last_end is not None else 0.0
            token_ids: Sequence[int] = ()
            if copies:
                token_ids = copies[0].tolist()
            elif slots:
                assert results is not None
                token_ids = results.tokens(result_row, len(slots))
            return StepOutput(
                step_id=plan.step_id,
                token_ids=token_ids,
                logprobs=dict(logprobs) if logprobs is not None else {},
                prompt_logprobs=prompt_logprobs,
                beams=beams.candidates(*copies[1:]) if beams is not None else {},
                device_s=end.seconds_since(start),
                launch_s=launched_s - began_s,
                idle_s=idle_s,
                times=times,
            )

        return PendingOutput(step_id=plan.step_id, event=copied, sources=sources, finish=finish, times=times)

    def _find_graph(self, plan: StepPlan, read: PlanRows) -> StepGraph | None:
        prompt_lens = self._slots.prompt_lens
        if prompt_lens and any(entry.start + 1 < prompt_lens.get(entry.slot, 0) for entry in plan.sequences):
            return None  # prompts are scored from the hidden states of every token
        num_rows = len(read.slots)
        size = StepSize(
            num_rows=num_rows,
            num_tokens=int(read.query_lens.sum()),
            num_long_rows=num_rows - read.num_decode_rows,
        )
        return self._graphs.find(size, is_decode=read.is_decode and len(read.sample_rows) == num_rows)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Run the layers; `[num_tokens, hidden]`."""
        planned = self._attention.plan(batch, self._kv_cache)
        return self._model.forward(batch, StepAttention(self._attention, batch, self._kv_cache, planned))

    def _choose(self, logits: torch.Tensor, rows: SampleRows, *, truncates: bool) -> None:
        assert self._results is not None
        self._sampler.choose(logits, rows, self._slots.history, self._results.memory, truncates=truncates)

    def _inherit(self, beams: ChosenBeams, positions: Sequence[int]) -> None:
        """Let rows of beam searches take the tokens and the KV of those they go on from."""
        lens = np.array([positions[row] for row in beams.rows], np.int64)
        slots = np.array(beams.slots, np.int64)
        self._slots.inherit(beams.slot_ids, beams.parent_slots, int(lens.max()))
        sources, targets = self._inputs.inherit(slots, beams.parent_slots, lens)
        if len(sources):
            self._kv_cache.copy_blocks(sources, targets)

    def _capture(self, size: StepSize) -> StepGraph:
        """Capture a step of padding, which writes nothing that belongs to a sequence."""
        assert isinstance(self._inputs, DeviceInputs)
        self._inputs.take_nothing(size)
        captured: list[Batch] = []

        def forward() -> Sequence[torch.Tensor]:
            batch = self._inputs.batch(size)
            captured[:] = [batch]
            hidden = self._forward(batch)
            if size.num_long_rows:
                hidden = hidden.index_select(0, batch.sample_tokens)
            out = None if self._graph_logits is None else self._graph_logits[: size.num_rows]
            logits = self._model.logits(hidden, out=out)
            rows = batch.sample_rows
            return logits, rows.slots, rows.positions, rows.write_back

        # Once without a graph: what is compiled or allocated the first time may not be while capturing.
        logits, *_ = forward()
        if self._graph_logits is None:
            self._graph_logits = logits.new_empty(self._graph_rows, logits.shape[1])
        for truncates in (False, True):
            self._choose(logits, captured[0].sample_rows, truncates=truncates)
        replay_forward, (logits, *_) = self.device.capture(forward, self._graph_memory)
        rows = captured[0].sample_rows

        def choose(*, truncates: bool) -> Sequence[torch.Tensor]:
            self._choose(logits, rows, truncates=truncates)
            return ()

        choose_plain, choose_truncated = (
            self.device.capture(functools.partial(choose, truncates=truncates), self._graph_memory)[0]
            for truncates in (False, True)
        )
        return StepGraph(
            size=size,
            forward=replay_forward,
            choose=choose_plain,
            choose_truncated=choose_truncated,
            logits=logits,
            rows=rows,
        )

    def _update_rows(self, plan: StepPlan) -> bool:
        """Apply all that comes before the step; return whether sequences were running before the plan."""
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
        self._sampler.upload()
        for append in plan.block_appends:
            self._block_tables[append.group_id].append(append)
        if plan.block_stores:
            self._require_host_blocks().store(plan.block_stores)
        for table in self._block_tables if self._attention.reads_unwritten else ():
            unclean = table.take_unclean(plan.sequences)
            if unclean:
                (block_ids,) = self._staging.upload([np.array(unclean, dtype=np.int64)])
                self._kv_cache.zero_blocks(block_ids)
        if plan.block_loads:
            # Not before a block is zeroed: of one that is loaded the rest may be left unwritten, too.
            self._require_host_blocks().load(plan.block_loads)
        return was_running

    def _require_host_blocks(self) -> HostBlocks:
        if self._host_blocks is None:
            raise InvariantError("a plan moves blocks to the host, which has no memory for them")
        return self._host_blocks

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        sources, targets = self._staging.upload(list(np.array(copies, np.int64).T.copy()))
        self._kv_cache.copy_blocks(sources, targets)

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
                    logits = self._model.logits(hidden[row : row + chunk_stop - chunk]).float()
                    targets = self._slots.tokens(slot, chunk, chunk_stop).to(torch.int64)
                    entries += self._sampler.prompt_logprobs(logits, targets, num_logprobs)
                if entries:
                    scored[slot] = entries
            begin += sequence.num_tokens
        return scored
