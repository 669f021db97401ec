"""A compiled grammar as the rest of the package sees it: what `loop` makes and `gpu` follows.

A `Grammar` is compiled once and shared by all requests that ask for the same shape; a `GrammarMatcher` is one
sequence's way through it. Two protocols, because the library behind them is known to `loop/grammar.py` alone
and the tests have another. Knows neither how grammars are written nor what a mask is used for.
"""

from typing import Protocol

USUAL_S = 0.0005
"""Processor time that one call of a matcher may take; two make a token. Most take a thirtieth of it."""
SLOW_S = 0.25
"""Processor time beyond it, all calls of all matchers of a grammar together, after which it is too slow."""


class TimeBudget:
    """What following one grammar may take, for all sequences that do: all others wait for each of its calls.

    Attributes:
        is_spent: Whether it took too long; stays so.
    """

    __slots__ = ("_late_s", "is_spent")

    def __init__(self) -> None:
        self._late_s = 0.0
        self.is_spent = False

    def note(self, took_s: float) -> None:
        """Count a call of a matcher. Calls that take less than usual make up for slow ones before them."""
        self._late_s = max(0.0, self._late_s + took_s - USUAL_S)
        if self._late_s > SLOW_S:
            self.is_spent = True


class GrammarMatcher(Protocol):
    """How far one sequence has come. Used by one thread at a time."""

    @property
    def is_done(self) -> bool:
        """Whether a stop token was accepted: nothing can follow."""

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changes, if it may not come here."""

    def fill_mask(self, words: memoryview) -> None:
        """Write which tokens may come next.

        Args:
            words: `ceil(vocab_size / 32)` int32 words, all of which are written. Bit `i % 32` of word
                `i // 32` says whether token `i` may come; once done, none may.
        """


class Grammar(Protocol):
    """A compiled grammar. Thread-safe; nothing of it changes but its `time_budget`.

    Attributes:
        stop_token_ids: The tokens that end a text, at least one; allowed where the text is complete.
        time_budget: Noted by the thread that follows it. Once spent, nobody follows it any more.
    """

    stop_token_ids: frozenset[int]
    time_budget: TimeBudget

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher, at the beginning."""
