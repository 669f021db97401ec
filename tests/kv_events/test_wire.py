from array import array

import msgspec

from asyncserve.cache_events import BlocksRemoved, BlocksStored, CacheCleared
from asyncserve.kv_events.wire import decode_batch, encode_batch, external_hash
from tests.kv_events import subscriber

FIRST, SECOND, THIRD = (bytes(range(start, start + 32)) for start in (0, 100, 200))


def stored(**changes: object) -> BlocksStored:
    event = BlocksStored(0, 2, None, None, (SECOND, THIRD), array("i", [5, 6, 7, 200_000]), None)
    return event._replace(**changes)


def test_a_batch_is_time_events_and_rank_and_each_event_an_array_with_its_name_first() -> None:
    batch = msgspec.msgpack.decode(
        encode_batch(
            [
                stored(parent=FIRST),
                stored(group_id=1, window_len=8, cache_salt="s"),
                BlocksRemoved(1, (FIRST, THIRD)),
                CacheCleared(),
            ],
            12.5,
        )
    )
    first, second, third = (external_hash(digest) for digest in (FIRST, SECOND, THIRD))
    about = ([5, 6, 7, 200_000], 2, None, "GPU", None)
    assert batch == [
        12.5,
        [
            ["BlockStored", [second, third], first, *about, [None, None], 0, "full_attention", None],
            ["BlockStored", [second, third], None, *about, [["s"], None], 1, "sliding_window", 8],
            ["BlockRemoved", [first, third], "GPU", 1],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_a_subscriber_that_knows_arrays_alone_reads_it() -> None:
    payload = encode_batch([stored(cache_salt="s"), BlocksRemoved(0, (FIRST,)), CacheCleared()], 1.0)
    batch = msgspec.msgpack.decode(payload, type=subscriber.EventBatch)
    one, removed, cleared = batch.events
    assert isinstance(one, subscriber.BlockStored)
    assert (one.block_size, one.extra_keys, one.kv_cache_spec_kind) == (2, [("s",), None], "full_attention")
    assert isinstance(removed, subscriber.BlockRemoved)
    assert isinstance(cleared, subscriber.AllBlocksCleared)
    assert decode_batch(payload).events[0].block_hashes == one.block_hashes  # type: ignore[union-attr]


def test_a_hash_is_the_last_eight_bytes_of_the_digest() -> None:
    assert external_hash(bytes(24) + b"\xff\0\0\0\0\0\0\x01") == 0xFF00_0000_0000_0001


def test_a_salt_that_is_no_text_does_not_stop_anything() -> None:
    batch = msgspec.msgpack.decode(encode_batch([stored(cache_salt="a\ud800")], 1.0))
    assert batch[1][0][8] == [["a?"], None]
