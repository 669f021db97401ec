"""What the machine is, and what a copy and a matrix product reach on it: the measure of all other figures.

Needs a CUDA device for all but `versions`. The copy is of 1 GiB, bytes read and written counted; the product
is 8192 x 8192 x 8192 in bfloat16 on random data (zeros take less power, hence less time).
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any

PRODUCT_SIZE = 8192
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader")


def versions() -> dict[str, str]:
    """Return the versions of Python and of what matters below it, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "tokenizers", "uvloop"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def commit() -> str:
    """Return the commit of the working folder, with a + if files differ from it; "unknown" outside git."""
    try:
        head = _output("git", "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measure() -> Iterator[dict[str, Any]]:
    """Give one row of what the GPU is and reaches."""
    # Imported here: they bring torch, and whoever only wants versions should not wait for it.
    import torch

    from loadtest.kernels import copy_gbps

    driver, power_limit, max_clock = _driver()
    torch.manual_seed(0)
    yield {
        "kind": "machine",
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "power_limit": power_limit,
        "max_clock": max_clock,
        "cuda": str(torch.version.cuda),
        "num_cores": len(os.sched_getaffinity(0)),
        "copy_gbps": copy_gbps(),
        "product_tflops": _product_tflops(),
    }
    torch.cuda.empty_cache()  # for the engine, if this process goes on


def _product_tflops() -> float:
    import torch

    size = PRODUCT_SIZE
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(left)
    times_ms = []
    for turn in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.mm(left, right, out=out)
        end.record()
        end.synchronize()
        if turn >= 3:  # the first ones choose an algorithm and warm the chip up
            times_ms.append(float(begin.elapsed_time(end)))
    return 2 * size**3 / min(times_ms) / 1e9


def _driver() -> tuple[str, str, str]:
    try:
        first = _output(*_NVIDIA_SMI).splitlines()[0]
        driver, power_limit, max_clock = (part.strip() for part in first.split(","))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return "unknown", "unknown", "unknown"
    return driver, power_limit, max_clock


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
