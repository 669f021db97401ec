"""What a layer keeps of the past, and how layers share it: the vocabulary of the KV cache.

`gpu/startup.py` makes these from the model's layers, `loop` allocates blocks by them and `gpu/kv_cache.py`
allocates tensors by them. All groups share one pool of blocks: a block is a page of equal bytes in each of as
many storages as the largest group has layers, and serves whichever group it is given to, one storage a layer.
In a group of attention layers it holds `block_len` consecutive positions.
"""

from collections.abc import Iterable
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of one element, by dtype name: the dtypes a KV cache can have."""

FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Those of 8 bits, by the names that options have for them."""

NULL_BLOCK = 0
"""Stands in a block table where a sequence holds nothing: at its beginning where a window has passed, and
on the device behind its end. It holds zeros and belongs to nobody."""

_ANY_LEN = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """A layer that attends to every earlier position (or to a window of them, keeping all).

    Args:
        block_len: Positions per block.
        num_kv_heads: Heads of K and of V.
        head_dim: Elements per head.
        dtype: Name of the cache's dtype, a key of `DTYPE_BYTES`.
    """

    block_len: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in one layer, K and V together."""
        return 2 * self.block_len * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def blocks_for(self, num_tokens: int) -> int:
        """Return how long a table is that covers `num_tokens` positions."""
        return -(-num_tokens // self.block_len)

    def most_held(self, num_tokens: int, chunk_len: int) -> int:
        """Return the most blocks a sequence holds at once until it has `num_tokens` positions.

        Args:
            num_tokens: Of the sequence.
            chunk_len: Most positions that a step computes of it.
        """
        return self.blocks_for(num_tokens)

    def num_unseen(self, position: int) -> int:
        """Return how many leading blocks lie wholly before what `position` and later ones attend to."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(FullAttention):
    """A layer that attends to the last positions only, and keeps no others.

    Args:
        window_len: Positions a token sees, itself included.
    """

    window_len: int

    def most_held(self, num_tokens: int, chunk_len: int) -> int:
        """Return the blocks of a chunk and of the window before it, wherever they begin; see the base."""
        num_positions = self.window_len - 1 + chunk_len
        spanned = (num_positions + self.block_len - 2) // self.block_len + 1
        return min(self.blocks_for(num_tokens), spanned)

    def num_unseen(self, position: int) -> int:
        """Return how many blocks the window has passed at `position`; see the base."""
        return max(0, position - self.window_len + 1) // self.block_len


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A layer that keeps one state per sequence, whatever its length.

    Args:
        state_bytes: Of one sequence.
        page_bytes: Of one block in one layer; a state takes a run of as many blocks as it needs, and leaves
            the end of the last one empty. 0: one block takes a whole state.
    """

    state_bytes: int
    page_bytes: int = 0

    @property
    def block_len(self) -> int:
        """Positions that the blocks of a sequence serve: any number."""
        return _ANY_LEN

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in one layer."""
        return self.page_bytes or self.state_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Return the length of the run that a state takes."""
        return -(-self.state_bytes // self.bytes_per_block)

    def most_held(self, num_tokens: int, chunk_len: int) -> int:
        """Return the length of the run that a state takes."""
        return self.blocks_for(num_tokens)

    def num_unseen(self, position: int) -> int:
        """Return 0: a state is needed to the end."""
        return 0


KVSpec = FullAttention | RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one kind of KV cache and hence one block table per sequence.

    Args:
        group_id: Index into every per-group tuple.
        spec: What each layer of the group keeps.
        layer_ids: The layers, by their index in the model.
        num_blocks: Blocks in the pool, which is the same one for all groups; block 0 (the null block, never
            given out) included; 0 before the pool is sized.
    """

    group_id: int
    spec: KVSpec
    layer_ids: tuple[int, ...]
    num_blocks: int = 0

    @property
    def attention(self) -> FullAttention:
        """The spec of a group of attention layers."""
        assert isinstance(self.spec, FullAttention), "layers that keep a state have no K and V"
        return self.spec

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block holds in all layers of the group."""
        return self.spec.bytes_per_block * len(self.layer_ids)


def pool_bytes_per_block(groups: Iterable[KVGroup]) -> int:
    """Return the bytes one block of the pool takes: a page of each storage; some groups use fewer."""
    return max(group.bytes_per_block for group in groups)


def most_blocks_held(groups: Iterable[KVGroup], num_tokens: int, chunk_len: int) -> int:
    """Return the most blocks that a sequence holds at once, all groups together; see `most_held`."""
    return sum(group.spec.most_held(num_tokens, chunk_len) for group in groups)


def longest_held(groups: Iterable[KVGroup], num_usable: int, chunk_len: int) -> int:
    """Return the length of the longest sequence that `num_usable` blocks hold; `_ANY_LEN` if any do."""
    groups = tuple(groups)
    low, high = 0, _ANY_LEN
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks_held(groups, middle, chunk_len) <= num_usable:
            low = middle
        else:
            high = middle - 1
    return low
