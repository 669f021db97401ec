import codecs
import json
import logging
import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, processors

from asyncserve.checkpoint import Checkpoint, CheckpointFormat, open_checkpoint
from asyncserve.errors import CheckpointError, ConfigError, InvalidRequest
from asyncserve.loop.tokenizer import FastTokenizer, Tokenizer, load_tokenizer
from asyncserve.request import ChatPrompt
from tests.fakes.demo_model import demo_model_path
from tests.fakes.gguf_files import CONTROL, NORMAL, write_gguf
from tests.fakes.small_tokenizers import CORPUS, byte_level_bpe, sentencepiece_bpe

_HI = ChatPrompt(messages=({"role": "user", "content": "hi"},))


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(demo_model_path())), chat_template=None)


def _library(tokenizer: FastTokenizer) -> RustTokenizer:
    return tokenizer._tokenizer


def _folder(path: Path, tokenizer: RustTokenizer | None = None, **files: Any) -> Checkpoint:
    (_library(byte_level_bpe()) if tokenizer is None else tokenizer).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return open_checkpoint(str(path), needs_weights=False)


# --- the demo model ---


def test_the_demo_model_is_described_rightly(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.eos_token_ids) == (49152, frozenset({2}))
    assert [token_id for token_id in range(49152) if demo.is_special(token_id)] == list(range(17))
    assert not demo.strips_leading_space


def test_the_demo_model_splits_digits_and_adds_no_bos(demo: Tokenizer) -> None:
    ids = demo.encode("a  5", add_special_tokens=True)
    assert isinstance(ids, array)
    assert ids.typecode == "i"
    assert [demo.token_bytes(token_id) for token_id in ids] == [b"a", b"  ", b"5"]


def test_the_demo_models_chat_template_puts_in_its_system_message(demo: Tokenizer) -> None:
    assert demo.render_chat(_HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_the_demo_model_encodes_it_decodes(demo: Tokenizer) -> None:
    for text in (*CORPUS, "<|im_start|>a<|im_end|>", " x\t\r\n  y ", "🏽" * 50):
        ids = demo.encode(text, add_special_tokens=False)
        assert demo.decode(ids, skip_special_tokens=False) == text
    assert (
        demo.decode(demo.encode("<|im_start|>a", add_special_tokens=False), skip_special_tokens=True) == "a"
    )


def test_threads_encode_at_once_and_get_the_same_ids(demo: Tokenizer) -> None:
    texts = [f"{text} {number}" for number in range(8) for text in CORPUS]
    expected = [demo.encode(text, add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = list(pool.map(lambda text: demo.encode(text, add_special_tokens=False), texts))
            assert found == expected


# --- bytes and text ---


@pytest.mark.parametrize("seed", range(4))
def test_byte_level_decoding_is_the_librarys(seed: int) -> None:
    tokenizer = byte_level_bpe()
    draw = random.Random(seed)
    for _ in range(100):
        ids = [draw.randrange(400) for _ in range(draw.randrange(1, 30))]
        for skip in (False, True):
            expected = _library(tokenizer).decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("seed", range(4))
def test_sentencepiece_decoding_is_the_librarys_where_bytes_are_characters(seed: int) -> None:
    """The library replaces whole runs of bytes that hold an invalid one, valid characters included."""
    tokenizer = sentencepiece_bpe()
    draw = random.Random(seed)
    for _ in range(100):
        ids: list[int] = []
        for _ in range(draw.randrange(1, 20)):
            if draw.random() < 0.3:
                ids += [3 + byte for byte in draw.choice("é日😀a ").encode()]
            else:
                ids.append(draw.choice([1, 2, *range(259, tokenizer.vocab_size)]))
        for skip in (False, True):
            expected = _library(tokenizer).decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_valid_characters_among_invalid_bytes_are_kept() -> None:
    tokenizer = sentencepiece_bpe()
    ids = [3 + byte for byte in b"\xff" + "é".encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\ufffdé"


def test_tokens_stand_for_their_bytes() -> None:
    tokenizer = byte_level_bpe()
    assert tokenizer.token_bytes(0) == b"<|begin|>"
    assert tokenizer.token_bytes(400) == "<tool é>".encode()
    space_one = tokenizer.encode(" one", add_special_tokens=False)
    assert tokenizer.token_bytes(space_one[0]) == b" one"
    pieces = sentencepiece_bpe()
    assert pieces.token_bytes(3 + 0x0A) == b"\n"
    assert pieces.token_bytes(pieces.encode("the", add_special_tokens=False)[0]) == b" the"


@pytest.mark.parametrize("token_id", [-1, 401, 10**9])
def test_ids_outside_the_vocabulary_stand_for_nothing(token_id: int) -> None:
    assert byte_level_bpe().token_bytes(token_id) == b""
    assert byte_level_bpe().decode([token_id], skip_special_tokens=True) == ""


def test_only_special_tokens_are_skipped() -> None:
    tokenizer = byte_level_bpe()
    assert tokenizer.vocab_size == 401
    assert [tokenizer.is_special(token_id) for token_id in (0, 1, 2, 400)] == [True, True, False, False]
    assert tokenizer.decode([0, 400, 1], skip_special_tokens=True) == "<tool é>"


def test_a_leading_space_is_stripped() -> None:
    tokenizer = sentencepiece_bpe()
    ids = tokenizer.encode("the a", add_special_tokens=False)
    assert tokenizer.strips_leading_space
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the a"
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" the a"


def test_a_lone_surrogate_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest) as raised:
        byte_level_bpe().encode("a\ud800", add_special_tokens=True)
    assert raised.value.param == "prompt"


def test_without_a_chat_template_messages_are_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidRequest, match="--chat-template") as raised:
        byte_level_bpe().render_chat(_HI)
    assert raised.value.param == "messages"


# --- folders ---


def test_a_folder_is_loaded_with_its_eos_ids_from_every_place(tmp_path: Path) -> None:
    checkpoint = _folder(
        tmp_path,
        config={"architectures": ["X"], "eos_token_id": 5},
        generation_config={"eos_token_id": [6, 7]},
        tokenizer_config={"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>"},
    )
    tokenizer = load_tokenizer(checkpoint, chat_template=None)
    assert tokenizer.eos_token_ids == {1, 5, 6, 7}


def test_the_served_models_eos_ids_count_if_its_tokenizer_is_elsewhere(tmp_path: Path) -> None:
    checkpoint = _folder(tmp_path)
    model = Checkpoint(
        name="m",
        path=tmp_path,
        format=CheckpointFormat.SAFETENSORS,
        config={"eos_token_id": 9},
        generation_config={},
    )
    assert load_tokenizer(checkpoint, chat_template=None, model=model).eos_token_ids == {9}


def test_special_tokens_are_also_read_from_the_older_file(tmp_path: Path) -> None:
    checkpoint = _folder(tmp_path, special_tokens_map={"eos_token": "<|end|>"}, tokenizer_config={})
    assert load_tokenizer(checkpoint, chat_template=None).eos_token_ids == {1}


def test_limits_kept_in_the_file_do_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    limited = RustTokenizer.from_str(_library(byte_level_bpe()).to_str())
    limited.enable_truncation(4)
    limited.enable_padding(length=64)
    text = CORPUS[0]
    tokenizer = load_tokenizer(_folder(tmp_path, limited), chat_template=None)
    expected = byte_level_bpe().encode(text, add_special_tokens=True)
    assert tokenizer.encode(text, add_special_tokens=True) == expected


@pytest.mark.parametrize(
    ("settings", "in_file", "adds_bos"),
    [
        ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizerFast"}, False, True),
        ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, True, False),
        ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizerFast"}, True, True),
        ({"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}, True, True),
        ({"tokenizer_class": "LlamaTokenizerFast"}, True, True),
    ],
)
def test_bos_is_added_as_the_class_would(
    tmp_path: Path, settings: dict[str, Any], in_file: bool, adds_bos: bool
) -> None:
    library = RustTokenizer.from_str(_library(byte_level_bpe()).to_str())
    if in_file:
        library.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
        )
    checkpoint = _folder(tmp_path, library, tokenizer_config={**settings, "bos_token": "<|begin|>"})
    tokenizer = load_tokenizer(checkpoint, chat_template=None)
    ids = tokenizer.encode("a", add_special_tokens=True)
    assert (ids[0] == 0) is adds_bos
    assert len(ids) == 1 + adds_bos


def test_the_chat_template_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    def rendered() -> str:
        checkpoint = open_checkpoint(str(tmp_path), needs_weights=False)
        return load_tokenizer(checkpoint, chat_template=None).render_chat(_HI)

    _folder(tmp_path, tokenizer_config={"chat_template": "string {{ messages[0].content }}"})
    assert rendered() == "string hi"
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    _folder(tmp_path, tokenizer_config={"chat_template": named})
    assert rendered() == "named"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "older file"}')
    assert rendered() == "older file"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert rendered() == "file hi"


def test_the_mark_that_editors_put_before_a_text_is_no_part_of_the_template(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_bytes(codecs.BOM_UTF8 + b"given {{ messages[0].content }}")
    checkpoint = _folder(tmp_path, tokenizer_config={})
    assert load_tokenizer(checkpoint, chat_template=str(given)).render_chat(_HI) == "given hi"
    given.rename(tmp_path / "chat_template.jinja")
    assert load_tokenizer(checkpoint, chat_template=None).render_chat(_HI) == "given hi"


def test_damaged_templates_are_named(tmp_path: Path) -> None:
    _folder(tmp_path, tokenizer_config={"chat_template": [{"foo": 1}]})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        load_tokenizer(open_checkpoint(str(tmp_path), needs_weights=False), chat_template=None)
    _folder(tmp_path, tokenizer_config={})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer(open_checkpoint(str(tmp_path), needs_weights=False), chat_template=None)


def test_templates_beside_the_default_one_are_found(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(
        _folder(tmp_path, tokenizer_config={"chat_template": "plain"}), chat_template=None
    )
    assert tokenizer.render_chat(_HI) == "plain"
    assert (
        tokenizer.render_chat(ChatPrompt(messages=_HI.messages, template_kwargs={"tools": [{}]})) == "tools"
    )


@pytest.fixture
def template_file(tmp_path: Path) -> Path:
    file = tmp_path / "own.jinja"
    file.write_text("own {{ messages[0].content }}{{ eos_token }}")
    return file


def test_a_template_named_on_the_command_line_replaces_the_models(template_file: Path) -> None:
    checkpoint = open_checkpoint(str(demo_model_path()))
    from_file = load_tokenizer(checkpoint, chat_template=str(template_file))
    assert from_file.render_chat(_HI) == "own hi<|im_end|>"
    from_text = load_tokenizer(checkpoint, chat_template="{{ bos_token }}text")
    assert from_text.render_chat(_HI) == "<|im_start|>text"


@pytest.mark.parametrize("option", ["/no/such/file.jinja", "{% if %}"])
def test_a_template_that_cannot_be_used_is_a_configuration_error(option: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template"):
        load_tokenizer(open_checkpoint(str(demo_model_path())), chat_template=option)


def test_a_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    checkpoint = _folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "9.9"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(checkpoint, chat_template=None)


def test_a_folder_without_a_tokenizer_says_where_else_one_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path), needs_weights=False)
    with pytest.raises(CheckpointError, match="--tokenizer"):
        load_tokenizer(checkpoint, chat_template=None)


@pytest.mark.slow
def test_an_older_tokenizer_is_converted(tmp_path: Path) -> None:
    """Only transformers can; GPT-2's two files stand for all older forms."""
    stored = json.loads(_library(byte_level_bpe()).to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(stored["vocab"]))
    merges = "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in stored["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|begin|>"}))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    checkpoint = open_checkpoint(str(tmp_path), needs_weights=False)
    tokenizer = load_tokenizer(checkpoint, chat_template=None)
    expected = byte_level_bpe().encode(CORPUS[0], add_special_tokens=False)
    assert tokenizer.encode(CORPUS[0], add_special_tokens=False) == expected
    assert tokenizer.eos_token_ids == {1}


def test_an_older_tokenizer_that_cannot_be_converted_says_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    checkpoint = open_checkpoint(str(tmp_path), needs_weights=False)
    with pytest.raises(CheckpointError, match="sentencepiece"):
        load_tokenizer(checkpoint, chat_template=None)


def test_metaspace_tokenizers_lose_their_leading_space_only_if_they_put_one() -> None:
    for scheme, strips in (("first", True), ("always", True), ("never", False)):
        library = RustTokenizer.from_str(_library(sentencepiece_bpe()).to_str())
        library.decoder = decoders.Metaspace(prepend_scheme=scheme)
        tokenizer = FastTokenizer(library, eos_token_ids=frozenset(), chat_template=None)
        assert tokenizer.strips_leading_space is strips
        the = list(tokenizer.encode("the", add_special_tokens=False))
        assert tokenizer.decode(the, skip_special_tokens=True) == library.decode(the)


# --- GGUF files ---


def test_control_tokens_that_end_a_turn_end_an_answer(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "m.gguf",
        tokens=["a", "</s>", "<|eot_id|>", "<|im_end|>"],
        types=[NORMAL, CONTROL, CONTROL, NORMAL],
        merges=[],
        metadata={"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.pre": "qwen2"},
    )
    tokenizer = load_tokenizer(open_checkpoint(str(file)), chat_template=None)
    assert tokenizer.eos_token_ids == {1, 2}
    with pytest.raises(InvalidRequest, match="--chat-template"):
        tokenizer.render_chat(_HI)


def test_a_gguf_file_may_hold_several_templates(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "m.gguf",
        tokens=["a"],
        merges=[],
        metadata={
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "tools",
        },
    )
    tokenizer = load_tokenizer(open_checkpoint(str(file)), chat_template=None)
    assert tokenizer.render_chat(_HI) == "plain"
    with_tools = ChatPrompt(messages=_HI.messages, template_kwargs={"tools": [{}]})
    assert tokenizer.render_chat(with_tools) == "tools"


def test_a_gguf_tokenizer_that_cannot_be_read_names_its_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", kind="rwkv", tokens=["a"])
    with pytest.raises(CheckpointError, match=r"m\.gguf.*'rwkv'"):
        load_tokenizer(open_checkpoint(str(file)), chat_template=None)


def test_loading_reports_nothing_unusual_for_the_demo_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    load_tokenizer(open_checkpoint(str(demo_model_path())), chat_template=None)
    assert caplog.text == ""
