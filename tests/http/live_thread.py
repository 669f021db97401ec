"""A live server on a loop in a thread of its own, for clients that block."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from tests.http.live import Live, live_server

Result = TypeVar("Result")


@dataclass(slots=True)
class LiveThread:
    """The server, and the loop it runs on."""

    live: Live
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, Result], *, timeout_s: float = 60.0) -> Result:
        """Run a coroutine on the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)


@contextmanager
def live_thread(**options: Any) -> Iterator[LiveThread]:
    """Serve for the duration of the block; options are those of `live_server`."""
    started: list[LiveThread | BaseException] = []
    is_up, ends = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with live_server(**options) as live:
            started.append(LiveThread(live, asyncio.get_running_loop()))
            is_up.set()
            await ends.wait()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:
            started.append(error)
            raise
        finally:
            is_up.set()

    thread = threading.Thread(target=run, name="live-server")
    thread.start()
    is_up.wait()
    server = started[0]
    try:
        if isinstance(server, BaseException):
            raise server
        yield server
    finally:
        if isinstance(server, LiveThread):
            server.loop.call_soon_threadsafe(ends.set)
        thread.join()
