import math

import pytest

from asyncserve.http.logprobs import CompletionLogprobs, TokenTexts, as_number, chat_content
from asyncserve.request import TokenLogprobs
from tests.fakes.tokenizer import EOS_ID, FakeTokenizer


def entry(token_id: int, *top: tuple[int, float], logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=logprob, rank=1, top=top)


@pytest.fixture
def texts() -> TokenTexts:
    tokenizer = FakeTokenizer()
    return TokenTexts(tokenizer.token_bytes, tokenizer.is_special)


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e6])
def test_what_json_cannot_hold_becomes_the_lowest(value: float) -> None:
    assert as_number(value) == -9999.0


def test_chat_entries_have_the_vocabularys_bytes(texts: TokenTexts) -> None:
    [shown] = chat_content([entry(0xE2, (0xE2, -1.0), (97, -math.inf))], texts)
    assert shown == {
        "token": "\N{REPLACEMENT CHARACTER}",
        "logprob": -1.0,
        "bytes": [0xE2],
        "top_logprobs": [
            {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -1.0, "bytes": [0xE2]},
            {"token": "a", "logprob": -9999.0, "bytes": [97]},
        ],
    }


def test_offset_counts_characters_of_the_text_not_of_the_tokens(texts: TokenTexts) -> None:
    lists = CompletionLogprobs(texts, skips_special=True, strips_prompt=False, strips_output=False)
    first = lists.output([entry(byte) for byte in "a\N{GRINNING FACE}b".encode()])
    assert first["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert lists.output([entry(EOS_ID), entry(99)])["text_offset"] == [3, 3]


def test_space_that_the_text_has_lost_at_its_beginning_does_not_count(texts: TokenTexts) -> None:
    lists = CompletionLogprobs(texts, skips_special=True, strips_prompt=True, strips_output=True)
    assert lists.output([entry(EOS_ID), entry(300), entry(300)])["text_offset"] == [0, 0, len("w300")]
    without = CompletionLogprobs(texts, skips_special=True, strips_prompt=True, strips_output=True)
    assert without.output([entry(97), entry(300), entry(97)])["text_offset"] == [0, 1, 1 + len(" w300")]


def test_special_token_counts_when_it_is_shown(texts: TokenTexts) -> None:
    lists = CompletionLogprobs(texts, skips_special=False, strips_prompt=False, strips_output=False)
    assert lists.output([entry(EOS_ID), entry(97)])["text_offset"] == [0, len("<eos>")]


def test_chosen_token_is_among_the_top_and_wins_over_one_of_equal_text(texts: TokenTexts) -> None:
    lists = CompletionLogprobs(texts, skips_special=True, strips_prompt=False, strips_output=False)
    shown = lists.output([entry(0xE2, (0xE3, -0.5), (98, -2.0))])
    assert shown["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -1.0, "b": -2.0}]
