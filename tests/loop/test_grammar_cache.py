import asyncio
import threading
from collections.abc import Iterator

import pytest

from asyncserve.loop.grammar_cache import GrammarCache, GrammarRefused, NobodyWaits
from asyncserve.request import StructuredOutput, StructureKind
from tests.fakes.grammar import FakeGrammarCompiler
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
    assert cache.num_pending == 2
    compiler.gate.set()
    grammars = await asyncio.gather(*futures)
    assert len({id(grammar) for grammar in grammars}) == 1
    assert (await other).texts == [b"b"]  # type: ignore[attr-defined]
    assert compiler.sources == ['["a"]', '["b"]']
    assert cache.num_pending == 0


async def test_what_is_refused_is_refused_to_all_and_not_kept(
    cache: GrammarCache, compiler: FakeGrammarCompiler
) -> None:
    regex = StructuredOutput(kind=StructureKind.REGEX, source="a+")
    futures = [cache.compile(regex, always) for _ in range(2)]
    for outcome in await asyncio.gather(*futures, return_exceptions=True):
        assert isinstance(outcome, GrammarRefused)
    assert cache.find(regex) is None
    with pytest.raises(GrammarRefused):
        await cache.compile(regex, always)
    assert compiler.sources == ["a+", "a+"]


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
