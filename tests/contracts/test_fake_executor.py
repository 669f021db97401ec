import asyncio
from array import array

import pytest

from asyncserve.errors import EngineStopped, StepFailed
from asyncserve.request import SamplingParams
from asyncserve.step import BAD_LOGITS, BlockAppend, ScheduledSequence, SlotAssignment, StepPlan
from tests.contracts.plan_rules import PlanRuleBroken
from tests.fakes.executor import FakeExecutor, FakeRunner, fake_continuation, fake_info

PROMPT = [5, 6, 7]
INFO = fake_info()


def plans(num_plans: int = 3, slot: int = 0, **sampling: int) -> list[StepPlan]:
    """One sequence: its prompt, then decode steps within its first block and second block."""
    admitted = SlotAssignment(
        slot=slot,
        token_ids=array("i", PROMPT),
        prompt_len=3,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=0,
    )
    first = StepPlan(
        step_id=0,
        sequences=(ScheduledSequence(slot, 0, 3, True),),
        admitted=(admitted,),
        block_appends=(BlockAppend(0, slot, (1, 2)),),
    )
    rest = [
        StepPlan(step_id=step_id, sequences=(ScheduledSequence(slot, 2 + step_id, 1, True),))
        for step_id in range(1, num_plans)
    ]
    return [first, *rest]


@pytest.mark.parametrize("check_plans", [True, False])
async def test_steps_finish_by_themselves_with_the_tokens_of_the_fixed_function(check_plans: bool) -> None:
    executor = FakeExecutor(INFO, check_plans=check_plans)
    assert await executor.start() is INFO
    outputs = [await executor.submit(plan) for plan in plans()]
    tokens = [output.token_ids[0] for output in outputs]
    assert tokens == fake_continuation(PROMPT, 3, INFO.vocab_size)


async def test_held_steps_finish_when_told_and_in_order() -> None:
    executor = FakeExecutor(INFO)
    await executor.start()
    executor.hold()
    first, second = (executor.submit(plan) for plan in plans(2))
    await asyncio.sleep(0)
    assert executor.pending_step_ids == [0, 1]
    assert not first.done()
    with pytest.raises(AssertionError, match="step 0 finishes before step 1"):
        executor.complete(1)
    executor.complete(0)
    assert first.done()
    assert not second.done()
    executor.resume()
    assert (await second).step_id == 1


async def test_a_failed_step_raises_and_the_next_one_still_runs() -> None:
    executor = FakeExecutor(INFO)
    await executor.start()
    executor.fail(0, "no luck")
    first, second = (executor.submit(plan) for plan in plans(2))
    with pytest.raises(StepFailed, match="step 0 failed: no luck"):
        await first
    assert (await second).step_id == 1


async def test_stopping_fails_the_steps_that_wait_and_later_ones() -> None:
    executor = FakeExecutor(INFO)
    await executor.start()
    executor.hold()
    first, second = plans(2)
    waiting = executor.submit(first)
    await executor.stop()
    await executor.stop()
    with pytest.raises(EngineStopped):
        await waiting
    with pytest.raises(EngineStopped):
        await executor.submit(second)


async def test_a_plan_that_breaks_the_rules_is_refused_when_submitted() -> None:
    executor = FakeExecutor(INFO)
    await executor.start()
    with pytest.raises(PlanRuleBroken):
        await executor.submit(plans(2)[1])


async def test_a_slot_released_while_a_step_uses_it_is_refused() -> None:
    executor = FakeExecutor(INFO)
    await executor.start()
    executor.hold()
    first = executor.submit(plans()[0])
    early = StepPlan(
        step_id=1,
        released_slots=(0,),
        admitted=(
            SlotAssignment(
                slot=1, token_ids=array("i", [1]), prompt_len=1, sampling=SamplingParams(), seed=0
            ),
        ),
        block_appends=(BlockAppend(0, 1, (5,)),),
        sequences=(ScheduledSequence(1, 0, 1, True),),
    )
    with pytest.raises(AssertionError, match=r"step 1 releases slots \[0\] which unfinished step 0"):
        await executor.submit(early)
    executor.complete()
    await first


async def test_a_start_that_fails_raises_what_it_was_given() -> None:
    with pytest.raises(OSError, match="no device"):
        await FakeExecutor(start_error=OSError("no device")).start()


def test_a_block_that_holds_another_prefix_is_noticed() -> None:
    runner = FakeRunner(INFO)
    runner.run(plans()[0])
    thief = SlotAssignment(
        slot=1, token_ids=array("i", [9] * 6), prompt_len=6, sampling=SamplingParams(), seed=0
    )
    wrong = StepPlan(
        step_id=1,
        admitted=(thief,),
        block_appends=(BlockAppend(0, 1, (1, 3)),),
        sequences=(ScheduledSequence(1, 4, 2, True),),
    )
    with pytest.raises(AssertionError, match="slot 1: group 0 does not hold the sequence's prefix at posi"):
        runner.run(wrong)


def test_tokens_computed_from_what_a_failed_step_left_are_wrong() -> None:
    first, second, _ = plans()
    runner = FakeRunner(INFO)
    runner.fail(first)
    assert list(runner.run(second).token_ids) != fake_continuation(PROMPT, 2, INFO.vocab_size)[1:]


@pytest.mark.parametrize("check_plans", [True, False])
def test_a_test_can_choose_the_tokens_and_ask_for_logprobs(check_plans: bool) -> None:
    runner = FakeRunner(
        INFO,
        next_token=lambda token_ids, prompt_len: BAD_LOGITS if len(token_ids) > 4 else len(token_ids),
        check_plans=check_plans,
    )
    first, second, third = (runner.run(plan) for plan in plans(num_logprobs=2, num_prompt_logprobs=1))
    assert [first.token_ids, second.token_ids, third.token_ids] == [[3], [4], [BAD_LOGITS]]
    assert first.logprobs[0].top == ((3, -0.25), (4, -0.5))
    assert [entry.token_id for entry in first.prompt_logprobs[0]] == [6, 7]
    assert second.prompt_logprobs == {}
    assert third.logprobs == {}
