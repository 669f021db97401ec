"""Structured output through the stages of the engine, over fakes of device and compiler."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncserve.errors import EngineError, EngineStopped, InvalidRequest, Overloaded
from asyncserve.grammar import Grammar
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import FinishReason, StructuredOutput, StructureKind
from tests.fakes.engine import VOCAB_SIZE, Bench, bench
from tests.fakes.executor import fake_info
from tests.fakes.grammar import FakeGrammarCompiler
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import EOS_ID
from tests.loop.test_grammar_cache import choice

REGEX = StructuredOutput(kind=StructureKind.REGEX, source="a+", param="structured_outputs")


@asynccontextmanager
async def structured_bench(**options: Any) -> AsyncIterator[tuple[Bench, FakeGrammarCompiler]]:
    made: list[FakeGrammarCompiler] = []

    def make(tokenizer: Tokenizer, vocab_size: int) -> FakeGrammarCompiler:
        made.append(FakeGrammarCompiler(tokenizer, vocab_size))
        return made[0]

    async with bench(make_grammar_compiler=make, **options) as b:
        yield b, made[0]
    assert made[0].is_closed


async def test_an_output_follows_its_grammar_and_ends_when_it_is_complete() -> None:
    async with structured_bench() as (b, _):
        sink = await b.send("x", structured=choice("hello"), max_tokens=50, ignore_eos=True).wait()
        answer = sink.choice()
        assert answer.text == "hello"
        assert answer.finish_reason is FinishReason.STOP
        assert answer.stop_reason is None
        assert answer.token_ids == [*b"hello", EOS_ID]


async def test_neighbours_without_a_grammar_are_left_alone() -> None:
    async with bench() as b:
        free = (await b.send("x").wait()).choice().token_ids
    async with structured_bench() as (b, _):
        sinks = [b.send("x", "free"), b.send("x", "held", structured=choice("ab", "cd"))]
        for sink in sinks:
            await sink.wait()
        assert sinks[0].choice().token_ids == free
        assert sinks[1].choice().text in ("ab", "cd")


async def test_an_output_cut_short_by_its_length_says_so() -> None:
    async with structured_bench() as (b, _):
        answer = (await b.send("x", structured=choice("hello"), max_tokens=3).wait()).choice()
        assert (answer.text, answer.finish_reason) == ("hel", FinishReason.LENGTH)


async def test_a_complete_output_ends_before_min_tokens() -> None:
    async with structured_bench() as (b, _):
        answer = (await b.send("x", structured=choice("ab"), min_tokens=9, max_tokens=20).wait()).choice()
        assert (answer.text, answer.finish_reason) == ("ab", FinishReason.STOP)


async def test_all_choices_of_a_request_follow_the_grammar_on_their_own() -> None:
    async with structured_bench() as (b, compiler):
        sink = await b.send("x", n=3, structured=choice("one", "two", "three"), max_tokens=20).wait()
        for index in range(3):
            assert sink.choice(index).text in ("one", "two", "three")
        assert len(compiler.sources) == 1


@pytest.mark.parametrize("async_scheduling", [True, False])
async def test_an_output_is_the_same_with_preemption(async_scheduling: bool) -> None:
    texts = ["alpha beta gamma delta", "one two three four five", "on the way"]
    answers = []
    for num_blocks in (200, 14):
        info = fake_info(vocab_size=VOCAB_SIZE, num_blocks=num_blocks, block_len=4, max_model_len=48)
        async with structured_bench(info=info, async_scheduling=async_scheduling) as (b, _):
            sinks = [b.send(f"p {i}", str(i), structured=choice(*texts), max_tokens=30) for i in range(6)]
            answers.append([(await sink.wait()).choice().text for sink in sinks])
            assert (b.engine.statistics().num_preemptions > 0) == (num_blocks == 14)
    assert answers[0] == answers[1]
    assert set(answers[0]) <= set(texts)


async def test_a_grammar_is_compiled_once_for_all_who_wait_and_not_again_later() -> None:
    async with structured_bench() as (b, compiler):
        compiler.gate.clear()
        sinks = [b.send("x", str(i), structured=choice("ab")) for i in range(5)]
        await asyncio.to_thread(compiler.begun.acquire)
        compiler.gate.set()
        for sink in sinks:
            assert (await sink.wait()).choice().text == "ab"
        assert (await b.send("x", "later", structured=choice("ab")).wait()).choice().text == "ab"
        assert len(compiler.sources) == 1


async def test_others_are_served_while_a_grammar_compiles() -> None:
    async with structured_bench() as (b, compiler):
        compiler.gate.clear()
        held = b.send("x", "held", structured=choice("ab"))
        assert (await b.send("y", "other").wait()).choice().finish_reason is FinishReason.LENGTH
        assert not held.has_ended
        assert held.prompt_token_ids is None
        assert b.engine.statistics().num_waiting == 1
        compiler.gate.set()
        await held.wait()


async def test_a_grammar_that_is_refused_fails_its_request_before_it_began_and_names_the_field() -> None:
    async with structured_bench() as (b, _):
        sinks = [b.send("x", "bad", structured=REGEX), b.send("x", "good", structured=choice("ab"))]
        error = (await sinks[0].wait()).error
        assert isinstance(error, InvalidRequest)
        assert error.param == "structured_outputs"
        assert error.message == "structured_outputs cannot be used: regex is more than the fake can do"
        assert sinks[0].prompt_token_ids is None
        assert [type(each) for each in b.observer.rejected] == [InvalidRequest]
        assert (await sinks[1].wait()).choice().text == "ab"


async def test_each_request_is_told_of_its_own_field() -> None:
    async with structured_bench() as (b, compiler):
        compiler.gate.clear()
        names = ["response_format", "guided_regex"]
        sinks = [
            b.send("x", name, structured=StructuredOutput(kind=StructureKind.REGEX, source="a", param=name))
            for name in names
        ]
        await asyncio.to_thread(compiler.begun.acquire)
        await b.turn()
        compiler.gate.set()
        assert [(await sink.wait()).error.param for sink in sinks] == names  # type: ignore[union-attr]
        assert len(compiler.sources) == 1


async def test_a_compiler_with_a_bug_fails_the_request_and_not_the_engine() -> None:
    class Broken(FakeGrammarCompiler):
        def compile(self, structured: StructuredOutput, is_wanted: Callable[[], bool]) -> Any:
            raise ZeroDivisionError

    async with bench(make_grammar_compiler=Broken) as b:
        assert isinstance((await b.send("x", structured=choice("ab")).wait()).error, EngineError)
        assert (await b.send("y").wait()).error is None


async def test_an_abort_while_its_grammar_compiles_leaves_nothing() -> None:
    async with structured_bench(max_num_queued_requests=2) as (b, compiler):
        compiler.gate.clear()
        first = b.send("x", "first", structured=choice("ab"))
        b.send("x", "second", structured=choice("cd"))
        await asyncio.to_thread(compiler.begun.acquire)
        with pytest.raises(Overloaded):
            b.send("x", "third")
        for name in ("first", "second"):
            b.engine.abort(name)
        assert b.engine.statistics().num_waiting == 2  # until the thread is done with them
        compiler.gate.set()
        await b.until(lambda: b.engine.statistics().num_waiting == 0)
        assert not first.has_ended
        assert b.observer.reasons == {FinishReason.ABORT: 2}
        assert compiler.sources == ['["ab"]']


async def test_who_comes_as_the_others_leave_gets_the_grammar_all_the_same() -> None:
    async with structured_bench() as (b, compiler):
        compiler.gate.clear()
        b.send("x", "running", structured=choice("zz"))
        await asyncio.to_thread(compiler.begun.acquire)
        b.send("x", "leaves", structured=choice("ab"))
        await b.turn()
        b.engine.abort("leaves")
        compiler.gate.set()
        stays = b.send("x", "stays", structured=choice("ab"))
        assert (await stays.wait()).choice().text == "ab"


async def test_stopping_the_engine_ends_a_compilation_and_fails_who_waits_for_it() -> None:
    sink = RecordingSink()
    async with structured_bench(settles=False) as (b, compiler):
        compiler.gate.clear()
        b.send("x", structured=choice("ab"), sink=sink)
        await asyncio.to_thread(compiler.begun.acquire)
        await b.engine.stop()
    assert isinstance(sink.error, EngineStopped)


async def test_a_row_left_without_a_token_ends_with_the_reason_and_harms_no_other() -> None:
    class Stuck(FakeGrammarCompiler):
        def compile(self, structured: StructuredOutput, is_wanted: Callable[[], bool]) -> Any:
            grammar = super().compile(structured, is_wanted)
            grammar.stop_token_ids = frozenset()  # nothing may come after the text
            return grammar

    async with bench(make_grammar_compiler=Stuck) as b:
        sinks = [b.send("x", "stuck", structured=choice("ab")), b.send("y", "free")]
        last = (await sinks[0].wait()).outputs[-1]
        assert sinks[0].choice().text == "ab"
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, InvalidRequest)
        assert last.error.param == "response_format"
        assert "no token is left" in last.error.message
        assert (await sinks[1].wait()).choice().finish_reason is FinishReason.LENGTH


async def test_the_device_is_given_the_grammar_with_the_tokens_that_end_it() -> None:
    async with structured_bench() as (b, _):
        await b.send("x", structured=choice("ab"), ignore_eos=True, stop_token_ids=(98,)).wait()
        (assignment,) = [each for plan in b.executor.plans for each in plan.admitted]
        grammar: Grammar | None = assignment.grammar
        assert grammar is not None
        assert assignment.stop_token_ids == {98, EOS_ID}
