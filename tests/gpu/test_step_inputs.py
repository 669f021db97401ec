"""The kernel that prepares inputs gives what numpy gives, for plans one after the other."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncserve.errors import InvariantError
from asyncserve.gpu.batch import Batch, PlanRows, plan_rows
from asyncserve.gpu.block_tables import BlockTable
from asyncserve.gpu.device import CpuDevice, open_device
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Staging
from asyncserve.gpu.step_inputs import DeviceInputs, HostInputs, StepSize
from asyncserve.request import SamplingParams
from asyncserve.step import BlockAppend, ScheduledSequence, SlotAssignment, StepPlan

NUM_SLOTS, MAX_LEN = 5, 40
BLOCK_LENS = (4, 8)
ON_GPU = torch.cuda.is_available()


class Rows:
    """The persistent rows and both ways to make inputs from them."""

    def __init__(self) -> None:
        device = open_device("cuda") if ON_GPU else CpuDevice(num_threads=1)
        device.activate()
        self.staging = Staging(device)
        self.slots = SlotTable(num_slots=NUM_SLOTS, max_model_len=MAX_LEN, device=device)
        self.tables = [
            BlockTable(
                group_id=group_id,
                num_slots=NUM_SLOTS,
                max_model_len=MAX_LEN,
                block_len=block_len,
                num_blocks=500,
            )
            for group_id, block_len in enumerate(BLOCK_LENS)
        ]
        self.on_host = HostInputs(self.slots, self.tables, self.staging)
        self.on_device = DeviceInputs(self.slots, self.tables, self.staging, device)
        self.random = np.random.default_rng(0)

    def admit(self, slot: int, num_tokens: int) -> None:
        tokens = self.random.integers(0, 1000, num_tokens).tolist()
        assignment = SlotAssignment(
            slot=slot, token_ids=array("i", tokens), prompt_len=num_tokens, sampling=SamplingParams(), seed=0
        )
        self.slots.admit([assignment], self.staging)

    def append(self, slot: int, group_id: int, num_blocks: int) -> None:
        blocks = self.random.integers(1, 500, num_blocks).tolist()
        self.tables[group_id].append(BlockAppend(group_id, slot, tuple(blocks)))

    def release(self, slot: int) -> None:
        self.slots.release(slot)
        for table in self.tables:
            table.release(slot)


def rows_of(rows: list[tuple[int, int, int, bool]]) -> PlanRows:
    return plan_rows(StepPlan(step_id=0, sequences=tuple(ScheduledSequence(*row) for row in rows)))


def assert_same(made: Batch, expected: Batch, *, room: StepSize | None = None) -> None:
    num_tokens, num_rows = expected.num_tokens, expected.num_rows
    num_samples = expected.sample_tokens.shape[0]
    assert made.input_ids[:num_tokens].tolist() == expected.input_ids.tolist()
    assert made.positions[:num_tokens].tolist() == expected.positions.tolist()
    assert made.query_start[: num_rows + 1].tolist() == expected.query_start.tolist()
    assert made.seq_lens[:num_rows].tolist() == expected.seq_lens.tolist()
    assert made.sample_tokens[:num_samples].tolist() == expected.sample_tokens.tolist()
    assert made.sample_rows.slots[:num_samples].tolist() == expected.sample_rows.slots.tolist()
    assert made.sample_rows.positions[:num_samples].tolist() == expected.sample_rows.positions.tolist()
    assert made.sample_rows.write_back[:num_samples].tolist() == expected.sample_rows.write_back.tolist()
    for group_id, block_len in enumerate(BLOCK_LENS):
        assert made.slot_mapping[group_id][:num_tokens].tolist() == expected.slot_mapping[group_id].tolist()
        for row, seq_len in enumerate(expected.seq_lens.tolist()):
            needed = -(-seq_len // block_len)
            assert (
                made.block_tables[group_id][row, :needed].tolist()
                == expected.block_tables[group_id][row, :needed].tolist()
            )
    if room is None:
        assert made.num_decode_rows == expected.num_decode_rows
        assert made.num_tokens == num_tokens
        assert made.query_lens_host == expected.query_lens_host
        assert made.seq_lens_host == expected.seq_lens_host
        return
    assert made.query_lens_host == made.seq_lens_host == ()
    assert made.padded is not None
    assert made.padded.num_long_rows == room.num_long_rows
    assert made.padded.first_long_row.tolist() == [expected.num_decode_rows]
    assert (made.num_rows, made.num_tokens) == (room.num_rows, room.num_tokens)
    assert set(made.seq_lens[num_rows:].tolist()) <= {0}
    assert set(made.query_start[num_rows:].tolist()) == {num_tokens}
    assert set(made.input_ids[num_tokens:].tolist()) <= {0}
    assert set(made.positions[num_tokens:].tolist()) <= {0}
    for mapping in made.slot_mapping:
        assert set(mapping[num_tokens:].tolist()) <= {-1}
    assert set(made.sample_rows.slots[num_samples:].tolist()) <= {-1}
    assert set(made.sample_tokens[num_samples:].tolist()) <= {0}
    assert set(made.sample_rows.write_back[num_samples:].tolist()) <= {NUM_SLOTS * (MAX_LEN + 1)}


def step(rows: Rows, planned: PlanRows, room: StepSize | None) -> None:
    rows.on_host.take(planned)
    expected = rows.on_host.batch()
    assert rows.on_device.take(planned, room, result_row=7)
    made = rows.on_device.batch(room)
    rows.on_device.settle()
    assert_same(made, expected, room=room)
    assert made.sample_rows.result_row is not None
    assert made.sample_rows.result_row.tolist() == [7]


STEPS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 2)), min_size=1, max_size=NUM_SLOTS
        ),
        st.booleans(),
        st.integers(0, NUM_SLOTS - 1),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(STEPS)
def test_the_kernel_makes_what_numpy_makes(
    steps: list[tuple[list[tuple[int, bool, int]], bool, int]],
) -> None:
    rows = Rows()
    lens = dict.fromkeys(range(NUM_SLOTS), 0)
    for slot in lens:
        rows.admit(slot, MAX_LEN)
    for sequences, is_padded, leaver in steps:
        plan = []
        for slot, (num_tokens, samples, more) in enumerate(sequences):
            num_tokens = min(num_tokens, MAX_LEN - lens[slot])
            if not num_tokens and not plan:
                continue
            plan.append((slot, lens[slot], num_tokens, samples))
            lens[slot] += num_tokens
            for group_id, block_len in enumerate(BLOCK_LENS):
                table = rows.tables[group_id]
                held = int(table._lens[slot])
                missing = max(0, -(-lens[slot] // block_len) - held)
                rows.append(slot, group_id, min(missing + more, table.max_blocks - held))
        if not plan:
            continue
        plan.sort(key=lambda row: 0 if row[2] == 1 else 2 - (row[2] > 1))  # branches behind a chunk
        total = sum(row[2] for row in plan)
        step(
            rows,
            rows_of(plan),
            StepSize(num_rows=NUM_SLOTS, num_tokens=total + 3, num_long_rows=2) if is_padded else None,
        )
        rows.release(leaver)
        rows.admit(leaver, MAX_LEN)
        lens[leaver] = 0


def test_a_step_that_was_never_launched_is_told_the_device_again() -> None:
    rows = Rows()
    rows.admit(1, 10)
    rows.append(1, 0, 3)
    rows.append(1, 1, 2)
    rows.on_device.take(rows_of([(1, 0, 10, True)]))
    step(rows, rows_of([(1, 0, 10, True)]), None)


def test_a_table_shorter_than_its_sequence_is_refused() -> None:
    rows = Rows()
    rows.admit(1, 10)
    rows.append(1, 0, 3)
    rows.append(1, 1, 1)
    with pytest.raises(InvariantError, match="shorter"):
        rows.on_device.take(rows_of([(1, 0, 10, True)]))


def test_a_step_with_more_blocks_than_graphs_take_is_left_to_another_way() -> None:
    rows = Rows()
    room = StepSize(num_rows=NUM_SLOTS, num_tokens=NUM_SLOTS)
    rows.on_device._persistent = rows.on_device._persistent[:40]
    rows.admit(0, 40)
    rows.append(0, 0, 10)
    rows.append(0, 1, 5)
    planned = rows_of([(0, 39, 1, True)])
    assert not rows.on_device.take(planned, room)
    step(rows, planned, None)


def test_padding_alone_touches_no_row() -> None:
    rows = Rows()
    rows.admit(0, 8)
    rows.append(0, 0, 2)
    rows.append(0, 1, 1)
    step(rows, rows_of([(0, 0, 8, True)]), None)
    before = [table.clone() for table in rows.on_device._on_device]
    assert all(table.any() for table in before)
    size = StepSize(num_rows=3, num_tokens=3)
    rows.on_device.take_nothing(size)
    made = rows.on_device.batch(size)
    assert made.seq_lens.tolist() == [0, 0, 0]
    assert made.slot_mapping[0].tolist() == [-1, -1, -1]
    assert made.sample_rows.slots.tolist() == [-1, -1, -1]
    for table, same in zip(rows.on_device._on_device, before, strict=True):
        assert torch.equal(table, same)
