from pathlib import Path

import pytest

from asyncserve.checkpoint import open_checkpoint
from asyncserve.loop.tokenizer import load_tokenizer
from loadtest.gpu.vocabulary import END_OF_TEXT, made_up_tokens, write_tokenizer


def test_the_tokenizer_has_exactly_the_tokens_asked_for_and_gives_text_back(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "made", 1000)
    tokenizer = load_tokenizer(open_checkpoint(str(folder), needs_weights=False), chat_template=None)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.eos_token_ids == {999}
    assert tokenizer.special_tokens == {END_OF_TEXT}
    text = "Ein Text, 3 Wörter more"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert len(token_ids) < len(text.encode())


def test_tokens_differ_and_each_is_the_merge_of_earlier_ones() -> None:
    tokens, merges = made_up_tokens(3000, seed=0)
    assert len(set(tokens)) == len(tokens) == 3000
    place = {token: index for index, token in enumerate(tokens)}
    assert len(merges) == 3000 - 256
    for token, (left, right) in zip(tokens[256:], merges, strict=True):
        assert token == left + right
        assert max(place[left], place[right]) < place[token]


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="200 tokens"):
        made_up_tokens(200, seed=0)
