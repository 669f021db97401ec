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


class _EncodedTokens(dict[int, bytes]):
    """Token id → its CBOR; remembered: whole blocks are encoded, one every few tokens of a stream."""

    def __missing__(self, token_id: int) -> bytes:
        encoded = self[token_id] = cbor2.dumps(token_id)
        return encoded


_encoded_tokens = _EncodedTokens()
_encoded_token = _encoded_tokens.__getitem__
_BEGIN = b"\x83"  # of an array of three
_NULL = b"\xf6"
_ARRAY = 4 << 5  # the kind of item
_BYTES = 2 << 5


def _item_head(kind: int, length: int) -> bytes:
    """Return what stands before so many bytes or items: an integer's encoding, of another kind."""
    head = cbor2.dumps(length)
    return bytes((kind | head[0],)) + head[1:]


_DIGEST_HEAD = _BEGIN + _item_head(_BYTES, sha256().digest_size)
_array_heads: dict[int, bytes] = {}


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
    # Put together here, in half the time: integers, byte strings and arrays have one encoding each.
    num_tokens = len(token_ids)
    array_head = _array_heads.get(num_tokens)
    if array_head is None:
        array_head = _array_heads[num_tokens] = _item_head(_ARRAY, num_tokens)
    extra_keys = _NULL if cache_salt is None else cbor2.dumps((_salt_key(cache_salt),))
    encoded = b"".join((_DIGEST_HEAD, parent, array_head, *map(_encoded_token, token_ids), extra_keys))
    return sha256(encoded).digest()


def _salt_key(cache_salt: str) -> str | bytes:
    """Return the salt; as bytes if it is no text that could be sent (JSON can name half a character)."""
    encoded = cache_salt.encode("utf-8", "surrogatepass")
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return encoded
