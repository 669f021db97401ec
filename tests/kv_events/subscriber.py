"""A subscriber of KV events: the field's structs, as its consumers declare them, and real sockets."""

from typing import Any

import msgspec
import zmq

TIMEOUT_MS = 60_000


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """As subscribers have it that know arrays alone."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Both sockets of a consumer.

    Args:
        endpoints: Of the publisher: PUB and ROUTER.
        topic: What it subscribes to.
        kind: Of the socket that asks for batches again.
        most_waiting: Messages kept here until they are received; 0 for any number.
    """

    def __init__(
        self,
        endpoints: tuple[str, str | None],
        *,
        topic: str = "",
        kind: int = zmq.DEALER,
        most_waiting: int = 0,
    ) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._sub.set_hwm(most_waiting)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoints[0])
        self._asking: zmq.Socket[bytes] | None = None
        if endpoints[1] is not None:
            self._asking = self._context.socket(kind)
            self._asking.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            self._asking.set_hwm(0)
            self._asking.connect(endpoints[1])

    def has_heard(self, within_ms: int) -> bool:
        """Return whether there is a message."""
        return bool(self._sub.poll(within_ms))

    def receive(self) -> tuple[bytes, int, EventBatch]:
        """Return topic, number and batch of the next message."""
        topic, number, payload = self._sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=EventBatch)

    def ask(self, start: int, *, envelope: tuple[bytes, ...] = ()) -> list[tuple[int, EventBatch]]:
        """Return what is told again from a number on."""
        assert self._asking is not None
        self._asking.send_multipart((*envelope, start.to_bytes(8, "big")))
        batches = []
        while True:
            *found, number, payload = self._asking.recv_multipart()
            assert tuple(found) == envelope
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=EventBatch)))

    def send_raw(self, *frames: bytes) -> None:
        """Ask for something else."""
        assert self._asking is not None
        self._asking.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)
