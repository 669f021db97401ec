"""What the machine is, and what a copy and a matrix product reach on it: the measure of all other figures.

Needs a CUDA device. The copy is of 1 GiB, bytes read and written counted; the product is 8192 x 8192 x 8192
in bfloat16 on random data (zeros take less power, hence less time).
"""

import os
from collections.abc import Iterator

import torch

from loadtest import figures
from loadtest.figures import Row
from loadtest.kernel_benchmark import copy_gbps

PRODUCT_SIZE = 8192


def measure() -> Iterator[Row]:
    """Give one row of what the GPU is and reaches."""
    driver, power_limit, max_clock = figures.driver()
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
