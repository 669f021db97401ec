"""What the benchmarks of kernels have in common: arguments, what is said of the machine, the file of figures.

Also compiles kernels in several processes at once: Triton keeps what it compiled on disk, where the process
that measures finds it. Knows no kernel.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

Rows = list[dict[str, Any]]
Way = TypeVar("Way")


def run_benchmark(
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    search_option: str,
    search_help: str,
    copy_gbps: Callable[[], float],
    measure: Callable[[float], Rows],
    search: Callable[[], Rows],
) -> None:
    """Measure, print, and write the figures if a file is named.

    Args:
        arguments: Of the command line; None for the process's own.
        description: Of the program.
        search_option: Asks for `search` instead of `measure`.
        search_help: What that does.
        copy_gbps: Measures the bandwidth of a copy.
        measure: Takes that bandwidth, prints and returns the figures.
        search: Times other ways than the ones chosen, prints and returns the figures.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(search_option, dest="searches", action="store_true", help=search_help)
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    parser.add_argument("--label", default="", help="said in the file: commit, machine")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    began_s = time.perf_counter()
    copy = copy_gbps()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"copy {copy:.0f} GB/s"
    )
    rows = search() if options.searches else measure(copy)
    print(f"{time.perf_counter() - began_s:.0f} s")
    if options.json is not None:
        content = {
            "date": datetime.date.today().isoformat(),
            "label": options.label,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_gbps": round(copy, 1),
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def compile_ahead(launch: Callable[[Way], object], ways: Sequence[Way]) -> None:
    """Launch each way once, in processes of their own, on as many cores as there are.

    Args:
        launch: A function of a module, which makes small tensors and launches the kernel on them.
        ways: What it takes, to be pickled.
    """
    began_s = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    num_processes = min(len(ways), os.cpu_count() or 1)
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        list(pool.map(launch, ways))
    print(f"{len(ways)} ways compiled in {time.perf_counter() - began_s:.0f} s", flush=True)
