"""Where a step's inputs are made: on the host in numpy, or on the device by a kernel.

Takes a plan's rows and gives its `Batch`, in two moves: `take` reads them and queues what the device must be
told; `batch` launches what makes the tensors, in shapes that may have room for more rows and tokens than the
step has, so that a CUDA graph can hold it. Knows no model and no sampling parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from asyncserve.gpu.batch import Batch, Padded, PlanRows, SampleRows, build_batch
from asyncserve.gpu.block_tables import BlockTable
from asyncserve.gpu.device import Device
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Int32Array, Int64Array, Staging

_BLOCKS_PER_GRAPH = 16 * 1024
"""New blocks that a step run by a graph can bring: those of a quarter of a million tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What a launch has room for.

    Args:
        num_rows: Sequences.
        num_tokens: Positions computed.
        num_long_rows: Of the rows, those behind the leading ones of one token. 0: each row is one token and
            samples, so that sampling row i is row i, and the batch is `is_decode`.
    """

    num_rows: int
    num_tokens: int
    num_long_rows: int = 0


class StepInputs(Protocol):
    """One way to make the inputs; it holds one step at a time."""

    def take(self, rows: PlanRows, size: StepSize | None = None, *, result_row: int = 0) -> bool:
        """Read a plan, whose admissions and appends are applied already, and queue its copy to the device.

        Args:
            rows: Of the plan.
            size: What there is room for; None for just this step.
            result_row: As `SampleRows.result_row`.

        Returns:
            Whether it fits what a graph can take; without a `size` always.

        Raises:
            InvariantError: A block table does not cover its row.
        """

    def batch(self, size: StepSize | None = None) -> Batch:
        """Launch what makes the step's tensors and return them.

        Args:
            size: What there is room for, as `take` was given it; the batch is `padded` then. None for just
                the step taken.
        """

    def settle(self) -> None:
        """Take note that what `take` queued will be used: the device's block tables are up to date."""

    def inherit(
        self, slots: Int64Array, parents: torch.Tensor, lens: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let rows hold the full blocks of others in place of their own, all at once.

        Args:
            slots: `[num]`, the rows, distinct; all were in the last step.
            parents: `[num] int64` on the device, slot of the row whose blocks each takes.
            lens: `[num]`, positions computed of both.

        Returns:
            The blocks of all groups, `[num_partial] int64` each on the device, whose content is to be taken
            and that are to take it: those of rows whose last block is not full.
        """


class HostInputs:
    """Inputs made in numpy, whose calls cost a fifth of torch's at these sizes.

    Args:
        slots: Where input ids are gathered from.
        block_tables: One per KV group.
        staging: Takes everything to the device in one copy.
    """

    def __init__(self, slots: SlotTable, block_tables: Sequence[BlockTable], staging: Staging) -> None:
        self._slots = slots
        self._block_tables = block_tables
        self._staging = staging
        self._rows: PlanRows | None = None

    def take(self, rows: PlanRows, size: StepSize | None = None, *, result_row: int = 0) -> bool:
        """Keep the rows."""
        assert size is None, "inputs made on the host have the step's size"
        self._rows = rows
        return True

    def batch(self, size: StepSize | None = None) -> Batch:
        """Build the batch of the rows taken."""
        assert self._rows is not None
        return build_batch(self._rows, self._slots, self._block_tables, self._staging)

    def settle(self) -> None:
        """Do nothing: the device keeps no tables."""

    def inherit(
        self, slots: Int64Array, parents: torch.Tensor, lens: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Change the tables, which are here; where the parents are on a GPU, they are waited for."""
        on_host = parents.cpu().numpy()
        pairs = [table.inherit(slots, on_host, lens) for table in self._block_tables]
        sources, targets = self._staging.upload(
            [np.concatenate([pair[side] for pair in pairs]) for side in (0, 1)]
        )
        return sources, targets


class DeviceInputs:
    """Inputs made by `kernels/input_preparation.py` from block tables and tokens that live on the device.

    Args:
        slots: Whose history the input ids come from.
        block_tables: One per KV group, on the host; the device's copies are made here.
        staging: For the one copy a step.
        device: Where.
    """

    def __init__(
        self, slots: SlotTable, block_tables: Sequence[BlockTable], staging: Staging, device: Device
    ) -> None:
        # Imported here: it brings Triton, which a CPU has no use for.
        from asyncserve.gpu.kernels import input_preparation

        self._kernels = input_preparation
        self._slots = slots
        self._block_tables = block_tables
        self._block_lens = [table.block_len for table in block_tables]
        self._staging = staging
        self._on_device = [
            torch.zeros((slots.num_slots, table.max_blocks), dtype=torch.int32, device=device.torch_device)
            for table in block_tables
        ]
        offsets = input_preparation.field_offsets(slots.num_slots, len(block_tables))
        # Graphs read from this place; a step with more is run without one, from a place of its own.
        self._persistent = torch.zeros(
            offsets.blocks + _BLOCKS_PER_GRAPH, dtype=torch.int32, device=device.torch_device
        )
        self._packed = self._persistent
        self._row_slots: Int64Array = np.empty(0, np.int64)
        self._query_lens = self._seq_lens = self._row_slots
        self._num_tokens = self._num_samples = self._num_decode_rows = 0
        self._is_decode = False

    def take(self, rows: PlanRows, size: StepSize | None = None, *, result_row: int = 0) -> bool:
        """Pack the step's row numbers and what the device's block tables lack, and queue the copy."""
        row_slots, query_lens, seq_lens, sample_rows = (
            rows.slots,
            rows.query_lens,
            rows.seq_lens,
            rows.sample_rows,
        )
        self._num_decode_rows, self._is_decode = rows.num_decode_rows, rows.is_decode
        self._row_slots, self._num_samples = row_slots, len(sample_rows)
        self._query_lens, self._seq_lens = query_lens, seq_lens
        num_rows = len(row_slots)
        room = size.num_rows if size is not None else num_rows
        unsent = [table.unsent(row_slots, seq_lens) for table in self._block_tables]
        offsets = self._kernels.field_offsets(room, len(unsent))
        num_elements = offsets.blocks + sum(len(blocks) for _, _, blocks in unsent)
        if size is not None and num_elements > len(self._persistent):
            return False

        packed: Int32Array = np.zeros(num_elements, np.int32)
        query_ends = np.cumsum(query_lens)
        self._num_tokens = int(query_ends[-1])
        packed[:5] = num_rows, self._num_tokens, len(sample_rows), result_row, self._num_decode_rows
        packed[offsets.slots : offsets.slots + num_rows] = row_slots
        packed[offsets.seq_lens : offsets.seq_lens + num_rows] = seq_lens
        packed[offsets.query_start + 1 : offsets.query_start + 1 + num_rows] = query_ends
        packed[offsets.query_start + 1 + num_rows : offsets.query_start + 1 + room] = query_ends[-1]
        packed[offsets.sample_rows : offsets.sample_rows + len(sample_rows)] = sample_rows
        begin = offsets.blocks
        for offset, (sent, counts, blocks) in zip(offsets.groups, unsent, strict=True):
            packed[offset : offset + num_rows] = sent
            begins = offset + offsets.stride
            packed[begins] = begin
            packed[begins + 1 : begins + 1 + num_rows] = begin + np.cumsum(counts)
            packed[begin : begin + len(blocks)] = blocks
            begin += len(blocks)

        self._packed = self._persistent
        if num_elements > len(self._persistent):
            self._packed = self._persistent.new_empty(num_elements)
        self._staging.fill(self._packed, packed)
        return True

    def take_nothing(self, size: StepSize) -> None:
        """Queue a step without sequences, all of whose rows are padding: what graphs are captured with."""
        offsets = self._kernels.field_offsets(size.num_rows, len(self._block_tables))
        self._staging.fill(self._persistent, np.zeros(offsets.blocks, np.int32))

    def batch(self, size: StepSize | None = None) -> Batch:
        """Launch the kernel; without a size the batch has the host's facts of the step taken, too."""
        if size is None:
            num_rows, num_tokens = len(self._row_slots), self._num_tokens
            num_samples, packed = self._num_samples, self._packed
        else:
            num_rows, num_tokens = size.num_rows, size.num_tokens
            num_samples, packed = num_rows, self._persistent
        made = self._kernels.prepare_inputs(
            packed,
            self._slots.history,
            self._on_device,
            num_rows=num_rows,
            num_tokens=num_tokens,
            history_width=self._slots.width,
            block_lens=self._block_lens,
        )
        offsets = self._kernels.field_offsets(num_rows, len(self._block_tables))
        return Batch(
            input_ids=made.input_ids,
            positions=made.positions,
            query_start=packed[offsets.query_start : offsets.query_start + num_rows + 1],
            seq_lens=packed[offsets.seq_lens : offsets.seq_lens + num_rows],
            slot_mapping=made.slot_mapping,
            block_tables=made.block_tables,
            sample_tokens=made.sample_tokens[:num_samples],
            query_lens_host=tuple(self._query_lens.tolist()) if size is None else (),
            seq_lens_host=tuple(self._seq_lens.tolist()) if size is None else (),
            num_decode_rows=self._num_decode_rows if size is None else num_rows,
            is_decode=self._is_decode if size is None else not size.num_long_rows,
            padded=None
            if size is None
            else Padded(num_long_rows=size.num_long_rows, first_long_row=packed[4:5]),
            sample_rows=SampleRows(
                slots=made.sample_slots[:num_samples],
                positions=made.sample_positions[:num_samples],
                write_back=made.write_back[:num_samples],
                result_row=packed[3:4],
            ),
        )

    def settle(self) -> None:
        """Mark the rows' tables as sent."""
        for table in self._block_tables:
            table.mark_sent(self._row_slots)

    def inherit(
        self, slots: Int64Array, parents: torch.Tensor, lens: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Change the device's tables; the host's keep what they have sent, and send it no more."""
        fulls = [lens // block_len for block_len in self._block_lens]
        partials = [
            (full * block_len < lens).nonzero()[0]
            for full, block_len in zip(fulls, self._block_lens, strict=True)
        ]
        slot_ids, *uploads = self._staging.upload([slots, *fulls, *partials])
        sources, targets = [], []
        for group_id, table in enumerate(self._on_device):
            full, partial = uploads[group_id], uploads[len(fulls) + group_id]
            rows = table[:, : int(fulls[group_id].max()) + 1]
            taken, own = rows.index_select(0, parents), rows.index_select(0, slot_ids)
            is_full = torch.arange(rows.shape[1], device=full.device) < full.unsqueeze(1)
            rows.index_copy_(0, slot_ids, torch.where(is_full, taken, own))
            columns = full.index_select(0, partial).unsqueeze(1)
            sources.append(taken.index_select(0, partial).gather(1, columns).squeeze(1))
            targets.append(own.index_select(0, partial).gather(1, columns).squeeze(1))
        return torch.cat(sources).to(torch.int64), torch.cat(targets).to(torch.int64)
