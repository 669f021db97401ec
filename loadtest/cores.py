"""Which cores run what: those of a server and those of its clients, on one machine.

Takes and gives core numbers. Where the machine does not let a process choose its cores, everything runs
anywhere, as if nothing had been asked for.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def on_cores(cores: Sequence[int] | None) -> Iterator[None]:
    """Let what is started in the block run on the given cores only; None for any."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a sandbox may not let it
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def split_cores() -> tuple[list[int], list[int]]:
    """Return the cores of the server and those of the clients: half each, or one and the same.

    Two threads of one core go to the same side.
    """
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_first_sibling(core), core))
    if len(cores) == 1:
        return cores, cores
    half = len(cores) // 2
    return cores[:half], cores[half:]


def _first_sibling(core: int) -> int:
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return core
    found = re.match(r"\d+", listed)
    return core if found is None else int(found[0])
