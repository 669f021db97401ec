"""Text to token ids and back: the tokenizer of a checkpoint, whichever form it is stored in.

Takes a `Checkpoint` (a folder with tokenizer.json or a SentencePiece model, or a GGUF file), gives a
`Tokenizer`. Also the chat template, because it is stored beside. Encoding releases the GIL and may be
called from several threads at once. Bytes, not text, are the unit of decoding: a character may be spread
over tokens, and what is not UTF-8 becomes U+FFFD. Incremental decoding is the detokenizer's; both give
the same text.
"""

import json
import logging
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import processors

from asyncserve.checkpoint import Checkpoint, CheckpointFormat, read_json
from asyncserve.errors import CheckpointError, ConfigError, InvalidRequest
from asyncserve.gguf_file import read_gguf_header
from asyncserve.loop.chat_template import DEFAULT, ChatTemplate, RequestTemplates
from asyncserve.loop.gguf_tokenizer import CONTROL, build_gguf_tokenizer
from asyncserve.request import ChatPrompt

logger = logging.getLogger(__name__)

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as the format spells it
    "pad_token": "padding",
    "mask_token": "mask",
}
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>")
"""Control tokens that end an answer; a GGUF file need not name them apart from its EOS."""

_BOS_CLASSES = ("LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "CodeLlamaTokenizer")
"""Classes in transformers that obey `add_bos_token` whatever tokenizer.json says (also with `Fast`)."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """What the rest of the server needs of a tokenizer."""

    vocab_size: int
    """One more than the highest token id; the model's output matrix may have more rows."""
    eos_token_ids: frozenset[int]
    """Every token that ends an answer of this model."""
    strips_leading_space: bool
    """Whether a text loses one space at its beginning (SentencePiece puts one there when encoding)."""
    special_tokens: frozenset[str]
    """Texts of the tokens that `skip_special_tokens` leaves out."""
    chat_template_text: str | None
    """The chat template as text, all of them if there are several; None if the model has none."""

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the text's token ids, `array('i')`. Thread-safe; releases the GIL.

        Args:
            text: Special tokens written in it are recognised.
            add_special_tokens: Add what the model expects around a prompt, such as BOS.

        Raises:
            InvalidRequest: The text holds a lone surrogate, which is no character.
        """

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Return the conversation as text; encode it without adding special tokens.

        Raises:
            InvalidRequest: The model has no chat template, or it refuses the messages.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; a special token's are its text, an unknown id has none."""

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves the token out."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens.

        Args:
            token_ids: Any ids; those outside the vocabulary stand for nothing.
            skip_special_tokens: Leave special tokens out.
        """


def load_tokenizer(
    checkpoint: Checkpoint, *, chat_template: str | None, model: Checkpoint | None = None
) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Args:
        checkpoint: Where the tokenizer is.
        chat_template: A file or the template itself, instead of the checkpoint's own.
        model: The model served, if its tokenizer is taken from elsewhere: its stop tokens count too.

    Raises:
        CheckpointError: The tokenizer is missing, damaged or of an unknown kind.
        ConfigError: `chat_template` names no file, or does not parse.
    """
    # One prompt is encoded per call, so the library's own thread pool could only fight for cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if checkpoint.format is CheckpointFormat.GGUF:
        tokenizer, special, templates, eos_ids = _from_gguf(checkpoint.path)
    else:
        tokenizer, special, templates, eos_ids = _from_folder(checkpoint.path)
    for source in (checkpoint, model):
        if source is not None:
            eos_ids |= declared_eos_ids(source)
    template: ChatTemplate | None = None
    if chat_template is not None:
        try:
            template = ChatTemplate({DEFAULT: _template_text(chat_template)}, special_tokens=special)
        except CheckpointError as error:
            raise ConfigError(f"--chat-template: {error}") from error
    elif templates:
        template = ChatTemplate(templates, special_tokens=special)
    return FastTokenizer(
        tokenizer,
        eos_token_ids=frozenset(eos_ids),
        chat_template=template,
        own_templates=RequestTemplates(special),
    )


def declared_eos_ids(checkpoint: Checkpoint) -> set[int]:
    """Return the EOS ids that `config.json` and `generation_config.json` name."""
    found: set[int] = set()
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(token_id for token_id in value if isinstance(token_id, int))
    return found


def _template_text(option: str) -> str:
    if "{" in option or "\n" in option:
        return option
    path = Path(option).expanduser()
    try:
        # Without the mark that some editors put at the beginning: it would stand in every prompt.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {option!r} is neither a template (no braces in it) nor a readable file: {error}"
        ) from error


_Loaded = tuple[RustTokenizer, dict[str, str], dict[str, str], set[int]]
"""Tokenizer, special tokens by name, chat templates by name, EOS ids the tokenizer's own files name."""


def _from_gguf(path: Path) -> _Loaded:
    metadata = read_gguf_header(path).metadata
    try:
        tokenizer = build_gguf_tokenizer(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    special = {}
    for name, key in _GGUF_NAMES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and token_id < len(tokens):
            special[name] = tokens[token_id]
    templates = {}
    prefix = "tokenizer.chat_template"
    for key, value in metadata.items():
        if key == prefix:
            templates[DEFAULT] = str(value)
        elif key.startswith(f"{prefix}."):
            templates[key.removeprefix(f"{prefix}.")] = str(value)
    types = metadata.get("tokenizer.ggml.token_type") or ()
    eos_ids = set()
    for text in _END_OF_TURN:
        token_id = tokenizer.token_to_id(text)
        if token_id is not None and token_id < len(types) and types[token_id] == CONTROL:
            eos_ids.add(token_id)
    return tokenizer, special, templates, eos_ids


def _from_folder(path: Path) -> _Loaded:
    settings = read_json(path / "tokenizer_config.json", missing_ok=True)
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            tokenizer = RustTokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself, of no subclass
            raise CheckpointError(
                f"{file} is damaged or newer than the tokenizers library: {error}"
            ) from error
    else:
        tokenizer = _converted(path)
    # Files saved after training often keep its limits, which would silently cut prompts short.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = _special_tokens(settings, read_json(path / "special_tokens_map.json", missing_ok=True))
    _obey_add_bos(tokenizer, settings, special)
    eos = special.get("eos_token")
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    return tokenizer, special, _folder_templates(path, settings), set() if eos_id is None else {eos_id}


def _converted(path: Path) -> RustTokenizer:
    """Convert a SentencePiece or other older tokenizer, which only transformers can."""
    if not any((path / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer.tiktoken")):
        raise CheckpointError(
            f"{path} holds no tokenizer (tokenizer.json or tokenizer.model); name another with --tokenizer"
        )
    logger.info("%s has no tokenizer.json: converting its older tokenizer", path)
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the tokenizer in {path} cannot be converted: {error} (a SentencePiece tokenizer.model needs "
            "the packages sentencepiece and protobuf)"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, RustTokenizer):
        raise CheckpointError(f"the tokenizer in {path} has no fast form; a tokenizer.json is needed")
    return backend


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    special: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                special.setdefault(name, value)
    return special


def _obey_add_bos(tokenizer: RustTokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    wanted = settings.get("add_bos_token")
    tokenizer_class = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    bos = special.get("bos_token")
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    if not isinstance(wanted, bool) or tokenizer_class not in _BOS_CLASSES or bos is None or bos_id is None:
        return
    if (bos_id in tokenizer.encode("").ids) != wanted:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["BOS", "$A"] if wanted else ["$A"],
            pair=["BOS", "$A", "$B"] if wanted else ["$A", "$B"],
            special_tokens=[{"id": "BOS", "ids": [bos_id], "tokens": [bos]}] if wanted else [],
        )


def _folder_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; a file of its own goes before what tokenizer_config.json says."""
    templates: dict[str, str] = {}
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        templates[DEFAULT] = stored
    elif isinstance(stored, list):
        try:
            templates.update({str(entry["name"]): str(entry["template"]) for entry in stored})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: chat_template is a list of something else than names and "
                "templates"
            ) from error
    older = read_json(path / "chat_template.json", missing_ok=True).get("chat_template")
    if isinstance(older, str):
        templates[DEFAULT] = older
    file = path / "chat_template.jinja"
    if file.is_file():
        templates[DEFAULT] = _read_text(file)
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _read_text(extra)
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class FastTokenizer:
    """A `Tokenizer` over the tokenizers library.

    Args:
        tokenizer: Not changed afterwards.
        eos_token_ids: Every token that ends an answer.
        chat_template: None if the model has none.
        own_templates: Renders conversations that bring a template of their own.
    """

    def __init__(
        self,
        tokenizer: RustTokenizer,
        *,
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None,
        own_templates: RequestTemplates | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._own_templates = own_templates or RequestTemplates({})
        self.chat_template_text = None if chat_template is None else chat_template.text
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        decoder = _decoder_steps(tokenizer)
        kinds = {str(step["type"]) for step in decoder}
        self._is_byte_level = "ByteLevel" in kinds
        self._byte_of_sign = _byte_level_alphabet() if self._is_byte_level else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        self.vocab_size = max(
            tokenizer.get_vocab_size(with_added_tokens=True), 1 + max(self._added, default=-1)
        )
        self.eos_token_ids = eos_token_ids
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        self.strips_leading_space = any(_strips_space(step) for step in decoder)

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """See `Tokenizer`. The batch form is used because only it releases the GIL."""
        try:
            encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}", param="prompt") from error
        return array("i", encoded[0].ids)

    def render_chat(self, prompt: ChatPrompt) -> str:
        """See `Tokenizer`."""
        if prompt.chat_template is not None:
            return self._own_templates.render(prompt.chat_template, prompt)
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot take messages: send a prompt to "
                "/v1/completions, or start the server with --chat-template",
                param="messages",
            )
        return self._chat_template.render(prompt)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        token = (
            added if added is not None else self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        )
        if token is None:
            return b""
        if self._is_byte_level:
            if added is None:
                signs = [self._byte_of_sign.get(sign) for sign in token]
                if None not in signs:
                    return bytes(value for value in signs if value is not None)
            return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes((int(match[1], 16),))
        return token.replace("▁", " ").encode()

    def is_special(self, token_id: int) -> bool:
        """See `Tokenizer`."""
        return token_id in self._special_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Tokenizer`."""
        kept: Iterable[int] = token_ids
        if skip_special_tokens:
            kept = (token_id for token_id in token_ids if token_id not in self._special_ids)
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text[:1] == " " else text


def _decoder_steps(tokenizer: RustTokenizer) -> list[Mapping[str, Any]]:
    """Return the parts of the tokenizer's decoder as its JSON describes them."""
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    described = json.loads(decoder.__getstate__())
    return list(described["decoders"]) if described["type"] == "Sequence" else [described]


def _strips_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _byte_level_alphabet() -> dict[str, int]:
    """Return sign → byte of byte-level BPE: printable Latin-1 stands for itself, U+0100 on for the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(0x100 + index): value for index, value in enumerate(others)
    }
