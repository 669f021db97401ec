"""What becomes of the prefix cache, as values: the loop tells, `kv_events` publishes.

A block that holds known content is *stored* when others can find it, and *removed* when they cannot any more.
Whoever applies all events in order, to an empty index at first, has the index of the pool. Digests are those
of `token_path/prefix_hash.py`.
"""

from array import array
from typing import NamedTuple


class BlocksStored(NamedTuple):
    """Consecutive blocks of one sequence can be found from now on.

    Args:
        group_id: KV group whose layers they serve.
        block_len: Tokens of each.
        window_len: Of the group's layers, if they have one.
        parent: Digest of the block before the first; None if that one begins the sequence.
        digests: One a block.
        token_ids: Of all of them.
        cache_salt: Of the sequence, if the first block begins it: its digest covers it.
    """

    group_id: int
    block_len: int
    window_len: int | None
    parent: bytes | None
    digests: tuple[bytes, ...]
    token_ids: "array[int]"
    cache_salt: str | None


class BlocksRemoved(NamedTuple):
    """Blocks of a KV group cannot be found any more."""

    group_id: int
    digests: tuple[bytes, ...]


class CacheCleared(NamedTuple):
    """No block can be found any more, in any group."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
