"""What a layer keeps of the past, and how layers share it: the vocabulary of the KV cache.

`gpu/startup.py` makes these from the model's layers, `loop` allocates blocks by them and `gpu/kv_cache.py`
allocates tensors by them. A block holds `block_len` consecutive positions of every layer of its group.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of one element, by dtype name: the dtypes a KV cache can have."""

FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Those of 8 bits, by the names that options have for them."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(FullAttention):
    """A layer that attends to the last positions only, and keeps no others.

    Args:
        window_len: Positions a token sees, itself included.
    """

    window_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A layer that keeps one state per sequence, whatever its length.

    Args:
        state_bytes: Of one sequence.
    """

    state_bytes: int


KVSpec = FullAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one kind of KV cache and hence one block table per sequence.

    Args:
        group_id: Index into every per-group tuple.
        spec: What each layer of the group keeps.
        layer_ids: The layers, by their index in the model.
        num_blocks: Blocks in the pool, block 0 (the null block, never given out) included; 0 before the
            pool is sized.
    """

    group_id: int
    spec: KVSpec
    layer_ids: tuple[int, ...]
    num_blocks: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers of the group."""
        return self.spec.bytes_per_block * len(self.layer_ids)
