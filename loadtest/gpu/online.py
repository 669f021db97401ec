"""Measured over HTTP: the start of the server, and loads of a fixed concurrency.

Takes a shape and how much to measure, gives one row per measurement. The server runs on one half of the
cores, the clients on the other; they stream completions of random token ids, greedy, all answers as long as
asked for. Of repeats, the one with most tokens per second is the figure and all are kept. What the server
counted meanwhile (device time, idle time, its own CPU time) stands beside.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import ceiling, client_processes, server_process
from loadtest.client import Record
from loadtest.client_processes import ClientProcesses
from loadtest.cores import split_cores
from loadtest.figures import Row
from loadtest.gpu.extent import Extent, OnlineLoad
from loadtest.gpu.offline import engine_options, of_shape
from loadtest.model_shapes import Shape
from loadtest.report import Report, summarize
from loadtest.sender import Job
from loadtest.server_process import ServerProcess
from loadtest.workload import Sample, random_tokens

CEILING = OnlineLoad(concurrency=256, num_requests=1024)
START_LIMIT_S = 120.0
MODEL = "bench"
"""Name under which the shape is served."""
WARM_UP_LEN = 16
"""Output tokens of the requests before a load that do not count."""


def server_options(extent: Extent, tokenizer: str, further: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the server."""
    options = engine_options(extent, {"tokenizer": tokenizer, **further})
    return {**options, "served_model_name": (MODEL,), "disable_access_log": True}


def measure_start(
    shape: Shape, tokenizer: str, extent: Extent, *, further: Mapping[str, Any], folder: Path
) -> Iterator[Row]:
    """Start a server without CUDA graphs and stop it."""
    options = server_options(extent, tokenizer, {"enforce_eager": True, **further})
    server_cores, _ = split_cores()
    log, port = folder / "server.log", server_process.free_port()
    with server_process.running(str(shape.folder), options, cores=server_cores, log=log, port=port) as server:
        yield start_row(server, "eager")


def measure(
    shape: Shape, tokenizer: str, extent: Extent, *, further: Mapping[str, Any], folder: Path
) -> Iterator[Row]:
    """Start the server, send every load, stop it.

    Args:
        shape: What is served.
        tokenizer: Folder of a tokenizer for it.
        extent: How much to measure.
        further: Options of the server that go before the usual ones.
        folder: For the server's log.
    """
    options = server_options(extent, tokenizer, further)
    server_cores, client_cores = split_cores()
    log, port = folder / "server.log", server_process.free_port()
    with (
        client_processes.running(extent.num_clients, client_cores) as clients,
        server_process.running(str(shape.folder), options, cores=server_cores, log=log, port=port) as server,
    ):
        yield start_row(server, "eager" if options.get("enforce_eager") else "graphs")
        loads: Sequence[OnlineLoad] = of_shape(extent.online_loads, shape)
        for load in loads:
            yield _load_row(shape, extent, load, clients, server)


def measure_clients(extent: Extent) -> Iterator[Row]:
    """What the clients could take at most, with servers that cost nothing in place of the one measured."""
    server_cores, client_cores = split_cores()
    with client_processes.running(extent.num_clients, client_cores) as clients:
        found = ceiling.measure(
            clients,
            concurrency=CEILING.concurrency,
            num_requests=CEILING.num_requests,
            cores=server_cores,
        )
    yield {
        "kind": "clients",
        "num_processes": extent.num_clients,
        "concurrency": CEILING.concurrency,
        "tps": found.replayed_tps,
        "is_sound": found.is_sound,
    }


def start_row(server: ServerProcess, mode: str) -> Row:
    """Wait for a server's start, and return when what was there, in seconds since the process was started.

    Raises:
        ServerFailed: It ended, or took too long.
    """
    listening_s = server.wait_for_status("/live", START_LIMIT_S)
    ready_s = server.wait_for_status("/ready", START_LIMIT_S)
    server.complete(range(100, 116), 1)
    first_token_s = time.perf_counter() - server.started_s
    return {
        "kind": "start",
        "mode": mode,
        "listening_s": listening_s,
        "ready_s": ready_s,
        "first_token_s": first_token_s,
        "warm_s": server.wait_until_warm(START_LIMIT_S),
        "log": [line for line in server.last_lines(30).splitlines() if " INFO " in line],
    }


def _load_row(
    shape: Shape, extent: Extent, load: OnlineLoad, clients: ClientProcesses, server: ServerProcess
) -> Row:
    input_len, output_len = extent.online_lens
    runs: list[tuple[Report, Row]] = []
    for turn in range(extent.online_repeats):
        warm_up = _samples(shape, load.concurrency, input_len, WARM_UP_LEN, f"{load} {turn} warm-up")
        clients.run(_job(server, warm_up, load))
        samples = _samples(shape, load.num_requests, input_len, output_len, f"{load} {turn}")
        before = server.metrics()
        sent = clients.run(_job(server, samples, load))
        report = summarize(sent.records, duration_s=sent.duration_s)
        runs.append((report, _counted(before, server.metrics(), sent.records)))
    best, counted = max(runs, key=lambda run: run[0].output_throughput)
    return {
        "kind": "online",
        "concurrency": load.concurrency,
        "num_requests": load.num_requests,
        "input_len": input_len,
        "output_len": output_len,
        "tps": best.output_throughput,
        "all_tps": [report.output_throughput for report, _ in runs],
        "all_ttft_p99_ms": [report.latencies["ttft"].p99 for report, _ in runs],
        "is_sound": all(report.is_sound for report, _ in runs),
        "failures": {message: count for report, _ in runs for message, count in report.failures.items()},
        "latencies_ms": best.to_json()["latencies"],
        **counted,
    }


def _job(server: ServerProcess, samples: Sequence[Sample], load: OnlineLoad) -> Job:
    return Job(urls=(server.url,), model=MODEL, items=samples, concurrency=load.concurrency)


def _samples(shape: Shape, count: int, input_len: int, output_len: int, seed: str) -> list[Sample]:
    return random_tokens(
        count,
        input_len=input_len,
        output_len=output_len,
        vocab_size=shape.vocab_size,
        seed=f"{shape.name} {seed}",
    )


def _counted(before: Mapping[str, float], after: Mapping[str, float], records: Sequence[Record]) -> Row:
    """Return what the server counted between two readings."""

    def grown(name: str) -> float:
        return after[name] - before[name]

    device_s, idle_s = grown("asyncserve:step_time_seconds_sum"), grown("asyncserve:gpu_idle_seconds_total")
    num_steps = grown("asyncserve:step_time_seconds_count")
    num_tokens = sum(record.num_output_tokens for record in records)
    return {
        "idle_share": idle_s / (idle_s + device_s) if idle_s + device_s else None,
        "device_ms": 1e3 * device_s / num_steps if num_steps else None,
        "server_cpu_us_per_token": 1e6 * grown("process_cpu_seconds_total") / num_tokens
        if num_tokens
        else None,
        "num_preemptions": grown("asyncserve:num_preemptions_total"),
    }
