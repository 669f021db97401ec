"""One invocation of `python -m loadtest`: sends loads to a server, prints what came, keeps the rows.

A `Session` knows the server and the clients; `measure` sends one load once and gives its row (see `results`).
Which loads, and how often, is the business of whoever calls it. No prompt is sent twice, in another run or
another repeat either, unless it comes from a file: what comes from a cache is not measured by mistake.
"""

import datetime
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from loadtest import arrivals, ceiling, figures, report, results, series, sharegpt, token_counts
from loadtest.ceiling import Ceiling
from loadtest.client import Client, ConnectionLost, Record
from loadtest.client_processes import ClientProcesses
from loadtest.figures import Row, Rows
from loadtest.load import Dataset, Load
from loadtest.report import Report
from loadtest.sender import Job, Sent
from loadtest.workload import Conversation, Sample

LAG_LIMIT_MS = 5.0
"""A client whose loop is later than this, at the 99th percentile, blurs the latencies it measures."""
BUSY_SHARE = 0.8
"""A client that computes for more than this share of the time may be what is measured."""
LEAST_BUSY_S = 1.0
"""Nothing is said of the CPU time of shorter runs: they are mostly beginning and end."""
MOST_CEILING_STREAMS = 256
"""The ceiling of loads with more requests at once is measured at this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, and how it is asked.

    Args:
        url: Base URL.
        model: Name to ask for; None for the server's first.
        api_key: Sent as a bearer token.
        tokenizer: File that counts a data set's tokens; None to ask the server.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    tokenizer: Path | None = None


class Session:
    """Measures loads one after the other.

    Args:
        target: The server.
        limits_ms: For goodput.
        num_processes: Client processes; 0 for one, and more where one is not enough and cores are free.
        measures_ceiling: Whether the clients' ceiling is measured.
        about: Fields of every row: command, argv, label, scenario.
        results_file: Each row is appended to it as it comes; None for nowhere.
        keeps_records: Whether `records` is filled.

    Attributes:
        rows: One per run.
        records: Name of a run → its records.
        is_sound: Whether every request of every run was answered in full.

    Raises:
        ConnectionLost: The server cannot be reached.
        ValueError: It lists no model.
    """

    def __init__(
        self,
        target: Target,
        *,
        limits_ms: Mapping[str, float],
        num_processes: int = 0,
        measures_ceiling: bool = True,
        about: Mapping[str, Any],
        results_file: Path | None = None,
        keeps_records: bool = False,
    ) -> None:
        self.rows: Rows = []
        self.records: dict[str, list[Record]] = {}
        self.is_sound = True
        self._target = target
        self._limits_ms = dict(limits_ms)
        self._is_growing = num_processes == 0
        self._measures_ceiling = measures_ceiling
        self._results_file = results_file
        self._keeps_records = keeps_records
        self._ceilings: dict[tuple[int, str, int], Ceiling] = {}
        self._datasets: dict[str, Dataset] = {}
        served, self._max_model_len, version = uvloop.run(_asked(target))
        self._model = target.model or served
        self._about = {
            "schema_version": results.SCHEMA_VERSION,
            **about,
            "url": target.url,
            "model": self._model,
            "server": {"version": version, "max_model_len": self._max_model_len},
            "commit": figures.commit(),
            "machine": figures.host(),
            "versions": figures.versions(),
            "limits_ms": self._limits_ms,
        }
        # A client that is alone runs in this process; several have their own.
        self._clients = ClientProcesses(num_processes if num_processes > 1 else 0)

    def close(self) -> None:
        """End the clients."""
        self._clients.close()

    def measure(self, load: Load, *, run: int, turn: int) -> Row:
        """Send a load once, after its warm-up; print and keep what came.

        Args:
            load: What to send.
            run: Its place in the session: part of what prompts are drawn from.
            turn: Which repeat of it this is, from 0.

        Raises:
            ValueError: The server does not take such prompts.
        """
        if load.has_token_ids and self._max_model_len is not None and load.most_tokens > self._max_model_len:
            raise ValueError(
                f"{load.name}: up to {load.most_tokens} tokens, but the server takes {self._max_model_len}"
            )
        name = load.name + (f" #{turn + 1}" if load.repeat > 1 else "")
        if any(row["name"] == name for row in self.rows):
            name += f" ({len(self.rows) + 1})"
        print(f"\n== {self._model}: {name} (seed {load.seed})", flush=True)
        seed = f"{load.seed}, run {run}, repeat {turn}"
        most = self._ceiling_of(load)
        sent, found = self._sent(load, seed)
        while self._is_growing and is_at_limit(found.output_throughput, sent, most) and self._grown():
            print(f"the client is at its limit: once more with {self._clients.count} processes", flush=True)
            most = self._ceiling_of(load)
            sent, found = self._sent(load, f"{seed}, {self._clients.count} processes")
        row = self._row(load, name, turn, sent, found, most)
        print(report.to_table(found), client_line(row["client"]), sep="\n")
        for warning in row["client"]["warnings"]:
            print(f"warning       {warning}")
        print(end="", flush=True)
        self._keep(row, sent.records, found)
        return row

    def _sent(self, load: Load, seed: str) -> tuple[Sent, Report]:
        # Other prompts in warm-up, every run and every repeat, so that none finds another's prefixes cached.
        if load.warmup:
            self._clients.run(self._job(load, self._items(load, load.warmup, f"{seed}, warm-up")))
        items = self._items(load, load.num_requests, seed)
        times = arrivals.arrival_times(len(items), rate=load.rate, burst_size=load.burst_size, seed=seed)
        sent = self._clients.run(self._job(load, items, times))
        return sent, report.summarize(sent.records, duration_s=sent.duration_s, limits_ms=self._limits_ms)

    def _items(self, load: Load, count: int, seed: str) -> Sequence[Sample | Conversation]:
        return load.items(
            count, seed, None if load.dataset_path is None else self._dataset(load.dataset_path)
        )

    def _dataset(self, path: str) -> Dataset:
        if path not in self._datasets:
            target = self._target
            count = (
                token_counts.by_server(target.url, model=self._model, api_key=target.api_key)
                if target.tokenizer is None
                else token_counts.by_tokenizer(target.tokenizer)
            )
            self._datasets[path] = Dataset(sharegpt.read(Path(path)), count)
            print(f"{len(self._datasets[path].dialogues)} conversations in {path}; tokens {count.origin}")
        return self._datasets[path]

    def _job(
        self, load: Load, items: Sequence[Sample | Conversation], times: Sequence[float] | None = None
    ) -> Job:
        return Job(
            urls=(self._target.url,),
            model=self._model,
            items=items,
            times=times,
            concurrency=load.concurrency,
            endpoint=load.endpoint,
            api_key=self._target.api_key,
            temperature=load.temperature,
            timeout_s=load.timeout,
        )

    def _ceiling_of(self, load: Load) -> Ceiling | None:
        if not self._measures_ceiling:
            return None
        streams = min(load.concurrency or MOST_CEILING_STREAMS, load.num_requests, MOST_CEILING_STREAMS)
        key = (self._clients.count, load.endpoint, streams)
        if key not in self._ceilings:
            self._ceilings[key] = ceiling.measure(self._clients, concurrency=streams, endpoint=load.endpoint)
        return self._ceilings[key]

    def _grown(self) -> bool:
        """Take more client processes if there are cores for them."""
        count = more_processes(self._clients.count, len(os.sched_getaffinity(0)))
        if count == self._clients.count:
            return False
        self._clients.close()
        self._clients = ClientProcesses(count)
        return True

    def _row(self, load: Load, name: str, turn: int, sent: Sent, found: Report, most: Ceiling | None) -> Row:
        return {
            **self._about,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "name": name,
            "point": load.name,
            "load": load.plain(),
            "repeat": turn + 1,
            **found.to_json(),
            "client": {
                "num_processes": self._clients.count,
                "cpu_share": max(sent.cpu_shares),
                "lag_p99_ms": sent.lag_p99_ms,
                "lag_max_ms": sent.lag_max_ms,
                "num_reconnects": sent.num_reconnects,
                "ceiling": None if most is None else asdict(most),
                "warnings": warnings(found.output_throughput, sent, most),
            },
            "percentiles": series.percentiles_of(report.latencies_ms(sent.records)),
            "over_time": series.over_time(sent.records),
            "goodput_by_scale": series.goodput(sent.records, self._limits_ms, duration_s=found.duration_s),
            "turns": series.turns(sent.records),
        }

    def _keep(self, row: Row, records: list[Record], found: Report) -> None:
        self.rows.append(row)
        self.is_sound = self.is_sound and found.is_sound
        if self._keeps_records:
            self.records[row["name"]] = records
        if self._results_file is not None:
            results.append(self._results_file, row)


def more_processes(count: int, num_cores: int) -> int:
    """Return how many client processes come after `count`: twice as many, on half the cores at most."""
    return 2 * count if 2 * count <= num_cores // 2 else count


def is_at_limit(output_throughput: float, sent: Sent, most: Ceiling | None) -> bool:
    """Say whether more clients could have read more."""
    is_near = most is not None and output_throughput > ceiling.WARNING_SHARE * most.tps
    return is_near or _is_busy(sent)


def _is_busy(sent: Sent) -> bool:
    return sent.duration_s >= LEAST_BUSY_S and max(sent.cpu_shares) > BUSY_SHARE


def warnings(output_throughput: float, sent: Sent, most: Ceiling | None) -> list[str]:
    """Say where a run tells of the client rather than of the server."""
    found = []
    if most is not None and output_throughput > ceiling.WARNING_SHARE * most.tps:
        share = output_throughput / most.tps
        found.append(
            f"output throughput is {share:.0%} of what this client reaches at most ({most.tps:,.0f} tok/s): "
            "use more --client-processes"
        )
    if sent.lag_p99_ms > LAG_LIMIT_MS:
        found.append(
            f"the client's loop ran {sent.lag_p99_ms:.1f} ms late (p99): latencies are not more exact"
        )
    if _is_busy(sent):
        found.append(f"a client process computed for {max(sent.cpu_shares):.0%} of the time")
    return found


def client_line(client: Mapping[str, Any]) -> str:
    """Return what is said of the client below a run's table."""
    count = client["num_processes"]
    line = (
        f"\nclient        {count} process{'es' if count > 1 else ''}, busy {client['cpu_share']:.0%}, "
        f"loop late by {client['lag_p99_ms']:.1f} ms (p99), {client['lag_max_ms']:.1f} (highest)"
    )
    most = client["ceiling"]
    if most is not None:
        line += f"; at most {most['tps']:,.0f} tok/s at {most['concurrency']} streams"
    if client["num_reconnects"]:
        line += f"\nreconnected   {client['num_reconnects']} x, a kept one being closed"
    return line


def command_line(argv: Sequence[str]) -> str:
    """Return a command line as it can be repeated, without its key."""
    words = list(argv)
    for number, word in enumerate(words):
        if word == "--api-key" and number + 1 < len(words):
            words[number + 1] = "…"
        elif word.startswith("--api-key="):
            words[number] = "--api-key=…"
    return shlex.join(["python", "-m", "loadtest", *words])


async def _asked(target: Target) -> tuple[str, int | None, str | None]:
    client = Client(target.url, api_key=target.api_key)
    try:
        model, max_model_len = await client.served_model()
        try:
            answer = await client.ask("GET", "/version")
            version = str(answer.json()["version"]) if answer.status == 200 else None
        except (ConnectionLost, ValueError, KeyError, TypeError):
            version = None
    finally:
        client.close()
    return model, max_model_len, version
