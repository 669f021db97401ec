"""Compiled grammars, kept for the next request that asks for the same, and a lane in which new ones are made.

Takes `StructuredOutput`s, gives `Grammar`s: at once those that are kept, the others as a future. Requests
that ask for the same at the same time share one compilation; one that nobody waits for any more is not
begun. What is kept is bounded in number and in bytes, the longest unused going first. All methods but
`close` run on the loop thread; the compiler runs in a thread of its own, one structure at a time.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from asyncserve.grammar import Grammar
from asyncserve.request import StructuredOutput

MAX_KEPT = 512
"""Grammars that are kept."""
MAX_KEPT_BYTES = 256 * 1024**2
"""Bytes that they may take together, a single larger one excepted."""


class GrammarRefused(Exception):
    """A structure cannot be used; the message says why, and is for whoever asked for it."""


class NobodyWaits(Exception):
    """A grammar was not made because nobody waited for it when its turn came."""


class SizedGrammar(Grammar, Protocol):
    """A grammar that tells its size.

    Attributes:
        num_bytes: What it takes in memory, about.
    """

    num_bytes: int


class GrammarCompiler(Protocol):
    """What makes grammars."""

    def compile(self, structured: StructuredOutput) -> SizedGrammar:
        """Return the compiled structure; blocks. Called by one thread at a time.

        Raises:
            GrammarRefused: It cannot be used.
            EngineError: Nothing can be compiled.
        """

    def close(self) -> None:
        """Stop, also a compilation that another thread is in. Idempotent."""


class GrammarCache:
    """The grammars of one engine.

    Args:
        compiler: Makes them; closed with the cache.
        max_kept: Most grammars kept.
        max_kept_bytes: Most bytes they take together.
    """

    def __init__(
        self, compiler: GrammarCompiler, *, max_kept: int = MAX_KEPT, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._compiler = compiler
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[StructuredOutput, SizedGrammar] = OrderedDict()
        self._num_bytes = 0
        self._pending: dict[StructuredOutput, _Compilation] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile-grammar")

    @property
    def num_pending(self) -> int:
        """Structures that are being compiled or wait for it."""
        return len(self._pending)

    def find(self, structured: StructuredOutput) -> Grammar | None:
        """Return a grammar if it is kept."""
        grammar = self._kept.get(structured)
        if grammar is not None:
            self._kept.move_to_end(structured)
        return grammar

    def compile(
        self, structured: StructuredOutput, is_wanted: Callable[[], bool]
    ) -> "asyncio.Future[SizedGrammar]":
        """Have a grammar made; the future is shared by all that ask for the same, so do not cancel it.

        Args:
            structured: Not kept.
            is_wanted: Asked in another thread when its turn comes; if no asker wants it any more, the future
                raises `NobodyWaits`.
        """
        pending = self._pending.get(structured)
        if pending is not None:
            pending.askers.append(is_wanted)
            return pending.future
        askers = [is_wanted]
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._make, structured, askers)
        self._pending[structured] = _Compilation(askers, future)
        future.add_done_callback(lambda done: self._note_made(structured, done))
        return future

    def close(self) -> None:
        """End the compiler and its thread; blocks. What is pending fails."""
        self._compiler.close()
        self._thread.shutdown(cancel_futures=True)

    def _make(self, structured: StructuredOutput, askers: list[Callable[[], bool]]) -> SizedGrammar:
        if not any(is_wanted() for is_wanted in askers):
            raise NobodyWaits
        return self._compiler.compile(structured)

    def _note_made(self, structured: StructuredOutput, future: "asyncio.Future[SizedGrammar]") -> None:
        self._pending.pop(structured, None)
        if future.cancelled() or future.exception() is not None:
            return
        grammar = future.result()
        self._kept[structured] = grammar
        self._num_bytes += grammar.num_bytes
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_kept or self._num_bytes > self._max_kept_bytes
        ):
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


class _Compilation:
    """A structure on its way: who asks for it, and what becomes of it."""

    __slots__ = ("askers", "future")

    def __init__(self, askers: list[Callable[[], bool]], future: "asyncio.Future[SizedGrammar]") -> None:
        self.askers = askers
        self.future = future
