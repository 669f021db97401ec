"""Results files: one row per run, as JSON lines or in one JSON document, of a schema with a version.

The schema stands in `results.schema.json` beside this file. `read` understands every version: files of
version 1 had no such number, and lack machine, client and curves. Rows of one load and one command are the
repeats of one *point*.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import series
from loadtest.figures import Row, Rows
from loadtest.load import identity
from loadtest.report import LATENCIES

SCHEMA_VERSION = 2
SCHEMA_FILE = Path(__file__).parent / "results.schema.json"
_REPEAT = re.compile(r"( #\d+)?( \(\d+\))?$")
_ARRIVAL = re.compile(r", (concurrency \d|all at once|[\d.e+-]+/s).*$")
_WHEN = frozenset({"concurrency", "rate", "num_requests", "burst_size"})
"""Fields of a load that say how many requests come when."""
_EMPTY: Row = {
    "command": "run",
    "argv": None,
    "url": None,
    "commit": None,
    "server": {"version": None, "max_model_len": None},
    "machine": None,
    "versions": None,
    "limits_ms": {},
    "client": None,
    "user_throughput": None,
    "num_good": None,
    "good_share": None,
    "percentiles": None,
    "over_time": None,
    "goodput_by_scale": None,
    "turns": None,
    # Of the first files of version 1.
    "num_cached_tokens": None,
    "prefix_cache_hit_rate": None,
    "num_wrong_length": 0,
    "num_without_usage": 0,
    "goodput": None,
}


@dataclass(frozen=True, slots=True)
class Point:
    """The repeats of one load.

    Args:
        name: Of the load.
        rows: One per repeat.
    """

    name: str
    rows: Sequence[Row]

    def values(self, metric: str) -> list[float]:
        """Return a metric of every repeat that has it: `output_throughput`, `ttft_p99`."""
        return [value for row in self.rows if (value := metric_of(row, metric)) is not None]


def metric_of(row: Mapping[str, Any], metric: str) -> float | None:
    """Return a figure of a run: a field of its row, or of a latency (`ttft_p99`); None if it has none."""
    latency, _, statistic = metric.partition("_")
    found = row["latencies"][latency].get(statistic) if latency in LATENCIES else row.get(metric)
    return None if found is None else float(found)


def points(rows: Iterable[Row]) -> list[Point]:
    """Put the repeats of each load together, in the order in which the loads come first."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row["command"], repr(identity(row["load"]))), []).append(row)
    return [Point(group[0]["point"], group) for group in found.values()]


def families(found: Iterable[Point]) -> dict[str, list[Point]]:
    """Put together the loads that differ in nothing but how many requests come when: one line of a plot.

    Returns:
        What the loads of a family have in common → them.
    """
    by_kind: dict[str, list[Point]] = {}
    names: dict[str, str] = {}
    for point in found:
        what = [pair for pair in identity(point.rows[0]["load"]) if pair[0] not in _WHEN]
        by_kind.setdefault(repr(what), []).append(point)
        names.setdefault(repr(what), _ARRIVAL.sub("", point.name))
    # Two kinds may have one name where it leaves out what tells them apart, such as a temperature.
    kinds = list(by_kind)
    shown = [names[kind] for kind in kinds]
    return {
        names[kind] + (f" ({number + 1})" if shown.count(names[kind]) > 1 else ""): by_kind[kind]
        for number, kind in enumerate(kinds)
    }


def read(path: Path) -> Rows:
    """Return the rows of a results file of any version, as rows of this one.

    Raises:
        ValueError: It is no results file of `python -m loadtest`, or of a version to come.
        OSError: It cannot be read.
    """
    content = path.read_text(encoding="utf-8")
    try:
        try:
            documents = [json.loads(content)]
        except json.JSONDecodeError:
            documents = [json.loads(line) for line in content.splitlines() if line.strip()]
        rows = [row for document in documents for row in _rows(document)]
        return [_upgraded(row) for row in rows]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no results file of python -m loadtest") from error


def _rows(document: Any) -> Iterable[Row]:
    if not isinstance(document, dict):
        raise TypeError("not an object")
    if "runs" not in document:
        return [dict(document)]
    about = {name: value for name, value in document.items() if name not in ("runs", "repeats", "search")}
    return [about | run for run in document["runs"]]


def _upgraded(row: Row) -> Row:
    version: int = row.get("schema_version", 1)
    if version == SCHEMA_VERSION:
        return row
    if version != 1:
        raise ValueError(f"a results file of version {version}; this reads up to {SCHEMA_VERSION}")
    latencies = {name: {"p95": None, "p999": None} | dict(row["latencies"][name]) for name in LATENCIES}
    tpot_ms: float | None = latencies["tpot"]["median"]
    values = row.get("values_ms")
    upgraded = _EMPTY | row | {"schema_version": SCHEMA_VERSION, "latencies": latencies}
    upgraded["point"] = _REPEAT.sub("", row["name"])
    upgraded["user_throughput"] = 1000 / tpot_ms if tpot_ms else None
    if values is not None:
        upgraded["percentiles"] = series.percentiles_of(values)
    return upgraded


def append(path: Path, row: Row) -> None:
    """Append a row to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
