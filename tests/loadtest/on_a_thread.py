"""A scripted server on a thread of its own, for programs that run an event loop themselves."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fakes.openai_server import ScriptedServer


@contextmanager
def on_a_thread(scripted: ScriptedServer) -> Iterator[ScriptedServer]:
    """Let a server run for the duration of the block."""
    loop = asyncio.new_event_loop()
    listening, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with scripted.running():
            listening.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    listening.wait()
    try:
        yield scripted
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
