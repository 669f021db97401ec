"""xgrammar's grammars made in the test's own process, and outputs written along them at random."""

import json
import random

import numpy as np

from asyncserve.grammar import Grammar
from asyncserve.loop.grammar import CompiledGrammar, Vocabulary
from asyncserve.loop.grammar_worker import Worker
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import StructuredOutput, StructureKind


def schema(source: object) -> StructuredOutput:
    """A JSON schema as a structure."""
    return StructuredOutput(kind=StructureKind.JSON_SCHEMA, source=json.dumps(source))


class Compiler:
    """What the server does in a process of its own, without the process."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> None:
        self.vocabulary = Vocabulary(tokenizer, vocab_size or tokenizer.vocab_size)
        self.worker = Worker(self.vocabulary.tokens, self.vocabulary.texts)
        self.vocabulary.take(self.worker.packed_vocabulary())

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        packed = self.worker.compile(structured.kind, structured.source)
        return self.vocabulary.unpack(packed, structured)


def compiled(
    structured: StructuredOutput, tokenizer: Tokenizer, *, vocab_size: int | None = None
) -> CompiledGrammar:
    return Compiler(tokenizer, vocab_size=vocab_size).compile(structured)


def write_at_random(
    grammar: Grammar, tokenizer: Tokenizer, seed: int, *, max_tokens: int = 300
) -> tuple[str, bool]:
    """Write a text along a grammar, leaning towards its end; return it and whether it ended."""
    rng = random.Random(seed)
    matcher = grammar.matcher()
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    closing = [tokenizer.encode(sign, add_special_tokens=False)[0] for sign in '"}]']
    text = b""
    for _ in range(max_tokens):
        matcher.fill_mask(words.data)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert allowed, f"a dead end behind {text!r}"
        others = [each for each in allowed if each not in grammar.stop_token_ids]
        if len(others) < len(allowed) and (not others or rng.random() < 0.6):
            assert matcher.accept(next(iter(grammar.stop_token_ids)))
            assert matcher.is_done
            return text.decode(), True
        ends = [each for each in closing if each in others]
        token_id = rng.choice(ends if ends and rng.random() < 0.4 else others)
        assert matcher.accept(token_id)
        text += tokenizer.token_bytes(token_id)
    return text.decode("utf-8", "ignore"), False
