"""Chained hash of a sequence's blocks: what makes two blocks the same block.

The digest of a block covers its tokens and, through its parent's digest, every token before them, so equal
digests mean equal prefixes. The first block's covers the cache salt, too: sequences with different salts
share nothing. SHA-256, because a collision would show one client another's conversation.

A digest is of `(parent, token ids, extra keys)` in canonical CBOR (RFC 8949, 4.2.1), and the first parent is
one of the seed: what vLLM computes as `sha256_cbor`, so that replicas, and routers that hash prompts
themselves, agree if their seeds do.
"""

import functools
from array import array
from hashlib import sha256

import cbor2


class _Encodings(dict[int, bytes]):
    """The encoding of each token id met so far: to encode them anew is most of what a digest costs."""

    def __missing__(self, token_id: int) -> bytes:
        encoded = self[token_id] = cbor2.dumps(token_id)
        return encoded


_encoding_of = _Encodings().__getitem__
_NO_KEYS = cbor2.dumps(None)
_BEFORE_PARENT = cbor2.dumps([b"", None, None])[:1] + cbor2.dumps(bytes(32))[:-32]
"""What an array of three that begins with 32 bytes begins with."""


def root_digest(seed: str) -> bytes:
    """Return the parent digest of every sequence's first block."""
    return sha256(cbor2.dumps(seed)).digest()


def block_digest(parent: bytes, token_ids: "array[int]", cache_salt: str | None = None) -> bytes:
    """Return the digest of a block.

    Args:
        parent: Of the block before it, or `root_digest`.
        token_ids: What it holds.
        cache_salt: Of the sequence, if the block is its first.
    """
    extra_keys = _NO_KEYS if cache_salt is None else cbor2.dumps((_salt_key(cache_salt),))
    # Integers, byte strings and arrays have one encoding each, unless asked otherwise: parts can be joined.
    tokens = map(_encoding_of, token_ids)
    return sha256(b"".join((_BEFORE_PARENT, parent, _head(len(token_ids)), *tokens, extra_keys))).digest()


@functools.cache
def _head(num_tokens: int) -> bytes:
    """Return how an array of so many begins: zeros take a byte each behind it."""
    return cbor2.dumps([0] * num_tokens)[:-num_tokens]


def _salt_key(cache_salt: str) -> str | bytes:
    """Return the salt; as bytes if it is no text that could be sent (JSON can name half a character)."""
    encoded = cache_salt.encode("utf-8", "surrogatepass")
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return encoded
