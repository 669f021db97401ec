from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loadtest.token_counts import TokenCounts, by_server, by_tokenizer, guessed
from tests.fakes.openai_server import ScriptedServer
from tests.loadtest.on_a_thread import on_a_thread


def test_the_server_is_asked_where_it_tells() -> None:
    with on_a_thread(ScriptedServer()) as server:
        count = by_server(server.url, model="scripted", api_key="key")
        assert count("one two three") == 3
    assert "/tokenize" in count.origin


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", ""])
def test_a_server_that_does_not_tell_leaves_a_guess(url: str) -> None:
    with on_a_thread(ScriptedServer(tokenizes=False)) as server:
        count = by_server(url or server.url, model="scripted")
    assert count("12345") == 2
    assert "guessed" in count.origin


def test_a_text_is_counted_once() -> None:
    asked: list[str] = []
    count = TokenCounts(lambda text: asked.append(text) or 7, "a test")
    assert [count("a"), count("a"), count("b")] == [7, 7, 7]
    assert asked == ["a", "b"]


def test_a_tokenizers_file_counts_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert by_tokenizer(tmp_path)("a b c") == 3
    assert by_tokenizer(tmp_path / "tokenizer.json")("a") == 1
    with pytest.raises(ValueError, match=r"nowhere.*is not there"):
        by_tokenizer(tmp_path / "nowhere")


def test_nothing_at_all_has_no_tokens() -> None:
    assert guessed()("") == 0
