"""A grammar without xgrammar: a list of texts, one of which must be written, over any tokenizer.

`FakeGrammar` and its matcher implement the protocols of `asyncserve/grammar.py`; `FakeGrammarCompiler` makes
them of CHOICE structures, refuses what it cannot, and can be held, so that a test decides when it is done.
"""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncserve.grammar import TimeBudget
from asyncserve.loop.grammar_cache import GrammarRefused
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import StructuredOutput, StructureKind


class GrammarTokens(Protocol):
    """What of a tokenizer a grammar needs."""

    eos_token_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class ByteTokens:
    """Tokens that are bytes, all but one that ends: for devices with a small vocabulary."""

    EOS_ID = 1
    eos_token_ids = frozenset({EOS_ID})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == self.EOS_ID


class FakeGrammar:
    """One of several texts, then the end."""

    def __init__(self, texts: Sequence[str], tokenizer: GrammarTokens, vocab_size: int) -> None:
        self.texts = [text.encode() for text in texts]
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.stop_token_ids = tokenizer.eos_token_ids
        self.num_bytes = sum(map(len, self.texts))
        self.time_budget = TimeBudget()

    def matcher(self) -> "FakeMatcher":
        return FakeMatcher(self)


class FakeMatcher:
    """How much of a text has been written."""

    def __init__(self, grammar: FakeGrammar) -> None:
        self._grammar = grammar
        self._written = b""
        self.is_done = False

    def accept(self, token_id: int) -> bool:
        if not self._may_come(token_id):
            return False
        if token_id in self._grammar.stop_token_ids:
            self.is_done = True
        else:
            self._written += self._grammar.tokenizer.token_bytes(token_id)
        return True

    def fill_mask(self, words: memoryview) -> None:
        for word in range(len(words)):
            words[word] = 0
        for token_id in range(self._grammar.vocab_size):
            if self._may_come(token_id):
                bits = words[token_id // 32] & 0xFFFFFFFF | 1 << token_id % 32
                words[token_id // 32] = bits - (1 << 32) if bits >= 1 << 31 else bits

    def _may_come(self, token_id: int) -> bool:
        grammar = self._grammar
        if self.is_done or not 0 <= token_id < grammar.vocab_size:
            return False
        if token_id in grammar.stop_token_ids:
            return self._written in grammar.texts
        if grammar.tokenizer.is_special(token_id):
            return False
        token = grammar.tokenizer.token_bytes(token_id)
        return bool(token) and any(text.startswith(self._written + token) for text in grammar.texts)


class FakeGrammarCompiler:
    """Compiles CHOICE at once, or when `gate` is set; everything else is refused.

    Attributes:
        gate: Compiling waits for it; set at first.
        begun: One release for each compilation that began.
        sources: What was compiled, in order.
        is_closed: Whether `close` was called; it sets the gate.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.sources: list[str] = []
        self.is_closed = False

    def compile(self, structured: StructuredOutput, is_wanted: Callable[[], bool]) -> FakeGrammar:
        self.sources.append(structured.source)
        self.begun.release()
        assert self.gate.wait(timeout=30)
        if structured.kind is not StructureKind.CHOICE:
            raise GrammarRefused(f"{structured.kind.value} is more than the fake can do")
        return FakeGrammar(json.loads(structured.source), self._tokenizer, self._vocab_size)

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()
