"""Python's garbage collector, kept from pauses that streams would feel.

A collection takes about 0.4 µs for each object it looks at: a full one 20 to 50 ms after loading, and 10 ms
with a thousand requests running. Nearly all garbage is freed by counting references, and most of the rest
soon after it was made. So young objects are looked at once, a few at a time; all others when nothing runs, or
when very many have come together.
"""

import gc
from collections.abc import Callable

YOUNG_OBJECTS = 1_500
"""Objects made and not freed since the last collection that make a young one, which takes 0.6 ms: few enough
not to be felt, and more than the rows of a step over 1,000 sequences, which are freed with it."""
YOUNG_BEFORE_OLD = 400
"""So many young collections, hence up to a million objects, make one that looks at all that came since."""
OLD_BEFORE_FULL = 10


def settle_collector() -> Callable[[], None]:
    """Forget what lives now, which lives for good, and collect seldom; to be called when all is loaded.

    Returns:
        What puts the collector back as it was, for a process that is not ours alone. If it was settled
        already, that is left to whoever settled it first.
    """
    ours = (YOUNG_OBJECTS, YOUNG_BEFORE_OLD, OLD_BEFORE_FULL)
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*ours)

    def put_back() -> None:
        if before != ours:
            gc.unfreeze()
            gc.set_threshold(*before)

    return put_back


def collect_in_peace() -> None:
    """Collect what has outlived a young collection, if any was made; to be called when nothing runs."""
    if any(gc.get_count()[1:]):
        gc.collect()
