from array import array

import numpy as np
import pytest
import torch

from asyncserve.errors import InvariantError
from asyncserve.gpu.device import CpuDevice, Device
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Staging
from asyncserve.request import SamplingParams
from asyncserve.step import BAD_LOGITS, SlotAssignment
from tests.fakes.device import FakeDevice


def assignment(slot: int, token_ids: list[int], **sampling: int) -> SlotAssignment:
    return SlotAssignment(
        slot=slot,
        token_ids=array("i", token_ids),
        prompt_len=len(token_ids),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=0,
    )


def table(device: Device | None = None) -> tuple[SlotTable, Staging]:
    device = device or CpuDevice(num_threads=1)
    return SlotTable(num_slots=3, max_model_len=8, device=device), Staging(device)


@pytest.mark.parametrize("device", [CpuDevice(num_threads=1), FakeDevice()])
def test_sampled_tokens_are_gathered_where_they_were_written(device: Device) -> None:
    slots, staging = table(device)
    slots.admit([assignment(0, [4, 5, 6]), assignment(2, [7])], staging)
    written = torch.from_numpy(slots.flat_indices(np.array([0, 2]), np.array([3, 1])))
    slots.write(written, torch.tensor([11, 12]))
    assert slots.tokens(0, 0, 4).tolist() == [4, 5, 6, 11]
    assert slots.tokens(2, 0, 2).tolist() == [7, 12]
    assert slots.gather(written).tolist() == [11, 12]
    assert slots.gather(written).dtype == torch.int32


def test_admitted_tokens_are_a_copy() -> None:
    slots, staging = table()
    given = assignment(0, [4, 5, 6])
    slots.admit([given], staging)
    given.token_ids[0] = 9
    assert slots.tokens(0, 0, 3).tolist() == [4, 5, 6]


def test_bad_logits_are_stored_as_a_token_that_exists() -> None:
    slots, staging = table()
    slots.admit([assignment(1, [4])], staging)
    where = torch.from_numpy(slots.flat_indices(np.array([1]), np.array([1])))
    slots.write(where, torch.tensor([BAD_LOGITS]))
    assert slots.gather(where).tolist() == [0]


def test_token_behind_the_last_position_has_a_place() -> None:
    slots, staging = table()
    slots.admit([assignment(2, [1] * 8)], staging)
    where = torch.from_numpy(slots.flat_indices(np.array([2]), np.array([8])))
    slots.write(where, torch.tensor([3]))
    assert slots.gather(where).tolist() == [3]


def test_row_longer_than_the_context_is_refused() -> None:
    slots, staging = table()
    with pytest.raises(InvariantError, match="9 tokens"):
        slots.admit([assignment(0, [1] * 9)], staging)


def test_slot_cannot_be_given_twice_or_released_twice() -> None:
    slots, staging = table()
    slots.admit([assignment(0, [1])], staging)
    with pytest.raises(InvariantError, match="admitted while taken"):
        slots.admit([assignment(0, [1])], staging)
    with pytest.raises(InvariantError, match="out of range"):
        slots.admit([assignment(3, [1])], staging)
    slots.release(0)
    assert slots.num_occupied == 0
    with pytest.raises(InvariantError, match="released while free"):
        slots.release(0)


def test_wish_for_prompt_logprobs_ends_with_the_slot() -> None:
    slots, staging = table()
    slots.admit([assignment(0, [1, 2], num_prompt_logprobs=3)], staging)
    assert slots.num_prompt_logprobs == {0: 3}
    assert slots.prompt_lens == {0: 2}
    slots.release(0)
    slots.admit([assignment(0, [1, 2])], staging)
    assert slots.num_prompt_logprobs == {}
