"""Curves of a run, small enough to keep: percentiles, tokens over time, goodput as limits move, turns.

Takes `Record`s, gives plain values for a results file; what they mean stands with each function. Plots are
drawn from these alone, so that a report can be made of any results file.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.client import Record
from loadtest.report import Distribution, keeps, latencies_ms

Floats = NDArray[np.float64]
PERCENTILES: tuple[float, ...] = (0, 1, 2, *range(5, 95, 5), *range(95, 100), 99.5, 99.9, 100)
"""Those of the percentile curves."""
SCALES = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
"""What the limits are multiplied by in the goodput curve."""
MOST_INTERVALS = 50
NICE_INTERVALS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)


def percentiles_of(values_ms: Mapping[str, Sequence[float]]) -> dict[str, list[float] | None]:
    """Return each latency's values in ms, and under `at` the percentiles that they are.

    Args:
        values_ms: Every latency by its short name, as `report.latencies_ms` gives them. One without a value
            becomes None.
    """
    found: dict[str, list[float] | None] = {"at": list(PERCENTILES)}
    for name, values in values_ms.items():
        curve = np.percentile(values, PERCENTILES) if len(values) else None
        found[name] = None if curve is None else [round(float(value), 4) for value in curve]
    return found


def over_time(records: Sequence[Record]) -> dict[str, Any]:
    """Return what happened in each interval of a run, from the first request sent.

    Returns:
        `interval_s`; `output_tokens`, those of an event counted when it came (an answer's tokens are spread
        evenly over its events); `started`, `completed` and `failed` requests; `running`, the mean number of
        requests that were out.
    """
    if not records:
        return {
            "interval_s": 1.0,
            "output_tokens": [],
            "started": [],
            "completed": [],
            "failed": [],
            "running": [],
        }
    began_s = min(record.started_s for record in records)
    duration_s = max(max(record.ended_s for record in records) - began_s, 1e-3)
    interval_s = next(
        (nice for nice in NICE_INTERVALS_S if duration_s / nice <= MOST_INTERVALS),
        math.ceil(duration_s / MOST_INTERVALS),
    )
    edges = np.arange(math.floor(duration_s / interval_s) + 2) * interval_s

    def counted(times_s: Sequence[float] | Floats, weights: Floats | None = None) -> list[float]:
        counts, _ = np.histogram(np.asarray(times_s, dtype=float) - began_s, bins=edges, weights=weights)
        return [round(float(count), 2) for count in counts]

    times, weights = _events(records)
    starts = np.asarray([record.started_s for record in records]) - began_s
    ends = np.asarray([record.ended_s for record in records]) - began_s
    out_s = [
        float(np.clip(np.minimum(ends, right) - np.maximum(starts, left), 0, None).sum())
        for left, right in itertools.pairwise(edges)
    ]
    return {
        "interval_s": float(interval_s),
        "output_tokens": counted(times, weights),
        "started": counted([record.started_s for record in records]),
        "completed": counted([record.ended_s for record in records if record.error is None]),
        "failed": counted([record.ended_s for record in records if record.error is not None]),
        "running": [round(seconds / interval_s, 2) for seconds in out_s],
    }


def _events(records: Sequence[Record]) -> tuple[Floats, Floats]:
    """Return when every event with content came, and how many tokens it stands for."""
    times: list[Floats] = [np.empty(0)]
    weights: list[Floats] = [np.empty(0)]
    for record in records:
        if record.first_s:
            since = np.concatenate(([0.0], np.cumsum(np.asarray(record.gaps_s, dtype=float))))
            times.append(record.first_s + since)
            weights.append(np.full(len(since), record.num_output_tokens / len(since)))
    return np.concatenate(times), np.concatenate(weights)


def goodput(
    records: Sequence[Record], limits_ms: Mapping[str, float], *, duration_s: float
) -> dict[str, list[float]] | None:
    """Return the `goodput`, requests/s, with all limits times each of `scales`; None without limits."""
    if not limits_ms:
        return None
    counts = [sum(keeps(record, limits_ms, scale=scale) for record in records) for scale in SCALES]
    return {"scales": list(SCALES), "goodput": [round(count / duration_s, 5) for count in counts]}


def turns(records: Sequence[Record]) -> list[dict[str, Any]] | None:
    """Return figures of each turn of conversations; None where nothing has a second turn."""
    by_turn: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_turn[record.turn].append(record)
    if len(by_turn) < 2:
        return None
    return [_of_turn(number, by_turn[number]) for number in sorted(by_turn)]


def _of_turn(number: int, records: Sequence[Record]) -> dict[str, Any]:
    completed = [record for record in records if record.error is None]
    num_prompt = sum(record.num_prompt_tokens for record in completed)
    told = [record.num_cached_tokens for record in completed if record.num_cached_tokens is not None]
    ttft = Distribution.of(latencies_ms(completed)["ttft"])
    return {
        "turn": number + 1,
        "num_requests": len(records),
        "num_completed": len(completed),
        "mean_prompt_tokens": num_prompt / len(completed) if completed else None,
        "prefix_cache_hit_rate": sum(told) / num_prompt if told and num_prompt else None,
        "ttft_median": ttft.median if completed else None,
        "ttft_p99": ttft.p99 if completed else None,
    }
