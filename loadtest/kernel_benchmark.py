"""What the benchmarks of kernels have in common: shapes, inputs, times of calls, a copy, arguments, the file.

Also compiles kernels in several processes at once: Triton keeps what it compiled on disk, where the process
that measures finds it. Knows no kernel.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from loadtest import figures
from loadtest.figures import Rows
from loadtest.model_shapes import Shape, known_shapes

DTYPE = torch.bfloat16
EPS = 1e-5
CALLS_PER_GRAPH = 32
BYTES_BEYOND_CACHE = 160 * 2**20

Call = Callable[[int], object]
"""Runs the kernel on the inputs of that number."""
Way = TypeVar("Way")


def kernel_shapes() -> list[Shape]:
    """Return the shapes that kernels are measured on, in the order of the tables."""
    return sorted(known_shapes(), key=lambda shape: shape.name)


def num_inputs(num_bytes: int) -> int:
    """Return how many inputs of that size leave nothing of the first in the L2 cache."""
    return max(1, min(CALLS_PER_GRAPH, -(-BYTES_BEYOND_CACHE // num_bytes)))


def random(*shape: int) -> torch.Tensor:
    """Return random values: zeros would take less power, and so less time."""
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def device_us(call: Call, inputs: int) -> float:
    """Return the device time of a call inside a graph of many."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS_PER_GRAPH):
            call(i % inputs)
    graph.replay()
    rounds = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(1e3 * float(begin.elapsed_time(end)) / (4 * CALLS_PER_GRAPH))
    return statistics.median(rounds)


def copy_gbps() -> float:
    """Return the bandwidth of a copy of 1 GiB, read and write counted.

    The quicker of two: the driver's copy, and a kernel that multiplies by one (on an H200 the driver's is
    much slower when it is part of a graph).
    """
    source, target = (torch.zeros(2**28, dtype=torch.float32, device="cuda") for _ in range(2))
    us = min(
        device_us(lambda _: target.copy_(source), 1),
        device_us(lambda _: torch.mul(source, 1.0, out=target), 1),
    )
    return 2 * 2**30 / us / 1e3


def run_benchmark(
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    search_option: str,
    search_help: str,
    measure: Callable[[float], Rows],
    search: Callable[[], Rows],
    part_option: str | None = None,
    part_help: str = "",
    part: Callable[[], Rows] | None = None,
) -> None:
    """Measure, print, and write the figures if a file is named.

    Args:
        arguments: Of the command line; None for the process's own.
        description: Of the program.
        search_option: Asks for `search` instead of `measure`.
        search_help: What that does.
        measure: Takes the bandwidth of a copy, prints and returns the figures.
        search: Times other ways than the ones chosen, prints and returns the figures.
        part_option: Asks for `part` instead of `measure`; None if there is none.
        part_help: What that does.
        part: Measures a part of it, prints and returns the figures.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(search_option, dest="searches", action="store_true", help=search_help)
    if part_option is not None:
        parser.add_argument(part_option, dest="is_part", action="store_true", help=part_help)
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    parser.add_argument("--label", default="", help="said in the file: commit, machine")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    began_s = time.perf_counter()
    copy = copy_gbps()
    machine = figures.machine()
    print(f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, copy {copy:.0f} GB/s")
    if options.searches:
        rows = search()
    elif part is not None and options.is_part:
        rows = part()
    else:
        rows = measure(copy)
    print(f"{time.perf_counter() - began_s:.0f} s")
    if options.json is not None:
        figures.write(options.json, label=options.label, copy_gbps=round(copy, 1), rows=rows)


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
