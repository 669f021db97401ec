"""Small real tokenizers, built in the test: byte-level BPE and SentencePiece's kind with byte fallback."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from asyncserve.loop.tokenizer import FastTokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Streaming tokens, one by one, to every client. ",
    "def stop(text: str) -> bool:\n    return text in ('a', 'b')\n\n\nUser: hello\nAssistant: hello there\n",
    "日本語のテキストと絵文字 😀😃 👩‍👩‍👧 🏽 ع ن é é ह न्द 한국어",
)


@cache
def byte_level_bpe() -> FastTokenizer:
    """Return a byte-level BPE tokenizer of 400 tokens; 0 and 1 are special, 400 is added but is not."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    return FastTokenizer(tokenizer, eos_token_ids=frozenset({1}), chat_template=None)


@cache
def sentencepiece_bpe() -> FastTokenizer:
    """Return a SentencePiece tokenizer of Llama 2's kind: <unk>, <s>, </s>, 256 bytes, then pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += list("▁abcdefghijklmnopqrstuvwxyzTHUA.,:é日")
    merges = [
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("o", "n"),
        ("▁", "a"),
        ("▁", "▁"),
        ("T", "he"),
        ("e", "l"),
    ]
    pieces += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        BPE(
            {piece: token_id for token_id, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return FastTokenizer(tokenizer, eos_token_ids=frozenset({2}), chat_template=None)
