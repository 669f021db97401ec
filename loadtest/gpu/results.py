"""What a run has measured so far: as JSON, as tables in Markdown, as a line per row on the terminal.

A `Results` is written anew after every row, so that a run that is ended keeps what it has. Tables are made of
the rows alone, hence also of files read back (`combined` puts several runs together: of parts that several
have, the last one done is taken). Shares of the byte floor are at the copy bandwidth of the same run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.figures import Row
from loadtest.gpu.aims import aims_of, others_of
from loadtest.gpu.parts import Outcome, Part


class Results:
    """A run's rows.

    Args:
        about: Date, commit, command, versions and the like.
        json_file: Where they go; its neighbour that ends in `.md` gets the tables. None for nowhere.
    """

    def __init__(self, about: Mapping[str, Any], json_file: Path | None) -> None:
        self._about = dict(about)
        self._file = json_file
        self._parts: list[dict[str, Any]] = []

    @property
    def content(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {**self._about, "parts": self._parts}

    def begin(self, part: Part) -> None:
        """Begin a part; rows that follow are its."""
        shape = None if part.shape is None else part.shape.name
        self._parts.append(
            {
                "name": part.name,
                "shape": shape,
                "status": "running",
                "error": None,
                "took_s": None,
                "rows": [],
            }
        )
        self.write()

    def add(self, row: Row) -> str:
        """Add a row to the part that runs; return it as a line for people."""
        part = self._parts[-1]
        part["rows"].append(row)
        self.write()
        return line(Measured(row, part["shape"], copy_gbps(self.content)))

    def end(self, outcome: Outcome) -> None:
        """End the part that runs."""
        self._parts[-1].update(status=outcome.status, error=outcome.error, took_s=round(outcome.took_s, 1))
        self.write()

    def write(self) -> None:
        """Write both files. Each is replaced whole: whoever reads it never finds half of one."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        for file, text in (
            (self._file, json.dumps(self.content, indent=1) + "\n"),
            (self._file.with_suffix(".md"), markdown([self.content])),
        ):
            unfinished = file.with_name(f".{file.name}")
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(file)


class Measured(NamedTuple):
    """A row and what it is to be seen with."""

    row: Row
    shape: str | None
    copy_gbps: float | None

    @property
    def floor_ms(self) -> float | None:
        """Least time for the bytes of a step."""
        return None if self.copy_gbps is None else self.row["floor_bytes"] / self.copy_gbps / 1e6


Cell = tuple[str, Callable[[Measured], str]]


def copy_gbps(run: Mapping[str, Any]) -> float | None:
    """Return the copy bandwidth that a run measured, if it did."""
    for part in run["parts"]:
        for row in part["rows"]:
            if row["kind"] == "machine":
                return float(row["copy_gbps"])
    return None


def number(value: float | None, digits: int = 1) -> str:
    """Write a figure: with so many digits behind the point, none above a thousand; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Write lowest and highest."""
    return f"{number(min(values), digits)} - {number(max(values), digits)}" if values else "-"


def percent(value: float | None) -> str:
    """Write a share."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _plain(key: str, digits: int = 1) -> Callable[[Measured], str]:
    return lambda each: number(each.row[key], digits)


def _count(key: str) -> Callable[[Measured], str]:
    return lambda each: str(each.row[key])


def _step(key: str, digits: int = 3) -> Callable[[Measured], str]:
    return lambda each: number((each.row["steps"] or {}).get(key), digits)


def _idle(each: Measured) -> str:
    steps = each.row.get("steps") or each.row
    return percent(steps.get("idle_share"))


def _share(key: Callable[[Row], float | None]) -> Callable[[Measured], str]:
    def share(each: Measured) -> str:
        ms = key(each.row)
        return percent(each.floor_ms / ms if each.floor_ms is not None and ms else None)

    return share


def _aim(find: Callable[[Any, Row], float | None], digits: int = 1) -> Cell:
    return "aim", lambda each: number(find(aims_of(each.shape or ""), each.row), digits)


def _other(find: Callable[[Any, Row], float | None], digits: int = 1) -> Cell:
    return "vLLM", lambda each: number(find(others_of(each.shape or ""), each.row), digits)


def _latency(name: str, statistic: str) -> Callable[[Measured], str]:
    return lambda each: number(each.row["latencies_ms"][name][statistic], 2)


SHAPE: Cell = ("shape", lambda each: each.shape or "")

TABLES: Mapping[str, tuple[str, Sequence[Cell]]] = {
    "machine": (
        "Machine",
        [
            ("GPU", _count("gpu")),
            ("driver", _count("driver")),
            ("power limit", _count("power_limit")),
            ("CUDA", _count("cuda")),
            ("cores", _count("num_cores")),
            ("copy, GB/s", _plain("copy_gbps", 0)),
            ("product, TFLOP/s", _plain("product_tflops", 0)),
        ],
    ),
    "decode": (
        "Decode: ms between two tokens",
        [
            SHAPE,
            ("rows", _count("batch")),
            ("context", _plain("context_len", 0)),
            ("TPOT", _plain("tpot_ms", 3)),
            ("repeats", lambda each: spread(each.row["all_ms"], 3)),
            _aim(lambda aims, row: aims.tpot_ms.get(row["batch"]), 2),
            _other(lambda others, row: others.tpot_ms.get(row["batch"]), 2),
            ("share of the byte floor", _share(lambda row: row["tpot_ms"])),
            ("step", _step("interval_ms")),
            ("p99", _step("interval_p99_ms")),
            ("device", _step("device_ms")),
            ("host", _step("launch_ms")),
            ("idle", _idle),
        ],
    ),
    "steps": (
        "Decode steps alone, ms",
        [
            SHAPE,
            ("rows", _count("batch")),
            ("context", _plain("context_len", 0)),
            ("temperature", _plain("temperature")),
            ("step", _step("interval_ms")),
            ("p99", _step("interval_p99_ms")),
            ("device", _step("device_ms")),
            ("host", _step("launch_ms")),
            ("idle", _idle),
            ("share of the byte floor", _share(lambda row: row["steps"]["interval_ms"])),
            _aim(lambda aims, row: aims.tpot_ms.get(row["batch"]), 2),
        ],
    ),
    "first-token": (
        "One prompt to its first token, ms",
        [
            SHAPE,
            ("prompt", _count("input_len")),
            ("ms", _plain("ms", 2)),
            ("repeats", lambda each: spread(each.row["all_ms"], 2)),
            _aim(lambda aims, row: aims.first_token_ms),
            _other(lambda others, row: others.first_token_ms),
        ],
    ),
    "prefill": (
        "Prefill of many prompts, tokens/s",
        [
            SHAPE,
            ("prompts", _count("num_requests")),
            ("of", _count("input_len")),
            ("tokens/s", _plain("tps", 0)),
            ("repeats, s", lambda each: spread(each.row["all_s"], 2)),
            _other(lambda others, row: others.prefill_tps, 0),
        ],
    ),
    "throughput": (
        "Offline, output tokens/s",
        [
            SHAPE,
            ("requests", _count("num_requests")),
            ("in", _count("input_len")),
            ("out", _count("output_len")),
            ("temperature", _plain("temperature")),
            ("tokens/s", _plain("tps", 0)),
            ("repeats, s", lambda each: spread(each.row["all_s"], 2)),
            _aim(lambda aims, row: aims.offline_tps, 0),
            _other(lambda others, row: others.offline_tps, 0),
            ("idle", _idle),
            ("preemptions", _count("num_preemptions")),
        ],
    ),
    "mix": (
        "Offline, lengths that vary (nano-vllm's benchmark), output tokens/s",
        [
            SHAPE,
            ("requests", _count("num_requests")),
            ("prompt tokens", _count("num_prompt_tokens")),
            ("output tokens", _count("num_output_tokens")),
            ("tokens/s", _plain("tps", 0)),
            ("repeats, s", lambda each: spread(each.row["all_s"], 2)),
            ("idle", _idle),
        ],
    ),
    "capacity": (
        "Requests that a pool of KV holds at once",
        [
            SHAPE,
            ("KV cache", _count("kv_cache_dtype")),
            ("blocks", _count("num_blocks")),
            ("requests", _count("num_requests")),
            ("in", _count("input_len")),
            ("out", _count("output_len")),
            ("most at once", _count("most_running")),
            ("median", _plain("median_running", 0)),
            ("tokens/s", _plain("tps", 0)),
            ("preemptions", _count("num_preemptions")),
        ],
    ),
    "online": (
        "Online, over HTTP; times in ms",
        [
            SHAPE,
            ("concurrency", _count("concurrency")),
            ("requests", _count("num_requests")),
            ("output tokens/s", _plain("tps", 0)),
            ("repeats", lambda each: spread(each.row["all_tps"], 0)),
            _aim(lambda aims, row: aims.online_tps.get(row["concurrency"]), 0),
            _other(lambda others, row: others.online_tps.get(row["concurrency"]), 0),
            ("TTFT median", _latency("ttft", "median")),
            ("p99", _latency("ttft", "p99")),
            (
                "p99 aim",
                lambda each: number(
                    aims_of(each.shape or "").online_ttft_p99_ms if each.row["concurrency"] == 256 else None
                ),
            ),
            ("TPOT median", _latency("tpot", "median")),
            ("p99", _latency("tpot", "p99")),
            ("ITL median", _latency("itl", "median")),
            ("p99", _latency("itl", "p99")),
            ("idle", _idle),
            ("server CPU µs/token", _plain("server_cpu_us_per_token", 0)),
            ("sound", lambda each: "yes" if each.row["is_sound"] else f"no: {each.row['failures']}"),
        ],
    ),
    "start": (
        "Start of the server, s since its process was started",
        [
            SHAPE,
            ("mode", _count("mode")),
            ("listening", _plain("listening_s", 2)),
            ("ready", _plain("ready_s", 2)),
            ("first token", _plain("first_token_s", 2)),
            ("graphs captured", _plain("warm_s", 2)),
            _aim(lambda aims, row: aims.ready_s),
            _other(lambda others, row: others.ready_s),
        ],
    ),
    "engine-start": (
        "Start of the engine in `LLM`, s (imports apart; the first of a machine compiles kernels)",
        [SHAPE, ("ready", _plain("start_s", 2)), ("graphs captured after", _plain("graphs_s", 2))],
    ),
    "clients": (
        "What the clients could take at least",
        [
            ("processes", _count("num_processes")),
            ("concurrency", _count("concurrency")),
            ("events/s", _plain("tps", 0)),
        ],
    ),
    "kernels-of-step": (
        "A decode step by its kernels, µs (under the profiler)",
        [
            SHAPE,
            ("rows", _count("batch")),
            ("steps", _count("num_steps")),
            ("first to last", _plain("device_us")),
            ("busy", _plain("busy_us")),
            ("sum", _plain("sum_us")),
        ],
    ),
}
"""Kind of row → heading and columns of its table."""

NUM_KERNELS = 30


def line(measured: Measured) -> str:
    """Return a row as a line for people."""
    kind = measured.row["kind"]
    if kind not in TABLES:
        return str(kind)
    _, cells = TABLES[kind]
    written = [f"{title} {write(measured)}" for title, write in cells if title != "shape"]
    return f"{kind}: " + " | ".join(each for each in written if not each.endswith(" -"))


def combined(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return runs with only the parts that no later run has done, too; what the machine reaches stays."""
    taken: set[str] = set()
    kept = []
    for run in reversed(runs):
        parts = [part for part in run["parts"] if part["name"] == "machine" or part["name"] not in taken]
        taken |= {part["name"] for part in run["parts"] if part["status"] == "done"}
        kept.append({**run, "parts": parts})
    return kept[::-1]


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of one or several runs."""
    lines = ["# On a GPU, measured by `python -m loadtest.gpu`", ""]
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        label = f", {run['label']}" if run["label"] else ""
        lines += [f"{run['date']}, commit {run['commit']}{label}; {versions}.", f"`{run['command']}`", ""]
    rows = [
        Measured(row, part["shape"], copy_gbps(run))
        for run in runs
        for part in run["parts"]
        for row in part["rows"]
    ]
    for kind, (heading, cells) in TABLES.items():
        of_kind = [each for each in rows if each.row["kind"] == kind]
        if of_kind:
            lines += [f"## {heading}", "", *_table(cells, of_kind), ""]
        if kind == "kernels-of-step":
            for each in of_kind:
                lines += _kernels(each)
    lines += ["## Parts", "", "| part | status | s |", "|---|---|---|"]
    for part in (part for run in runs for part in run["parts"]):
        error = f": {part['error'].splitlines()[0][:200]}" if part["error"] else ""
        lines.append(f"| {part['name']} | {part['status']}{error} | {number(part['took_s'])} |")
    return "\n".join(lines) + "\n"


def _table(cells: Sequence[Cell], rows: Sequence[Measured]) -> Iterator[str]:
    yield "| " + " | ".join(title for title, _ in cells) + " |"
    yield "|" + "---|" * len(cells)
    for each in rows:
        yield "| " + " | ".join(write(each) for _, write in cells) + " |"


def _kernels(each: Measured) -> list[str]:
    lines = [
        f"**{each.shape}, {each.row['batch']} rows**",
        "",
        "| kernel | calls | µs | share |",
        "|---|---|---|---|",
    ]
    for kernel in each.row["kernels"][:NUM_KERNELS]:
        name = kernel["name"].replace("|", " ")
        lines.append(
            f"| `{name}` | {number(kernel['calls'])} | {number(kernel['us'])} | {percent(kernel['share'])} |"
        )
    return [*lines, ""]
