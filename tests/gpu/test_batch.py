from array import array

import pytest
import torch

from asyncserve.gpu.batch import Batch, build_batch, plan_rows
from asyncserve.gpu.block_tables import BlockTable
from asyncserve.gpu.device import CpuDevice, Device
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Staging
from asyncserve.request import SamplingParams
from asyncserve.step import BlockAppend, ScheduledSequence, SlotAssignment, StepPlan
from tests.fakes.device import FakeDevice

TOKENS = {0: [10, 11, 12, 13, 14, 15], 1: [20, 21, 22], 3: [30, 31, 32, 33, 34, 35, 36, 37, 38]}
BLOCKS = [{0: (1, 2), 1: (3,), 3: (4, 5, 6)}, {0: (6, 5), 1: (4,), 3: (3, 2, 1)}]


def batch_of(
    rows: list[tuple[int, int, int, bool]], device: Device, *, admits: bool = False
) -> tuple[Batch, list[int]]:
    staging = Staging(device)
    slots = SlotTable(num_slots=4, max_model_len=16, device=device)
    tables = [
        BlockTable(group_id=group_id, num_slots=4, max_model_len=16, block_len=4, num_blocks=8)
        for group_id in range(2)
    ]
    for slot, tokens in TOKENS.items():
        sampling = SamplingParams()
        assignment = SlotAssignment(
            slot=slot, token_ids=array("i", tokens), prompt_len=len(tokens), sampling=sampling, seed=0
        )
        slots.admit([assignment], staging)
        for group_id, table in enumerate(tables):
            table.append(BlockAppend(group_id, slot, BLOCKS[group_id][slot]))
    sequences = tuple(ScheduledSequence(*row) for row in rows)
    plan = StepPlan(step_id=0, sequences=sequences, admitted=(assignment,) if admits else ())
    batch = build_batch(plan_rows(plan), slots, tables, staging)
    return batch, batch.sample_rows.write_back.tolist()


@pytest.mark.parametrize("device", [CpuDevice(num_threads=1), FakeDevice()])
def test_decode_rows_before_prefill_chunks(device: Device) -> None:
    batch, write_back = batch_of([(1, 2, 1, True), (3, 5, 3, False), (0, 0, 6, True)], device)
    assert batch.input_ids.tolist() == [22, 35, 36, 37, 10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [2, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert batch.query_start.tolist() == [0, 1, 4, 10]
    assert batch.seq_lens.tolist() == [3, 8, 6]
    assert batch.slot_mapping[0].tolist() == [14, 21, 22, 23, 4, 5, 6, 7, 8, 9]
    assert batch.slot_mapping[1].tolist() == [18, 9, 10, 11, 24, 25, 26, 27, 20, 21]
    assert batch.block_tables[0].tolist() == [[3, 0], [4, 5], [1, 2]]
    assert batch.block_tables[1].tolist() == [[4, 0], [3, 2], [6, 5]]
    assert batch.sample_tokens.tolist() == [0, 9]
    assert batch.query_lens_host == (1, 3, 6)
    assert batch.seq_lens_host == (3, 8, 6)
    assert batch.num_decode_rows == 1
    assert (batch.num_tokens, batch.num_rows) == (10, 3)
    assert write_back == [1 * 17 + 3, 0 * 17 + 6]


@pytest.mark.parametrize("device", [CpuDevice(num_threads=1), FakeDevice()])
def test_decode_rows_only(device: Device) -> None:
    batch, write_back = batch_of([(3, 8, 1, True), (0, 5, 1, True)], device)
    assert batch.input_ids.tolist() == [38, 15]
    assert batch.positions.tolist() == [8, 5]
    assert batch.query_start.tolist() == [0, 1, 2]
    assert batch.block_tables[0].tolist() == [[4, 5, 6], [1, 2, 0]]
    assert batch.num_decode_rows == 2
    assert write_back == [3 * 17 + 9, 6]


@pytest.mark.parametrize(
    ("query_len", "admits", "is_decode"), [(1, False, True), (1, True, False), (2, False, False)]
)
def test_rows_of_one_token_are_strangers_unless_a_sequence_begins(
    query_len: int, admits: bool, is_decode: bool
) -> None:
    rows = [(3, 8, 1, True), (0, 4, query_len, True)]
    batch, _ = batch_of(rows, CpuDevice(num_threads=1), admits=admits)
    assert batch.is_decode is is_decode


def test_prefill_rows_only_and_none_samples() -> None:
    batch, write_back = batch_of([(3, 0, 4, False), (0, 2, 2, False)], CpuDevice(num_threads=1))
    assert batch.input_ids.tolist() == [30, 31, 32, 33, 12, 13]
    assert batch.num_decode_rows == 0
    assert batch.sample_tokens.tolist() == []
    assert write_back == []


def test_a_branch_samples_from_the_last_token_before_it() -> None:
    # As many rows as tokens, not one token a row.
    batch, write_back = batch_of(
        [(1, 2, 1, True), (3, 0, 2, True), (0, 6, 0, True)], CpuDevice(num_threads=1), admits=True
    )
    assert batch.input_ids.tolist() == [22, 30, 31]
    assert batch.positions.tolist() == [2, 0, 1]
    assert batch.query_start.tolist() == [0, 1, 3, 3]
    assert batch.sample_tokens.tolist() == [0, 2, 2]
    assert batch.sample_rows.positions.tolist() == [3, 2, 6]
    assert batch.num_decode_rows == 1
    assert write_back == [1 * 17 + 3, 3 * 17 + 2, 0 * 17 + 6]


def test_every_tensor_has_the_dtype_it_promises() -> None:
    batch, _ = batch_of([(1, 2, 1, True), (0, 0, 6, True)], CpuDevice(num_threads=1))
    int32 = (batch.input_ids, batch.query_start, batch.seq_lens, *batch.block_tables)
    int64 = (batch.positions, batch.sample_tokens, *batch.slot_mapping)
    assert {tensor.dtype for tensor in int32} == {torch.int32}
    assert {tensor.dtype for tensor in int64} == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in (*int32, *int64))
