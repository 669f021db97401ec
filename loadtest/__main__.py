"""`python -m loadtest --url URL …`: run one load, or the runs of a scenario, and report.

Options come from the command line; a scenario file gives several runs their options, which the command line
overrides. Prints a table per run and, after several, one row for each and the spread over its repeats. No
prompt is sent twice, in another run or another repeat either: what comes from a cache is not measured.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import random
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from loadtest import arrivals, report
from loadtest.client import Client, ConnectionLost, Record
from loadtest.workload import Sample, longest, random_tokens, text

SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run's options; names and meanings as on the command line."""

    workload: str = "random"
    endpoint: str = "completions"
    num_requests: int = 100
    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int = 32_000
    concurrency: int | None = None
    rate: float = math.inf
    burst_size: int = 1
    seed: int
    temperature: float = 0.0
    warmup: int = 1
    repeat: int = 1
    timeout: float = 600.0

    @property
    def name(self) -> str:
        """What tells this run from others."""
        arrival = "all at once" if self.rate == math.inf else f"{self.rate:g}/s"
        if self.burst_size > 1:
            arrival += f" in bursts of {self.burst_size}"
        if self.concurrency is not None:
            arrival = f"concurrency {self.concurrency}" + ("" if self.rate == math.inf else f", {arrival}")
        kind = self.workload if self.endpoint == "completions" else f"{self.endpoint}, {self.workload}"
        return f"{kind} {self.input_len}+{self.output_len}, {arrival}"

    def samples(self, count: int, seed: str) -> list[Sample]:
        """Draw prompts."""
        lengths: dict[str, Any] = {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "range_ratio": self.range_ratio,
            "prefix_len": self.prefix_len,
            "seed": seed,
        }
        if self.workload == "text":
            return text(count, **lengths)
        return random_tokens(count, vocab_size=self.vocab_size, **lengths)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says; 0 if every request was answered in full, 1 if not, 2 for an error."""
    arguments = _parser().parse_args(argv)
    try:
        name, loads = _loads(arguments)
        limits_ms = _limits(arguments.goodput)
        return uvloop.run(_run_all(arguments, name, loads, limits_ms))
    except (ValueError, OSError, ConnectionLost) as error:
        print(f"loadtest: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description="Load an OpenAI-compatible server and report latencies and throughput.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="Base URL of the server.")
    parser.add_argument("--model", default=None, help="Model to ask for. Default: the server's first.")
    parser.add_argument("--api-key", default=None, help="Key to send.")
    parser.add_argument(
        "--scenario", default=None, help="TOML file of runs, or the name of one in scenarios/."
    )
    parser.add_argument("--json", type=Path, default=None, help="Write everything measured to this file.")
    parser.add_argument("--png", type=Path, default=None, help="Draw the latency distributions to this file.")
    parser.add_argument(
        "--results", type=Path, default=None, help="Append one JSON line per run to this file."
    )
    parser.add_argument("--label", default="", help="Said of every run in files: commit, machine.")
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="Limits, such as ttft:500 tpot:50 e2el:9000.",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--workload", choices=["random", "text"], help="Random token ids, or English text.")
    load.add_argument("--endpoint", choices=["completions", "chat"], help="Default: completions.")
    load.add_argument("--num-requests", type=int, help="Requests to send.")
    load.add_argument("--input-len", type=int, help="Mean prompt length: tokens (random) or words (text).")
    load.add_argument("--output-len", type=int, help="Mean tokens to generate.")
    load.add_argument(
        "--range-ratio", type=float, help="Spread of both lengths around their mean, in [0, 1)."
    )
    load.add_argument("--prefix-len", type=int, help="Beginning that all prompts share, added to input-len.")
    load.add_argument("--vocab-size", type=int, help="Random token ids are below it. Default: 32000.")
    load.add_argument("--concurrency", type=int, help="Most requests at once. Default: no limit.")
    load.add_argument("--rate", type=float, help="Poisson arrivals per second. Default: all at once.")
    load.add_argument("--burst-size", type=int, help="Requests that arrive together.")
    load.add_argument(
        "--seed",
        type=int,
        help="Of prompts and arrivals; the same seed asks the same again, which a server may have cached. "
        "Default: another one every time.",
    )
    load.add_argument("--temperature", type=float, help="Default: 0.")
    load.add_argument("--warmup", type=int, help="Requests to send before, which do not count. Default: 1.")
    load.add_argument(
        "--repeat", type=int, help="Times to run it, with other prompts each time; the spread is shown."
    )
    load.add_argument("--timeout", type=float, help="Most seconds for one request.")
    return parser


def _loads(arguments: argparse.Namespace) -> tuple[str, list[Load]]:
    names = {option.name for option in dataclasses.fields(Load)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    if arguments.scenario is None:
        runs: list[dict[str, Any]] = [{}]
        name = ""
    else:
        path = Path(arguments.scenario)
        if not path.suffix:
            path = SCENARIOS / f"{path}.toml"
            if not path.is_file():
                known = ", ".join(sorted(file.stem for file in SCENARIOS.glob("*.toml")))
                raise ValueError(f"no scenario {arguments.scenario!r}; there are {known}")
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        name = path.stem
        runs = [content.get("defaults", {}) | run for run in content["run"]]
        unknown = {key for run in runs for key in run} - names
        if unknown:
            raise ValueError(f"{path}: unknown option {min(unknown)}")
    # One seed for the whole invocation, told in the output and the files; the runs' indices make it theirs.
    seed = random.SystemRandom().randrange(2**32)
    loads = [Load(**({"seed": seed} | run | given)) for run in runs]
    for load in loads:
        _check(load)
    return name, loads


def _check(load: Load) -> None:
    if load.endpoint == "chat" and load.workload == "random":
        raise ValueError("random prompts are token ids, which only completions takes: use --workload text")
    if not 0.0 <= load.range_ratio < 1.0:
        raise ValueError(f"range-ratio is {load.range_ratio}; it must lie in [0, 1)")
    for name in ("num_requests", "input_len", "output_len", "burst_size", "repeat", "concurrency", "rate"):
        value = getattr(load, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name.replace('_', '-')} is {value}; it must be above 0")


def _limits(texts: Sequence[str]) -> dict[str, float]:
    limits = {}
    for limit in texts:
        name, _, value = limit.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"goodput takes ttft, tpot and e2el, not {name!r}")
        limits[name] = float(value)
    return limits


async def _run_all(
    arguments: argparse.Namespace, scenario: str, loads: Sequence[Load], limits_ms: Mapping[str, float]
) -> int:
    if arguments.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install '.[loadtest]'")
    client = Client(arguments.url, api_key=arguments.api_key)
    try:
        return await _run_each(client, arguments, scenario, loads, limits_ms)
    finally:
        client.close()


async def _run_each(
    client: Client,
    arguments: argparse.Namespace,
    scenario: str,
    loads: Sequence[Load],
    limits_ms: Mapping[str, float],
) -> int:
    is_sound = True
    served, max_model_len = await client.served_model()
    client.model = arguments.model or served
    runs: dict[str, list[Record]] = {}
    rows = []
    spreads = []
    for index, load in enumerate(loads):
        lengths = (longest(mean, load.range_ratio) for mean in (load.input_len, load.output_len))
        most = load.prefix_len + sum(lengths)
        if load.workload == "random" and max_model_len is not None and most > max_model_len:
            raise ValueError(f"{load.name}: up to {most} tokens, but the server takes {max_model_len}")
        client.endpoint, client.temperature, client.timeout_s = load.endpoint, load.temperature, load.timeout
        for turn in range(load.repeat):
            name = load.name + (f" #{turn + 1}" if load.repeat > 1 else "")
            if name in runs:
                name += f" ({len(runs) + 1})"
            print(f"\n== {client.model}: {name} (seed {load.seed})", flush=True)
            num_reconnects = client.num_reconnects
            records, duration_s = await _run(client, load, f"{load.seed}, run {index}, repeat {turn}")
            result = report.summarize(records, duration_s=duration_s, limits_ms=limits_ms)
            print(report.to_table(result), flush=True)
            if client.num_reconnects > num_reconnects:
                print(f"reconnected   {client.num_reconnects - num_reconnects} x, a kept one being closed")
            runs[name] = records
            is_sound = is_sound and result.is_sound
            rows.append({"name": name, "load": _plain(load), "repeat": turn + 1, **result.to_json()})
        if load.repeat > 1:
            spreads.append({"name": load.name, **_spread(rows[-load.repeat :])})
    if len(rows) > 1:
        print(_summary(rows))
    if spreads:
        print(_spread_table(spreads))
    _write(arguments, scenario, client.model, rows, spreads, runs)
    return 0 if is_sound else 1


async def _run(client: Client, load: Load, seed: str) -> tuple[list[Record], float]:
    # Other prompts in warm-up, every run and every repeat, so that none finds another's prefixes cached.
    if load.warmup:
        samples = load.samples(load.warmup, f"{seed}, warm-up")
        await arrivals.run(samples, [0.0] * len(samples), client.complete, concurrency=load.concurrency)
    samples = load.samples(load.num_requests, seed)
    times = arrivals.arrival_times(load.num_requests, rate=load.rate, burst_size=load.burst_size, seed=seed)
    return await arrivals.run(samples, times, client.complete, concurrency=load.concurrency)


def _plain(load: Load) -> dict[str, Any]:
    values = dataclasses.asdict(load)
    return values | {"rate": None if load.rate == math.inf else load.rate}


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    width = max(len(row["name"]) for row in rows)
    titles = f"{'TTFT median / p99, ms':>22}  {'TPOT median / p99, ms':>22}"
    columns = f"{'out tok/s':>9}  {titles}  {'cached':>6}  {'failed':>6}"
    lines = ["", f"{'run':{width}}  {columns}"]
    for row in rows:
        ttft, tpot = (
            f"{_figure(row['latencies'][name]['median'])} / {_figure(row['latencies'][name]['p99'])}"
            for name in ("ttft", "tpot")
        )
        failed = row["num_requests"] - row["num_completed"] + row["num_wrong_length"]
        hit_rate = row["prefix_cache_hit_rate"]
        cached = "-" if hit_rate is None else f"{hit_rate:.1%}"
        throughput = f"{row['output_throughput']:9.1f}"
        lines.append(f"{row['name']:{width}}  {throughput}  {ttft:>22}  {tpot:>22}  {cached:>6}  {failed:6}")
    return "\n".join(lines)


SPREAD = ("output_throughput", "total_throughput", "ttft_median", "tpot_median")
"""The figures whose spread over the repeats of a run is shown."""


def _spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, of the repeats of one run, the median, lowest and highest of each figure in `SPREAD`."""
    spread: dict[str, Any] = {"num_repeats": len(rows)}
    for name in SPREAD:
        latency, _, statistic = name.partition("_")
        found = [row[name] if name in row else row["latencies"][latency][statistic] for row in rows]
        values = [value for value in found if value is not None]
        spread[name] = (
            {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None
        )
    return spread


def _spread_table(spreads: Sequence[Mapping[str, Any]]) -> str:
    heading = "repeats: median (lowest - highest)"
    width = max(len(heading), *(len(spread["name"]) for spread in spreads))
    titles = ("output tok/s", "total tok/s", "TTFT median, ms", "TPOT median, ms")
    columns = "".join(f"{title:>28}" for title in titles)
    lines = ["", f"{heading:{width}}{columns}"]
    for spread in spreads:
        cells = [
            f"{value['median']:.1f} ({value['min']:.1f} - {value['max']:.1f})" if value else "-"
            for value in (spread[name] for name in SPREAD)
        ]
        lines.append(f"{spread['name']:{width}}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _write(
    arguments: argparse.Namespace,
    scenario: str,
    model: str,
    rows: Sequence[Mapping[str, Any]],
    spreads: Sequence[Mapping[str, Any]],
    runs: Mapping[str, Sequence[Record]],
) -> None:
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "label": arguments.label,
        "model": model,
        "scenario": scenario,
    }
    if arguments.json is not None:
        detailed = [{**row, "values_ms": report.latencies_ms(runs[row["name"]])} for row in rows]
        content = {**about, "runs": detailed, "repeats": spreads}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.results is not None:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        with arguments.results.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**about, **row}) + "\n" for row in rows)
    if arguments.png is not None:
        report.plot(runs, arguments.png)


if __name__ == "__main__":
    sys.exit(main())
