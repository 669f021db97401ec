"""A search for the greatest request rate at which a given share of requests keeps its limits.

The rate is doubled until it is too great, or halved until it is not, and then bisected. `greatest` knows only
a function that says whether a rate is kept; what that costs is the caller's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.load import Load

LEAST_SHARE = 1 / 16
"""Of the first rate; below it nothing is tried: what fails there fails alone."""


FINEST = 0.002
"""A finer precision is none: two trials of one rate differ by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """What is looked for; names as on the command line.

    Args:
        share: Of all requests, those that must keep every limit.
        first: Rate to begin with, requests per second.
        last: Greatest rate to try.
        precision: The search ends when a rate that is kept and one that is not are this near, as a share.
        seconds: Shortest run of each rate: a queue takes time to build up.
    """

    share: float = 0.99
    first: float = 1.0
    last: float = 4096.0
    precision: float = 0.05
    seconds: float = 30.0

    def at(self, load: Load, rate: float) -> Load:
        """Return the load of one rate.

        Raises:
            ValueError: It cannot be run.
        """
        count = max(load.num_requests, math.ceil(rate * self.seconds))
        return load.changed(rate=rate, num_requests=count)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Args:
        rate: The greatest rate that was kept; None if none was, down to `LEAST_SHARE` of the first.
        too_great: The smallest rate above it that was not; None if even the greatest was kept.
    """

    rate: float | None
    too_great: float | None


def greatest(is_kept: Callable[[float], bool], *, first: float, last: float, precision: float) -> Found:
    """Find the greatest rate that is kept, as far as one trial of each rate can tell.

    Args:
        is_kept: Tries a rate.
        first: Rate to begin with.
        last: Greatest rate to try.
        precision: Ends when the two rates of the result are this near, as a share of the lower.
    """
    kept: float | None = None
    too_great: float | None = None
    rate = min(first, last)
    while kept is None or too_great is None:
        if is_kept(rate):
            kept = rate
            if kept >= last:
                return Found(kept, None)
            rate = min(2 * rate, last)
        else:
            too_great = rate
            rate /= 2
            if rate < LEAST_SHARE * first:
                return Found(None, too_great)
    while too_great > (1 + max(precision, FINEST)) * kept:
        # Four digits are more than the finest precision asks for, and people can read them.
        rate = float(f"{math.sqrt(kept * too_great):.4g}")
        if is_kept(rate):
            kept = rate
        else:
            too_great = rate
    return Found(kept, too_great)
