"""The client's own ceiling: how many tokens per second it could read if it did nothing else.

Measured with servers that cost next to nothing: the CPU time that the client needs for a token there, hence
what it reaches when it has no time left. A figure of a real server that comes near it says as much about the
client as about the server; `WARNING_SHARE` says how near is too near. It is an upper bound: a server that is
slower is read in smaller pieces, which cost more. So the client's CPU time in the run itself is to be looked
at as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest import replay_server
from loadtest.client_processes import ClientProcesses, end, start
from loadtest.report import summarize
from loadtest.sender import Job
from loadtest.workload import random_tokens, text

WARNING_SHARE = 0.8
"""A throughput above this share of the ceiling may be the client's."""
INPUT_LEN = 512
OUTPUT_LEN = 128
LEAST_REQUESTS = 256
REQUESTS_EACH = 4
"""Requests per stream, as long as no number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What clients reach at most.

    Args:
        tps: Output tokens per second with no CPU time left.
        replayed_tps: Output tokens per second that were read to measure it.
        num_processes: Clients.
        concurrency: Requests at once, all clients together.
        cpu_share: CPU time of the clients as a share of the time, their mean: how busy they were.
        is_sound: Whether everything was answered in full.
    """

    tps: float
    replayed_tps: float
    num_processes: int
    concurrency: int
    cpu_share: float
    is_sound: bool


def measure(
    clients: ClientProcesses,
    *,
    concurrency: int,
    endpoint: str = "completions",
    num_requests: int | None = None,
    cores: Sequence[int] | None = None,
) -> Ceiling:
    """Return what the clients reach with a replaying server each.

    Args:
        clients: They are kept.
        concurrency: Requests at once, all clients together.
        endpoint: `completions` or `chat`.
        num_requests: How many to send; None for a few per stream.
        cores: Where the servers run; None for anywhere.
    """
    count = num_requests or max(REQUESTS_EACH * concurrency, LEAST_REQUESTS)
    draw = text if endpoint == "chat" else random_tokens
    samples = draw(count, input_len=INPUT_LEN, output_len=OUTPUT_LEN)
    servers = start(replay_server.serve, clients.count, cores)
    try:
        urls = [f"http://127.0.0.1:{pipe.recv()}" for _, pipe in servers]
        job = Job(urls=urls, model="replay", items=samples, concurrency=concurrency, endpoint=endpoint)
        _, sent = (clients.run(job) for _ in range(2))  # the first time fills caches
    finally:
        end(servers)
    report = summarize(sent.records, duration_s=sent.duration_s)
    cpu_share = min(sum(sent.cpu_shares) / len(sent.cpu_shares), 1.0)
    return Ceiling(
        tps=report.output_throughput / cpu_share,
        replayed_tps=report.output_throughput,
        num_processes=clients.count,
        concurrency=concurrency,
        cpu_share=cpu_share,
        is_sound=report.is_sound,
    )
