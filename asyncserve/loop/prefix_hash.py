"""Chained hash of a sequence's blocks: what makes two blocks the same block.

The digest of a block covers its tokens and, through its parent's digest, every token before them, so equal
digests mean equal prefixes. The chain starts from a digest of the cache salt: sequences with different salts
share nothing. SHA-256, because a collision would show one client another's conversation.
"""

from array import array
from hashlib import sha256


def root_digest(cache_salt: str | None) -> bytes:
    """Return the parent digest of a sequence's first block."""
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    return sha256(b"asyncserve:" + salt).digest()


def block_digest(parent: bytes, token_ids: "array[int]") -> bytes:
    """Return the digest of the block that holds `token_ids` and follows the block `parent`."""
    return sha256(parent + token_ids.tobytes()).digest()
