"""The engine on a real device side over failed steps and lost devices: every answer as if nothing had been.

All kinds of sampling that keep something on the device are mixed in each batch: seeds, penalties, grammars,
scored prompts. Float32, tiny model; what a failed step should have written is left as it was.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from asyncserve.errors import DeviceLost, StepFailed
from asyncserve.faults import Faults, FaultyExecutor, Trigger
from asyncserve.gpu.completion import PendingOutput
from asyncserve.gpu.executor import ThreadExecutor
from asyncserve.gpu.runner import ModelRunner
from asyncserve.loop.engine import Engine
from asyncserve.request import (
    FinishReason,
    RequestOutput,
    StructuredOutput,
    StructureKind,
    TokensPrompt,
)
from asyncserve.step import Executor, ExecutorInfo, StepPlan
from tests.fakes.engine import request
from tests.fakes.grammar import FakeGrammarCompiler
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import FakeTokenizer
from tests.gpu.tiny_runners import VOCAB, Subject, start_subject, subjects

CULPRIT = VOCAB - 2
NUM_TOKENS = 14
CHOICE = StructuredOutput(kind=StructureKind.CHOICE, source=json.dumps(["abcabcabcabcabc", "xyzxyzxyz"]))
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7], {"temperature": 0.0}),
    (list(range(3, 60)), {"temperature": 1.0, "seed": 11, "n": 2}),
    ([*range(3, 50), 9], {"temperature": 0.9, "seed": 13, "frequency_penalty": 0.4, "num_logprobs": 1}),
    (list(range(20, 45)), {"temperature": 0.0, "num_prompt_logprobs": 1, "repetition_penalty": 1.3}),
    ([8, 8, 8, 8], {"temperature": 1.0, "seed": 14, "structured": CHOICE, "ignore_eos": False}),
    ([4, 5], {"temperature": 0.8, "seed": 15, "min_tokens": 3, "top_p": 0.9}),
]

each_subject = pytest.mark.parametrize("subject", subjects("cpu", "cuda"))


def start(subject: Subject, **options: Any) -> tuple[ModelRunner, ExecutorInfo]:
    runner, info, _ = start_subject(subject, **{"num_slots": 8, "num_blocks": 160, **options})
    return runner, info


async def serve(
    executor: Executor, asked: Sequence[tuple[list[int], dict[str, Any]]] = ASKED, **options: Any
) -> tuple[list[list[RequestOutput]], Engine]:
    """Return every choice of every request, and the engine, which has been stopped."""
    engine = Engine(
        executor=executor,
        tokenizer=FakeTokenizer(vocab_size=VOCAB),
        make_grammar_compiler=FakeGrammarCompiler,
        **options,
    )
    await engine.start()
    sinks = []
    for number, (prompt, sampling) in enumerate(asked):
        sink = RecordingSink(sampling.get("n", 1))
        tokens = TokensPrompt(token_ids=prompt)
        engine.submit(request(tokens, str(number), **{"max_tokens": NUM_TOKENS, **sampling}), sink)
        sinks.append(sink)
    for sink in sinks:
        await sink.wait()
    await engine.stop()
    choices = [
        [] if sink.error else [sink.choice(index) for index in range(sampling.get("n", 1))]
        for sink, (_, sampling) in zip(sinks, asked, strict=True)
    ]
    return choices, engine


def comparable(choices: Sequence[Sequence[RequestOutput]]) -> list[Any]:
    """Return what must be equal: tokens and reasons; numbers are rounded in batches of other sizes."""
    return [
        [
            (
                list(choice.token_ids),
                choice.text,
                choice.finish_reason,
                [each.token_id for each in choice.logprobs or ()],
                [each.token_id for each in choice.prompt_logprobs or ()],
            )
            for choice in each
        ]
        for each in choices
    ]


def faults(**steps: Trigger) -> Faults:
    return Faults(steps={name.replace("_", "-"): trigger for name, trigger in steps.items()})


@each_subject
@pytest.mark.parametrize("caching", [True, False])
def test_answers_over_failed_steps_and_lost_devices_are_those_of_an_undisturbed_run(
    subject: Subject, caching: bool
) -> None:
    async def run(injected: Faults | None) -> tuple[list[Any], Engine]:
        executor: Executor = ThreadExecutor(lambda: start(subject))
        if injected is not None:
            executor = FaultyExecutor(executor, injected)
        choices, engine = await serve(executor, enable_prefix_caching=caching)
        assert engine.failure is None
        return comparable(choices), engine

    undisturbed, _ = asyncio.run(run(None))
    assert len(undisturbed[4][0][0]) > 9, "the grammar's text is long enough to be cut by failures"
    # Not more often: one that is tried alone, over several small steps, would meet two.
    disturbed, engine = asyncio.run(
        run(faults(fail_step=Trigger(every=11), oom_step=Trigger(step_id=9), lose_device=Trigger(step_id=15)))
    )
    assert disturbed == undisturbed
    statistics = engine.statistics()
    assert statistics.num_failed_steps >= 4
    assert statistics.num_device_restarts == 1
    assert statistics.num_failed_sequences == 0


@each_subject
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("every", [7, 12, 1000])
def test_answers_from_a_host_tier_over_failed_steps_are_those_of_an_undisturbed_run(
    subject: Subject, caching: bool, every: int
) -> None:
    asked = [(prompt, {**sampling, "max_tokens": 24}) for prompt, sampling in ASKED]

    async def run() -> None:
        undisturbed, _ = await serve(ThreadExecutor(lambda: start(subject)), asked)
        executor = FaultyExecutor(
            ThreadExecutor(lambda: start(subject, num_blocks=45, num_host_blocks=200)),
            faults(fail_step=Trigger(every=every)),
        )
        choices, engine = await serve(executor, asked, enable_prefix_caching=caching)
        assert comparable(choices) == comparable(undisturbed)
        statistics = engine.statistics()
        assert statistics.num_failed_sequences == 0
        assert (statistics.num_swapped, statistics.num_host_blocks_used) == (0, 0)
        assert statistics.num_swaps > 0
        if every > 10:
            assert statistics.host_loaded_bytes > 0

    asyncio.run(run())


@each_subject
def test_only_the_culprit_of_steps_that_raise_on_the_device_ends(subject: Subject) -> None:
    class FailingRunner(ModelRunner):
        """Raises in a step that has a prompt with the culprit's token."""

        _slots_failing: set[int]

        def run(self, plan: StepPlan) -> PendingOutput:
            failing = self.__dict__.setdefault("_slots_failing", set())
            failing.difference_update(plan.released_slots)
            failing.update(each.slot for each in plan.admitted if CULPRIT in each.token_ids)
            fails = any(sequence.slot in failing for sequence in plan.sequences)
            spoil: Callable[[torch.device], object] | None = _raise if fails else None
            self._model.spoil = spoil  # type: ignore[attr-defined]
            pending = super().run(plan)
            if fails:
                _raise(self.device.torch_device)  # a replayed graph has no forward pass that could be spoilt
            return pending

    def start_failing() -> tuple[ModelRunner, ExecutorInfo]:
        runner, info, _ = start_subject(subject, num_slots=8, num_blocks=160, runner_class=FailingRunner)
        return runner, info

    asked = [*ASKED[:2], ([CULPRIT] * 9, {"temperature": 0.0}), *ASKED[2:]]

    async def run() -> list[list[RequestOutput]]:
        undisturbed, _ = await serve(ThreadExecutor(lambda: start(subject)))
        choices, engine = await serve(ThreadExecutor(start_failing), asked)
        assert engine.statistics().num_failed_sequences == 1
        culprit = choices.pop(2)
        assert comparable(choices) == comparable(undisturbed)
        return [culprit]

    ((culprit,),) = asyncio.run(run())
    assert culprit.finish_reason is FinishReason.ERROR
    assert isinstance(culprit.error, StepFailed)
    assert "out of order" in str(culprit.error)


def _raise(device: torch.device) -> None:
    raise RuntimeError("this prompt is out of order")


@pytest.mark.parametrize("subject", subjects("cpu"))
def test_a_thread_that_hangs_in_a_step_is_left_behind_and_every_request_goes_on(subject: Subject) -> None:
    gate = threading.Event()
    entered: list[int] = []

    class HangingRunner(ModelRunner):
        def run(self, plan: StepPlan) -> PendingOutput:
            if plan.step_id == 5:
                entered.append(plan.step_id)
                gate.wait()
            return super().run(plan)

    def start_hanging() -> tuple[ModelRunner, ExecutorInfo]:
        runner, info, _ = start_subject(subject, num_slots=8, num_blocks=160, runner_class=HangingRunner)
        return runner, info

    async def run() -> None:
        undisturbed, _ = await serve(ThreadExecutor(lambda: start(subject)))
        executor = ThreadExecutor(start_hanging, left_behind_after_s=0.01)
        choices, engine = await serve(executor, step_timeout_s=1.0, max_device_restarts=100)
        assert comparable(choices) == comparable(undisturbed)
        # A machine that stands still for a second makes more of them.
        assert engine.statistics().num_device_restarts >= 1

    try:
        asyncio.run(run())
    finally:
        gate.set()
    assert entered == [5]


@pytest.mark.parametrize("subject", subjects("cpu"))
def test_a_device_thread_that_dies_is_replaced_once_and_the_engine_ends_if_that_is_not_allowed(
    subject: Subject,
) -> None:
    class DyingRunner(ModelRunner):
        def run(self, plan: StepPlan) -> PendingOutput:
            if plan.step_id == 4:
                raise SystemExit("something unforeseen")
            return super().run(plan)

    def start_dying() -> tuple[ModelRunner, ExecutorInfo]:
        runner, info, _ = start_subject(subject, num_slots=8, num_blocks=160, runner_class=DyingRunner)
        return runner, info

    async def run(limit: int) -> tuple[list[Any], Engine]:
        choices, engine = await serve(ThreadExecutor(start_dying), ASKED[:2], max_device_restarts=limit)
        return comparable(choices), engine

    replaced, engine = asyncio.run(run(1))
    assert engine.failure is None
    undisturbed, _ = asyncio.run(serve(ThreadExecutor(lambda: start(subject)), ASKED[:2]))
    assert replaced == comparable(undisturbed)
    nothing, engine = asyncio.run(run(0))
    assert nothing == [[], []]
    assert isinstance(engine.failure, DeviceLost)
