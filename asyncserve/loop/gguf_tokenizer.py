"""A tokenizer built from what a GGUF file says: vocabulary, merges or scores, token types, pre-tokenizer.

Takes the file's metadata, gives a `tokenizers.Tokenizer` with the same ids as the model's original one.
Two kinds exist: byte-level BPE (`gpt2`), whose pre-tokenizer is only named in the file and spelled out
here, and SentencePiece BPE (`llama`), which stores scores instead of merges. Chat templates and stop
tokens are not its concern.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from asyncserve.errors import CheckpointError

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens in `tokenizer.ggml.token_type`."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LINES_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX"
)
_CJK_DEEPSEEK_CODER = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_DEEPSEEK_V3 = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before merging.

    Args:
        splits: Regular expressions, applied one after another, each match a piece of its own.
        gpt2_words: Then cut into words as GPT-2 does.
        individual_digits: First cut every digit off.
        ignore_merges: A piece that is a token is taken whole, whatever the merges say.
        adds_bos: BOS is put before a prompt if the file does not say.
        normalizes: Text is brought to Unicode's NFC first.
    """

    splits: tuple[str, ...] = ()
    gpt2_words: bool = False
    individual_digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False


_GPT2 = _PreTokenizer(gpt2_words=True)
_DIGITS_GPT2 = _PreTokenizer(individual_digits=True, gpt2_words=True)
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_LINES}"
_LLAMA3 = _PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True, adds_bos=True)
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_LINES}"
_QWEN2 = _PreTokenizer((_QWEN2_SPLIT,), normalizes=True)
_GPT4O = _PreTokenizer(
    (_CASED_WORDS.replace("SUFFIX", _CONTRACTIONS + "?") + rf"|\p{{N}}{{1,3}}|{_LINES_SLASH}",)
)

PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "jais": _GPT2,
    "trillion": _GPT2,
    "exaone4": _GPT2,
    "mellum": _GPT2,
    "gigachat": _GPT2,
    "a.x-4.0": _GPT2,
    "granite-docling": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "mellum2": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _PreTokenizer((_LLAMA3_SPLIT,)),
    "smaug-bpe": _PreTokenizer((_LLAMA3_SPLIT,)),
    "glm4": _PreTokenizer((_LLAMA3_SPLIT,)),
    "chatglm-bpe": _PreTokenizer((_LLAMA3_SPLIT,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "kormo": _QWEN2,
    "f2llmv2": _QWEN2,
    "stablelm2": _PreTokenizer((_QWEN2_SPLIT,)),
    "hunyuan": _PreTokenizer((_QWEN2_SPLIT,)),
    "solar-open": _PreTokenizer((_QWEN2_SPLIT,)),
    "grok-2": _PreTokenizer((_QWEN2_SPLIT,)),
    "qwen35": _PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        normalizes=True,
    ),
    "tekken": _PreTokenizer(
        (_CASED_WORDS.replace("SUFFIX", "") + rf"|\p{{N}}|{_LINES_SLASH}",), ignore_merges=True, adds_bos=True
    ),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-coder": _PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_DEEPSEEK_CODER, r"\p{N}"),
    ),
    "deepseek-v3": _PreTokenizer((r"\p{N}{1,3}", _CJK_DEEPSEEK_V3, _DEEPSEEK_V3_WORDS)),
    "hunyuan-dense": _PreTokenizer((r"\p{N}{1,3}", _CJK_DEEPSEEK_V3, _DEEPSEEK_V3_WORDS)),
    "seed-coder": _PreTokenizer(
        (
            rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}"
            r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}
"""By the name in `tokenizer.ggml.pre`. The expressions are those of the models' own tokenizers."""


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: The file's metadata with its arrays.

    Raises:
        CheckpointError: The file has no tokenizer, one of an unknown kind, or an inconsistent one.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise CheckpointError("the GGUF file holds no tokenizer; name another source with --tokenizer")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, tokens, types), True
    else:
        raise CheckpointError(
            f"the GGUF file's tokenizer is of the kind {kind!r}; 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece) can be read. Name a folder with tokenizer.json with --tokenizer"
        )
    _add_tokens(tokenizer, tokens, types)
    _add_template(
        tokenizer,
        tokens,
        first=_marker(metadata, "bos", default=adds_bos),
        last=_marker(metadata, "eos", default=False),
    )
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer and whether its kind puts BOS before a prompt unless told otherwise."""
    name = str(metadata.get("tokenizer.ggml.pre", ""))
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        pre = _GPT2
        logger.warning(
            "the GGUF file names the pre-tokenizer %r, which is not known here: GPT-2's is used, so some "
            "token ids may differ from the model's own; name a folder with tokenizer.json with --tokenizer",
            name,
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_merge(line) for line in metadata.get("tokenizer.ggml.merges", ())]
    try:
        tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises Exception itself, of no subclass
        raise CheckpointError(f"the GGUF file's merges do not fit its vocabulary: {error}") from error
    if pre.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.individual_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _merge(line: str) -> tuple[str, str]:
    # The parts are joined by a space; the first may begin with one.
    at = line.find(" ", 1)
    return line[:at], line[at + 1 :]


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError("the GGUF file's SentencePiece tokenizer lacks a score for every token")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    has_bytes = BYTE in types
    pieces = (
        (token, score)
        for token, score, kind in zip(tokens, scores, types, strict=True)
        # The other kinds are never made of smaller pieces: user-defined ones are found in the text as
        # they are, byte tokens stand for what no piece covers.
        if kind in (NORMAL, UNUSED)
    )
    tokenizer = Tokenizer(
        BPE(
            vocab,
            merges_by_score(vocab, pieces),
            unk_token=tokens[unknown_id] if 0 <= unknown_id < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    # A prefix goes before every stretch of text between special tokens, as llama.cpp has it. Hence a
    # normalizer: the newer pre-tokenizer form would put it before the first only.
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else normalizers.Sequence([spaces])
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_by_score(vocab: Mapping[str, int], pieces: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return the merges that make BPE choose as SentencePiece does: the pair whose union scores highest.

    Every way of cutting a piece into two tokens is a merge, ranked by the piece's score.

    Args:
        vocab: Token to id.
        pieces: The tokens that may be made by merging, with their scores.
    """
    ranked = []
    for piece, score in pieces:
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in vocab and (right := piece[cut:]) in vocab:
                ranked.append((score, len(left), len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    # Found in the text as they stand, before anything else is done to it (a run of spaces is such a token
    # in Gemma's vocabulary); control tokens are special besides.
    for special, kinds in ((False, (USER_DEFINED,)), (True, (CONTROL, UNKNOWN))):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds and token
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _marker(metadata: Mapping[str, Any], name: str, *, default: bool) -> int | None:
    """Return the id of the BOS or EOS token if one is put around a prompt."""
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return None
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if token_id is None else int(token_id)


def _add_template(
    tokenizer: Tokenizer, tokens: Sequence[str], *, first: int | None, last: int | None
) -> None:
    markers = [token_id for token_id in (first, last) if token_id is not None]
    if not markers:
        return
    if any(token_id >= len(tokens) for token_id in markers):
        raise CheckpointError(f"the GGUF file's BOS or EOS id lies beyond its {len(tokens)} tokens")
    # Referred to by a name of its own, because a token's text may contain the template's own signs.
    names = {token_id: f"T{token_id}" for token_id in markers}
    single = [names[first]] if first is not None else []
    single += ["$A"] + ([names[last]] if last is not None else [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, "$B"],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [tokens[token_id]]} for token_id, name in names.items()
        ],
    )
