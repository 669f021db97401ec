"""What an event loop's callbacks cost it: how late it is, and its longest callback.

`StallProbe` reads a timer of the kernel each millisecond; how late it does is what any other event would have
waited. On a shared machine that includes time the process did not get. `TimedLoop` measures what it cannot
feel: the CPU time of each callback. Both cost something, so costs are measured in rounds without them.
"""

import asyncio
import ctypes
import os
import struct
import time
from array import array
from collections.abc import Callable
from typing import Any

import uvloop

TICK_S = 0.001


class StallProbe:
    """Notes how late the loop reads a timer that expires each millisecond.

    Attributes:
        late_s: One entry for each reading.
    """

    def __init__(self) -> None:
        self.late_s: array[float] = array("d")
        libc = ctypes.CDLL(None, use_errno=True)
        self._number = int(libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK))
        tick = struct.pack("4q", 0, int(1e9 * TICK_S), 0, int(1e9 * TICK_S))
        self._began_s = time.monotonic()
        if self._number < 0 or libc.timerfd_settime(self._number, 0, tick, None) != 0:
            raise OSError(ctypes.get_errno(), "a timer could not be made")
        self._num_ticks = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._number, self._read)

    def stop(self) -> None:
        """Note nothing more."""
        self._loop.remove_reader(self._number)
        os.close(self._number)

    def _read(self) -> None:
        (num_ticks,) = struct.unpack("Q", os.read(self._number, 8))
        # The first of the expirations is the one that has waited longest.
        due_s = self._began_s + TICK_S * (self._num_ticks + 1)
        self._num_ticks += num_ticks
        self.late_s.append(max(0.0, time.monotonic() - due_s))


class CallbackTimes:
    """CPU time of callbacks.

    Attributes:
        longest: CPU seconds by what was called, the longest of each.
    """

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self.num_calls = 0

    def timed(self, callback: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the callback, timed."""

        def call(*args: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return callback(*args)
            finally:
                self.note(name, 1e-9 * (time.thread_time_ns() - began_ns))

        return call

    def note(self, name: str, cpu_s: float) -> None:
        """Count one call."""
        self.num_calls += 1
        if cpu_s > self.longest.get(name, 0.0):
            self.longest[name] = cpu_s

    def clear(self) -> None:
        """Forget what has been."""
        self.longest.clear()
        self.num_calls = 0


class TimedLoop(uvloop.Loop):
    """uvloop's loop, with the CPU time of every callback from Python, and of what arrives from clients."""

    def __init__(self) -> None:
        super().__init__()
        self.times = CallbackTimes()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Any:
        """Time it."""
        return super().call_soon(self._timed(callback), *args, **keywords)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Any:
        """Time it."""
        return super().call_soon_threadsafe(self._timed(callback), *args, **keywords)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Any:
        """Time it."""
        return super().call_later(delay, self._timed(callback), *args, **keywords)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Any:
        """Time it."""
        return super().call_at(when, self._timed(callback), *args, **keywords)

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], Any], *args: Any, **keywords: Any
    ) -> Any:
        """Time what its protocols do with data."""
        timed: Callable[[], Any] = lambda: _TimedProtocol(factory(), self.times)  # noqa: E731
        return await super().create_server(timed, *args, **keywords)

    def _timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        return self.times.timed(callback, _name(callback))


class _TimedProtocol:
    """A protocol whose calls with work in them are timed."""

    def __init__(self, inner: asyncio.Protocol, times: CallbackTimes) -> None:
        self.connection_made = times.timed(inner.connection_made, "connection_made")
        self.data_received = times.timed(inner.data_received, "data_received")
        self.eof_received = inner.eof_received
        self.connection_lost = times.timed(inner.connection_lost, "connection_lost")
        self.pause_writing = inner.pause_writing
        self.resume_writing = inner.resume_writing


def _name(callback: Callable[..., Any]) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine = owner.get_coro()
        return f"task {getattr(coroutine, '__qualname__', coroutine)}"
    return str(getattr(callback, "__qualname__", type(callback).__name__))
