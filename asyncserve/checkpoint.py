"""Where a model's files are and what they say about it: a Hugging Face folder, a hub id or a GGUF file.

Gives the configuration in Hugging Face's spelling whatever the format, so that models and tokenizers read
one kind of dictionary. Knows no tensor and imports neither torch nor transformers; the weights are read by
`gpu/weights.py`, the tokenizer by `loop/tokenizer.py`, both from the `Checkpoint` made here.
"""

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncserve.errors import CheckpointError
from asyncserve.gguf_config import gguf_config, gguf_generation_config
from asyncserve.gguf_file import read_gguf_header

_DOWNLOADED = ("*.json", "*.model", "*.tiktoken", "merges.txt", "*.jinja")
_WEIGHTS = "*.safetensors"
_NOT_DOWNLOADED = ("*/*.safetensors", "*/*.json", "*/*.model", "consolidated*.safetensors", "original/*")
"""Subfolders hold other forms of the same model (ONNX, the authors' own); `consolidated` is one, too."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer.tiktoken")
_LFS_POINTER = b"version https://git-lfs"


class CheckpointFormat(enum.Enum):
    """How the weights are stored."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model on local disk.

    Args:
        name: What the user typed.
        path: The folder, or the `.gguf` file itself.
        format: How the weights are stored.
        config: `config.json`, or a GGUF file's metadata translated to the same keys.
        generation_config: `generation_config.json`; empty if there is none (for a GGUF file: its EOS ids).
    """

    name: str
    path: Path
    format: CheckpointFormat
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The model class the checkpoint names, such as `LlamaForCausalLM`.

        Raises:
            CheckpointError: It names none.
        """
        names = self.config.get("architectures")
        if isinstance(names, str):
            names = [names]
        if not names:
            raise CheckpointError(f"the configuration of {self.name} names no architecture")
        return str(names[0])


def open_checkpoint(
    model: str, *, revision: str | None = None, download_dir: str | None = None, needs_weights: bool = True
) -> Checkpoint:
    """Find a model's files, downloading them if `model` is a hub id, and read what they say.

    Args:
        model: A folder, a `.gguf` file, or a hub id such as `Qwen/Qwen3-0.6B`.
        revision: Branch, tag or commit on the hub.
        download_dir: Where the hub's files are kept; None for the hub library's own cache.
        needs_weights: Without it a folder needs no weights (dummy ones will do), or, if it holds a
            tokenizer, no configuration either; none are downloaded.

    Raises:
        CheckpointError: Missing, unreachable (says what to do), damaged or without a configuration.
    """
    try:
        path = Path(model).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        # No such user's home, a name too long, a NUL in it, a folder that may not be entered.
        raise CheckpointError(f"{model!r} cannot be looked up: {error}") from error
    if is_file:
        return _open_file(model, path)
    if is_folder:
        return _open_folder(model, path, needs_weights=needs_weights)
    if _looks_like_path(model):
        raise CheckpointError(f"{model} does not exist: no such folder or .gguf file")
    folder = _download(model, revision=revision, download_dir=download_dir, needs_weights=needs_weights)
    return _open_folder(model, folder, needs_weights=needs_weights)


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        missing_ok: Take a missing file for an empty object.

    Raises:
        CheckpointError: It is missing, cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8 included
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def _open_file(name: str, path: Path) -> Checkpoint:
    header = read_gguf_header(path)
    if header.metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one part of a split GGUF file; join the parts with `llama-gguf-split --merge`"
        )
    return Checkpoint(
        name=name,
        path=path,
        format=CheckpointFormat.GGUF,
        config=gguf_config(header),
        generation_config=gguf_generation_config(header),
    )


def _open_folder(name: str, path: Path, *, needs_weights: bool) -> Checkpoint:
    has_config = (path / "config.json").is_file()
    if needs_weights and not any(path.glob(_WEIGHTS)):
        gguf_files = sorted(path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return _open_file(name, gguf_files[0])
        if gguf_files:
            names = ", ".join(file.name for file in gguf_files)
            raise CheckpointError(f"{path} holds several GGUF files; name one of them: {names}")
        if has_config:
            raise CheckpointError(
                f"{path} holds no weights in safetensors format"
                + (" (only PyTorch .bin files, which are not read)" if any(path.glob("*.bin")) else "")
            )
    has_tokenizer = any((path / file).is_file() for file in _TOKENIZER_FILES)
    if not has_config and (needs_weights or not has_tokenizer):
        raise CheckpointError(f"{path} is not a model folder: it has no config.json")
    if needs_weights:
        _check_weights(path)
    return Checkpoint(
        name=name,
        path=path,
        format=CheckpointFormat.SAFETENSORS,
        config=_text_config(read_json(path / "config.json", missing_ok=not has_config)),
        generation_config=read_json(path / "generation_config.json", missing_ok=True),
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model, where it is one part of several."""
    part = config.get("text_config")
    if not isinstance(part, dict):
        return config
    stated = {key: value for key, value in part.items() if value is not None and key != "architectures"}
    return {**config, **stated}


def _check_weights(path: Path) -> None:
    """Find out now, not minutes into loading, that a download is incomplete."""
    index = read_json(path / "model.safetensors.index.json", missing_ok=True)
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path / 'model.safetensors.index.json'} names no file for each tensor")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of its {len(shards)} weight files, such as {missing[0]}: "
            "the download is incomplete"
        )
    for file in sorted(path.glob(_WEIGHTS)):
        with file.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(f"{file} is only a Git LFS pointer; run `git lfs pull` in {path}")


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.endswith(".gguf")


def _download(model: str, *, revision: str | None, download_dir: str | None, needs_weights: bool) -> Path:
    # Imported here: it brings an HTTP client, and a folder or file needs none of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*_DOWNLOADED, _WEIGHTS] if needs_weights else list(_DOWNLOADED),
            ignore_patterns=list(_NOT_DOWNLOADED),
        )
    except HFValidationError as error:
        raise CheckpointError(f"{model!r} is neither a folder, a .gguf file nor a hub id: {error}") from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated on the hub: accept its terms on its page and set HF_TOKEN to a token of yours"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{model} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is not a local folder or .gguf file, and the hub does not know it. Check the spelling; "
            "if it is private, set HF_TOKEN"
        ) from error
    except Exception as error:  # a dozen unrelated classes for being offline, more with every release
        raise CheckpointError(_unreachable(model, error)) from error
    return Path(folder)


def _unreachable(model: str, error: Exception) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE")
    why = (
        f"HF_HUB_OFFLINE={offline} forbids downloads and the cache does not hold it"
        if offline
        else f"the hub cannot be reached and the cache does not hold it: {_first_line(error)}"
    )
    return (
        f"{model} is no local folder or .gguf file, and {why}. Either download the model where there is a "
        "network and pass the folder, or set HF_ENDPOINT to a mirror you can reach, or copy a filled hub "
        "cache here and set HF_HOME (or --download-dir) to it"
    )


def _first_line(error: BaseException) -> str:
    # The library wraps the network's own message, which says more, one or two deep.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
