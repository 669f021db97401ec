"""What clients notice of failed steps, lost devices and hung steps: a pause, and the culprit its error."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import pytest

from asyncserve.errors import DeviceLost, EngineStopped, StartupError, StepFailed
from asyncserve.faults import Faults, FaultyExecutor, FaultyTokenizer, Trigger
from asyncserve.loop.engine import Engine
from asyncserve.loop.restart_budget import LOSSES_OF_A_CULPRIT
from asyncserve.observer import NullObserver
from asyncserve.request import FinishReason, TokensPrompt
from asyncserve.step import ExecutorInfo
from tests.fakes.engine import VOCAB_SIZE, Bench, bench, request
from tests.fakes.executor import FakeExecutor, fake_continuation, fake_info
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import FakeTokenizer

CULPRIT = 500
"""The first token of a prompt that lets steps fail."""


def prompt(first: int, num_tokens: int = 5) -> list[int]:
    return [first, *range(1, num_tokens)]


def send(b: Bench, first: int, **options: Any) -> RecordingSink:
    return b.send(TokensPrompt(token_ids=prompt(first)), str(first), **options)


def send_some(b: Bench, number: int, **options: Any) -> RecordingSink:
    return b.send(TokensPrompt(token_ids=prompt(number % 400)), f"number {number}", **options)


def expected(first: int, num_tokens: int = 6) -> list[int]:
    return fake_continuation(prompt(first), num_tokens, VOCAB_SIZE)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize("ahead", [True, False])
async def test_the_culprit_of_failed_steps_ends_with_the_error_and_all_others_get_their_tokens(
    ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(async_scheduling=ahead) as b:
        b.executor.fail_with(CULPRIT, "the device choked")
        sinks = {first: send(b, first, n=2) for first in (3, CULPRIT, 7, 11)}
        for first, sink in sinks.items():
            await sink.wait()
            for index in (0, 1):
                answer = sink.choice(index)
                if first == CULPRIT:
                    assert answer.finish_reason is FinishReason.ERROR
                    assert isinstance(answer.error, StepFailed)
                    assert "the device choked" in str(answer.error)
                else:
                    assert answer.finish_reason is FinishReason.LENGTH
                    assert answer.token_ids == expected(first)
        await b.settle()
        statistics = b.engine.statistics()
        assert statistics.num_failed_sequences == 2
        assert 0 < statistics.num_retried_steps < 12
        assert b.observer.reasons == {FinishReason.ERROR: 2, FinishReason.LENGTH: 6}
    logged = messages(caplog, logging.ERROR)
    assert sum("computed alone, so that request ends" in message for message in logged) == 1
    assert len(logged) == statistics.num_failed_steps


async def test_after_a_lost_device_every_request_goes_on_as_if_nothing_had_been(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        b.executor.lose_device_at(4)
        sinks = {first: send(b, first, max_tokens=12) for first in (3, 5, 7)}
        for first, sink in sinks.items():
            assert (await sink.wait()).choice().token_ids == expected(first, 12)
        statistics = b.engine.statistics()
        assert b.executor.num_restarts == statistics.num_device_restarts == 1
        assert statistics.num_replayed_sequences == 3
        assert not statistics.device_is_lost
        assert b.observer.reasons == {FinishReason.LENGTH: 3}
    assert "opening it anew" in messages(caplog, logging.ERROR)[0]


async def test_while_the_device_is_opened_anew_requests_are_taken_and_may_be_aborted() -> None:
    class SlowExecutor(FakeExecutor):
        gate: asyncio.Event

        async def restart(self) -> ExecutorInfo:
            await self.gate.wait()
            return await super().restart()

    executor = SlowExecutor(fake_info(vocab_size=VOCAB_SIZE))
    executor.gate = asyncio.Event()
    async with bench(executor=executor) as b:
        executor.lose_device_at(2)
        running, aborted = send(b, 3), send(b, 5)
        await b.until(lambda: b.engine.statistics().device_is_lost)
        late = send(b, 7)
        b.engine.abort("5")
        await b.turn(50)
        assert b.engine.is_accepting
        assert not late.outputs
        executor.gate.set()
        assert (await running.wait()).choice().token_ids == expected(3)
        assert (await late.wait()).choice().token_ids == expected(7)
        assert not aborted.has_ended


async def test_a_step_that_hangs_counts_as_a_lost_device() -> None:
    async with bench(step_timeout_s=0.02) as b:
        sink = send(b, 3)
        await b.until(lambda: bool(sink.outputs))
        b.executor.hold()
        assert (await sink.wait()).choice().token_ids == expected(3)
        assert b.executor.num_restarts == 1


async def test_a_loop_that_stood_still_takes_no_step_for_hung_that_has_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncserve.loop.pipeline.HEARING_S", 3600.0)
    async with bench(step_timeout_s=0.001) as b:
        b.executor.hold()
        sink = send(b, 3)
        await b.until(lambda: bool(b.executor.pending_step_ids))
        await b.turn()
        time.sleep(0.01)  # noqa: ASYNC251 - the loop is to be held up
        # Some turns pass until the loop has heard of the end.
        await b.turn(5)
        b.executor.resume()
        assert (await sink.wait()).choice().token_ids == expected(3)
        assert b.executor.num_restarts == 0


async def test_without_a_limit_a_step_may_take_as_long_as_it_likes() -> None:
    async with bench(step_timeout_s=0.0) as b:
        b.executor.hold()
        sink = send(b, 3)
        await b.turn(200)
        assert not sink.outputs
        b.executor.resume()
        assert (await sink.wait()).choice().token_ids == expected(3)
        assert b.executor.num_restarts == 0


@pytest.mark.parametrize(
    ("error", "limit", "message"),
    [
        (None, 0, "as often as it may be"),
        (StartupError("no such file"), 3, "it cannot be opened again: no such file"),
        (DeviceLost("only a new process can use it"), 3, "only a new process can use it"),
    ],
)
async def test_a_device_that_is_lost_for_good_ends_the_engine_and_tells_everyone(
    error: Any, limit: int, message: str
) -> None:
    async with bench(settles=False, max_device_restarts=limit) as b:
        b.executor.restart_error = error
        b.executor.lose_device_at(3)
        sinks = [send(b, first) for first in (3, 5)]
        for sink in sinks:
            await sink.wait()
            assert isinstance(sink.error, EngineStopped)
            assert message in str(sink.error)
        await b.engine.wait_stopped()
        assert isinstance(b.engine.failure, DeviceLost)
        assert b.executor.is_stopped


async def test_a_device_that_offers_less_than_before_is_not_used() -> None:
    class ShrinkingExecutor(FakeExecutor):
        async def restart(self) -> ExecutorInfo:
            await super().restart()
            return fake_info(vocab_size=VOCAB_SIZE, num_blocks=8)

    async with bench(executor=ShrinkingExecutor(fake_info(vocab_size=VOCAB_SIZE)), settles=False) as b:
        b.executor.lose_device_at(2)
        sink = send(b, 3)
        await sink.wait()
        assert "offers less" in str(sink.error)


async def test_a_device_that_fails_whatever_it_computes_is_opened_anew_and_given_up_in_the_end() -> None:
    class BrokenExecutor(FakeExecutor):
        def submit(self, plan: Any) -> "asyncio.Future[Any]":
            self.fail(plan.step_id)
            return super().submit(plan)

    executor = BrokenExecutor(fake_info(vocab_size=VOCAB_SIZE, num_slots=64, num_blocks=512))
    async with bench(executor=executor, settles=False, max_device_restarts=1) as b:
        sinks = [send(b, first) for first in range(40)]
        for sink in sinks:
            await sink.wait()
        await b.engine.wait_stopped()
        assert executor.num_restarts == 1
        assert isinstance(b.engine.failure, DeviceLost)
        ended = [sink.error is None and sink.choice().finish_reason for sink in sinks]
        assert ended.count(FinishReason.ERROR) == 16


async def test_an_observer_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenObserver(NullObserver):
        def __getattribute__(self, name: str) -> Any:
            def broken(*_: Any) -> None:
                raise ZeroDivisionError("a bug in the observer")

            return object.__getattribute__(self, name) if name.startswith("__") else broken

    engine = Engine(
        executor=FakeExecutor(fake_info(vocab_size=VOCAB_SIZE)),
        tokenizer=FakeTokenizer(vocab_size=VOCAB_SIZE),
        observer=BrokenObserver(),
        loop_lag_interval_s=0.0,
    )
    await engine.start()
    answered, refused = RecordingSink(), RecordingSink()
    engine.submit(request(TokensPrompt(token_ids=prompt(3)), "a"), answered)
    engine.submit(request("x" * 500, "b"), refused)
    assert (await answered.wait()).choice().token_ids == expected(3)
    await refused.wait()
    assert refused.error is not None
    await engine.stop()
    assert engine.failure is None
    assert len(messages(caplog, logging.ERROR)) == 1


# Injected faults


async def undisturbed(prompts: Sequence[int], **options: Any) -> None:
    async with bench(**options) as b:
        sinks = {first: send(b, first, max_tokens=20) for first in prompts}
        for first, sink in sinks.items():
            assert (await sink.wait()).choice().token_ids == expected(first, 20)


def faulty(**steps: Trigger) -> FaultyExecutor:
    # The fake's rules do not know steps that compute nothing.
    info = fake_info(vocab_size=VOCAB_SIZE)
    named = {name.replace("_", "-"): trigger for name, trigger in steps.items()}
    return FaultyExecutor(FakeExecutor(info, check_plans=False), Faults(steps=named))


@pytest.mark.parametrize(
    "steps",
    [
        {"fail_step": Trigger(step_id=4)},
        {"fail_step": Trigger(every=7)},
        {"oom_step": Trigger(every=9)},
        {"lose_device": Trigger(step_id=6)},
        {"hang_step": Trigger(step_id=5, delay_s=3600.0)},
        {"fail_step": Trigger(every=11), "oom_step": Trigger(step_id=20), "lose_device": Trigger(step_id=9)},
    ],
    ids=["fail", "fail every", "oom", "lose", "hang", "all"],
)
async def test_injected_faults_change_no_answer(steps: Any) -> None:
    await undisturbed(range(3, 15, 2), executor=faulty(**steps), settles=False, step_timeout_s=0.05)


async def test_an_injected_delay_holds_up_the_steps_behind_and_changes_no_answer() -> None:
    executor = faulty(hang_step=Trigger(every=3, delay_s=0.001))
    await undisturbed(range(3, 9, 2), executor=executor, settles=False)


@pytest.mark.parametrize("kind", ["fail_step", "nan_row", "oom_step"])
async def test_an_injected_culprit_ends_alone(kind: str) -> None:
    async with bench(executor=faulty(**{kind: Trigger(token_id=CULPRIT)}), settles=False) as b:
        sinks = {first: send(b, first, max_tokens=20) for first in (3, CULPRIT, 7)}
        for first, sink in sinks.items():
            answer = (await sink.wait()).choice()
            if first == CULPRIT:
                assert answer.finish_reason is FinishReason.ERROR
            else:
                assert answer.token_ids == expected(first, 20)


@pytest.mark.parametrize("kind", ["fail_step", "lose_device"])
async def test_the_choices_of_a_culprit_end_together_however_many(kind: str) -> None:
    executor = faulty(**{kind: Trigger(token_id=CULPRIT)})
    async with bench(executor=executor, settles=False, max_device_restarts=3) as b:
        innocent = send(b, 3, max_tokens=20)
        culprit = send(b, CULPRIT, n=12)
        await culprit.wait()
        assert {culprit.choice(index).finish_reason for index in range(12)} == {FinishReason.ERROR}
        assert (await innocent.wait()).choice().token_ids == expected(3, 20)
        await b.until(lambda: b.engine.statistics().num_unapplied_steps == 0)
        statistics = b.engine.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.num_blocks_used) == (0, 0, 0)
        assert statistics.num_failed_sequences == 12
        assert statistics.num_device_restarts == statistics.num_explained_losses
        assert statistics.num_device_restarts == (0 if kind == "fail_step" else 3)
        assert b.engine.failure is None


async def test_any_number_of_requests_that_lose_the_device_ends_neither_the_engine_nor_others() -> None:
    executor = faulty(lose_device=Trigger(token_id=CULPRIT))
    async with bench(executor=executor, settles=False, max_device_restarts=3) as b:
        for number in range(12):
            innocents = {first: send(b, first, max_tokens=20) for first in (3, 5)}
            culprit = b.send(TokensPrompt(token_ids=prompt(CULPRIT)), f"culprit {number}")
            await culprit.wait()
            assert culprit.choice().finish_reason is FinishReason.ERROR
            for first, sink in innocents.items():
                assert (await sink.wait()).choice().token_ids == expected(first, 20)
        statistics = b.engine.statistics()
        assert 24 <= statistics.num_device_restarts == statistics.num_explained_losses <= 36
        assert statistics.num_failed_sequences == 12
        assert b.engine.is_accepting


async def test_losses_by_requests_that_leave_before_they_are_tried_do_not_count_against_the_device() -> None:
    executor = faulty(lose_device=Trigger(token_id=CULPRIT))
    async with bench(executor=executor, settles=False, max_device_restarts=3) as b:
        for number in range(8):
            num_before = b.engine.statistics().num_device_restarts
            innocents = {first: send(b, first, max_tokens=20) for first in (3, 5)}
            b.send(TokensPrompt(token_ids=prompt(CULPRIT)), f"culprit {number}")
            await b.until(lambda num=num_before: b.engine.statistics().num_device_restarts > num)
            b.engine.abort(f"culprit {number}")
            for first, sink in innocents.items():
                assert (await sink.wait()).choice().token_ids == expected(first, 20)
        assert b.engine.statistics().num_device_restarts >= 8
        assert b.engine.is_accepting


async def test_many_requests_at_once_that_lose_the_device_end_and_those_that_run_go_on() -> None:
    executor = faulty(lose_device=Trigger(token_id=CULPRIT))
    async with bench(executor=executor, settles=False, max_device_restarts=3) as b:
        innocents = {first: send(b, first, max_tokens=40) for first in range(3, 19, 2)}
        await b.until(lambda: all(sink.outputs for sink in innocents.values()))
        culprits = [b.send(TokensPrompt(token_ids=prompt(CULPRIT)), f"culprit {each}") for each in range(7)]
        for culprit in culprits:
            await culprit.wait()
            assert culprit.choice().finish_reason is FinishReason.ERROR
        for first, sink in innocents.items():
            assert (await sink.wait()).choice().token_ids == expected(first, 40)
        assert b.engine.statistics().num_failed_sequences == 7


@pytest.mark.parametrize("num_requests", [1, 40])
async def test_a_device_that_loses_itself_whatever_it_computes_is_given_up_after_bounded_restarts(
    num_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    executor = faulty(lose_device=Trigger(every=1))
    async with bench(executor=executor, settles=False, max_device_restarts=2) as b:
        number = 0
        while b.engine.failure is None:
            sinks = [send_some(b, number + each) for each in range(num_requests)]
            number += num_requests
            for sink in sinks:
                await sink.wait()
            assert number < 1000
            await b.turn(50)
        await b.engine.wait_stopped()
        assert "no step went well in between" in str(b.engine.failure)
        statistics = b.engine.statistics()
        assert statistics.num_device_restarts == 2 * LOSSES_OF_A_CULPRIT


async def test_losses_that_are_nobodys_fault_count_though_culprits_are_found_between_them() -> None:
    executor = faulty(lose_device=Trigger(every=9))
    async with bench(executor=executor, settles=False, max_device_restarts=3) as b:
        number = 0
        while b.engine.failure is None:
            sink = send_some(b, number, max_tokens=20)
            number += 1
            await sink.wait()
            assert number < 1000
            await b.turn(50)
        assert "as often as it may be" in str(b.engine.failure)
        assert b.engine.statistics().num_device_restarts == 3


@pytest.mark.parametrize(
    ("options", "num_restarts"),
    [
        ({"executor": ("lose_device", 0.0), "max_device_restarts": 3}, 3),
        ({"executor": ("hang_step", 3600.0), "max_device_restarts": 4, "step_timeout_s": 0.05}, 4),
    ],
    ids=["lose", "hang"],
)
async def test_a_request_that_loses_the_device_ends_alone_and_costs_a_few_restarts(
    options: Any, num_restarts: int
) -> None:
    kind, delay_s = options["executor"]
    executor = faulty(**{kind: Trigger(token_id=CULPRIT, delay_s=delay_s)})
    async with bench(**{**options, "executor": executor}, settles=False) as b:
        sinks = {first: send(b, first, max_tokens=20) for first in (3, CULPRIT, 7, 9, 11)}
        for first, sink in sinks.items():
            answer = (await sink.wait()).choice()
            if first == CULPRIT:
                assert answer.finish_reason is FinishReason.ERROR
                assert isinstance(answer.error, StepFailed)
                assert "computed alone, it lost the device again" in str(answer.error)
            else:
                assert answer.token_ids == expected(first, 20)
        statistics = b.engine.statistics()
        assert statistics.num_device_restarts == num_restarts
        assert statistics.num_failed_sequences == 1
        assert b.engine.is_accepting


async def test_an_injected_fault_of_the_tokenizer_refuses_that_prompt_alone() -> None:
    tokenizer = FaultyTokenizer(FakeTokenizer(vocab_size=VOCAB_SIZE), "poison")
    async with bench(tokenizer=tokenizer) as b:  # type: ignore[arg-type]
        poisoned, good = b.send("a poisoned prompt", "1"), b.send("good", "2")
        await poisoned.wait()
        assert "injected fault" in str(poisoned.error)
        assert (await good.wait()).choice().finish_reason is FinishReason.LENGTH


async def test_a_device_that_computes_a_part_of_each_prompt_and_no_more_is_given_up() -> None:
    class TiringExecutor(FakeExecutor):
        num_since_opened = 0

        def submit(self, plan: Any) -> "asyncio.Future[Any]":
            self.num_since_opened += 1
            if self.num_since_opened == 2:
                self.lose_device_at(plan.step_id)
            return super().submit(plan)

        async def restart(self) -> ExecutorInfo:
            self.num_since_opened = 0
            return await super().restart()

    executor = TiringExecutor(fake_info(vocab_size=VOCAB_SIZE, max_num_batched_tokens=8))
    async with bench(executor=executor, settles=False, max_device_restarts=2) as b:
        number = 0
        while b.engine.failure is None:
            sink = b.send(TokensPrompt(token_ids=prompt(number % 400, 30)), f"number {number}")
            number += 1
            await sink.wait()
            assert number < 100
            await b.turn(50)
        assert "no step went well in between" in str(b.engine.failure)
