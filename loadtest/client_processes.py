"""Clients that send one load together: in this process, or in several of their own.

A `ClientProcesses` keeps its processes over all loads; each gets its share of the items and of the
concurrency, makes itself ready, and starts when all are. Times of their records can be compared: the clock is
the machine's. With no process of its own, the client runs in the caller's.
"""

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import uvloop

from loadtest.cores import on_cores
from loadtest.sender import Job, Sent, send

END_LIMIT_S = 5.0


def shares(job: Job, num_processes: int) -> list[Job]:
    """Divide items, times, URLs and concurrency as evenly as they go; no process gets none of either."""
    concurrency = job.concurrency
    num_processes = min(num_processes, len(job.items), concurrency or num_processes)
    urls = itertools.cycle(job.urls)
    return [
        replace(
            job,
            urls=(next(urls),),
            items=job.items[number::num_processes],
            times=None if job.times is None else job.times[number::num_processes],
            concurrency=None
            if concurrency is None
            else concurrency // num_processes + (number < concurrency % num_processes),
        )
        for number in range(num_processes)
    ]


class ClientProcesses:
    """Clients that send jobs.

    Args:
        count: How many processes; 0 for none but the caller's.
        cores: Where they run; None for anywhere.
    """

    def __init__(self, count: int, cores: Sequence[int] | None = None) -> None:
        self.count = max(count, 1)
        self._workers = start(work, count, cores)

    def run(self, job: Job) -> Sent:
        """Send a job and wait until all of it is answered.

        Raises:
            EOFError: A process ended.
        """
        if not self._workers:
            return uvloop.run(send(job))
        parts = shares(job, len(self._workers))
        workers = self._workers[: len(parts)]
        for (_, pipe), part in zip(workers, parts, strict=True):
            pipe.send(part)
        for _, pipe in workers:
            pipe.recv()
        for _, pipe in workers:
            pipe.send(None)
        sent: list[Sent] = [pipe.recv() for _, pipe in workers]
        return reduce(Sent.merged, sent)

    def close(self) -> None:
        """End the processes."""
        end(self._workers)


@contextmanager
def running(count: int, cores: Sequence[int] | None = None) -> Iterator[ClientProcesses]:
    """Keep client processes for the duration of the block."""
    clients = ClientProcesses(count, cores)
    try:
        yield clients
    finally:
        clients.close()


def work(pipe: "Connection[Any, Any]") -> None:
    """Be a client process: jobs in, what was sent out, until the pipe ends."""

    def wait() -> None:
        pipe.send(None)
        pipe.recv()

    while True:
        try:
            job = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if job is None:
            return
        try:
            pipe.send(uvloop.run(send(job, wait)))
        except KeyboardInterrupt:  # the terminal tells every process; who started us says the rest
            return


Worker = tuple[BaseProcess, "Connection[Any, Any]"]
"""A process and this end of a pipe to it."""


def start(target: Any, count: int, cores: Sequence[int] | None) -> list[Worker]:
    """Start processes that call `target` with their end of a pipe."""
    # A fork of a process that has threads may hang; a new interpreter takes a fraction of a second.
    context = multiprocessing.get_context("spawn")
    workers: list[Worker] = []
    with on_cores(cores):
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
    return workers


def end(workers: Sequence[Worker]) -> None:
    """Close the pipes and wait for the processes; one that does not end is killed."""
    for _, pipe in workers:
        pipe.close()
    for process, _ in workers:
        process.join(END_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
