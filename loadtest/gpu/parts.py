"""The parts of a run, each in a process of its own, so that one that fails or hangs takes nothing with it.

`all_parts` names them; `run` starts one as a child with the same command line plus its name, and hands on
each of its rows as it comes, through a pipe of their own (what the child prints goes where this process
prints). A part that outlives its limit is ended with everything it started. `perform` is the child's side.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.figures import Row
from loadtest.gpu.extent import Extent
from loadtest.model_shapes import Shape

PROGRAMS = ("attention", "kernels", "linears", "sampling")
"""Of `loadtest`, those that measure kernels alone."""
ERROR = "error"
"""Key of a row that says why the part ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something to measure.

    Args:
        name: Of the part.
        kind: What it does, see `perform`.
        limit_s: When it is ended.
        shape: Of which model, if of any.
    """

    name: str
    kind: str
    limit_s: float
    shape: Shape | None = None

    def is_named(self, words: Sequence[str]) -> bool:
        """Whether the name contains one of the words."""
        return any(word in self.name for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a part.

    Args:
        status: done, failed or "ended after N s".
        error: Why it failed.
        took_s: How long it took.
    """

    status: str
    error: str | None
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child needs beside its part.

    Args:
        tokenizers: Folder with one folder per shape.
        extent: How much to measure.
        further: Options of engine and server.
        measurements: Of the offline ones, those to make.
        batches: Rows of the decode steps that are looked at alone.
        num_steps: How many of these.
        temperature: Of these.
        trace: Folder for their profiles; None for none.
    """

    tokenizers: Path
    extent: Extent
    further: Mapping[str, Any]
    measurements: Sequence[str]
    batches: Sequence[int] = ()
    num_steps: int = 0
    temperature: float = 0.0
    trace: Path | None = None


def all_parts(shapes: Sequence[Shape], only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Part]:
    """Return the parts in the order in which they are run.

    Args:
        shapes: Models to measure.
        only: Parts whose name contains one of these; all if there are none. What the machine reaches is
            measured in any case: everything else is compared with it.
        skip: Parts whose name contains one of these are left out.

    Raises:
        ValueError: No part has such a name.
    """
    found = [Part(name="machine", kind="machine", limit_s=90)]
    for shape in shapes:
        found += [
            Part(name=f"offline-{shape.name}", kind="offline", limit_s=270, shape=shape),
            Part(name=f"online-{shape.name}", kind="online", limit_s=210, shape=shape),
            Part(name=f"start-{shape.name}", kind="start", limit_s=90, shape=shape),
        ]
    found.append(Part(name="clients", kind="clients", limit_s=60))
    found += [Part(name=program, kind="program", limit_s=150) for program in PROGRAMS]
    for word in (*only, *skip):
        if not any(part.is_named([word]) for part in found):
            raise ValueError(f"no part {word!r}; there are {', '.join(part.name for part in found)}")
    return [
        part
        for part in found
        if part.kind == "machine" or (part.is_named(only or [""]) and not part.is_named(skip))
    ]


def step_parts(kind: str, shapes: Sequence[Shape]) -> list[Part]:
    """Return the parts that look at decode steps alone: `steps` times them, `profile` lists their kernels."""
    return [Part(name=f"{kind}-{shape.name}", kind=kind, limit_s=180, shape=shape) for shape in shapes]


def run(part: Part, command: Sequence[str], on_row: Callable[[Row], None]) -> Outcome:
    """Run one part in a child.

    Args:
        part: Which.
        command: Of the child; `--part NAME --rows-to FILE_DESCRIPTOR` is added.
        on_row: Given each row when it is made.
    """
    began_s = time.perf_counter()
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*command, "--part", part.name, "--rows-to", str(writing)],
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _end_group(process)

    timer = threading.Timer(part.limit_s, end)
    timer.start()
    error = None
    try:
        with os.fdopen(reading, encoding="utf-8") as rows:
            for line in rows:
                row = json.loads(line)
                if ERROR in row:
                    error = row[ERROR]
                else:
                    on_row(row)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        timer.cancel()
        timer.join()
        _end_group(process)
        status = process.wait()
    took_s = time.perf_counter() - began_s
    if is_late.is_set():
        return Outcome(status=f"ended after {part.limit_s:g} s", error=error, took_s=took_s)
    if error is None and status != 0:
        error = f"the process ended with status {status}"
    return Outcome(status="done" if error is None else "failed", error=error, took_s=took_s)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a child and whatever it started: it leads a group of its own, whose id is its as long as nobody
    has taken its status."""
    os.killpg(process.pid, signal.SIGKILL)


def perform(part: Part, job: Job, rows_to: int) -> int:
    """Be the child: make the part's measurements, write each row as a line of JSON."""
    with os.fdopen(rows_to, "w", encoding="utf-8", buffering=1) as output:
        try:
            with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
                for row in measure(part, job, Path(folder)):
                    output.write(json.dumps(row) + "\n")
        except Exception as error:  # the top of a process: told to whoever reads the rows
            traceback.print_exc()
            output.write(json.dumps({ERROR: f"{type(error).__name__}: {error}"}) + "\n")
            return 1
    return 0


def measure(part: Part, job: Job, folder: Path) -> Iterator[Row]:
    """Make a part's measurements."""
    # Imported here, each by those who need it: most bring torch.
    if part.kind == "machine":
        from loadtest.gpu import machine

        yield from machine.measure()
    elif part.kind == "program":
        yield from _program(part.name, folder)
    elif part.kind == "clients":
        from loadtest.gpu import online

        yield from online.measure_clients(job.extent)
    else:
        assert part.shape is not None
        yield from _measure_shape(part, part.shape, job, folder)


def _measure_shape(part: Part, shape: Shape, job: Job, folder: Path) -> Iterator[Row]:
    from asyncserve.serve import configure_logging

    configure_logging("info")
    tokenizer = str(job.tokenizers / shape.name)
    if part.kind == "offline":
        from loadtest.gpu import offline

        yield from offline.measure(shape, tokenizer, job.extent, further=job.further, only=job.measurements)
    elif part.kind in ("steps", "profile"):
        yield from _decode_steps(part, shape, tokenizer, job)
    else:
        from loadtest.gpu import online

        make = online.measure if part.kind == "online" else online.measure_start
        yield from make(shape, tokenizer, job.extent, further=job.further, folder=folder)


def _decode_steps(part: Part, shape: Shape, tokenizer: str, job: Job) -> Iterator[Row]:
    import torch

    from loadtest.gpu import kernel_times, machine, steps

    if torch.cuda.is_available():
        yield from machine.measure()
    if part.kind == "steps":
        yield from steps.measure(
            shape,
            tokenizer,
            job.extent,
            further=job.further,
            batches=job.batches,
            num_steps=job.num_steps,
            temperature=job.temperature,
        )
    else:
        yield from kernel_times.measure(
            shape,
            tokenizer,
            job.extent,
            further=job.further,
            batches=job.batches,
            num_steps=job.num_steps,
            trace=job.trace,
        )


def _program(name: str, folder: Path) -> Iterator[Row]:
    """Run one of the programs that measure kernels alone."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"loadtest.{name}", "--json", str(file)]
    subprocess.run(command, check=True)
    yield {"kind": name, "figures": json.loads(file.read_text(encoding="utf-8"))["rows"]}
