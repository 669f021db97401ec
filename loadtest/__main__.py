"""`python -m loadtest [run | sweep | search | compare | report | ceiling] …`; without a command: `run`.

Options come from the command line; a scenario file gives several runs their options, which the command line
overrides. Prints a table per run and, after several, one row for each and the spread over its repeats.
"""

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import (
    ceiling,
    client_processes,
    comparison,
    html_report,
    options,
    pareto,
    report,
    results,
    search,
)
from loadtest.client import ConnectionLost
from loadtest.figures import Row, Rows
from loadtest.options import Plan
from loadtest.session import Session, Target, command_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says.

    Returns:
        0 if all is well; 1 if a request was not answered in full, a comparison failed or a search found
        nothing; 2 for an error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command, arguments = options.parsed(words)
    try:
        if command == "compare":
            return _compare(arguments)
        if command == "report":
            return _report(arguments)
        if command == "ceiling":
            return _ceiling(arguments)
        return _measure(command, arguments, command_line(words))
    except (ValueError, OSError, ConnectionLost) as error:
        print(f"loadtest: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _measure(command: str, arguments: argparse.Namespace, argv: str) -> int:
    plan = options.plan(command, arguments)
    limits_ms = options.limits(arguments.goodput)
    if plan.search is not None and not limits_ms:
        raise ValueError("a search needs limits: --goodput ttft:500 tpot:50")
    pictures = [arguments.png, getattr(arguments, "pareto", None)]
    if any(path is not None for path in pictures) and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a picture needs matplotlib: pip install '.[loadtest]'")
    kind = "sweep" if plan.sweep is not None else "search" if plan.search is not None else "run"
    session = Session(
        Target(
            url=arguments.url,
            model=arguments.model,
            api_key=arguments.api_key,
            tokenizer=arguments.tokenizer,
        ),
        limits_ms=limits_ms,
        num_processes=arguments.client_processes,
        measures_ceiling=arguments.ceiling,
        about={"command": kind, "argv": argv, "label": arguments.label, "scenario": plan.scenario},
        results_file=arguments.results,
        keeps_records=arguments.png is not None or arguments.json is not None,
    )
    found: dict[str, Any] = {}
    try:
        is_well = _run(session, plan, found)
    finally:
        session.close()
        # What was measured before an error or Ctrl-C is kept.
        if session.rows:
            _write(arguments, session, found)
    return 0 if is_well else 1


def _run(session: Session, plan: Plan, found: dict[str, Any]) -> bool:
    if plan.sweep is not None:
        _sweep(session, plan)
        return session.is_sound
    if plan.search is not None:
        return _search(session, plan, found)
    for number, load in enumerate(plan.loads):
        for turn in range(load.repeat):
            session.measure(load, run=number, turn=turn)
    if len(session.rows) > 1:
        print(_summary(session.rows))
    if any(load.repeat > 1 for load in plan.loads):
        print(_spread_table(_spreads(session.rows)))
    return session.is_sound


def _sweep(session: Session, plan: Plan) -> None:
    assert plan.sweep is not None
    points: list[Rows] = []
    for number, value in enumerate(plan.sweep.values()):
        load = plan.sweep.at(plan.loads[0], value)
        points.append([session.measure(load, run=number, turn=turn) for turn in range(load.repeat)])
        why = plan.sweep.is_saturated(points)
        if why:
            print(f"\nthe sweep ends here: {why}")
            break
    print(_summary(session.rows))
    found = results.points(session.rows)
    print(pareto.to_text(found))
    print("", *pareto.conclusions(found), sep="\n")


def _search(session: Session, plan: Plan, found: dict[str, Any]) -> bool:
    wanted = plan.search
    assert wanted is not None
    tried: list[tuple[float, float]] = []

    def is_kept(rate: float) -> bool:
        load = wanted.at(plan.loads[0], rate)
        rows = [session.measure(load, run=len(tried), turn=turn) for turn in range(load.repeat)]
        share: float = sum(row["num_good"] for row in rows) / sum(row["num_requests"] for row in rows)
        tried.append((rate, share))
        print(f"\n{rate:.3f}/s: {share:.2%} of requests kept the limits", flush=True)
        return share >= wanted.share

    outcome = search.greatest(is_kept, first=wanted.first, last=wanted.last, precision=wanted.precision)
    found["search"] = {
        "share": wanted.share,
        "rate": outcome.rate,
        "too_great": outcome.too_great,
        "tried": [{"rate": rate, "share": share} for rate, share in tried],
    }
    print(f"\n{'rate, 1/s':>12}{'within limits':>16}")
    for rate, share in sorted(tried):
        print(f"{rate:12.3f}{share:16.2%}")
    if outcome.rate is None:
        lowest = min(rate for rate, _ in tried)
        print(f"\nno rate down to {lowest:.3g}/s keeps the limits for {wanted.share:.2%} of requests")
        return False
    beyond = (
        "none beyond was tried" if outcome.too_great is None else f"{outcome.too_great:.3f}/s is too much"
    )
    print(f"\ngreatest rate that keeps the limits for {wanted.share:.2%}: {outcome.rate:.3f}/s ({beyond})")
    return True


def _summary(rows: Sequence[Row]) -> str:
    width = max(len(row["name"]) for row in rows)
    latencies = ("ttft", "tpot", "itl")
    titles = "".join(f"{f'{name.upper()} median / p99, ms':>24}" for name in latencies)
    lines = ["", f"{'run':{width}}  {'out tok/s':>9}  {'per user':>8}{titles}  {'cached':>6}  {'failed':>6}"]
    for row in rows:
        cells = "".join(
            f"{_figure(row['latencies'][name]['median'])} / {_figure(row['latencies'][name]['p99'])}".rjust(
                24
            )
            for name in latencies
        )
        failed = row["num_requests"] - row["num_completed"] + row["num_wrong_length"]
        hit_rate = row["prefix_cache_hit_rate"]
        cached = "-" if hit_rate is None else f"{hit_rate:.1%}"
        lines.append(
            f"{row['name']:{width}}  {row['output_throughput']:9.1f}  {_figure(row['user_throughput']):>8}"
            f"{cells}  {cached:>6}  {failed:6}"
        )
    return "\n".join(lines)


SPREAD = {
    "output_throughput": "output tok/s",
    "total_throughput": "total tok/s",
    "ttft_median": "TTFT median, ms",
    "tpot_median": "TPOT median, ms",
}
"""The figures whose spread over the repeats of a run is shown."""


def _spreads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return, for each load with repeats, the median, lowest and highest of each figure in `SPREAD`."""
    spreads = []
    for point in results.points(rows):
        if len(point.rows) < 2:
            continue
        spread: dict[str, Any] = {"name": point.name, "num_repeats": len(point.rows)}
        for name in SPREAD:
            values = point.values(name)
            spread[name] = (
                {"median": statistics.median(values), "min": min(values), "max": max(values)}
                if values
                else None
            )
        spreads.append(spread)
    return spreads


def _spread_table(spreads: Sequence[Mapping[str, Any]]) -> str:
    heading = "repeats: median (lowest - highest)"
    width = max(len(heading), *(len(spread["name"]) for spread in spreads))
    lines = ["", f"{heading:{width}}" + "".join(f"{title:>28}" for title in SPREAD.values())]
    for spread in spreads:
        cells = [
            f"{value['median']:.1f} ({value['min']:.1f} - {value['max']:.1f})" if value else "-"
            for value in (spread[name] for name in SPREAD)
        ]
        lines.append(f"{spread['name']:{width}}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _write(arguments: argparse.Namespace, session: Session, found: Mapping[str, Any]) -> None:
    rows = session.rows
    if arguments.json is not None:
        detailed = [{**row, "values_ms": report.latencies_ms(session.records[row["name"]])} for row in rows]
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = {"schema_version": results.SCHEMA_VERSION, "date": date}
        content = {**about, "runs": detailed, "repeats": _spreads(rows), **found}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.html is not None:
        title = f"Load test of {rows[0]['model']}"
        html_report.write(arguments.html, {arguments.label: rows}, title=title)
    if arguments.png is not None:
        report.plot(session.records, arguments.png)
    if getattr(arguments, "pareto", None) is not None:
        pareto.draw({rows[0]["model"]: rows}, arguments.pareto)


def _compare(arguments: argparse.Namespace) -> int:
    names = _names([arguments.before, arguments.after])
    rows = {name: results.read(path) for name, path in names.items()}
    (first, before), (second, after) = rows.items()
    unknown = set(arguments.metrics or ()) - comparison.METRICS.keys()
    if unknown:
        raise ValueError(f"no metric {min(unknown)}; there are {', '.join(comparison.METRICS)}")
    found = comparison.compare(before, after)
    print(comparison.to_text(found, (first, second)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(comparison.to_json(found), indent=1) + "\n", encoding="utf-8")
    if arguments.html is not None:
        html_report.write(arguments.html, rows, title=f"{first} and {second}", comparison=found)
    if arguments.fail_if_slower is None:
        return 0
    slower = found.slower(arguments.fail_if_slower, arguments.metrics)
    for load, difference in slower:
        title = comparison.METRICS[difference.metric]
        noise = "" if difference.has_spread else " (of single runs: the noise is not known)"
        print(f"slower: {load.before.name}: {title} is worse by {difference.worse_by:.1%}{noise}")
    failing = [load for load in found.loads if load.fails_more]
    for load in failing:
        print(f"more requests go wrong: {load.before.name}")
    return 1 if slower or failing else 0


def _report(arguments: argparse.Namespace) -> int:
    files = {name: results.read(path) for name, path in _names(arguments.files).items()}
    html_report.write(arguments.output, files, title=arguments.title or "Load test")
    return 0


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """Call files by their names, or by their paths where two have the same."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise ValueError("the same file was given twice")
    return dict(zip(names, paths, strict=True))


def _ceiling(arguments: argparse.Namespace) -> int:
    count = max(arguments.client_processes, 1)
    print(f"{'streams':>8}{'processes':>11}{'read, tok/s':>14}{'busy':>8}{'ceiling, tok/s':>17}")
    with client_processes.running(count if count > 1 else 0) as clients:
        for concurrency in arguments.concurrency:
            found = ceiling.measure(clients, concurrency=concurrency, endpoint=arguments.endpoint)
            read = f"{found.replayed_tps:14,.0f}{found.cpu_share:8.0%}"
            print(f"{concurrency:8}{count:11}{read}{found.tps:17,.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
