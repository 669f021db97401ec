"""The process's limit of open files, and how many connections it leaves room for.

Every connection is an open file. A server that runs out of them cannot accept, read its key file or load a
library, so it refuses connections before. Changes the limit of the process it is called in.
"""

import resource

RESERVED = 256
"""Files for everything else: the model, libraries, threads' wake-ups, pipes, connections being refused."""
MOST = 2**20
"""No higher limit is asked for: some systems have one of a billion, and old libraries try each number."""


def raise_limit() -> int:
    """Raise the limit of open files as far as it goes and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def max_connections(limit: int, asked: int | None) -> int:
    """Return how many connections are taken.

    Args:
        limit: Of open files.
        asked: What the options say, if anything; what the limit does not leave is not given.
    """
    room = max(limit - RESERVED, limit // 2)
    return room if asked is None else min(asked, room)
