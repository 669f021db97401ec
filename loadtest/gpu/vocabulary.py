"""A tokenizer made up for a vocabulary size: byte-level BPE over words that do not exist.

Gives a folder with `tokenizer.json` of exactly as many tokens as a model has, so that text is really made of
token ids (and would be really encoded), without a file from anywhere. Its tokens are the 256 bytes, then
merges of an earlier token and a letter (words of up to 8 letters, some with a space in front), then one
special token.
"""

import json
import random
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
MAX_WORD_LEN = 8
_SPACE = "Ġ"
"""How byte-level BPE writes a space."""


def write_tokenizer(folder: Path, vocab_size: int, *, seed: int = 0) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` into a folder, which is made, and return it.

    Args:
        folder: Where to.
        vocab_size: Tokens, at least 257.
        seed: The same seed gives the same tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens, merges = made_up_tokens(vocab_size - 1, seed=seed)
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def made_up_tokens(count: int, *, seed: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens in the order of their ids, and the merges that make those from the 257th on.

    Raises:
        ValueError: There are more bytes than tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if count < len(alphabet):
        raise ValueError(f"{count} tokens; the bytes alone are {len(alphabet)}")
    source = random.Random(seed)
    tokens = list(alphabet)
    known = set(tokens)
    merges = []
    letters = list(string.ascii_lowercase)
    begins = [_SPACE, *letters]
    while len(tokens) < count:
        # Without the first branch hardly a word would begin with a space, since there is one space among
        # ever more beginnings.
        left = _SPACE if source.random() < 0.05 else source.choice(begins)
        right = source.choice(letters)
        word = left + right
        if word in known:
            continue
        known.add(word)
        tokens.append(word)
        merges.append((left, right))
        if len(word.removeprefix(_SPACE)) < MAX_WORD_LEN:
            begins.append(word)
    return tokens, merges
