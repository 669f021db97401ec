"""A sweep: one load at 1, 2, 4 … requests at once, or per second, until the server is saturated.

A `SweepPlan` gives the loads one after the other and, from what each brought, says when there is nothing more
to gain. Measures nothing itself.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.load import Load

BELOW_RATE = 0.9
"""A server that answers less than this share of the requests that arrive is saturated."""
MOST_FAILED = 0.05
"""With a greater share of failed requests there is no use in asking for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What is varied, and when to stop; names as on the command line.

    Args:
        over: `concurrency` or `rate`.
        points: Its values; None for doubling.
        first: First value when doubling.
        last: Greatest value when doubling.
        gain: Saturated once two points in a row bring less than this share over the best before.
        requests_per_user: Requests at a concurrency of n: n times this, if that is more than the load's.
        seconds: Shortest run at a rate.
        has_warmup: Whether the load's own warm-up is meant; else every stream is warmed up once.
    """

    over: str = "concurrency"
    points: Sequence[float] | None = None
    first: float = 1.0
    last: float = 1024.0
    gain: float = 0.05
    requests_per_user: int = 10
    seconds: float = 30.0
    has_warmup: bool = False

    def values(self) -> list[float]:
        """Return what is to be tried, in order.

        Raises:
            ValueError: There is nothing between the bounds.
        """
        if self.points is not None:
            return sorted(self.points)
        if not 0 < self.first <= self.last:
            raise ValueError(f"a sweep from {self.first:g} to {self.last:g}: it must rise, from above 0")
        count = max(math.floor(math.log2(self.last / self.first)) + 1, 1)
        return [self.first * 2**step for step in range(count)]

    def at(self, load: Load, value: float) -> Load:
        """Return the load of one point.

        Raises:
            ValueError: It cannot be run.
        """
        if self.over == "rate":
            count = max(load.num_requests, math.ceil(value * self.seconds))
            return load.changed(rate=value, num_requests=count)
        users = int(value)
        return load.changed(
            concurrency=users,
            num_requests=max(self.requests_per_user * users, load.num_requests),
            warmup=load.warmup if self.has_warmup else users,
        )

    def is_saturated(self, points: Sequence[Sequence[Mapping[str, Any]]]) -> str:
        """Say why the sweep ends after these points, or "" if it goes on.

        Args:
            points: The rows of each point so far, its repeats.
        """
        last = points[-1]
        failed = sum(row["num_requests"] - row["num_completed"] for row in last)
        if failed > MOST_FAILED * sum(row["num_requests"] for row in last):
            return f"{failed} requests failed"
        if self.over == "rate":
            rate = last[0]["load"]["rate"]
            answered = statistics.median(row["request_throughput"] for row in last)
            return (
                f"{answered:.2f} of {rate:g} requests/s are answered" if answered < BELOW_RATE * rate else ""
            )
        reached = [statistics.median(row["output_throughput"] for row in rows) for rows in points]
        if len(reached) < 3 or max(reached[-2:]) >= (1 + self.gain) * max(reached[:-2]):
            return ""
        return f"two points brought less than {self.gain:.0%} over {max(reached[:-2]):.1f} output tok/s"
