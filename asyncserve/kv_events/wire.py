"""The messages of KV events, as the field's subscribers read them.

A batch is a msgpack array `[seconds since 1970, events, data-parallel rank]`, an event an array whose first
element names its kind. vLLM up to 0.23 writes events so; later ones write maps. Subscribers that read maps
read arrays, too, and some read arrays alone. Of a digest of 32 bytes the last 8 are sent, as an integer.

Source: vLLM `distributed/kv_events.py` (fields and their order); llm-d, Dynamo (what they read).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncserve.cache_events import BlocksRemoved, BlocksStored, CacheEvent

MEDIUM = "GPU"
"""Where the blocks of the pool are, whatever the device: the field's name for the quickest tier."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, array_like=True, tag=True, gc=False, frozen=True):
    """Base of the events: the tag, which is the name of the class, comes first."""


class BlockStored(_Event, frozen=True):
    """Consecutive blocks can be found.

    Args:
        block_hashes: One a block.
        parent_block_hash: Of the block before the first; None if that one begins the sequence.
        token_ids: Of all blocks.
        block_size: Tokens of each.
        lora_id: None.
        medium: `MEDIUM`.
        lora_name: None.
        extra_keys: Per block, what its hash covers besides tokens and parent: the cache salt.
        group_idx: The KV group.
        kv_cache_spec_kind: full_attention or sliding_window.
        kv_cache_spec_sliding_window: Length of the window.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None
    group_idx: int | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None


class BlockRemoved(_Event, frozen=True):
    """Blocks cannot be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None


class AllBlocksCleared(_Event, frozen=True):
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Events in order, and when they were told.

    Args:
        ts: Seconds since 1970.
        events: At least one.
        data_parallel_rank: 0: there is one.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None


def external_hash(digest: bytes) -> int:
    """Return what stands for a digest in a message."""
    return int.from_bytes(digest[-8:], "big")


def encode_batch(events: Sequence[CacheEvent], now_s: float) -> bytes:
    """Write a batch.

    Args:
        events: What became of the cache.
        now_s: Seconds since 1970.
    """
    return msgspec.msgpack.encode(Batch(now_s, [_wire_event(event) for event in events], 0))


def decode_batch(payload: bytes) -> Batch:
    """Read a batch.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return msgspec.msgpack.decode(payload, type=Batch)


def _wire_event(event: CacheEvent) -> Event:
    if isinstance(event, BlocksStored):
        extra_keys: list[Any] = [None] * len(event.digests)
        if event.cache_salt is not None:
            extra_keys[0] = (event.cache_salt.encode("utf-8", "replace").decode(),)
        return BlockStored(
            block_hashes=list(map(external_hash, event.digests)),
            parent_block_hash=None if event.parent is None else external_hash(event.parent),
            token_ids=event.token_ids.tolist(),
            block_size=event.block_len,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=extra_keys,
            group_idx=event.group_id,
            kv_cache_spec_kind="full_attention" if event.window_len is None else "sliding_window",
            kv_cache_spec_sliding_window=event.window_len,
        )
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(list(map(external_hash, event.digests)), MEDIUM, event.group_id)
    return AllBlocksCleared()
