"""The server as it is, and, on SIGUSR1, a line about what is alive in it.

Its command line is a file and then that of the server. Each signal appends one JSON object to the file: tasks
of the loop, threads, and objects of the kinds that a request leaves behind if it is forgotten. Nothing else
about the server is changed.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import uvloop

from asyncserve.cli import read_config
from asyncserve.config import ServerConfig
from asyncserve.errors import StartupError
from asyncserve.http.generation import CollectingSink
from asyncserve.http.responses.background import BackgroundResponse
from asyncserve.http.sse import EventStream
from asyncserve.loop.active_request import ActiveRequest
from asyncserve.loop.sequence import SequenceState
from asyncserve.request import Request
from asyncserve.serve import serve

KINDS = (
    ActiveRequest,
    BackgroundResponse,
    CollectingSink,
    EventStream,
    Request,
    SequenceState,
)
"""Objects that end with their request."""
POOLED = "asyncio_"
"""How the names of the threads behind `asyncio.to_thread` begin: there are as many as were once needed at the
same time, and they stay."""


def alive() -> dict[str, int]:
    """Return how many there are of all that should be few when nobody is served."""
    gc.collect()
    objects = Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KINDS)
    threads = threading.enumerate()
    num_pooled = sum(thread.name.startswith(POOLED) for thread in threads)
    return {
        **{kind.__name__: objects[kind.__name__] for kind in KINDS},
        "tasks": len(asyncio.all_tasks()),
        "threads": len(threads) - num_pooled,
        "pooled threads": num_pooled,
    }


def main() -> int:
    """Run the server of this command line."""
    file = Path(sys.argv[1])
    config = read_config(sys.argv[2:], os.environ, ServerConfig)

    def write() -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(alive()) + "\n")

    def watch(url: str) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)

    try:
        return uvloop.run(serve(config, on_ready=watch))
    except StartupError as error:
        print(f"watched_server: cannot start: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
