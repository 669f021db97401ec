import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from asyncserve.errors import CheckpointError
from asyncserve.gguf_file import read_gguf_header
from asyncserve.loop.gguf_tokenizer import PRE_TOKENIZERS, build_gguf_tokenizer
from tests.fakes.demo_model import demo_model_path
from tests.fakes.gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_gguf

# --- byte-level BPE ---


@pytest.fixture(scope="session")
def demo_tokenizer() -> RustTokenizer:
    return build_gguf_tokenizer(read_gguf_header(demo_model_path()).metadata)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a  5", ["a", "ĠĠ", "5"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("Hello world", ["Hello", "Ġworld"]),
        ("x   y", ["x", "ĠĠ", "Ġy"]),
        ("don't", ["don", "'t"]),
        ("a½", ["a", "Â½"]),
    ],
)
def test_the_demo_model_splits_as_it_was_trained(
    demo_tokenizer: RustTokenizer, text: str, tokens: list[str]
) -> None:
    assert demo_tokenizer.encode(text).tokens == tokens


def test_special_tokens_in_a_text_are_found_and_no_bos_is_added(demo_tokenizer: RustTokenizer) -> None:
    assert demo_tokenizer.encode("<|im_start|>user").ids == [1, 4093]


def _byte_level(path: Path, tokens: Sequence[str], merges: Sequence[str], **metadata: Any) -> RustTokenizer:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if key != "types"}
    types = metadata.get("types", [])
    file = write_gguf(path / "m.gguf", tokens=tokens, types=types, merges=merges, metadata=keys)
    return build_gguf_tokenizer(read_gguf_header(file).metadata)


_LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGH0123456789.,!?/-+Ċčĉ'", "Ġ", "Ì", "ģ", "Ã", "©"]


def _splits(path: Path, pre: str, text: str) -> list[str]:
    """Return how the pre-tokenizer cuts a text, in the byte-level alphabet."""
    tokenizer = _byte_level(path, _LETTERS, [], pre=pre)
    assert tokenizer.pre_tokenizer is not None
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123 x", ["ab", "Ġ123", "Ġx"]),
        ("smollm", "ab 123 x", ["ab", "Ġ", "1", "2", "3", "Ġx"]),
        ("llama-bpe", "ab 12345 x", ["ab", "Ġ", "123", "45", "Ġx"]),
        ("llama-bpe", "HE'S ok.\n\nx", ["HE", "'S", "Ġok", ".ĊĊ", "x"]),
        ("qwen2", "ab 123 x", ["ab", "Ġ", "1", "2", "3", "Ġx"]),
        ("qwen2", "a   b", ["a", "ĠĠ", "Ġb"]),
        ("tekken", "fooBar/\nHTTPServer 12", ["foo", "Bar", "/Ċ", "HTTPServer", "Ġ", "1", "2"]),
        ("gpt-4o", "it's 1234 fooBar", ["it's", "Ġ", "123", "4", "Ġfoo", "Bar"]),
        ("deepseek-v3", "ab 1234 c+d", ["ab", "Ġ", "123", "4", "Ġc", "+d"]),
        ("deepseek-coder", "a b12\nc", ["a", "Ġb", "1", "2", "Ċ", "c"]),
    ],
)
def test_pre_tokenizers_cut_as_named(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    assert _splits(tmp_path, pre, text) == pieces


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_no_byte(tmp_path: Path, pre: str) -> None:
    text = "It's 12345 naïve  tests,\r\n\n\tof 日本語 ½ — e\u0301 👩‍👩‍👧!?/ x"
    tokenizer = _byte_level(tmp_path, _LETTERS, [], pre=pre)
    assert tokenizer.pre_tokenizer is not None
    assert tokenizer.decoder is not None
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert len(pieces) > 10
    assert tokenizer.decoder.decode(pieces) == text


def test_an_unknown_pre_tokenizer_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _splits(tmp_path, "brand-new", "ab 12") == ["ab", "Ġ12"]
    assert "'brand-new'" in caplog.text


def test_known_pre_tokenizers_warn_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _splits(tmp_path, "qwen2", "x")
    assert caplog.text == ""


def test_merges_apply_in_order_and_words_that_are_tokens_are_whole_where_the_model_wants_it(
    tmp_path: Path,
) -> None:
    tokens, merges = [*_LETTERS, "ab", "bc", "abc"], ["b c", "a b"]
    assert _byte_level(tmp_path, tokens, merges, pre="qwen2").encode("abc").tokens == ["a", "bc"]
    assert _byte_level(tmp_path, tokens, merges, pre="llama-bpe").encode("abc").tokens == ["abc"]


def test_qwen_text_is_composed_first(tmp_path: Path) -> None:
    assert _byte_level(tmp_path, _LETTERS, [], pre="qwen2").encode("e\u0301").tokens == ["Ã", "©"]
    assert _byte_level(tmp_path, _LETTERS, [], pre="gpt-2").encode("e\u0301").tokens == ["e", "Ì", "ģ"]


@pytest.mark.parametrize(
    ("pre", "metadata", "ids"),
    [
        ("qwen2", {}, [0]),
        ("llama-bpe", {}, [55, 0]),
        ("llama-bpe", {"add_bos_token": False}, [0]),
        ("qwen2", {"add_bos_token": True}, [55, 0]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [55, 0, 56]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_or_its_kind_says(
    tmp_path: Path, pre: str, metadata: dict[str, bool], ids: list[int]
) -> None:
    tokens = [*_LETTERS[:55], "<$A:1>", "</s>"]
    types = [NORMAL] * 55 + [CONTROL] * 2
    tokenizer = _byte_level(
        tmp_path, tokens, [], pre=pre, types=types, bos_token_id=55, eos_token_id=56, **metadata
    )
    assert tokenizer.encode("a").ids == ids
    assert tokenizer.encode("a", add_special_tokens=False).ids == [0]


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokens = [*"abcd ", "<|end|>", "<tool>"]
    tokenizer = _byte_level(tmp_path, tokens, [], pre="qwen2", types=[NORMAL] * 5 + [CONTROL, USER_DEFINED])
    assert tokenizer.encode("a<tool>b<|end|>").ids == [0, 6, 1, 5]
    special = {token_id: token.special for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    assert special == {5: True, 6: False}


# --- SentencePiece ---

_PIECES = [
    ("▁", -1.0),
    *((letter, -2.0) for letter in "abcdehlot<>x01"),
    ("▁a", -3.0),
    ("he", -4.0),
    ("ll", -5.0),
    ("▁he", -6.0),
    ("hello", -7.0),
    ("llo", -8.0),
    ("▁hello", -9.0),
    ("ab", -10.0),
    ("▁▁", -11.0),
    ("bc", -9.5),
    ("abc", -12.0),
]


def _sentencepiece(path: Path, **metadata: Any) -> RustTokenizer:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    tokens += [piece for piece, _ in _PIECES] + ["<box>", "   "]
    types += [NORMAL] * len(_PIECES) + [USER_DEFINED] * 2
    scores = [0.0] * 259 + [score for _, score in _PIECES] + [-1000.0] * 2
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0}
    file = write_gguf(
        path / "m.gguf", kind="llama", tokens=tokens, types=types, scores=scores, metadata={**ids, **keys}
    )
    return build_gguf_tokenizer(read_gguf_header(file).metadata)


def _by_score(text: str) -> list[str]:
    """SentencePiece's rule, written plainly: merge the pair whose union scores best, leftmost first."""
    scores = dict(_PIECES)
    symbols = list(text)
    while True:
        unions = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        known = [(score, position) for score, position in unions if score is not None]
        if not known:
            return [
                part
                for symbol in symbols
                for part in ([symbol] if symbol in scores else [f"<0x{b:02X}>" for b in symbol.encode()])
            ]
        at = -max(known)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def test_pieces_are_merged_by_score_as_sentencepiece_does(tmp_path: Path) -> None:
    tokenizer = _sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(draw.choice("aabbccdehlllo  é日") for _ in range(draw.randrange(1, 16)))
        if "   " in text:  # a token of its own in this vocabulary
            continue
        assert tokenizer.encode(text).tokens == _by_score(text.replace(" ", "▁")), text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["<s>", "▁hello"]),
        (" hello", ["<s>", "▁", "▁hello"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        ("<s>hello", ["<s>", "<s>", "▁hello"]),
        ("<0x41>", ["<s>", "▁", "<", "0", "x", "<0x34>", "1", ">"]),
        ("", ["<s>"]),
    ],
)
def test_llamas_kind_prefixes_a_space_and_falls_back_to_bytes(
    tmp_path: Path, text: str, tokens: list[str]
) -> None:
    assert _sentencepiece(tmp_path).encode(text).tokens == tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["<s>", "hello"]),
        (" hello", ["<s>", "▁hello"]),
        ("a<box>b", ["<s>", "a", "<box>", "b"]),
        ("a   b", ["<s>", "a", "   ", "b"]),
        ("a  b", ["<s>", "a", "▁▁", "b"]),
        ("a    b", ["<s>", "a", "   ", "▁", "b"]),
    ],
)
def test_gemmas_kind_prefixes_nothing_and_finds_its_runs_of_spaces(
    tmp_path: Path, text: str, tokens: list[str]
) -> None:
    tokenizer = _sentencepiece(tmp_path, add_space_prefix=False)
    assert tokenizer.encode(text).tokens == tokens
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 259 + len(_PIECES) + 2


def test_bos_is_left_out_if_the_file_says_so(tmp_path: Path) -> None:
    assert _sentencepiece(tmp_path, add_bos_token=False).encode("hello").tokens == ["▁hello"]


# --- files that cannot be read ---


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"no tokenizer.*--tokenizer"):
        build_gguf_tokenizer(header.metadata)


def test_an_unknown_kind_of_tokenizer_is_named(tmp_path: Path) -> None:
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", kind="rwkv", tokens=["a"]))
    with pytest.raises(CheckpointError, match="'rwkv'"):
        build_gguf_tokenizer(header.metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": ["a z"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"tokenizer.ggml.model": "llama"}, "lacks a score"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 99}, "beyond"),
    ],
)
def test_an_inconsistent_tokenizer_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tokens=["a", "b"], merges=[])
    metadata = {**read_gguf_header(file).metadata, **change}
    with pytest.raises(CheckpointError, match=message):
        build_gguf_tokenizer(metadata)
