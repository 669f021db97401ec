"""What every `Grammar` must do, as a suite: subclass `GrammarContract` and compile a list of texts.

    class TestXGrammar(GrammarContract):
        def make_grammar(self, texts: list[str], tokenizer: Tokenizer, vocab_size: int) -> Grammar: ...

The grammar allows exactly one of the texts, then a stop token.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence

import pytest

from asyncserve.grammar import Grammar, GrammarMatcher
from asyncserve.loop.tokenizer import Tokenizer
from tests.fakes.small_tokenizers import byte_level_bpe, sentencepiece_bpe
from tests.fakes.tokenizer import FakeTokenizer

TEXTS = ["yes", "yesterday", "né", "[1]\n", "日本"]
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": FakeTokenizer,
    "byte-level": byte_level_bpe,
    "sentencepiece": sentencepiece_bpe,
}


def allowed(matcher: GrammarMatcher, vocab_size: int) -> list[int]:
    """Return the tokens a matcher allows, and check that it writes every word and no bit beyond the
    tokens."""
    num_words = -(-vocab_size // 32)
    found = []
    for fill in (0, -1):
        words = array("i", [fill] * num_words)
        matcher.fill_mask(memoryview(words))
        bits = [each for each in range(32 * num_words) if words[each // 32] >> each % 32 & 1]
        assert all(each < vocab_size for each in bits)
        found.append(bits)
    assert found[0] == found[1], "a word is left as it was"
    return found[0]


class GrammarContract(ABC):
    """The suite."""

    @abstractmethod
    def make_grammar(self, texts: list[str], tokenizer: Tokenizer, vocab_size: int) -> Grammar:
        """Return the grammar of exactly one of these texts."""

    @pytest.fixture(params=TOKENIZERS)
    def tokenizer(self, request: pytest.FixtureRequest) -> Tokenizer:
        return TOKENIZERS[request.param]()

    @pytest.fixture
    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """More than the tokenizer knows, as many models have it."""
        return tokenizer.vocab_size + 37

    @pytest.fixture
    def grammar(self, tokenizer: Tokenizer, vocab_size: int) -> Grammar:
        return self.make_grammar(TEXTS, tokenizer, vocab_size)

    def spell(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return tokens that stand for the text, and for nothing before it."""
        data, ids = text.encode(), []
        longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        known: dict[bytes, int] = {}
        for token_id in range(tokenizer.vocab_size):
            if not tokenizer.is_special(token_id):
                known.setdefault(tokenizer.token_bytes(token_id), token_id)
        while data:
            size = next(size for size in range(longest, 0, -1) if data[:size] in known)
            ids.append(known[data[:size]])
            data = data[size:]
        return ids

    def test_it_names_the_tokens_that_end_an_answer(self, grammar: Grammar, tokenizer: Tokenizer) -> None:
        assert grammar.stop_token_ids == tokenizer.eos_token_ids

    @pytest.mark.parametrize("text", TEXTS)
    def test_each_text_can_be_written_and_then_ended(
        self, grammar: Grammar, tokenizer: Tokenizer, vocab_size: int, text: str
    ) -> None:
        matcher = grammar.matcher()
        for token_id in self.spell(text, tokenizer):
            assert token_id in allowed(matcher, vocab_size)
            assert not matcher.is_done
            assert matcher.accept(token_id)
        (stop,) = grammar.stop_token_ids
        assert stop in allowed(matcher, vocab_size)
        assert matcher.accept(stop)
        assert matcher.is_done
        assert allowed(matcher, vocab_size) == []
        assert not matcher.accept(stop)

    def test_what_the_mask_allows_is_accepted_and_nothing_else_is(
        self, grammar: Grammar, tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        path: list[int] = []
        for token_id in [*self.spell("yes", tokenizer), None]:
            in_mask = set(allowed(self.moved_on(grammar, path), vocab_size))
            accepted = {each for each in range(vocab_size) if self.moved_on(grammar, path).accept(each)}
            assert in_mask == accepted
            texts = [b"".join(map(tokenizer.token_bytes, [*path, each])) for each in in_mask]
            for each, text in zip(in_mask, texts, strict=True):
                ends = each in grammar.stop_token_ids
                assert ends or any(known.encode().startswith(text) for known in TEXTS)
            if token_id is not None:
                path.append(token_id)

    def test_special_tokens_are_never_part_of_a_text(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = next(each for each in range(tokenizer.vocab_size) if tokenizer.is_special(each))
        text = tokenizer.token_bytes(special).decode()
        matcher = self.make_grammar([text], tokenizer, vocab_size).matcher()
        assert special not in allowed(matcher, vocab_size)
        assert not matcher.accept(special)

    @pytest.mark.parametrize("token_id", [-2, -1, 10_000_000])
    def test_a_token_that_does_not_exist_is_refused(self, grammar: Grammar, token_id: int) -> None:
        assert not grammar.matcher().accept(token_id)

    def test_a_refused_token_changes_nothing(
        self, grammar: Grammar, tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        matcher = grammar.matcher()
        first, *rest = self.spell("yes", tokenizer)
        assert matcher.accept(first)
        before = allowed(matcher, vocab_size)
        (wrong,) = self.spell("z", tokenizer)
        assert not matcher.accept(wrong)
        assert allowed(matcher, vocab_size) == before
        assert all(matcher.accept(each) for each in rest)

    def test_matchers_of_one_grammar_do_not_know_of_each_other(
        self, grammar: Grammar, tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        one, other = grammar.matcher(), grammar.matcher()
        at_first = allowed(other, vocab_size)
        for token_id in self.spell("yes", tokenizer):
            one.accept(token_id)
        assert allowed(other, vocab_size) == at_first

    def moved_on(self, grammar: Grammar, path: Sequence[int]) -> GrammarMatcher:
        matcher = grammar.matcher()
        for token_id in path:
            assert matcher.accept(token_id)
        return matcher
