"""What every `Executor` must do, as a suite: subclass `ExecutorContract` and give it a device to try.

    class TestThreadExecutor(ExecutorContract):
        def make_device(self) -> DeviceUnderTest: ...

The device needs two slots, 8 blocks in each group, 8 tokens a step and two unapplied steps. Two devices made
by the same class must give equal tokens for equal plans.
"""

import asyncio
import contextlib
import pickle
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from asyncserve.errors import DeviceLost, EngineStopped, InvariantError, StepFailed
from asyncserve.grammar import Grammar
from asyncserve.request import SamplingParams
from asyncserve.step import (
    NO_TOKEN,
    BlockAppend,
    Executor,
    ExecutorInfo,
    ScheduledSequence,
    SlotAssignment,
    StepOutput,
    StepPlan,
)
from tests.fakes.grammar import ByteTokens, FakeGrammar

PROMPT = array("i", [5, 6, 7, 8, 9])


class DeviceUnderTest(Protocol):
    """An executor not yet started, with hooks on its device side."""

    @property
    def executor(self) -> Executor:
        """The executor."""

    def hold(self) -> None:
        """Let steps wait on the device (or before it) from now on."""

    def release(self) -> None:
        """Let them run again. Idempotent."""

    def fail_step(self, step_id: int) -> None:
        """Let a step that has not run yet raise on the device."""

    def lose_device_at(self, step_id: int) -> None:
        """Let a step that has not run yet be the device's last."""


class PlanWriter:
    """Writes valid plans, one sequence each, for a few greedy sequences that fit without any scheduling."""

    def __init__(self, info: ExecutorInfo) -> None:
        self._info = info
        self._next_step_id = 0
        self._next_block_id = 1
        self._computed: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}

    def reopen(self) -> None:
        """Write plans for the device opened anew: its slots and blocks are free, step ids count on."""
        self._next_block_id = 1
        self._computed.clear()
        self._num_blocks.clear()

    def admit(
        self, slot: int, token_ids: "array[int]" = PROMPT, *, grammar: Grammar | None = None
    ) -> StepPlan:
        """Return a plan that admits a prompt and computes all of it."""
        assignment = SlotAssignment(
            slot=slot,
            token_ids=token_ids[:],
            prompt_len=len(token_ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=8),
            seed=1,
            stop_token_ids=frozenset() if grammar is None else grammar.stop_token_ids,
            grammar=grammar,
        )
        self._computed[slot] = self._num_blocks[slot] = 0
        return self._plan(slot, len(token_ids), admitted=(assignment,))

    def decode(self, slot: int, *, release: tuple[int, ...] = ()) -> StepPlan:
        """Return a plan for one more token, which also tells that the slots in `release` are free."""
        return self._plan(slot, 1, released_slots=release)

    def _plan(
        self,
        slot: int,
        num_tokens: int,
        *,
        admitted: tuple[SlotAssignment, ...] = (),
        released_slots: tuple[int, ...] = (),
    ) -> StepPlan:
        start = self._computed[slot]
        self._computed[slot] = start + num_tokens
        appends = []
        block_len = self._info.kv_groups[0].spec.block_len
        num_needed = -(-(start + num_tokens) // block_len) - self._num_blocks[slot]
        if num_needed > 0:
            self._num_blocks[slot] += num_needed
            for group in self._info.kv_groups:
                block_ids = tuple(range(self._next_block_id, self._next_block_id + num_needed))
                self._next_block_id += num_needed
                appends.append(BlockAppend(group.group_id, slot, block_ids))
        step_id = self._next_step_id
        self._next_step_id += 1
        return StepPlan(
            step_id=step_id,
            sequences=(ScheduledSequence(slot, start, num_tokens, True),),
            admitted=admitted,
            released_slots=released_slots,
            block_appends=tuple(appends),
        )


def submit(device: DeviceUnderTest, plan: StepPlan) -> "asyncio.Future[StepOutput]":
    """Submit a plan and return its awaitable as a future."""
    return asyncio.ensure_future(device.executor.submit(plan))


async def undisturbed_tokens(device: DeviceUnderTest, slot: int, num_tokens: int) -> list[int]:
    """Return the tokens of one prompt alone on a fresh device, each step awaited before the next."""
    writer = PlanWriter(await device.executor.start())
    try:
        output = await device.executor.submit(writer.admit(slot))
        tokens = list(output.token_ids)
        while len(tokens) < num_tokens:
            output = await device.executor.submit(writer.decode(slot))
            tokens.extend(output.token_ids)
    finally:
        await device.executor.stop()
    return tokens


class ExecutorContract(ABC):
    """The suite."""

    @abstractmethod
    def make_device(self) -> DeviceUnderTest:
        """Return a fresh device, not started; all devices made are alike."""

    @pytest.fixture
    async def device(self) -> AsyncIterator[DeviceUnderTest]:
        """A device that is stopped when the test ends."""
        device = self.make_device()
        yield device
        device.release()
        await device.executor.stop()

    async def test_start_tells_what_the_device_offers(self, device: DeviceUnderTest) -> None:
        info = await device.executor.start()
        assert info.num_slots >= 2
        assert info.max_unapplied >= 2
        assert info.vocab_size > max(PROMPT)
        assert [group.group_id for group in info.kv_groups] == list(range(len(info.kv_groups)))
        assert all(group.num_blocks >= 8 for group in info.kv_groups)

    async def test_each_step_gives_its_own_output_with_one_token_per_sampling_sequence(
        self, device: DeviceUnderTest
    ) -> None:
        info = await device.executor.start()
        writer = PlanWriter(info)
        for plan in (writer.admit(0), writer.decode(0), writer.admit(1)):
            output = await device.executor.submit(plan)
            assert output.step_id == plan.step_id
            assert len(output.token_ids) == 1
            assert 0 <= output.token_ids[0] < info.vocab_size

    async def test_submit_returns_before_the_step_has_run(self, device: DeviceUnderTest) -> None:
        writer = PlanWriter(await device.executor.start())
        device.hold()
        step = submit(device, writer.admit(0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not step.done()
        device.release()
        assert (await step).step_id == 0

    async def test_steps_end_in_the_order_submitted(self, device: DeviceUnderTest) -> None:
        writer = PlanWriter(await device.executor.start())
        ended: list[int] = []
        device.hold()
        steps = [submit(device, writer.admit(0)), submit(device, writer.admit(1))]
        for step in steps:
            step.add_done_callback(lambda step: ended.append(step.result().step_id))
        device.release()
        await asyncio.gather(*steps)
        # From Python 3.12 on, gather over finished steps returns before their callbacks have run.
        await asyncio.sleep(0)
        assert ended == [0, 1]

    async def test_a_step_submitted_ahead_continues_from_the_token_the_device_just_sampled(
        self, device: DeviceUnderTest
    ) -> None:
        expected = await undisturbed_tokens(self.make_device(), 0, 4)
        writer = PlanWriter(await device.executor.start())
        plans = [writer.admit(0), *(writer.decode(0) for _ in range(3))]
        tokens: list[int] = []
        steps = [submit(device, plans[0])]
        for plan in plans[1:]:
            steps.append(submit(device, plan))
            tokens.extend((await steps.pop(0)).token_ids)
        tokens.extend((await steps.pop()).token_ids)
        assert tokens == expected

    async def test_a_sequence_follows_its_grammar_also_in_a_step_submitted_ahead(
        self, device: DeviceUnderTest
    ) -> None:
        info = await device.executor.start()
        grammar = FakeGrammar(["012345", "05050505", "12"], ByteTokens(), info.vocab_size)
        writer = PlanWriter(info)
        plans = [writer.admit(0, grammar=grammar), *(writer.decode(0) for _ in range(9))]
        tokens: list[int] = []
        steps = [submit(device, plans[0])]
        for plan in plans[1:]:
            steps.append(submit(device, plan))
            tokens.extend((await steps.pop(0)).token_ids)
        tokens.extend((await steps.pop()).token_ids)
        end = tokens.index(ByteTokens.EOS_ID)
        assert bytes(tokens[:end]) in grammar.texts
        assert set(tokens[end + 1 :]) <= {NO_TOKEN}

    async def test_a_plan_that_was_pickled_gives_the_same_tokens(self, device: DeviceUnderTest) -> None:
        expected = await undisturbed_tokens(self.make_device(), 0, 2)
        writer = PlanWriter(await device.executor.start())
        tokens: list[int] = []
        for plan in (writer.admit(0), writer.decode(0)):
            copy = pickle.loads(pickle.dumps(plan))
            assert copy == plan
            tokens.extend((await device.executor.submit(copy)).token_ids)
        assert tokens == expected

    async def test_a_released_slot_serves_the_next_sequence_as_if_new(self, device: DeviceUnderTest) -> None:
        expected = await undisturbed_tokens(self.make_device(), 1, 3)
        writer = PlanWriter(await device.executor.start())
        await device.executor.submit(writer.admit(1, array("i", [3, 3, 3, 3, 3, 3])))
        await device.executor.submit(writer.admit(0))
        await device.executor.submit(writer.decode(0, release=(1,)))
        tokens = list((await device.executor.submit(writer.admit(1))).token_ids)
        for _ in range(2):
            tokens.extend((await device.executor.submit(writer.decode(1))).token_ids)
        assert tokens == expected

    async def test_a_step_that_raises_fails_alone(self, device: DeviceUnderTest) -> None:
        expected = await undisturbed_tokens(self.make_device(), 1, 3)
        writer = PlanWriter(await device.executor.start())
        tokens = list((await device.executor.submit(writer.admit(1))).token_ids)
        device.fail_step(1)
        with pytest.raises(StepFailed) as caught:
            await device.executor.submit(writer.admit(0))
        assert caught.value.step_id == 1
        for _ in range(2):
            tokens.extend((await device.executor.submit(writer.decode(1))).token_ids)
        assert tokens == expected

    async def test_the_step_behind_one_that_raises_still_runs(self, device: DeviceUnderTest) -> None:
        expected = await undisturbed_tokens(self.make_device(), 1, 1)
        writer = PlanWriter(await device.executor.start())
        device.hold()
        device.fail_step(0)
        failing, behind = submit(device, writer.admit(0)), submit(device, writer.admit(1))
        device.release()
        with pytest.raises(StepFailed) as caught:
            await failing
        assert caught.value.step_id == 0
        assert list((await behind).token_ids) == expected

    async def test_a_caller_that_stops_waiting_disturbs_no_other_step(self, device: DeviceUnderTest) -> None:
        expected = await undisturbed_tokens(self.make_device(), 0, 2)
        writer = PlanWriter(await device.executor.start())
        device.hold()
        forgotten = submit(device, writer.admit(0))
        behind = submit(device, writer.decode(0))
        forgotten.cancel()
        device.release()
        assert list((await behind).token_ids) == expected[1:]
        assert forgotten.cancelled()

    async def test_starting_again_does_not_lose_what_the_device_holds(self, device: DeviceUnderTest) -> None:
        expected = await undisturbed_tokens(self.make_device(), 0, 2)
        info = await device.executor.start()
        writer = PlanWriter(info)
        tokens = list((await device.executor.submit(writer.admit(0))).token_ids)
        with contextlib.suppress(RuntimeError, InvariantError):  # refusing is as good as doing nothing
            assert await device.executor.start() == info
        tokens.extend((await device.executor.submit(writer.decode(0))).token_ids)
        assert tokens == expected

    async def test_a_device_that_is_opened_anew_works_as_if_new(self, device: DeviceUnderTest) -> None:
        expected = await undisturbed_tokens(self.make_device(), 0, 3)
        info = await device.executor.start()
        writer = PlanWriter(info)
        await device.executor.submit(writer.admit(0, array("i", [3, 3, 3, 3, 3, 3])))
        await device.executor.submit(writer.decode(0))
        assert await device.executor.restart() == info
        writer.reopen()
        tokens = list((await device.executor.submit(writer.admit(0))).token_ids)
        for _ in range(2):
            tokens.extend((await device.executor.submit(writer.decode(0))).token_ids)
        assert tokens == expected

    async def test_no_step_runs_on_a_lost_device_until_it_is_opened_anew(
        self, device: DeviceUnderTest
    ) -> None:
        expected = await undisturbed_tokens(self.make_device(), 0, 2)
        writer = PlanWriter(await device.executor.start())
        await device.executor.submit(writer.admit(1))
        device.hold()
        device.lose_device_at(1)
        steps = [submit(device, writer.decode(1)), submit(device, writer.admit(0))]
        device.release()
        answers = await asyncio.gather(*steps, return_exceptions=True)
        answers += await asyncio.gather(submit(device, writer.decode(1)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [DeviceLost] * 3
        await device.executor.restart()
        writer.reopen()
        tokens = list((await device.executor.submit(writer.admit(0))).token_ids)
        tokens.extend((await device.executor.submit(writer.decode(0))).token_ids)
        assert tokens == expected

    async def test_a_step_that_hangs_is_given_up_when_the_device_is_opened_anew(
        self, device: DeviceUnderTest
    ) -> None:
        expected = await undisturbed_tokens(self.make_device(), 0, 2)
        writer = PlanWriter(await device.executor.start())
        device.hold()
        steps = [submit(device, writer.admit(1)), submit(device, writer.admit(0))]
        for _ in range(5):
            await asyncio.sleep(0)
        await device.executor.restart()
        answers = await asyncio.gather(*steps, return_exceptions=True)
        assert [type(answer) for answer in answers] == [DeviceLost] * 2
        device.release()
        writer.reopen()
        tokens = list((await device.executor.submit(writer.admit(0))).token_ids)
        tokens.extend((await device.executor.submit(writer.decode(0))).token_ids)
        assert tokens == expected

    async def test_a_device_that_was_stopped_is_not_opened_anew(self, device: DeviceUnderTest) -> None:
        await device.executor.start()
        await device.executor.stop()
        with pytest.raises(EngineStopped):
            await device.executor.restart()

    async def test_stop_while_busy_leaves_no_step_unanswered(self, device: DeviceUnderTest) -> None:
        writer = PlanWriter(await device.executor.start())
        device.hold()
        steps = [submit(device, writer.admit(0)), submit(device, writer.admit(1))]
        stopping = asyncio.create_task(device.executor.stop())
        for _ in range(5):
            await asyncio.sleep(0)
        device.release()
        await stopping
        answers = await asyncio.gather(*steps, return_exceptions=True)
        kinds = ["ran" if isinstance(answer, StepOutput) else type(answer).__name__ for answer in answers]
        # The one that ran may finish; once one has not run, none behind it does.
        assert kinds in (
            ["ran", "ran"],
            ["ran", EngineStopped.__name__],
            [EngineStopped.__name__, EngineStopped.__name__],
        )

    async def test_a_step_submitted_after_stop_is_answered_with_engine_stopped(
        self, device: DeviceUnderTest
    ) -> None:
        writer = PlanWriter(await device.executor.start())
        await device.executor.stop()
        with pytest.raises(EngineStopped):
            await device.executor.submit(writer.admit(0))

    async def test_stop_is_idempotent_and_may_come_before_start(self, device: DeviceUnderTest) -> None:
        await device.executor.stop()
        await device.executor.stop()
        other = self.make_device()
        await other.executor.start()
        await other.executor.stop()
        await other.executor.stop()
