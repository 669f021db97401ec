"""One results file held against another: what differs beyond noise, and what does not.

Runs of the same load (everything but the seed) are compared, metric by metric: the ratio of the medians over
the repeats, and the least and greatest ratio that the repeats allow. A metric *differs* when those ratios lie
all on one side of 1, that is, when no repeat of the one is within the other's range. Chance alone does that
to `chance` of all metrics (1 in 10 with three repeats each, 1 in 126 with five); with a single run each
nothing is known of the noise, and nothing is said to differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.figures import Row
from loadtest.load import identity
from loadtest.results import Point, points

METRICS: dict[str, str] = {
    "output_throughput": "output tok/s",
    "request_throughput": "requests/s",
    "user_throughput": "tok/s per user",
    "goodput": "goodput, requests/s",
    "ttft_median": "TTFT median, ms",
    "ttft_p99": "TTFT p99, ms",
    "tpot_median": "TPOT median, ms",
    "tpot_p99": "TPOT p99, ms",
    "itl_median": "ITL median, ms",
    "itl_p99": "ITL p99, ms",
    "e2el_median": "E2EL median, ms",
    "e2el_p99": "E2EL p99, ms",
}
"""Every metric that is compared, and what people read."""
MORE_IS_BETTER = frozenset({"output_throughput", "request_throughput", "user_throughput", "goodput"})
ABOUT = ("label", "commit", "model", "server", "machine", "versions", "url", "argv")
"""What is said beside the figures where it differs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one load.

    Args:
        metric: Its name in `METRICS`.
        before: Median of the first file.
        after: Median of the second.
        ratio: The second over the first.
        least: Least ratio that the repeats allow.
        greatest: Greatest ratio that the repeats allow.
        num_repeats: Of the first file and of the second.
    """

    metric: str
    before: float
    after: float
    ratio: float
    least: float
    greatest: float
    num_repeats: tuple[int, int]

    @property
    def has_spread(self) -> bool:
        """Whether both sides were repeated."""
        return min(self.num_repeats) > 1

    @property
    def differs(self) -> bool:
        """Whether the difference is beyond noise."""
        return self.has_spread and not self.least <= 1 <= self.greatest

    @property
    def worse_by(self) -> float:
        """By what share of the first the second is less, or more where less is better; below 0 if better."""
        return 1 - self.ratio if self.metric in MORE_IS_BETTER else self.ratio - 1

    @property
    def verdict(self) -> str:
        """Say it in a word or two."""
        if not self.has_spread:
            return "one run"
        if not self.differs:
            return "same"
        return "worse" if self.worse_by > 0 else "better"

    def is_slower(self, limit: float) -> bool:
        """Whether it is worse by more than a share, as far as the noise is known."""
        return self.worse_by > limit and (self.differs or not self.has_spread)


@dataclass(frozen=True, slots=True)
class Compared:
    """One load in both files.

    Args:
        before: Its runs in the first file.
        after: Its runs in the second.
        differences: Of each metric that both have.
        remarks: What else is not equal: failures, token counts.
    """

    before: Point
    after: Point
    differences: Sequence[Difference]
    remarks: Sequence[str]

    @property
    def fails_more(self) -> bool:
        """Whether a greater share of requests went wrong than before."""
        return _failed_share(self.after) > _failed_share(self.before)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two files.

    Args:
        loads: Those in both.
        only_before: Loads that only the first file has.
        only_after: Loads that only the second has.
        about: What differs beside the figures: name, the first's, the second's.
    """

    loads: Sequence[Compared]
    only_before: Sequence[str]
    only_after: Sequence[str]
    about: Sequence[tuple[str, str, str]]

    def slower(self, limit: float, metrics: Sequence[str] | None = None) -> list[tuple[Compared, Difference]]:
        """Return what is worse by more than a share.

        Args:
            limit: The share.
            metrics: Only these count; None for all.
        """
        return [
            (load, difference)
            for load in self.loads
            for difference in load.differences
            if (metrics is None or difference.metric in metrics) and difference.is_slower(limit)
        ]


def compare(before: Sequence[Row], after: Sequence[Row]) -> Comparison:
    """Hold the rows of one file against those of another.

    Raises:
        ValueError: They have no load in common.
    """
    first = {_key(point): point for point in points(before)}
    second = {_key(point): point for point in points(after)}
    loads = [_compared(first[key], second[key]) for key in first if key in second]
    if not loads:
        raise ValueError(
            "the files have no load in common: "
            f"{', '.join(point.name for point in first.values())}; "
            f"{', '.join(point.name for point in second.values())}"
        )
    return Comparison(
        loads=loads,
        only_before=[point.name for key, point in first.items() if key not in second],
        only_after=[point.name for key, point in second.items() if key not in first],
        about=[
            (name, one, other)
            for name in ABOUT
            if (one := _said(before, name)) != (other := _said(after, name))
        ],
    )


def chance(num_before: int, num_after: int) -> float:
    """Return how often chance alone puts all repeats of one side beyond all of the other."""
    return 2 / math.comb(num_before + num_after, num_before)


def _key(point: Point) -> str:
    return repr(identity(point.rows[0]["load"]))


def _compared(before: Point, after: Point) -> Compared:
    differences = []
    for metric in METRICS:
        one, other = before.values(metric), after.values(metric)
        if one and other and median(one) > 0:
            differences.append(_difference(metric, one, other))
    remarks = []
    for name, text in (("num_output_tokens", "output tokens"), ("num_prompt_tokens", "prompt tokens")):
        counts = [{row[name] for row in point.rows} for point in (before, after)]
        if counts[0] != counts[1] and max(counts[0] | counts[1]) > 1.02 * min(counts[0] | counts[1]):
            remarks.append(f"{text} differ: {_several(counts[0])} and {_several(counts[1])}")
    shares = [_failed_share(point) for point in (before, after)]
    if any(shares):
        remarks.append(f"requests that went wrong: {shares[0]:.2%} and {shares[1]:.2%}")
    return Compared(before, after, differences, remarks)


def _difference(metric: str, before: Sequence[float], after: Sequence[float]) -> Difference:
    return Difference(
        metric,
        before=median(before),
        after=median(after),
        ratio=median(after) / median(before),
        least=min(after) / max(before),
        greatest=max(after) / min(before) if min(before) > 0 else math.inf,
        num_repeats=(len(before), len(after)),
    )


def _failed_share(point: Point) -> float:
    wrong = sum(row["num_requests"] - row["num_completed"] + row["num_wrong_length"] for row in point.rows)
    return float(wrong / max(sum(row["num_requests"] for row in point.rows), 1))


def _several(counts: set[int]) -> str:
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _said(rows: Sequence[Row], name: str) -> str:
    """Return what the rows say under a name, each saying once."""
    values = {_plain(row.get(name)): None for row in rows}
    return "; ".join(values)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items() if inner is not None)
    return "-" if value in (None, "") else str(value)


def to_text(found: Comparison, names: tuple[str, str]) -> str:
    """Return the comparison as text for people.

    Args:
        found: The comparison.
        names: What the files are called.
    """
    lines = [f"before  {names[0]}", f"after   {names[1]}"]
    lines += [f"{name}: {one}  →  {other}" for name, one, other in found.about]
    for load in found.loads:
        counts = load.differences[0].num_repeats if load.differences else (0, 0)
        lines += ["", f"== {load.before.name} ({counts[0]} and {counts[1]} runs)"]
        lines += [f"! {remark}" for remark in load.remarks]
        lines.append(f"{'':22}{'before':>12}{'after':>12}{'ratio':>9}  {'(lowest - highest)':20}")
        for difference in load.differences:
            spread = f"({difference.least:.3f} - {difference.greatest:.3f})" if difference.has_spread else ""
            lines.append(
                f"{METRICS[difference.metric]:22}{difference.before:12.2f}{difference.after:12.2f}"
                f"{difference.ratio:9.3f}  {spread:20}  {difference.verdict}"
            )
    lines.append("")
    lines += [f"only before: {name}" for name in found.only_before]
    lines += [f"only after: {name}" for name in found.only_after]
    differing = [difference for load in found.loads for difference in load.differences if difference.differs]
    total = sum(len(load.differences) for load in found.loads)
    spread_known = [one for load in found.loads for one in load.differences if one.has_spread]
    lines.append(f"{len(differing)} of {total} metrics differ beyond noise.")
    if spread_known:
        expected = sum(chance(*one.num_repeats) for one in spread_known)
        lines.append(f"Chance alone would make {expected:.1f} of them seem to, were they independent.")
    if len(spread_known) < total:
        lines.append("Of single runs nothing is known: use --repeat.")
    return "\n".join(lines)


def to_json(found: Comparison) -> dict[str, object]:
    """Return plain values for a JSON file."""
    return {
        "about": [{"name": name, "before": one, "after": other} for name, one, other in found.about],
        "loads": [
            {
                "name": load.before.name,
                "remarks": list(load.remarks),
                "metrics": {
                    one.metric: {
                        "before": one.before,
                        "after": one.after,
                        "ratio": one.ratio,
                        "least": one.least if one.has_spread else None,
                        "greatest": one.greatest if one.has_spread and one.greatest != math.inf else None,
                        "verdict": one.verdict,
                    }
                    for one in load.differences
                },
            }
            for load in found.loads
        ],
        "only_before": list(found.only_before),
        "only_after": list(found.only_after),
    }
