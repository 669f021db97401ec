"""Clients in processes of their own, on cores of their own, that send one load together.

A `ClientProcesses` keeps them over all loads; each gets its share of the samples and of the concurrency,
makes itself ready, and starts when all are. Times of their records can be compared: the clock is the
machine's. `ceiling` lets them read from servers that cost nothing: what they could take at most.
"""

import gc
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import uvloop

from loadtest import arrivals
from loadtest.client import Client, Record
from loadtest.gpu import replay_server
from loadtest.gpu.server_process import on_cores
from loadtest.report import Report, summarize
from loadtest.workload import Sample, random_tokens

END_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one process is to send."""

    url: str
    model: str
    samples: Sequence[Sample]
    concurrency: int


def shares(samples: Sequence[Sample], concurrency: int, num_processes: int) -> list[tuple[list[Sample], int]]:
    """Divide samples and concurrency as evenly as they go; no process gets none of either."""
    num_processes = min(num_processes, concurrency, len(samples))
    return [
        (
            list(samples[number::num_processes]),
            concurrency // num_processes + (number < concurrency % num_processes),
        )
        for number in range(num_processes)
    ]


class ClientProcesses:
    """Processes that send requests.

    Args:
        count: How many.
        cores: Where they run.
    """

    def __init__(self, count: int, cores: Sequence[int]) -> None:
        self._workers = _start(work, count, cores)

    def run(
        self, urls: Sequence[str], model: str, samples: Sequence[Sample], concurrency: int
    ) -> tuple[list[Record], float]:
        """Send samples, never more than `concurrency` at once.

        Args:
            urls: The server's; several are taken in turn by the processes.
            model: Its name.
            samples: What to send.
            concurrency: Most at once, all processes together.

        Returns:
            The records, and the seconds from the first request until the last answer.

        Raises:
            EOFError: A process ended.
        """
        divided = shares(samples, concurrency, len(self._workers))
        workers = self._workers[: len(divided)]
        for (_, pipe), url, (part, at_once) in zip(workers, itertools.cycle(urls), divided, strict=False):
            pipe.send(Share(url, model, part, at_once))
        for _, pipe in workers:
            pipe.recv()
        for _, pipe in workers:
            pipe.send(None)
        records: list[Record] = []
        for _, pipe in workers:
            records += pipe.recv()
        began_s = min(record.started_s for record in records)
        return records, max(max(record.last_s for record in records) - began_s, 1e-9)

    def close(self) -> None:
        """End the processes."""
        _end(self._workers)


def ceiling(
    clients: ClientProcesses, *, num_servers: int, cores: Sequence[int], concurrency: int, num_requests: int
) -> Report:
    """Return what the clients reach with servers that cost nothing, each on one of `cores`."""
    servers = _start(replay_server.serve, num_servers, cores)
    try:
        urls = [f"http://127.0.0.1:{pipe.recv()}" for _, pipe in servers]
        samples = random_tokens(num_requests, input_len=512, output_len=128)
        records, duration_s = clients.run(urls, "replay", samples, concurrency)
    finally:
        _end(servers)
    return summarize(records, duration_s=duration_s)


@contextmanager
def running(count: int, cores: Sequence[int]) -> Iterator[ClientProcesses]:
    """Keep client processes for the duration of the block."""
    clients = ClientProcesses(count, cores)
    try:
        yield clients
    finally:
        clients.close()


def work(pipe: "Connection[Any, Any]") -> None:
    """Be a client process: shares in, records out, until the pipe ends."""
    while True:
        try:
            share = pipe.recv()
        except EOFError:
            return
        if share is None:
            return
        pipe.send(uvloop.run(_send(share, pipe)))


async def _send(share: Share, pipe: "Connection[Any, Any]") -> list[Record]:
    client = Client(share.url, model=share.model)
    connections = [await client.open() for _ in range(share.concurrency)]
    for connection in connections:
        client.release(connection)
    gc.collect()
    gc.freeze()
    pipe.send(time.perf_counter())
    pipe.recv()
    try:
        records, _ = await arrivals.run(
            share.samples, [0.0] * len(share.samples), client.complete, concurrency=share.concurrency
        )
    finally:
        client.close()
    return records


_Worker = tuple[BaseProcess, "Connection[Any, Any]"]


def _start(target: Any, count: int, cores: Sequence[int]) -> list[_Worker]:
    # A fork of a process that has threads may hang; a new interpreter takes a fraction of a second.
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    with on_cores(cores):
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
    return workers


def _end(workers: Sequence[_Worker]) -> None:
    for _, pipe in workers:
        pipe.close()
    for process, _ in workers:
        process.join(END_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
