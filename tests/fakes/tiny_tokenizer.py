"""A byte-level tokenizer file for the tiny models: every byte is a token, so any text can be asked."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def write_tiny_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """Write `tokenizer.json`: ids 0-2 are <unk>, <s>, </s>, then the 256 bytes, then unused words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet]
    words += [f"<unused{i}>" for i in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
