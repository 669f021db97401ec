"""Throughput against speed per user: the points of a sweep, and which of them nothing beats.

Takes rows of results files; a point is the median over the repeats of one load, with its lowest and highest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.figures import Row
from loadtest.results import Point, families, points

GOOD_SHARE = 0.99
"""A load keeps the limits if so many of its requests do, in the median over its repeats."""


@dataclass(frozen=True, slots=True)
class Range:
    """A figure over the repeats of a load."""

    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(values: Sequence[float]) -> "Range":
        """Put values together.

        Raises:
            ValueError: There is none.
        """
        return Range(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Trade:
    """One point: what all users get together, and what each gets.

    Args:
        point: Its runs.
        label: What was varied, such as `8`.
        user: Output tokens per second of one stream.
        total: Output tokens per second.
    """

    point: Point
    label: str
    user: Range
    total: Range


def trades(found_points: Iterable[Point]) -> list[Trade]:
    """Return the points that have both figures, by the speed of one user, slowest first."""
    found = []
    for point in found_points:
        user, total = point.values("user_throughput"), point.values("output_throughput")
        if user and total:
            found.append(Trade(point, label(point), Range.of(user), Range.of(total)))
    return sorted(found, key=lambda trade: trade.user.median)


def why_none(point: Point) -> str:
    """Say why a point has no place here, or "" if it has one."""
    if point.values("user_throughput"):
        return ""
    if not any(row["num_completed"] for row in point.rows):
        return "no request was answered in full"
    if not point.values("tpot_median"):
        return "no answer of two tokens, hence no speed per user"
    return "all tokens of an answer came in one read, hence no speed per user"


def to_text(found_points: Sequence[Point]) -> str:
    """Return a table of the points, the fastest user first; at its end those that have no place, and why."""
    found = trades(found_points)
    best = {trade.label for trade in on_front(found)}
    lines = ["", f"{'point':>8}{'tok/s per user':>28}{'output tok/s':>28}   Pareto"]
    for trade in reversed(found):
        cells = "".join(
            f"{value.median:.1f} ({value.lowest:.1f} - {value.highest:.1f})".rjust(28)
            for value in (trade.user, trade.total)
        )
        lines.append(f"{trade.label:>8}{cells}   {'yes' if trade.label in best else 'no'}")
    left_out = [(label(point), why) for point in found_points if (why := why_none(point))]
    lines += [f"{name:>8}   not compared: {why}" for name, why in left_out]
    return "\n".join(lines)


def conclusions(found_points: Sequence[Point]) -> list[str]:
    """Say in a sentence each which load gives most, and up to which the limits are kept, if there are any."""
    found = []
    if reached := [(median(values), point) for point in found_points if (values := _totals(point))]:
        most, point = max(reached, key=lambda each: each[0])
        found.append(f"most output tokens/s: {most:.1f}, at {_amount(point)}")
    limited = [point for point in found_points if point.values("good_share")]
    if limited:
        limits = ", ".join(
            f"{name.upper()} {value:g} ms" for name, value in limited[0].rows[0]["limits_ms"].items()
        )
        kept = [median(point.values("good_share")) >= GOOD_SHARE for point in limited]
        num_kept = kept.index(False) if False in kept else len(kept)
        said = f"up to {_amount(limited[num_kept - 1])}" if num_kept else "at none of these loads"
        found.append(f"{GOOD_SHARE:.0%} of requests keep the limits ({limits}) {said}")
    return found


def _totals(point: Point) -> list[float]:
    """Return output tokens/s of the repeats; none if nothing was answered."""
    return point.values("output_throughput") if any(row["num_completed"] for row in point.rows) else []


def _amount(point: Point) -> str:
    load = point.rows[0]["load"]
    if load.get("concurrency") is not None:
        return f"{load['concurrency']} requests at once"
    return "all requests at once" if load.get("rate") is None else f"{load['rate']:.3g} requests/s"


def label(point: Point) -> str:
    """Return what was varied: the concurrency, or else the rate."""
    load = point.rows[0]["load"]
    if load.get("concurrency") is not None:
        return str(load["concurrency"])
    return "all" if load.get("rate") is None else f"{load['rate']:.3g}/s"


def front(values: Sequence[tuple[float, float]]) -> list[int]:
    """Return which pairs nothing beats: no other is as good in both values and better in one; more is better.

    Returns:
        Their indices, by the first value, ascending.
    """
    best = float("-inf")
    kept: list[int] = []
    for index in sorted(range(len(values)), key=lambda index: values[index], reverse=True):
        if values[index][1] > best or (kept and values[index] == values[kept[-1]]):
            kept.append(index)
            best = values[index][1]
    return kept[::-1]


def on_front(found: Sequence[Trade]) -> list[Trade]:
    """Return the points that nothing beats, slowest user first."""
    return [found[index] for index in front([(trade.user.median, trade.total.median) for trade in found])]


def lines(files: Mapping[str, Sequence[Row]]) -> dict[str, list[Trade]]:
    """Return what is drawn as one line: the loads of a file that differ only in how many requests come when.

    Args:
        files: What a file is called → its rows.
    """
    found: dict[str, list[Trade]] = {}
    for name, rows in files.items():
        kinds = families(points(rows))
        for kind, members in kinds.items():
            label = ": ".join(part for part in (name, kind if len(kinds) > 1 or not name else "") if part)
            found[label] = trades(members)
    return {label: line for label, line in found.items() if len(line) > 1 or len(found) == 1}


def draw(files: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw tokens/s against tokens/s per user, as PNG or SVG by the file's name; one line per name.

    Args:
        files: What a line is called → its rows.
        path: The file to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name, found in lines(files).items():
        line = panel.plot(
            [trade.user.median for trade in on_front(found)],
            [trade.total.median for trade in on_front(found)],
            label=name,
        )
        panel.errorbar(
            [trade.user.median for trade in found],
            [trade.total.median for trade in found],
            xerr=_errors([trade.user for trade in found]),
            yerr=_errors([trade.total for trade in found]),
            fmt="o",
            color=line[0].get_color(),
            markersize=4,
            capsize=2,
        )
        for trade in found:
            panel.annotate(
                trade.label,
                (trade.user.median, trade.total.median),
                textcoords="offset points",
                xytext=(5, 5),
                fontsize="small",
            )
    panel.set(
        xlabel="output tokens/s per user (1000 / median TPOT)", ylabel="output tokens/s", ylim=(0, None)
    )
    panel.set_xlim(0, None)
    panel.grid(visible=True, alpha=0.3)
    if len(panel.lines) > 1:
        panel.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _errors(ranges: Sequence[Range]) -> list[list[float]]:
    return [
        [found.median - found.lowest for found in ranges],
        [found.highest - found.median for found in ranges],
    ]
