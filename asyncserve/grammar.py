"""A compiled grammar as the rest of the package sees it: what `loop` makes and `gpu` follows.

A `Grammar` is compiled once and shared by all requests that ask for the same shape; a `GrammarMatcher` is one
sequence's way through it. Two protocols, because the library behind them is known to `loop/grammar.py` alone
and the tests have another. Knows neither how grammars are written nor what a mask is used for.
"""

from typing import Protocol


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
    """A compiled grammar. Thread-safe and never changed.

    Attributes:
        stop_token_ids: The tokens that end a text, at least one; allowed where the text is complete.
    """

    stop_token_ids: frozenset[int]

    def matcher(self) -> GrammarMatcher:
        """Return a new matcher, at the beginning."""
