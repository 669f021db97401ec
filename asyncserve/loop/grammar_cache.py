"""Compiled grammars, kept for the next request that asks for the same, and a lane in which new ones are made.

Takes `StructuredOutput`s, gives `Grammar`s: at once those that are kept, the others as a future. Requests
that ask for the same at the same time share one compilation; one that nobody waits for any more is not
begun, or ended if it takes long. The shortest source comes first: long ones are those that take long. What is
kept is bounded in number and in bytes, the longest unused going first; so is what is kept and what requests
follow together, and how many wait. What was refused is kept as well. All methods but `close` run on the loop
thread; the compiler runs in a thread of its own, one structure at a time.
"""

import asyncio
import heapq
import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from asyncserve.errors import Overloaded
from asyncserve.grammar import Grammar
from asyncserve.request import StructuredOutput

MAX_KEPT = 512
"""Grammars that are kept."""
MAX_KEPT_BYTES = 256 * 1024**2
"""Bytes that they may take together, a single larger one excepted."""
MAX_ALIVE_BYTES = 1024**3
"""Bytes of all grammars, those included that only requests hold, above which no more are made."""
MAX_REFUSED = 128
"""Structures of which it is kept why they were refused. A structure has up to 128 KiB."""
MAX_PENDING = 256
"""Structures that may wait to be compiled."""
TOO_SLOW = "it takes too long to follow; make it less ambiguous"
RETRY_AFTER_S = 10.0
"""What those are told who ask then."""


class GrammarRefused(Exception):
    """A structure cannot be used; the message says why, and is for whoever asked for it."""


class WorkerDied(GrammarRefused):
    """Compiling it ended a worker, twice: maybe by chance, so those who ask later are not refused for it."""


class NobodyWaits(Exception):
    """A grammar was not made because nobody waited for it, when its turn came or after some time."""


class SizedGrammar(Grammar, Protocol):
    """A grammar that tells its size.

    Attributes:
        num_bytes: What it takes in memory, about.
    """

    num_bytes: int


class GrammarCompiler(Protocol):
    """What makes grammars."""

    def compile(self, structured: StructuredOutput, is_wanted: Callable[[], bool]) -> SizedGrammar:
        """Return the compiled structure; blocks. Called by one thread at a time.

        Args:
            is_wanted: Asked now and then, in whichever thread, whether it is worth going on.

        Raises:
            GrammarRefused: It cannot be used.
            NobodyWaits: It was not worth going on.
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
        max_alive_bytes: Most bytes of these and those that requests hold, before another is made.
        max_refused: Most refusals kept.
        max_pending: Most structures that wait or are being compiled.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        max_kept: int = MAX_KEPT,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        max_alive_bytes: int = MAX_ALIVE_BYTES,
        max_refused: int = MAX_REFUSED,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._compiler = compiler
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[StructuredOutput, SizedGrammar] = OrderedDict()
        self._num_bytes = 0
        self._max_alive_bytes = max_alive_bytes
        self._num_alive_bytes = 0
        self._freed: deque[int] = deque()  # sizes of grammars that are gone, in whichever thread they went
        self._refused: OrderedDict[StructuredOutput, str] = OrderedDict()
        self._max_refused = max_refused
        self._pending: dict[StructuredOutput, _Compilation] = {}
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._waiting: list[_Compilation] = []  # a heap
        self._orders = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile-grammar")

    def find(self, structured: StructuredOutput) -> Grammar | None:
        """Return a grammar if it is kept and was not found to be too slow since."""
        grammar = self._kept.get(structured)
        if grammar is None:
            return None
        if grammar.time_budget.is_spent:
            del self._kept[structured]
            self._num_bytes -= grammar.num_bytes
            self._note_refused(structured, TOO_SLOW)
            return None
        self._kept.move_to_end(structured)
        return grammar

    def compile(
        self, structured: StructuredOutput, is_wanted: Callable[[], bool]
    ) -> "asyncio.Future[SizedGrammar]":
        """Have a grammar made; the future is shared by all that ask for the same, so do not cancel it.

        Args:
            structured: Not kept.
            is_wanted: Asked in another thread when its turn comes and while it is compiled; if no asker wants
                it any more, the future raises `NobodyWaits`.

        Raises:
            Overloaded: Grammars take too much memory already, or too many structures wait.
        """
        loop = asyncio.get_running_loop()
        refusal = self._refused.get(structured)
        if refusal is not None:
            self._refused.move_to_end(structured)
            refused: asyncio.Future[SizedGrammar] = loop.create_future()
            refused.set_exception(GrammarRefused(refusal))
            return refused
        pending = self._pending.get(structured)
        if pending is not None:
            pending.askers.append(is_wanted)
            return pending.future
        if len(self._pending) >= self._max_pending:
            raise Overloaded(
                f"{len(self._pending)} structures wait to be compiled already; try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        while self._freed:
            self._num_alive_bytes -= self._freed.popleft()
        if self._num_alive_bytes > self._max_alive_bytes:
            raise Overloaded(
                f"the structures of the requests being served take {self._num_alive_bytes >> 20} MiB already;"
                " try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        made: Future[SizedGrammar] = Future()
        future = asyncio.wrap_future(made, loop=loop)
        compilation = _Compilation(
            len(structured.source), next(self._orders), structured, [is_wanted], made, future
        )
        with self._lock:
            heapq.heappush(self._waiting, compilation)
        self._pending[structured] = compilation
        future.add_done_callback(lambda done: self._note_made(structured, done))
        self._thread.submit(self._make_next)
        return future

    def close(self) -> None:
        """End the compiler and its thread; blocks. What is pending fails."""
        self._compiler.close()
        self._thread.shutdown(cancel_futures=True)
        for compilation in self._waiting:
            compilation.made.cancel()

    def _make_next(self) -> None:
        """Make one of those that wait; called once for each."""
        with self._lock:
            compilation = heapq.heappop(self._waiting)
        made = compilation.made
        if not made.set_running_or_notify_cancel():
            return
        try:
            if not compilation.is_wanted():
                raise NobodyWaits
            made.set_result(self._compiler.compile(compilation.structured, compilation.is_wanted))
        except BaseException as error:  # for whoever waits for it
            made.set_exception(error)
            del compilation, made  # which hold the error, which holds this frame

    def _note_refused(self, structured: StructuredOutput, why: str) -> None:
        self._refused[structured] = why
        if len(self._refused) > self._max_refused:
            self._refused.popitem(last=False)

    def _note_made(self, structured: StructuredOutput, future: "asyncio.Future[SizedGrammar]") -> None:
        self._pending.pop(structured, None)
        if future.cancelled():
            return
        error = future.exception()
        if isinstance(error, GrammarRefused) and not isinstance(error, WorkerDied):
            self._note_refused(structured, str(error))
        if error is not None:
            return
        grammar = future.result()
        self._kept[structured] = grammar
        self._num_bytes += grammar.num_bytes
        self._num_alive_bytes += grammar.num_bytes
        weakref.finalize(grammar, self._freed.append, grammar.num_bytes).atexit = False
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_kept or self._num_bytes > self._max_kept_bytes
        ):
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


@dataclass(slots=True, order=True)
class _Compilation:
    """A structure on its way, before those with longer sources: who asks for it, and what becomes of it."""

    length: int
    order: int
    structured: StructuredOutput = field(compare=False)
    askers: list[Callable[[], bool]] = field(compare=False)
    made: Future[SizedGrammar] = field(compare=False)
    future: "asyncio.Future[SizedGrammar]" = field(compare=False)

    def is_wanted(self) -> bool:
        """Return whether anybody still waits for it; asked in any thread."""
        return any(is_wanted() for is_wanted in self.askers)
