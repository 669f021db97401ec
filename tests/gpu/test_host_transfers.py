"""Whole steps with stores and loads: who comes back from the host goes on as if it had never left."""

import dataclasses
from collections.abc import Sequence

import pytest

from asyncserve.errors import InvariantError
from asyncserve.step import BlockTransfer, StepPlan
from tests.fakes.plan_driver import PlanDriver
from tests.gpu.tiny_runners import BLOCK_LEN, PROMPTS, Subject, drive, expected, generate_alone, subjects

PROMPT = PROMPTS[2]
NUM_TOKENS = 12
NUM_BEFORE = 3


def stores(blocks: Sequence[int]) -> tuple[BlockTransfer, ...]:
    """Return the stores of blocks, the last one first in the host's memory."""
    return tuple(BlockTransfer(block, len(blocks) - idx) for idx, block in enumerate(blocks))


def come_back(driver: PlanDriver, token_ids: Sequence[int]) -> tuple[int, StepPlan]:
    """Admit a sequence whose blocks the host has, all tokens but the last computed; return slot and plan."""
    slot = driver.admit(token_ids, prompt_len=len(PROMPT))
    driver.starts[slot] = len(token_ids) - 1
    plan = driver.plan({slot: 1})
    table = driver.tables[slot][0]
    loads = tuple(BlockTransfer(device, host) for device, host in stores(table))
    return slot, dataclasses.replace(plan, block_loads=loads)


@pytest.mark.parametrize("subject", subjects("cpu", "cuda"))
def test_a_sequence_that_was_swapped_goes_on_with_the_same_tokens(subject: Subject) -> None:
    driver = drive(subject, num_blocks=12, num_host_blocks=8)
    tokens = generate_alone_but_stay(driver, PROMPT, NUM_BEFORE)
    slot = next(iter(driver.tables))
    table = driver.tables[slot][0]
    assert (len(PROMPT) + NUM_BEFORE - 1) % BLOCK_LEN, "the last block is partly filled"
    driver.release(slot)
    # The other gets the very blocks that are stored in its first step.
    other = driver.admit(PROMPTS[3])
    plan = driver.plan({other: len(PROMPTS[3])})
    assert set(driver.tables[other][0]) <= set(table)
    sampled = driver.runner.run(dataclasses.replace(plan, block_stores=stores(table))).wait().token_ids
    others = [*sampled, *driver.generate([other], NUM_TOKENS - 1)[0]]
    assert others == expected(subject, PROMPTS[3], NUM_TOKENS)
    # It comes back while the other still runs.
    slot, plan = come_back(driver, [*PROMPT, *tokens])
    tokens += driver.runner.run(plan).wait().token_ids
    tokens += driver.generate([slot], NUM_TOKENS - len(tokens))[0]
    assert tokens == expected(subject, PROMPT, NUM_TOKENS)


def test_what_is_loaded_is_not_zeroed_with_the_rest_of_its_block() -> None:
    subject = Subject(kind="cpu", architecture="llama")
    driver = drive(subject, num_blocks=12, num_host_blocks=8)
    assert driver.runner._attention.reads_unwritten
    tokens = generate_alone_but_stay(driver, PROMPT, NUM_BEFORE)
    slot = next(iter(driver.tables))
    table = driver.tables[slot][0]
    driver.release(slot, keep_blocks=True)
    plan = driver.plan({driver.admit([1]): 1})
    driver.runner.run(dataclasses.replace(plan, block_stores=stores(table))).wait()
    slot, plan = come_back(driver, [*PROMPT, *tokens])
    tokens += driver.runner.run(plan).wait().token_ids
    assert tokens == expected(subject, PROMPT, 4)


def test_a_plan_with_transfers_fails_where_the_host_has_no_memory_for_blocks() -> None:
    driver = drive(Subject(kind="cpu", architecture="llama"))
    plan = driver.plan({driver.admit(PROMPT): 1})
    with pytest.raises(InvariantError, match="no memory"):
        driver.runner.run(dataclasses.replace(plan, block_stores=(BlockTransfer(1, 1),)))


def test_a_runner_measures_how_long_blocks_take() -> None:
    subject = Subject(kind="cpu", architecture="llama")
    driver = drive(subject, num_host_blocks=8)
    assert 0 < driver.runner.measure_transfers() < 10
    assert generate_alone(driver, PROMPT, 3) == expected(subject, PROMPT, 3)


def generate_alone_but_stay(driver: PlanDriver, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Let a sequence generate, and keep its slot."""
    return driver.generate([driver.admit(prompt)], num_tokens)[0]
