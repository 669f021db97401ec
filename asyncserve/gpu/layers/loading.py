"""How a checkpoint's tensors find a model's parameters, and what is done once they have.

A model's modules carry the names of Hugging Face's, so the name of a parameter is its name in the checkpoint,
but for matrices that a `Linear` stacks. Reads no file: `weights.py` does.
"""

import importlib.util
from collections.abc import Collection, Iterable

import torch
from torch import nn

from asyncserve.errors import CheckpointError
from asyncserve.gpu.kv_scales import KVScales, StatedScales
from asyncserve.gpu.layers.attention import Attention
from asyncserve.gpu.layers.embedding import OutputHead
from asyncserve.gpu.layers.linear import Linear
from asyncserve.gpu.layers.mlp import GatedMLP
from asyncserve.gpu.layers.norm import RMSNorm
from asyncserve.gpu.layers.rotary import Rotary

_DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints store RoPE's frequencies, which follow from the configuration."""


def parameter_views(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return, by name in the checkpoint (without `model.` in front), the memory each tensor goes to."""
    views: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        stacked = module.stacked if isinstance(module, Linear) else None
        for name, parameter in module.named_parameters(recurse=False):
            if stacked is None:
                views[f"{path}.{name}"] = parameter.data
                continue
            parent = path.rpartition(".")[0]
            parts = parameter.data.split(list(stacked.values()))
            for part_name, part in zip(stacked, parts, strict=True):
                views[f"{parent}.{part_name}.{name}"] = part
    return views


def fill_parameters(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *, ignored: Collection[str] = ()
) -> None:
    """Copy a checkpoint's tensors into a model's parameters, converting their dtype.

    Scales of the KV cache go to the attention layers they are for.

    Args:
        model: Its parameters must have memory (not be on the meta device).
        weights: (checkpoint name, tensor) pairs in any order; each is let go of before the next is taken.
        ignored: Names a checkpoint may hold although the model has no use for them.

    Raises:
        CheckpointError: A tensor is missing, unknown or of the wrong shape; names it.
    """
    scales = StatedScales()
    views = parameter_views(model)
    missing = dict.fromkeys(views)
    for name, tensor in weights:
        own_name = name.removeprefix("model.")
        view = views.get(own_name)
        if view is None:
            if own_name.endswith(_DERIVED_SUFFIX) or own_name in ignored or scales.take(own_name, tensor):
                continue
            raise CheckpointError(f"the checkpoint holds {name!r}, which the model has no place for")
        if tensor.shape != view.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(tensor.shape)} in the checkpoint, expected {tuple(view.shape)}"
            )
        assert not view.is_meta, "parameters must have memory before weights are loaded"
        view.copy_(tensor)
        missing.pop(own_name, None)
    if missing:
        names = list(missing)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise CheckpointError(f"the checkpoint lacks {', '.join(names[:5])}{more}")
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Attention)}
    found = scales.of_layers({path: module.layer.num_kv_heads for path, module in layers.items()})
    for path, of_layer in found.items():
        layers[path].kv_scales = of_layer


def kv_scales(model: nn.Module) -> dict[int, KVScales]:
    """Return the scales that a checkpoint stated for an 8-bit KV cache, by layer index."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return {module.layer.layer_id: module.kv_scales for module in layers if module.kv_scales is not None}


def finish_layers(model: nn.Module, *, fused: bool | None = None) -> None:
    """Let every layer prepare what follows from its weights; once, after they are in.

    Args:
        model: Its weights are loaded, or have their memory at least.
        fused: Whether layers run the Triton kernels of `gpu/kernels` where they have one; None: on a GPU, if
            Triton is installed. Only then is it imported.
    """
    device = next(model.parameters()).device
    if fused is None:
        fused = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    for module in model.modules():
        if isinstance(module, Rotary):
            module.finish_loading(device, fused=fused)
        elif isinstance(module, Attention | GatedMLP | Linear | OutputHead | RMSNorm):
            module.finish_loading(fused=fused)
    for module in model.modules():
        # nn.Module finds its children by a fallback that takes as long as a small kernel. From here on they
        # do not change, so plain attributes may stand in front of it.
        module.__dict__.update(module.named_children())
