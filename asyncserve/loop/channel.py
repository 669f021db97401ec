"""Channel: a bounded, closable queue between two stages, with statistics; first_ready: wait on several.

One task receives from a channel, and at most one task at a time waits to send; any code on the loop may
send with `put_nowait`. Nothing here polls: a stage that has nothing to do costs nothing. A channel knows
nothing of what it carries.

A closed channel takes nothing more; what it holds can still be received, then receiving raises
`ChannelClosed` (and `async for` ends).
"""

import asyncio
from collections import deque
from typing import Any, Generic, TypeVar

from asyncserve.errors import InvariantError
from asyncserve.observer import ChannelStatistics

T = TypeVar("T")


class ChannelClosed(Exception):
    """The channel takes nothing more, or is closed and empty."""


class ChannelFull(Exception):
    """The channel holds as much as it may."""


class Channel(Generic[T]):
    """A bounded first-in-first-out queue from one stage to the next.

    Args:
        name: For statistics and messages.
        capacity: Most values it holds, at least 1.
    """

    __slots__ = ("_capacity", "_closed", "_items", "_name", "_peak", "_receiver", "_sender")

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name!r}: capacity is {capacity}; it must be at least 1")
        self._name = name
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._closed = False
        self._peak = 0
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing more."""
        return self._closed

    @property
    def is_ready(self) -> bool:
        """Whether `get` would return or raise at once."""
        return bool(self._items) or self._closed

    def put_nowait(self, item: T) -> None:
        """Send a value, or raise at once.

        Raises:
            ChannelFull: There is no room.
            ChannelClosed: The channel is closed.
        """
        items = self._items
        if self._closed:
            raise ChannelClosed(self._name)
        if len(items) >= self._capacity:
            raise ChannelFull(f"{self._name} holds {len(items)} of {self._capacity}")
        items.append(item)
        if len(items) > self._peak:
            self._peak = len(items)
        receiver = self._receiver
        if receiver is not None and not receiver.done():
            receiver.set_result(None)

    async def put(self, item: T) -> None:
        """Send a value, waiting for room.

        Raises:
            ChannelClosed: The channel is closed, or was closed while waiting; the value was not sent.
        """
        while len(self._items) >= self._capacity and not self._closed:
            if self._sender is not None:
                raise InvariantError(f"channel {self._name!r}: two tasks wait to send")
            self._sender = asyncio.get_running_loop().create_future()
            try:
                await self._sender
            finally:
                self._sender = None
        self.put_nowait(item)

    def get_nowait(self) -> T | None:
        """Take the oldest value; None if there is none (so a channel does not carry None)."""
        if not self._items:
            return None
        item = self._items.popleft()
        self._wake_sender()
        return item

    def take_all(self) -> list[T]:
        """Take everything it holds, oldest first; may be empty."""
        items = list(self._items)
        if items:
            self._items.clear()
            self._wake_sender()
        return items

    async def get(self) -> T:
        """Take the oldest value, waiting for one.

        Raises:
            ChannelClosed: The channel is closed and empty.
        """
        if not self.is_ready:
            await first_ready(self)
        if not self._items:
            raise ChannelClosed(self._name)
        item = self._items.popleft()
        self._wake_sender()
        return item

    def __aiter__(self) -> "Channel[T]":
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except ChannelClosed:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Take nothing more and wake whoever waits. Idempotent."""
        self._closed = True
        self._wake_sender()
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def statistics(self) -> ChannelStatistics:
        """State for metrics; `peak` is the greatest depth so far."""
        return ChannelStatistics(self._name, len(self._items), self._capacity, self._peak)

    def _wake_sender(self) -> None:
        if self._sender is not None and not self._sender.done():
            self._sender.set_result(None)

    def _listen(self, waiter: "asyncio.Future[None]") -> None:
        if self._receiver is not None:
            raise InvariantError(f"channel {self._name!r}: two tasks wait to receive")
        self._receiver = waiter

    def _unlisten(self, waiter: "asyncio.Future[None]") -> None:
        if self._receiver is waiter:
            self._receiver = None


async def first_ready(*channels: Channel[Any]) -> Channel[Any]:
    """Wait until a channel holds a value or is closed, and return it.

    Returns:
        The first such channel in the order given, whatever the order of arrival: put first what matters
        most. One that holds a value goes before one that is merely closed.
    """
    while True:
        for channel in channels:
            if channel:
                return channel
        for channel in channels:
            if channel.is_closed:
                return channel
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for channel in channels:
                channel._listen(waiter)
            await waiter
        finally:
            for channel in channels:
                channel._unlisten(waiter)
