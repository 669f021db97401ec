"""What the values of an 8-bit KV cache are multiplied by: where a checkpoint states it, and how it is used.

A value x is kept as x / scale, cut to the range of the cache's dtype and rounded; who reads it multiplies.
There is a scale for K and one for V of each layer and KV head. Folded into the queries (or the factor on the
scores) and into the output, they cost nothing that grows with the context.

Source of the names: what vLLM reads, which covers those that ModelOpt, compressed-tensors, Quark and AutoFP8
write.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from asyncserve.errors import CheckpointError

_SCALE = re.compile(
    r"(?P<attention>.+\.self_attn)\."
    r"(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?(?P<name>k|v|kv)_scale|(?P<projection>[kv])_proj\.output_scale)"
)
_UNUSED = re.compile(
    r".+\.self_attn\.(?:(?:attn\.|q_proj\.|qkv_proj\.)?(?:q|prob)_scale|q_proj\.output_scale|prob_output_scale)"
)
"""Scales of queries and probabilities, for who multiplies in 8 bits."""


class KVScales(NamedTuple):
    """Scales of one layer.

    Args:
        k: `[num_kv_heads] float32`.
        v: As `k`.
    """

    k: torch.Tensor
    v: torch.Tensor


class StatedScales:
    """The scales found among a checkpoint's tensors."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, torch.Tensor]] = {}

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Keep a tensor if it is a scale of attention; return whether it is.

        Raises:
            CheckpointError: It is one, but holds what cannot be a scale.
        """
        match = _SCALE.fullmatch(name)
        if match is None:
            return _UNUSED.fullmatch(name) is not None
        scale = tensor.to(device="cpu", dtype=torch.float32).reshape(-1).clone()
        if not (scale.isfinite() & (scale > 0)).all():
            raise CheckpointError(f"{name!r} holds {scale.tolist()}; a scale is a finite number above 0")
        of_attention = self._found.setdefault(match["attention"], {})
        of_attention[match["name"] or match["projection"]] = scale
        return True

    def of_layers(self, num_kv_heads: Mapping[str, int]) -> dict[str, KVScales]:
        """Return the scales of the attention layers that have any.

        Args:
            num_kv_heads: Of every attention layer, by its path in the model.

        Raises:
            CheckpointError: There is no such layer, or it has another number of heads.
        """
        scales = {}
        for path, found in self._found.items():
            if path not in num_kv_heads:
                raise CheckpointError(f"the checkpoint holds scales for {path!r}, which the model lacks")
            # One alone is for both, as is the `kv_scale` of old.
            some = next(iter(found.values()))
            pair = [found.get(name, found.get("kv", some)) for name in "kv"]
            for scale in pair:
                if scale.numel() not in (1, num_kv_heads[path]):
                    raise CheckpointError(
                        f"{path!r} has {scale.numel()} scales in the checkpoint; it can have one, or one for "
                        f"each of its {num_kv_heads[path]} KV heads"
                    )
            scales[path] = KVScales(*(scale.expand(num_kv_heads[path]).contiguous() for scale in pair))
        return scales


def as_cached(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return K or V as a cache holds them; what has its dtype already is taken as it is.

    Args:
        x: `[num_tokens, num_kv_heads, head_dim]`.
        dtype: Of the cache.
        scale: `[num_kv_heads] float32`; None for 1.
    """
    if x.dtype == dtype or dtype.itemsize > 1:
        return x.to(dtype)
    if scale is not None:
        x = x.float() / scale[:, None]
    # A cast does not saturate everywhere. NaN stays: it tells of a broken row.
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a cache holds in another dtype, as `x.to(dtype)` does; on a CPU several times as fast.

    torch converts float8_e4m3fn one by one there, at 3 ns a value. Its digits stand in float16 as they do
    in the three bits of its own, with an exponent that is 8 less; 15 and all digits, which is NaN, is not.
    """
    if x.dtype != torch.float8_e4m3fn or x.device.type != "cpu":
        return x.to(dtype)
    bits = x.view(torch.int8).to(torch.int16)
    digits = bits & 0x7F
    half = (digits << 7).bitwise_or_(bits.bitwise_and_(-0x8000))
    is_nan = digits.add_(1).bitwise_and_(0x80)
    half.bitwise_or_(is_nan.mul_(0x7C00 // 0x80))
    return half.view(torch.float16).to(dtype).mul_(2.0**8)


def times_scale(heads: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply query heads, or what attention gives for them, by the scales of their KV heads.

    Args:
        heads: `[num_tokens, num_heads, head_dim]`.
        scale: `[num_kv_heads] float32`.

    Returns:
        Shape and dtype of `heads`.
    """
    each = scale.repeat_interleave(heads.shape[1] // scale.shape[0])
    return (heads * each[:, None]).to(heads.dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a view that torch can copy and fill by index, which it cannot do in every 8-bit dtype."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
