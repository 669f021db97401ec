"""Figures that are kept: rows of plain values, and what is said with them of commit, machine and versions.

Used by the load test and by all programs that measure on a GPU. Brings no torch on import: whoever only wants
versions should not wait for it.
"""

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""What one measurement gave: plain values for JSON."""
Rows = list[Row]


def versions() -> dict[str, str]:
    """Return the versions of Python and of what matters below it, as far as they are installed."""
    names = ("torch", "triton", "transformers", "tokenizers", "uvloop")
    return {"python": platform.python_version()} | {name: _version(name) or "none" for name in names}


def host() -> dict[str, str | int | None]:
    """Return what the machine is, as far as it tells: processor, cores for this process, memory, kernel."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        told = ""
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": memory_bytes // 2**20,
        "system": f"{platform.system()} {platform.release()}",
    }


def machine() -> dict[str, str | None]:
    """Return the GPU's name and the versions of torch and Triton; None for what is not there."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,  # says for which CUDA it was built, which its metadata may not
        "triton": _version("triton"),
    }


def driver() -> tuple[str, str, str]:
    """Return the driver's version, the power limit and the greatest clock; "unknown" if none says."""
    fields = "driver_version,power.limit,clocks.max.sm"
    try:
        said = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines()[0]
        version, power_limit, max_clock = (part.strip() for part in said.split(","))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return "unknown", "unknown", "unknown"
    return version, power_limit, max_clock


def commit() -> str:
    """Return the commit of the working folder, with a + if files differ from it; "unknown" outside git."""
    try:
        head = _output("git", "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(file: Path, *, label: str, **figures: Any) -> None:
    """Write figures as JSON, after the date, a label and the machine."""
    content = {"date": datetime.date.today().isoformat(), "label": label, **machine(), **figures}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
