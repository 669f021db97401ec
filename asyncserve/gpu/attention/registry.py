"""Attention backends by name, and the choice of one for a cache and a device.

To add a backend: a file beside this one, a line in `BACKENDS`, and its place in `_PREFERENCE`; then run
`tests/contracts/attention_contract.py` on it. Imported only when chosen.
"""

import importlib
from collections.abc import Sequence

import torch

from asyncserve.errors import ConfigError
from asyncserve.gpu.attention.interface import AttentionBackend
from asyncserve.kv_spec import KVGroup

BACKENDS = {
    "cpu": "asyncserve.gpu.attention.cpu:CPUAttention",
    "reference": "asyncserve.gpu.attention.reference:ReferenceAttention",
}
"""Name to `module:class`; the class takes no argument."""

_PREFERENCE = {"cuda": ("reference",), "cpu": ("cpu", "reference")}


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
    reasons = []
    for candidate in _PREFERENCE[device.type] if name == "auto" else (name,):
        module_name, _, class_name = BACKENDS[candidate].partition(":")
        backend: AttentionBackend = getattr(importlib.import_module(module_name), class_name)()
        reason = next((why for group in groups if (why := backend.supports(group.spec, device))), None)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(f"no attention backend serves this model on {device}: {'; '.join(reasons)}")
