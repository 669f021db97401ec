"""Chained hash of a sequence's blocks: what makes two blocks the same block.

The digest of a block covers its tokens and, through its parent's digest, every token before them, so equal
digests mean equal prefixes. The first block's covers the cache salt, too: sequences with different salts
share nothing. SHA-256, because a collision would show one client another's conversation.

A digest is of `(parent, token ids, extra keys)` in canonical CBOR (RFC 8949, 4.2.1), and the first parent is
one of the seed: what vLLM computes as `sha256_cbor`, so that replicas, and routers that hash prompts
themselves, agree if their seeds do.
"""

from array import array
from hashlib import sha256

import cbor2


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
    extra_keys = None if cache_salt is None else (_salt_key(cache_salt),)
    return sha256(cbor2.dumps((parent, token_ids.tolist(), extra_keys))).digest()


def _salt_key(cache_salt: str) -> str | bytes:
    """Return the salt; as bytes if it is no text that could be sent (JSON can name half a character)."""
    encoded = cache_salt.encode("utf-8", "surrogatepass")
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return encoded


def extend_digests(digests: list[bytes], token_ids: "array[int]", num_blocks: int, block_len: int) -> None:
    """Append the digests of a sequence's blocks, as far as `num_blocks` of them.

    Args:
        digests: Of its first blocks, at least one.
        token_ids: Of 32 bits each; as many as those blocks have.
        num_blocks: How many digests there are to be.
        block_len: Tokens of each.

    Raises:
        ValueError: There are fewer tokens.
    """
    if num_blocks * block_len > len(token_ids):
        raise ValueError("there are fewer tokens than the blocks have")
    for start in range(len(digests) * block_len, num_blocks * block_len, block_len):
        digests.append(block_digest(digests[-1], token_ids[start : start + block_len]))
