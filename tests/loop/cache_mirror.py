"""The index of a prefix cache, rebuilt from its events alone, as a router does."""

from collections.abc import Iterator, Sequence

from asyncserve.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from asyncserve.loop.cache_log import CacheLog
from asyncserve.loop.kv_groups import KVAllocator
from asyncserve.token_path import block_digest, root_digest


class CacheMirror:
    """Applies events, and holds each against what it may say.

    Args:
        hash_seed: Of the digests.
    """

    def __init__(self, hash_seed: str = "0") -> None:
        self.log = CacheLog(self.apply)
        self.index: dict[int, set[bytes]] = {}
        self.events: list[CacheEvent] = []
        self._root = root_digest(hash_seed)
        self._digest_len: int | None = None

    def apply(self, events: Sequence[CacheEvent]) -> None:
        """Take a batch."""
        assert events, "an empty batch was told"
        self.events += events
        for event in events:
            if isinstance(event, CacheCleared):
                self.index.clear()
                continue
            known = self.index.setdefault(event.group_id, set())
            if isinstance(event, BlocksRemoved):
                assert len(set(event.digests)) == len(event.digests)
                assert known.issuperset(event.digests), "what is removed was stored before"
                known.difference_update(event.digests)
            else:
                assert list(event.digests) == list(self._digests_of(event)), (
                    "the tokens do not give the hashes"
                )
                assert known.isdisjoint(event.digests), "what is stored was stored already"
                # What a window has passed may be gone.
                is_known = event.parent is None or event.parent in known
                assert is_known or event.window_len is not None, "a parent is stored before its children"
                known.update(event.digests)

    def check(self, allocator: KVAllocator) -> None:
        """Hold the index against the pool's own."""
        self._digest_len = allocator.block_len
        self.log.flush()
        for group_id, index in enumerate(allocator.pool._index):
            assert self.index.get(group_id, set()) == set(index)

    def _digests_of(self, event: BlocksStored) -> Iterator[bytes]:
        assert len(event.token_ids) == len(event.digests) * event.block_len
        parent, salt = event.parent or self._root, event.cache_salt
        assert event.parent is None or salt is None
        digest_len = self._digest_len or event.block_len
        for end in range(digest_len, len(event.token_ids) + 1, digest_len):
            parent = block_digest(parent, event.token_ids[end - digest_len : end], salt)
            salt = None
            if end % event.block_len == 0:
                yield parent
