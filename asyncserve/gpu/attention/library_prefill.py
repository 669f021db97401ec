"""What backends share that leave prefill to a library of finished kernels: all else is the Triton backend's.

A library is given only what it attends right and at no cost to the rest of the server: 16 bits, the whole
sequence. What lies in blocks that a window has passed may be anybody's, NaN included, and libraries multiply
it by zero; so layers with a window stay with Triton, as rows of one token do, which it serves at the
bandwidth of a copy. Imported without any library; its constructor imports it.
"""

import inspect
from collections.abc import Callable

import torch

from asyncserve.errors import ConfigError
from asyncserve.gpu.attention.interface import AttentionLayer
from asyncserve.gpu.attention.triton import TritonAttention, TritonStep
from asyncserve.gpu.batch import Batch
from asyncserve.gpu.kv_cache import KVCache
from asyncserve.kv_spec import KVSpec

_CAPABILITY = (9, 0)
"""What the libraries were run on. Elsewhere they take other kernels."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class LibraryPrefill(TritonAttention):
    """The Triton backend with a library for rows of several tokens, where the library serves the layer."""

    def supports(self, spec: KVSpec, device: torch.device) -> str | None:
        """Return None for a cache of 16 bits on a device of compute capability 9.0."""
        reason = super().supports(spec, device)
        if reason is not None:
            return reason
        if device.type != "cuda":
            return "it needs a CUDA device"
        found = torch.cuda.get_device_capability(device)
        return lacking(found, getattr(spec, "dtype", ""))

    def serves(self, layer: AttentionLayer, step: TritonStep) -> bool:
        """Return whether the library attends for a layer without a window whose dtype it serves."""
        raise NotImplementedError

    def attend_by_library(
        self, layer: AttentionLayer, q: torch.Tensor, batch: Batch, kv_cache: KVCache, step: TritonStep
    ) -> torch.Tensor:
        """Attend as `TritonAttention.attend_long_rows` for a layer it `serves`."""
        raise NotImplementedError

    def attend_long_rows(
        self, layer: AttentionLayer, q: torch.Tensor, batch: Batch, kv_cache: KVCache, step: TritonStep
    ) -> torch.Tensor:
        """Attend by the library what it serves, else by Triton; as the base has it."""
        cached = kv_cache.keys[layer.layer_id].dtype
        if (
            layer.window_len is None
            and q.dtype == cached
            and cached in _DTYPES.values()
            and self.serves(layer, step)
        ):
            return self.attend_by_library(layer, q, batch, kv_cache, step)
        return super().attend_long_rows(layer, q, batch, kv_cache, step)


def lacking(capability: tuple[int, int], cache_dtype: str) -> str | None:
    """Return why no library serves such a cache on such a device; None if they do.

    Args:
        capability: Compute capability of the device.
        cache_dtype: A key of `DTYPE_BYTES`.
    """
    if capability != _CAPABILITY:
        return f"it serves compute capability 9.0, the device has {capability[0]}.{capability[1]}"
    if cache_dtype not in _DTYPES:
        return f"it serves a KV cache of bfloat16 or float16, not of {cache_dtype}"
    return None


def require_parameters(function: Callable[..., object], names: set[str], package: str) -> None:
    """Raise unless a library's function takes all that it is called with.

    Args:
        function: Of the library.
        names: Of parameters.
        package: What a user installs to get it, for the message.

    Raises:
        ConfigError: It is another version's.
    """
    missing = names - inspect.signature(function).parameters.keys()
    if missing:
        raise ConfigError(
            f"{function.__qualname__} of the installed {package} takes no {', '.join(sorted(missing))}: "
            "another version is needed"
        )
