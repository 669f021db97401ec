"""The grammar contract, run on xgrammar and on the fake that other tests use in its place."""

import json

import pytest

from asyncserve.grammar import Grammar
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import StructuredOutput, StructureKind
from tests.contracts.grammar_contract import GrammarContract
from tests.fakes.grammar import FakeGrammar
from tests.loop.grammars import compiled


class TestFakeGrammar(GrammarContract):
    def make_grammar(self, texts: list[str], tokenizer: Tokenizer, vocab_size: int) -> Grammar:
        return FakeGrammar(texts, tokenizer, vocab_size)


@pytest.mark.slow
class TestXGrammar(GrammarContract):
    def make_grammar(self, texts: list[str], tokenizer: Tokenizer, vocab_size: int) -> Grammar:
        structured = StructuredOutput(kind=StructureKind.CHOICE, source=json.dumps(texts))
        return compiled(structured, tokenizer, vocab_size=vocab_size)
