"""Attention backends by name, and the choice of one for a cache and a device.

To add a backend: a file beside this one, a line in `BACKENDS`, its name among the option's in
`asyncserve/config.py`, and its place in `_PREFERENCE` unless it is only taken when asked for; then run
`tests/contracts/attention_contract.py` on it. Imported only when considered, so that what it needs may be
missing.
"""

import importlib
import logging
from collections.abc import Sequence

import torch

from asyncserve.errors import ConfigError
from asyncserve.gpu.attention.interface import AttentionBackend
from asyncserve.kv_spec import KVGroup

logger = logging.getLogger(__name__)

BACKENDS = {
    "cpu": "asyncserve.gpu.attention.cpu:CPUAttention",
    "flash_attn": "asyncserve.gpu.attention.flash_attn:FlashAttention",
    "flashinfer": "asyncserve.gpu.attention.flashinfer:FlashInfer",
    "reference": "asyncserve.gpu.attention.reference:ReferenceAttention",
    "triton": "asyncserve.gpu.attention.triton:TritonAttention",
}
"""Name to `module:class`; the class takes no argument."""

_PACKAGES = {"flash_attn": "--pre flash-attn-4", "flashinfer": "flashinfer-python"}
"""What installs a module, where the name does not tell."""

_PREFERENCE = {"cuda": ("triton", "reference"), "cpu": ("cpu", "reference")}


def load_attention(name: str, groups: Sequence[KVGroup], device: torch.device) -> AttentionBackend:
    """Return the backend a user asked for.

    Args:
        name: A key of `BACKENDS`, or auto: the first preferred one of the device that supports every group.
        groups: The cache it must serve.
        device: Where.

    Raises:
        ConfigError: Unknown, or it cannot serve such a cache there (with the reason).
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention_backend is {name!r}; known: auto, {', '.join(BACKENDS)}")
    reasons: list[str] = []
    for candidate in _PREFERENCE[device.type] if name == "auto" else (name,):
        found = _load(candidate, groups, device)
        if not isinstance(found, str):
            why = "asked for" if name != "auto" else f"the first that serves this model on {device}"
            logger.info("attention backend %s: %s", candidate, "; ".join((why, *reasons)))
            return found
        if name != "auto":
            raise ConfigError(f"attention_backend {name} cannot serve this model on {device}: {found}")
        reasons.append(f"{candidate}: {found}")
    raise ConfigError(f"no attention backend serves this model on {device}: {'; '.join(reasons)}")


def _load(name: str, groups: Sequence[KVGroup], device: torch.device) -> AttentionBackend | str:
    """Return a backend, or why it cannot serve."""
    module_name, _, class_name = BACKENDS[name].partition(":")
    try:
        backend: AttentionBackend = getattr(importlib.import_module(module_name), class_name)()
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "asyncserve":
            raise
        if isinstance(error, ModuleNotFoundError):
            package = _PACKAGES.get(error.name.partition(".")[0])
            hint = f" (pip install {package})" if package else ""
            return f"it needs {error.name}, which is not installed{hint}"
        return f"another version of {error.name} is needed: {error}"
    except ConfigError as error:
        return str(error)
    reason = next((why for group in groups if (why := backend.supports(group.spec, device))), None)
    return backend if reason is None else reason
