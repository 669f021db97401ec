import asyncio
import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from asyncserve.errors import Overloaded
from asyncserve.grammar import SLOW_S
from asyncserve.loop.grammar_cache import GrammarCache, GrammarRefused, NobodyWaits, WorkerDied
from asyncserve.request import StructuredOutput, StructureKind
from tests.fakes.grammar import FakeGrammar, FakeGrammarCompiler
from tests.fakes.tokenizer import FakeTokenizer


def choice(*texts: str, param: str = "response_format") -> StructuredOutput:
    listed = ", ".join(f'"{text}"' for text in texts)
    return StructuredOutput(kind=StructureKind.CHOICE, source=f"[{listed}]", param=param)


def always() -> bool:
    return True


@pytest.fixture
def compiler() -> FakeGrammarCompiler:
    return FakeGrammarCompiler(FakeTokenizer(), 512)


@pytest.fixture
def cache(compiler: FakeGrammarCompiler) -> Iterator[GrammarCache]:
    cache = GrammarCache(compiler, max_kept=3, max_kept_bytes=100)
    yield cache
    cache.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile-grammar")]


async def test_a_grammar_is_compiled_in_another_thread_and_then_kept(
    cache: GrammarCache, compiler: FakeGrammarCompiler
) -> None:
    assert cache.find(choice("a")) is None
    grammar = await cache.compile(choice("a"), always)
    assert cache.find(choice("a")) is grammar
    assert cache.find(choice("a", param="structured_outputs")) is grammar
    assert cache.find(choice("b")) is None
    assert compiler.sources == ['["a"]']


async def test_those_who_ask_for_the_same_at_once_share_one_compilation(
    cache: GrammarCache, compiler: FakeGrammarCompiler
) -> None:
    compiler.gate.clear()
    futures = [cache.compile(choice("a"), always) for _ in range(5)]
    other = cache.compile(choice("b"), always)
    compiler.gate.set()
    grammars = await asyncio.gather(*futures)
    assert len({id(grammar) for grammar in grammars}) == 1
    assert (await other).texts == [b"b"]  # type: ignore[attr-defined]
    assert compiler.sources == ['["a"]', '["b"]']


async def test_what_is_refused_is_refused_to_all_and_not_kept(
    cache: GrammarCache, compiler: FakeGrammarCompiler
) -> None:
    regex = StructuredOutput(kind=StructureKind.REGEX, source="a+")
    futures = [cache.compile(regex, always) for _ in range(2)]
    for outcome in await asyncio.gather(*futures, return_exceptions=True):
        assert isinstance(outcome, GrammarRefused)
    assert cache.find(regex) is None
    for _ in range(2):
        with pytest.raises(GrammarRefused, match="more than the fake can do"):
            await cache.compile(regex, always)
    assert compiler.sources == ["a+"]


async def test_the_refusals_that_are_kept_are_bounded(compiler: FakeGrammarCompiler) -> None:
    cache = GrammarCache(compiler, max_refused=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        with pytest.raises(GrammarRefused):
            await cache.compile(StructuredOutput(kind=StructureKind.REGEX, source=source), always)
    assert compiler.sources == ["a", "b", "c", "b"]
    await asyncio.to_thread(cache.close)


async def test_a_worker_that_died_is_no_refusal_for_those_who_ask_next(
    compiler: FakeGrammarCompiler,
) -> None:
    class Dying(FakeGrammarCompiler):
        def compile(self, structured: StructuredOutput, is_wanted: Callable[[], bool]) -> FakeGrammar:
            if not self.sources:
                self.sources.append("")
                raise WorkerDied("by chance")
            return super().compile(structured, is_wanted)

    cache = GrammarCache(Dying(FakeTokenizer(), 512))
    with pytest.raises(GrammarRefused, match="by chance"):
        await cache.compile(choice("a"), always)
    await cache.compile(choice("a"), always)
    await asyncio.to_thread(cache.close)


async def test_a_grammar_that_turned_out_too_slow_is_refused_from_then_on(
    cache: GrammarCache, compiler: FakeGrammarCompiler
) -> None:
    grammar = await cache.compile(choice("a"), always)
    grammar.time_budget.note(2 * SLOW_S)
    assert cache.find(choice("a")) is None
    with pytest.raises(GrammarRefused, match="too long to follow"):
        await cache.compile(choice("a"), always)
    assert compiler.sources == ['["a"]']
    await cache.compile(choice("x" * 90), always)
    await cache.compile(choice("y"), always)
    assert cache.find(choice("x" * 90)) is not None, "what is gone still counts"


async def test_the_longest_unused_goes_first_when_there_are_too_many(cache: GrammarCache) -> None:
    for text in "abc":
        await cache.compile(choice(text), always)
    assert cache.find(choice("a")) is not None
    await cache.compile(choice("d"), always)
    assert [text for text in "abcd" if cache.find(choice(text)) is not None] == ["a", "c", "d"]


async def test_what_is_kept_is_bounded_in_bytes_but_a_larger_one_is_kept_alone(cache: GrammarCache) -> None:
    await cache.compile(choice("x" * 60), always)
    await cache.compile(choice("y" * 60), always)
    assert cache.find(choice("x" * 60)) is None
    await cache.compile(choice("z" * 500), always)
    assert cache.find(choice("y" * 60)) is None
    assert cache.find(choice("z" * 500)) is not None
    await cache.compile(choice("a"), always)
    assert cache.find(choice("z" * 500)) is None
    assert cache.find(choice("a")) is not None


async def test_no_more_grammars_are_made_while_those_that_are_held_take_too_much(
    compiler: FakeGrammarCompiler,
) -> None:
    cache = GrammarCache(compiler, max_kept=1, max_alive_bytes=100)
    held = [await cache.compile(choice(sign * 60), always) for sign in "ab"]
    with pytest.raises(Overloaded):
        await cache.compile(choice("c"), always)
    assert cache.find(choice("b" * 60)) is held[1]
    held.clear()
    gc.collect()
    await cache.compile(choice("c"), always)
    assert compiler.sources[2:] == ['["c"]']
    await asyncio.to_thread(cache.close)


async def test_what_nobody_waits_for_any_more_is_not_begun(
    cache: GrammarCache, compiler: FakeGrammarCompiler
) -> None:
    compiler.gate.clear()
    running = cache.compile(choice("a"), always)
    left = cache.compile(choice("b"), lambda: False)
    shared = cache.compile(choice("c"), lambda: False)
    assert cache.compile(choice("c"), always) is shared
    compiler.gate.set()
    await running
    with pytest.raises(NobodyWaits):
        await left
    assert (await shared).texts == [b"c"]  # type: ignore[attr-defined]
    assert compiler.sources == ['["a"]', '["c"]']


async def test_the_compiler_is_told_when_nobody_waits_any_more() -> None:
    asked = threading.Event()
    has_left = threading.Event()

    class Patient(FakeGrammarCompiler):
        def compile(self, structured: StructuredOutput, is_wanted: Callable[[], bool]) -> FakeGrammar:
            assert is_wanted()
            asked.set()
            assert has_left.wait(30)
            if not is_wanted():
                raise NobodyWaits
            return super().compile(structured, is_wanted)

    cache = GrammarCache(Patient(FakeTokenizer(), 512))
    left = cache.compile(choice("a"), lambda: not has_left.is_set())
    await asyncio.to_thread(asked.wait, 30)
    has_left.set()
    with pytest.raises(NobodyWaits):
        await left
    await cache.compile(choice("a"), always)  # it was not taken for a refusal
    await asyncio.to_thread(cache.close)


async def test_no_more_than_a_number_of_structures_wait(compiler: FakeGrammarCompiler) -> None:
    cache = GrammarCache(compiler, max_pending=2)
    compiler.gate.clear()
    pending = [cache.compile(choice(text), always) for text in "ab"]
    with pytest.raises(Overloaded, match="wait to be compiled"):
        await cache.compile(choice("c"), always)
    assert cache.compile(choice("b"), always) is pending[1]
    compiler.gate.set()
    await asyncio.gather(*pending)
    await cache.compile(choice("c"), always)
    await asyncio.to_thread(cache.close)


async def test_the_shortest_source_that_waits_is_compiled_first(
    cache: GrammarCache, compiler: FakeGrammarCompiler
) -> None:
    compiler.gate.clear()
    running = cache.compile(choice("running"), always)
    await asyncio.to_thread(compiler.begun.acquire)
    others = [cache.compile(choice(text), always) for text in ("long" * 5, "aa", "b", "cc")]
    compiler.gate.set()
    await asyncio.gather(running, *others)
    assert compiler.sources[1:] == ['["b"]', '["aa"]', '["cc"]', f'["{"long" * 5}"]']


async def test_closing_ends_what_runs_and_what_waits(compiler: FakeGrammarCompiler) -> None:
    cache = GrammarCache(compiler)
    compiler.gate.clear()
    running = cache.compile(choice("a"), always)
    waiting = cache.compile(choice("b"), always)
    await asyncio.to_thread(compiler.begun.acquire)
    await asyncio.to_thread(cache.close)
    assert compiler.is_closed
    outcomes = await asyncio.gather(running, waiting, return_exceptions=True)
    assert not isinstance(outcomes[0], BaseException)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert compiler.sources == ['["a"]']
