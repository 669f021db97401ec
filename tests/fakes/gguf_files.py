"""Small GGUF files, written with the format's own library so that our reader is tested against it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tokens: Sequence[str] = (),
    types: Sequence[int] = (),
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    kind: str = "gpt2",
    tensors: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Write a file of zeros with this metadata.

    Args:
        path: Of the file.
        architecture: `general.architecture`.
        metadata: Further keys; floats are stored as float32, ints as uint32.
        tokens: Vocabulary, in order of ids; none: no tokenizer at all.
        types: Kind of each token; empty: all normal.
        scores: Of each token, for SentencePiece.
        merges: For byte-level BPE.
        kind: `tokenizer.ggml.model`.
        tensors: Name to shape, outermost first; all float32 zeros.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if tokens:
        writer.add_tokenizer_model(kind)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(types) or [NORMAL] * len(tokens))
        if scores is not None:
            writer.add_token_scores(list(scores))
        if merges is not None:
            writer.add_token_merges(list(merges))
    for name, shape in (tensors or {"token_embd.weight": (max(1, len(tokens)), 4)}).items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
