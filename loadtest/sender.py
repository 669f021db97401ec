"""One client's part of a load: sends what it is given at the times it is given, and tells what that took.

Takes a `Job`, gives a `Sent`: the records, and whether the client kept up (CPU time, how late its loop ran).
Runs in the process that calls it; `client_processes` runs several of them side by side.
"""

import contextlib
import gc
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest import arrivals
from loadtest.client import Client, ConnectionLost, Record
from loadtest.loop_lag import LoopLag
from loadtest.workload import Conversation, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be sent, and how.

    Args:
        urls: Base URLs of the server; several are taken in turn by the processes.
        model: Its name.
        items: What to send. The turns of a conversation go one after the other.
        times: Seconds from the start for each item, ascending; None for all at once.
        concurrency: Most items at once; None for no limit.
        endpoint: `completions` or `chat`.
        api_key: Sent as a bearer token.
        temperature: Of every request.
        timeout_s: Most seconds for one request.
    """

    urls: Sequence[str]
    model: str
    items: Sequence[Sample | Conversation]
    times: Sequence[float] | None = None
    concurrency: int | None = None
    endpoint: str = "completions"
    api_key: str | None = None
    temperature: float = 0.0
    timeout_s: float = 600.0


@dataclass(slots=True, kw_only=True)
class Sent:
    """What came of a job.

    Args:
        records: One per request; those of a conversation stand together.
        cpu_shares: For each process, its CPU time as a share of the time it sent.
        late_s: By how many seconds the processes' loops ran late, sampled.
        num_reconnects: Requests sent once more because a kept connection turned out to be closed.
    """

    records: list[Record]
    cpu_shares: list[float]
    late_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_reconnects: int = 0

    @property
    def duration_s(self) -> float:
        """From the first request sent to the last answer."""
        began_s = min((record.started_s for record in self.records), default=0.0)
        return max(max((record.ended_s for record in self.records), default=0.0) - began_s, 1e-9)

    @property
    def lag_p99_ms(self) -> float:
        """Of the loops' lateness, the 99th percentile."""
        return 1000 * float(np.percentile(self.late_s, 99)) if len(self.late_s) else 0.0

    @property
    def lag_max_ms(self) -> float:
        """Of the loops' lateness, the greatest."""
        return 1000 * max(self.late_s, default=0.0)

    def merged(self, other: "Sent") -> "Sent":
        """Return this and what another process sent."""
        return Sent(
            records=self.records + other.records,
            cpu_shares=self.cpu_shares + other.cpu_shares,
            late_s=self.late_s + other.late_s,
            num_reconnects=self.num_reconnects + other.num_reconnects,
        )


async def send(job: Job, wait: Callable[[], None] | None = None) -> Sent:
    """Send a job to its first URL.

    Args:
        job: What to send.
        wait: Called when everything is ready; may block until the others are ready, too.
    """
    allow_many_connections()
    client = Client(
        job.urls[0],
        model=job.model,
        endpoint=job.endpoint,
        api_key=job.api_key,
        temperature=job.temperature,
        timeout_s=job.timeout_s,
    )
    try:
        with contextlib.suppress(ConnectionLost):  # the requests will tell
            at_once = min(job.concurrency or 0, len(job.items))
            for connection in [await client.open() for _ in range(at_once)]:
                client.release(connection)
        gc.freeze()  # what is there already need not be looked at again while times are taken
        if wait is not None:
            wait()
        return await _send_timed(client, job)
    finally:
        gc.unfreeze()
        client.close()


async def _send_timed(client: Client, job: Job) -> Sent:
    lag = LoopLag()
    cpu_s, began_s = time.process_time(), time.perf_counter()
    lag.start()
    times = [0.0] * len(job.items) if job.times is None else job.times
    try:
        answers, _ = await arrivals.run(job.items, times, client.take, concurrency=job.concurrency)
    finally:
        lag.stop()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    return Sent(
        records=[record for records in answers for record in records],
        cpu_shares=[cpu_s / max(wall_s, 1e-9)],
        late_s=lag.late_s,
        num_reconnects=client.num_reconnects,
    )


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
