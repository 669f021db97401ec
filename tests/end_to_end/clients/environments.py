"""Environments for clients that do not fit into this project's own: made once, kept between test runs.

A Python client's environment lies over the one the tests run in: what is installed there (torch above all) is
seen from it, and only what is missing or has another version is installed, from a file with every version.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3] / ".client-environments"
INSTALL_LIMIT_S = 600.0

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "DO_NOT_TRACK": "1",
}
"""Clients stay off the network, and off the cores that the server needs."""


def client_python(name: str) -> Path:
    """Return the interpreter of the environment that `requirements/<name>.txt` describes."""
    requirements = HERE / "requirements" / f"{name}.txt"
    home = _home(name, requirements.read_bytes() + sys.version.encode())
    python = home / "bin" / "python"
    with _being_made(home) as is_missing:
        if is_missing:
            venv.create(home, with_pip=True, symlinks=True)
            library = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
            (library / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
            # The list is whole, and some of it replaces what lies below: nothing is to be resolved.
            install = ["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
            _run([str(python), *install, "-r", str(requirements)])
    return python


def node_client() -> Path:
    """Return the folder with the packages of `node/package.json`; skip where there is no node."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    source = HERE / "node"
    home = _home("node", (source / "package-lock.json").read_bytes())
    with _being_made(home) as is_missing:
        if is_missing:
            home.mkdir()
            for name in ("package.json", "package-lock.json"):
                shutil.copy(source / name, home)
            _run(["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=home)
    return home


def run_client(command: list[str], *, cwd: Path, timeout_s: float = 240.0, **environment: str) -> str:
    """Run a client to its end and return what it printed; a failure fails the test."""
    return _run(command, cwd=cwd, timeout_s=timeout_s, **QUIET, **environment)


def _home(name: str, what: bytes) -> Path:
    return ROOT / f"{name}-{hashlib.sha256(what).hexdigest()[:12]}"


@contextmanager
def _being_made(home: Path) -> Iterator[bool]:
    """Tell whether an environment is still to be made; another process that needs it waits meanwhile."""
    ROOT.mkdir(exist_ok=True)
    with (ROOT / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_missing = not (home / "complete").exists()
        if is_missing:
            shutil.rmtree(home, ignore_errors=True)
        yield is_missing
        (home / "complete").touch()


def _run(
    command: list[str], *, cwd: Path | None = None, timeout_s: float = INSTALL_LIMIT_S, **environment: str
) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command[:4]} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout
