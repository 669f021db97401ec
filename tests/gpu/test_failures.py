"""What goes wrong in one step, or in one row of it, ends the sequences it touches and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from asyncserve.errors import AsyncserveError, StepFailed
from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.executor import ThreadExecutor
from asyncserve.gpu.runner import ModelRunner
from asyncserve.loop.engine import Engine
from asyncserve.request import FinishReason, TokensPrompt
from asyncserve.step import BAD_LOGITS, ExecutorInfo, StepPlan
from tests.fakes.engine import request
from tests.fakes.observer import RecordingObserver
from tests.fakes.plan_driver import PlanDriver
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import FakeTokenizer
from tests.gpu.tiny_runners import (
    PROMPTS,
    VOCAB,
    Subject,
    WatchedLlama,
    WatchedModel,
    WatchedQwen3,
    expected,
    start_subject,
    subjects,
)

pytestmark = pytest.mark.timeout(300)

POISON, CULPRIT = VOCAB - 1, VOCAB - 2
"""Tokens that no prompt has: one whose embedding is NaN, one that lets the step fail that admits it."""
POISONED = [POISON, 1, 2, 3, 4]
FAILING = [CULPRIT] * 20
"""Longer than what any graph takes, so that its step is launched anew."""
NUM_TOKENS = 4

each_subject = pytest.mark.parametrize("subject", subjects())
each_quick_subject = pytest.mark.parametrize("subject", subjects("cpu", "cuda"))


def run_out_of_memory(device: torch.device) -> None:
    torch.empty(2**50, dtype=torch.uint8, device=device)


def raise_as_a_kernel_does(device: torch.device) -> None:
    raise RuntimeError("Triton Error [CUDA]: invalid argument")


each_failure = pytest.mark.parametrize("failure", [run_out_of_memory, raise_as_a_kernel_does])


def poison(model: WatchedModel) -> None:
    model.embed_tokens.weight.data[POISON] = float("nan")


@each_quick_subject
@each_failure
def test_a_step_that_raises_leaves_later_steps_of_others_right(
    subject: Subject, failure: Callable[[torch.device], object]
) -> None:
    runner, info, model = start_subject(subject, num_blocks=16)
    driver = PlanDriver(runner, info)
    survivor = driver.admit(PROMPTS[0])
    tokens = driver.generate([survivor], 2)[0]
    model.spoil = failure
    culprit = driver.admit(FAILING)
    with pytest.raises(RuntimeError):
        driver.launch({culprit: len(FAILING)})
    model.spoil = None
    # The step queued behind was planned before anyone knew.
    tokens += driver.step({survivor: 1, culprit: 1}).token_ids[:1]
    driver.release(culprit)
    tokens += driver.step({survivor: 1}).token_ids
    heir = driver.admit(PROMPTS[2])
    assert driver.generate([heir], NUM_TOKENS)[0] == expected(subject, PROMPTS[2], NUM_TOKENS)
    assert tokens == expected(subject, PROMPTS[0], 4)


@each_subject
def test_a_row_of_nan_is_told_and_harms_neither_its_batch_nor_the_next_owner_of_its_blocks(
    subject: Subject,
) -> None:
    num_tokens = 2 if subject.is_slow else NUM_TOKENS
    runner, info, _ = start_subject(subject, num_blocks=14, change=poison)
    driver = PlanDriver(runner, info)
    culprit = driver.admit(POISONED)
    others = [driver.admit(prompt) for prompt in (PROMPTS[0], PROMPTS[3])]
    outputs = [driver.step({culprit: 5, others[0]: 3, others[1]: 4}).token_ids]
    outputs += [driver.step(dict.fromkeys([culprit, *others], 1)).token_ids for _ in range(num_tokens - 1)]
    tokens = [list(row) for row in zip(*outputs, strict=True)]
    assert tokens == [
        [BAD_LOGITS] * num_tokens,
        expected(subject, PROMPTS[0], num_tokens),
        expected(subject, PROMPTS[3], num_tokens),
    ]
    driver.release(culprit)
    # Its blocks, NaN in every position that was written, are the first to be handed out again.
    heir = driver.admit(PROMPTS[2])
    assert driver.generate([heir], num_tokens)[0] == expected(subject, PROMPTS[2], num_tokens)


@each_quick_subject
def test_a_row_of_nan_that_draws_is_told_too(subject: Subject) -> None:
    runner, info, _ = start_subject(subject, change=poison)
    driver = PlanDriver(runner, info)
    culprit = driver.admit(POISONED, temperature=1.0, top_p=0.9, seed=1)
    other = driver.admit(PROMPTS[3])
    outputs = [driver.step({culprit: 5, other: 4}).token_ids]
    outputs.append(driver.step({culprit: 1, other: 1}).token_ids)
    assert [list(tokens) for tokens in outputs] == [
        [BAD_LOGITS, token_id] for token_id in expected(subject, PROMPTS[3], 2)
    ]


class FailingRunner(ModelRunner):
    """Runs out of memory in a step that admits a prompt beginning with `CULPRIT`."""

    def run(self, plan: StepPlan) -> PendingOutput:
        assert isinstance(self._model, WatchedLlama | WatchedQwen3)
        fails = any(assignment.token_ids[0] == CULPRIT for assignment in plan.admitted)
        self._model.spoil = run_out_of_memory if fails else None
        pending = super().run(plan)
        if fails:
            # A replayed graph has no forward pass that could be spoilt: a smaller try may be one.
            run_out_of_memory(self.device.torch_device)
        return pending


def start_failing(subject: Subject, *, captures: bool = True) -> tuple[ModelRunner, ExecutorInfo]:
    runner, info, _ = start_subject(subject, captures=captures, change=poison, runner_class=FailingRunner)
    return runner, info


@each_quick_subject
def test_the_executor_fails_a_step_without_memory_and_runs_those_around_it(subject: Subject) -> None:
    async def run() -> list[int]:
        executor = ThreadExecutor(lambda: start_failing(subject))
        writer = PlanDriver(None, await executor.start())  # type: ignore[arg-type]
        survivor = writer.admit(PROMPTS[0])
        steps = [executor.submit(writer.plan({survivor: 3}))]
        culprit = writer.admit(FAILING)
        failing = executor.submit(writer.plan({culprit: len(FAILING)}))
        steps.append(executor.submit(writer.plan({survivor: 1})))
        writer.release(culprit)
        steps.append(executor.submit(writer.plan({survivor: 1})))
        with pytest.raises(StepFailed) as caught:
            await failing
        assert isinstance(caught.value.__cause__, RuntimeError)
        tokens = [(await step).token_ids[0] for step in steps]
        await executor.stop()
        return tokens

    assert asyncio.run(run()) == expected(subject, PROMPTS[0], 3)


async def settle(engine: Engine) -> None:
    """Return when the steps launched ahead of the last answers have ended, too."""
    for _ in range(100_000):
        if engine.statistics().num_unapplied_steps == 0:
            return
        await asyncio.sleep(0)
    raise AssertionError("steps are still unapplied")


@asynccontextmanager
async def engine_of(subject: Subject, *, captures: bool = True) -> AsyncIterator[Engine]:
    """A started engine, which must be alive and empty at the end."""
    engine = Engine(
        executor=ThreadExecutor(lambda: start_failing(subject, captures=captures)),
        tokenizer=FakeTokenizer(vocab_size=VOCAB),
        observer=RecordingObserver(),
    )
    await engine.start()
    try:
        yield engine
        await settle(engine)
        assert engine.failure is None
        engine.check()
        statistics = engine.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.num_blocks_used) == (0, 0, 0)
    finally:
        await engine.stop()


def ask(
    engine: Engine, prompt: Sequence[int], request_id: str, num_tokens: int = NUM_TOKENS
) -> RecordingSink:
    """Submit a greedy request and return its sink."""
    sink = RecordingSink()
    asked = request(TokensPrompt(token_ids=prompt), request_id, max_tokens=num_tokens, temperature=0.0)
    engine.submit(asked, sink)
    return sink


def error_of(sink: RecordingSink) -> AsyncserveError | None:
    """Return what the only choice ended with, which must be an error."""
    choice = sink.choice()
    assert choice.finish_reason is FinishReason.ERROR
    return choice.error


@each_subject
def test_an_engine_serves_on_after_a_step_without_memory_and_rows_of_nan(subject: Subject) -> None:
    async def run() -> None:
        async with engine_of(subject) as engine:
            first = await ask(engine, PROMPTS[2], "first").wait()
            failed = await ask(engine, FAILING, "failing").wait()
            prompts = (PROMPTS[0], POISONED, PROMPTS[2], PROMPTS[3])
            asked = [ask(engine, prompt, f"request {number}") for number, prompt in enumerate(prompts)]
            before, poisoned, cached, after = [await sink.wait() for sink in asked]
            assert isinstance(error_of(failed), StepFailed)
            assert error_of(poisoned) is not None
            for sink, number in ((first, 2), (before, 0), (cached, 2), (after, 3)):
                assert list(sink.choice().token_ids) == expected(subject, PROMPTS[number], NUM_TOKENS)

    asyncio.run(run())


@pytest.mark.parametrize("subject", subjects(with_graphs=True))
def test_answers_are_the_same_before_while_and_after_graphs_are_captured_in_idle_time(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    num_tokens = 2 if subject.is_slow else NUM_TOKENS

    async def run() -> list[list[int]]:
        answers: list[list[int]] = []
        async with engine_of(subject, captures=False) as engine:
            num_after = 2
            while num_after:
                num_after -= engine.statistics().graphs_pending == 0
                sink = await ask(engine, PROMPTS[2], f"request {len(answers)}", num_tokens).wait()
                answers.append(list(sink.choice().token_ids))
        return answers

    answers = asyncio.run(run())
    assert answers == [expected(subject, PROMPTS[2], num_tokens)] * len(answers)
    assert not [record for record in caplog.records if "no CUDA graph" in record.message]
