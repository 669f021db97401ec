"""The sizes that every decoder-only transformer has, read from `config.json` and checked.

What differs between architectures is read in their own files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncserve.errors import CheckpointError
from asyncserve.gpu.layers.rotary import read_rope_parameters
from asyncserve.kv_spec import FullAttention, KVSpec, SlidingWindow

_DEFAULT_CONTEXT_LEN = 2048
"""For a configuration that does not say what the model was trained for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Sizes of a decoder-only transformer.

    Args:
        vocab_size: Rows of the embedding and of the logits.
        hidden_size: Elements of a hidden state.
        intermediate_size: Elements inside the feed-forward network.
        num_layers: Decoder layers.
        num_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: K and V heads.
        head_dim: Elements per head; even.
        norm_eps: Epsilon of the RMSNorms.
        tied: Whether the output matrix is the embedding's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool


def read_dimensions(
    config: Mapping[str, Any],
    *,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    activation: str = "silu",
) -> Dimensions:
    """Read the sizes, with the defaults Hugging Face gives keys that are left out.

    Args:
        config: The checkpoint's configuration.
        head_dim: What it is if the configuration does not say; None: hidden size over heads.
        num_kv_heads: Likewise; None: as many as query heads.
        activation: The one that the architecture has.

    Raises:
        CheckpointError: A size is missing or contradicts another, or the activation is another one.
    """
    hidden_size = _size(config, "hidden_size")
    num_heads = _size(config, "num_attention_heads")
    if config.get("num_key_value_heads", num_kv_heads) is None:
        num_kv_heads = num_heads
    else:
        num_kv_heads = _size(config, "num_key_value_heads", num_kv_heads)
    if config.get("head_dim", head_dim) is None:
        if hidden_size % num_heads:
            raise CheckpointError(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                "and there is no head_dim"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = _size(config, "head_dim", head_dim)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd, so it cannot be rotated")
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key, activation) not in (activation, None):
            raise CheckpointError(f"{key} {config[key]!r} is not supported, only {activation!r}")
    return Dimensions(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def context_len(config: Mapping[str, Any]) -> int:
    """Return the longest sequence a model is meant for that says so as Llama's do, RoPE scaling included.

    Raises:
        CheckpointError: The configuration states no possible length.
    """
    stated_len = stated_context_len(config, default=_DEFAULT_CONTEXT_LEN)
    if config.get("max_position_embeddings") is None:
        return stated_len
    rope = read_rope_parameters(config)
    if rope["rope_type"] == "linear":
        return int(stated_len * float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        return int(rope["original_max_position_embeddings"] * float(rope["factor"]))
    # llama3, longrope and their like already state the stretched length; dynamic scaling begins beyond it.
    return stated_len


def stated_context_len(config: Mapping[str, Any], *, default: int) -> int:
    """Return the length that a configuration states, whatever the scaling; `default` if it states none.

    Raises:
        CheckpointError: It is no possible length.
    """
    max_len = config.get("max_position_embeddings")
    if max_len is None:
        return default
    if not isinstance(max_len, int) or max_len < 2:
        raise CheckpointError(
            f"max_position_embeddings is {max_len!r}; a context holds a token of prompt and one of output"
        )
    return max_len


def layer_windows(config: Mapping[str, Any], *, num_layers: int) -> tuple[int | None, ...]:
    """Read each layer's attention window as the Qwen models state it; None where a layer sees everything.

    Raises:
        CheckpointError: A layer type is unknown, their number is wrong, or a window has no length.
    """
    window_len = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first_sliding = int(config.get("max_window_layers", 28))
        return tuple(window_len if layer_id >= first_sliding else None for layer_id in range(num_layers))
    return windows_of_types(layer_types, window_len, num_layers=num_layers)


def windows_of_types(
    layer_types: Sequence[str], window_len: int | None, *, num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's attention window; None where a layer sees everything.

    Args:
        layer_types: Of each layer, `full_attention` or `sliding_attention`.
        window_len: Of the sliding ones; None: there may be none.
        num_layers: How many there must be.

    Raises:
        CheckpointError: As `layer_windows`.
    """
    if len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types names {len(layer_types)} layers of {num_layers}")
    windows: list[int | None] = []
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise CheckpointError(f"layer type {layer_type!r} is not supported by this architecture")
        if layer_type == "sliding_attention" and window_len is None:
            raise CheckpointError("layer_types has sliding layers, but there is no sliding window in use")
        windows.append(window_len if layer_type == "sliding_attention" else None)
    return tuple(windows)


def window_specs(
    sizes: Dimensions, windows: Sequence[int | None], *, block_len: int, dtype: str
) -> tuple[KVSpec, ...]:
    """Return what each layer keeps: its window alone, if it has one.

    Args:
        sizes: Of the model.
        windows: Of each layer; None: it sees everything.
        block_len: Positions per block.
        dtype: Of the cache.
    """
    full = FullAttention(
        block_len=block_len, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, dtype=dtype
    )
    return tuple(
        full
        if window_len is None
        else SlidingWindow(
            block_len=block_len,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=dtype,
            window_len=window_len,
        )
        for window_len in windows
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"the configuration's {name} is {value!r}, expected a positive integer")
    return value
