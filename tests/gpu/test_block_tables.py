import numpy as np
import pytest

from asyncserve.errors import InvariantError
from asyncserve.gpu.block_tables import BlockTable
from asyncserve.step import BlockAppend, ScheduledSequence


def table() -> BlockTable:
    return BlockTable(group_id=0, num_slots=3, max_model_len=16, block_len=4, num_blocks=20)


def row(slot: int, start: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(slot, start, num_tokens, samples=True)


def test_rows_are_as_wide_as_the_longest_and_padded_with_the_null_block() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 2, (5, 6)))
    blocks.append(BlockAppend(0, 0, (9,)))
    blocks.append(BlockAppend(0, 2, (7, 8)))
    rows = blocks.rows(np.array([0, 2]), np.array([4, 9]))
    assert rows.tolist() == [[9, 0, 0], [5, 6, 7]]
    assert rows.dtype == np.int32


def test_a_shorter_row_shows_its_blocks_for_later_tokens_before_the_null_block() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 0, (9, 10)))
    blocks.append(BlockAppend(0, 2, (5, 6, 7)))
    assert blocks.rows(np.array([0, 2]), np.array([4, 9])).tolist() == [[9, 10, 0], [5, 6, 7]]


def test_slot_mapping_is_block_times_length_plus_offset() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 1, (5, 3)))
    blocks.append(BlockAppend(0, 2, (19,)))
    mapping = blocks.slot_mapping(np.array([1, 1, 1, 2]), np.array([0, 3, 4, 2]))
    assert mapping.tolist() == [20, 23, 12, 78]
    assert mapping.dtype == np.int64


def test_nothing_of_a_released_table_is_left() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 1, (5, 3)))
    blocks.release(1)
    blocks.append(BlockAppend(0, 1, (7,)))
    blocks.append(BlockAppend(0, 2, (8, 9)))
    assert blocks.rows(np.array([1, 2]), np.array([1, 8])).tolist() == [[7, 0], [8, 9]]


def test_table_shorter_than_its_sequence_is_refused() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 1, (5,)))
    blocks.rows(np.array([1]), np.array([4]))
    with pytest.raises(InvariantError, match="shorter than its sequence"):
        blocks.rows(np.array([1]), np.array([5]))


@pytest.mark.parametrize("block_id", [0, -1, 20])
def test_block_outside_the_pool_is_refused(block_id: int) -> None:
    with pytest.raises(InvariantError, match="the pool has 1 … 19"):
        table().append(BlockAppend(0, 0, (4, block_id)))


def test_table_does_not_outgrow_the_context() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 0, (1, 2, 3, 4, 5)))
    with pytest.raises(InvariantError, match="6 blocks"):
        blocks.append(BlockAppend(0, 0, (6,)))


def test_only_new_blocks_the_step_leaves_partly_unwritten_are_unclean() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 0, (1, 2, 3)))
    blocks.append(BlockAppend(0, 1, (4,)))
    blocks.append(BlockAppend(0, 2, (5, 6)))
    assert blocks.take_unclean([row(0, 0, 6), row(1, 0, 4)]) == [2, 3]
    assert blocks.take_unclean([row(0, 6, 1)]) == []
    # Slot 2 was not in that step; its turn comes when it is. Block 5 was cached, hence full.
    assert blocks.take_unclean([row(2, 4, 1), row(0, 7, 1)]) == [6]
    assert blocks.take_unclean([row(2, 5, 1)]) == []


def test_unclean_blocks_of_a_released_slot_are_forgotten() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 0, (1,)))
    blocks.release(0)
    assert blocks.take_unclean([row(0, 0, 1)]) == []


def test_a_table_may_begin_with_null_blocks_and_with_nothing_else_is_null() -> None:
    blocks = table()
    blocks.append(BlockAppend(0, 1, (0, 0, 7)))
    assert blocks.rows(np.array([1]), np.array([12])).tolist() == [[0, 0, 7]]
    assert blocks.take_unclean([ScheduledSequence(1, 9, 2, True)]) == [7]
    with pytest.raises(InvariantError, match="gets blocks"):
        blocks.append(BlockAppend(0, 1, (0, 8)))
    with pytest.raises(InvariantError, match="gets blocks"):
        blocks.append(BlockAppend(0, 2, (6, 0)))
    blocks.append(BlockAppend(0, 0, (0, 0)))
    blocks.append(BlockAppend(0, 0, (3,)))
    assert blocks.rows(np.array([0]), np.array([12])).tolist() == [[0, 0, 3]]
