"""Weights: from a checkpoint's files to (name, tensor) pairs in Hugging Face's names, or random ones.

safetensors files are memory-mapped and read tensor by tensor. GGUF tensors are dequantized to float32 one at
a time, and what llama.cpp changed (names, the order of Llama's q and k rows) is changed back. Knows no model:
the model's own `load_weights` takes the pairs.
"""

import itertools
import json
import math
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from asyncserve.checkpoint import Checkpoint, CheckpointFormat
from asyncserve.errors import CheckpointError
from asyncserve.gguf_file import GGUFTensor, read_gguf_header

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER_NAMES_OF = {
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
"""Names that an architecture has besides, or instead."""

_ADDS_ONE_TO_NORMS = ("gemma3",)
"""Architectures whose norms multiply by 1 + w: a GGUF file holds the sum, a checkpoint w."""

_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GGUF_OTHER = re.compile(r"(\w+)\.(weight|bias)")

_ELEMENTS_AT_ONCE = 1 << 17
"""Elements dequantized at a time, whatever the row: the library's temporaries then stay in the cache, which
measured 1.6 times as fast as its own groups of rows."""

_PLAIN_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""GGML types that torch has too."""

_DUMMY_STD = 0.02


def read_weights(checkpoint: Checkpoint, *, progress: bool) -> Generator[tuple[str, torch.Tensor]]:
    """Read every tensor of a checkpoint.

    Args:
        checkpoint: What to read.
        progress: Whether to draw a bar on stderr.

    Yields:
        (name, tensor on the CPU). A tensor may lie in the mapped file: read it, do not write to it. Those of
        a GGUF file are float32 or as stored.

    Raises:
        CheckpointError: A file or tensor is missing or damaged, or of a type that cannot be read; names it.
    """
    if checkpoint.format is CheckpointFormat.GGUF:
        return _read_gguf(checkpoint, progress=progress)
    return _read_safetensors(checkpoint.path, progress=progress)


def initialize_dummy(model: nn.Module, seed: int) -> None:
    """Fill every parameter at random: small normal values, norms around one.

    Args:
        model: Its parameters must have memory.
        seed: Equal seeds give equal weights on one kind of device.
    """
    generator: torch.Generator | None = None
    for name, parameter in model.named_parameters():
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(seed)
        is_norm = name.endswith("norm.weight")
        parameter.data.normal_(1.0 if is_norm else 0.0, _DUMMY_STD, generator=generator)


def _progress_bar(total_bytes: int, *, progress: bool) -> Any:
    return tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="Loading weights",
        disable=not progress,
    )


def _read_safetensors(folder: Path, *, progress: bool) -> Generator[tuple[str, torch.Tensor]]:
    names_by_file = _safetensors_files(folder)
    total_bytes = sum(path.stat().st_size for path in names_by_file)
    with _progress_bar(total_bytes, progress=progress) as bar:
        for path, names in names_by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    held = set(file.keys())
                    for name in held if names is None else names:
                        if name not in held:
                            raise CheckpointError(f"{path} lacks tensor {name!r}, which {_INDEX_NAME} names")
                        tensor = file.get_tensor(name)
                        yield name, tensor
                        bar.update(tensor.nbytes)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error


def _safetensors_files(folder: Path) -> dict[Path, list[str] | None]:
    """Return each file with the tensors to take from it; None for all."""
    index_path = folder / _INDEX_NAME
    if not index_path.is_file():
        single_path = folder / _SINGLE_NAME
        if not single_path.is_file():
            raise CheckpointError(f"{folder} holds neither {_SINGLE_NAME} nor {_INDEX_NAME}")
        return {single_path: None}
    try:
        weight_map = json.loads(index_path.read_bytes())["weight_map"]
        entries = sorted((str(file_name), str(name)) for name, file_name in weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path} is damaged: {error!r}") from error
    files: dict[Path, list[str] | None] = {}
    for file_name, group in itertools.groupby(entries, key=lambda entry: entry[0]):
        path = folder / file_name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, which {_INDEX_NAME} names")
        files[path] = [name for _, name in group]
    return files


def _read_gguf(checkpoint: Checkpoint, *, progress: bool) -> Generator[tuple[str, torch.Tensor]]:
    path, config = checkpoint.path, checkpoint.config
    header = read_gguf_header(path)
    file = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    data = {tensor.name: _stored_bytes(tensor, file, path) for tensor in header.tensors.values()}
    architecture = str(header.metadata.get("general.architecture"))
    num_heads = int(config["num_attention_heads"])
    heads = {"attn_q": num_heads, "attn_k": int(config.get("num_key_value_heads") or num_heads)}
    with _progress_bar(sum(stored.size for stored in data.values()), progress=progress) as bar:
        for tensor in header.tensors.values():
            stored = data[tensor.name]
            weight = _dequantize(tensor, stored, path)
            layer = _GGUF_LAYER.fullmatch(tensor.name)
            if architecture == "llama" and layer is not None and layer[2] in heads:
                weight = _unpermute(weight, heads[layer[2]])
            elif architecture in _ADDS_ONE_TO_NORMS and tensor.name.endswith("norm.weight"):
                weight -= 1.0
            yield gguf_to_hf_name(tensor.name, architecture), weight
            bar.update(stored.size)


def gguf_to_hf_name(name: str, architecture: str = "llama") -> str:
    """Translate a tensor's name; one without a counterpart comes back as it is."""
    layer = _GGUF_LAYER.fullmatch(name)
    names = {**_GGUF_LAYER_NAMES, **_GGUF_LAYER_NAMES_OF.get(architecture, {})}
    if layer is not None and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
    other = _GGUF_OTHER.fullmatch(name)
    if other is not None and other[1] in _GGUF_NAMES:
        return f"{_GGUF_NAMES[other[1]]}.{other[2]}"
    return name


def _stored_bytes(tensor: GGUFTensor, file: np.ndarray[Any, Any], path: Path) -> np.ndarray[Any, Any]:
    """Return the part of the mapped file that a tensor takes, `[num_bytes] uint8`."""
    # Slow to import, and needed for GGUF files alone.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has unknown type {tensor.type_id}") from error
    num_bytes = math.prod(tensor.shape) // block_len * block_bytes
    if tensor.offset + num_bytes > file.size:
        raise CheckpointError(f"{path} is cut short: tensor {tensor.name!r} ends beyond it")
    return file[tensor.offset : tensor.offset + num_bytes]


def _dequantize(tensor: GGUFTensor, stored: np.ndarray[Any, Any], path: Path) -> torch.Tensor:
    """Return a GGUF tensor, float32 unless it is stored in a dtype of torch's."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    if tensor.type_id in _PLAIN_DTYPES:
        # A copy: torch wants memory it may write to, and the file is mapped read-only.
        return torch.from_numpy(stored.copy()).view(_PLAIN_DTYPES[tensor.type_id]).view(tensor.shape)
    kind = GGMLQuantizationType(tensor.type_id)
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    result = torch.empty(tensor.shape, dtype=torch.float32)
    flat = result.view(-1)
    num_blocks = _ELEMENTS_AT_ONCE // block_len
    for idx, start in enumerate(range(0, stored.size, num_blocks * block_bytes)):
        try:
            part = dequantize(stored[None, start : start + num_blocks * block_bytes], kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has type {kind.name}, which cannot be read"
            ) from error
        begin = idx * num_blocks * block_len
        flat[begin : begin + part.size] = torch.from_numpy(part.reshape(-1))
    return result


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows: within a head it interleaves the two halves that RoPE pairs."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
