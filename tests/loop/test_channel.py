import asyncio

import pytest

from asyncserve.errors import InvariantError
from asyncserve.loop.channel import Channel, ChannelClosed, ChannelFull, first_ready


async def turns(num_turns: int = 3) -> None:
    """Let every task that can run do so."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


def test_channel_refuses_a_capacity_below_one() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        Channel[int]("x", 0)


async def test_channel_gives_values_in_the_order_sent() -> None:
    channel = Channel[int]("x", 8)
    for value in range(5):
        channel.put_nowait(value)
    assert [await channel.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert channel.get_nowait() is None


async def test_full_channel_refuses_and_keeps_what_it_has() -> None:
    channel = Channel[int]("x", 2)
    channel.put_nowait(1)
    channel.put_nowait(2)
    with pytest.raises(ChannelFull, match="2 of 2"):
        channel.put_nowait(3)
    assert channel.take_all() == [1, 2]
    assert channel.take_all() == []


@pytest.mark.parametrize("how", ["get", "get_nowait", "take_all"])
async def test_sender_waits_while_full_and_goes_on_when_there_is_room(how: str) -> None:
    channel = Channel[int]("x", 1)
    await channel.put(1)
    sender = asyncio.create_task(channel.put(2))
    await turns()
    assert not sender.done()
    if how == "get":
        assert await channel.get() == 1
    elif how == "get_nowait":
        assert channel.get_nowait() == 1
    else:
        assert channel.take_all() == [1]
    await sender
    assert await channel.get() == 2


async def test_sender_that_was_overtaken_waits_again() -> None:
    channel = Channel[int]("x", 1)
    await channel.put(1)
    sender = asyncio.create_task(channel.put(3))
    await turns()
    channel.get_nowait()
    channel.put_nowait(2)
    await turns()
    assert not sender.done()
    assert await channel.get() == 2
    await sender
    assert await channel.get() == 3


async def test_receiver_waits_until_a_value_comes() -> None:
    channel = Channel[int]("x", 1)
    receiver = asyncio.create_task(channel.get())
    await turns()
    assert not receiver.done()
    channel.put_nowait(7)
    assert await receiver == 7


async def test_closed_channel_gives_what_it_holds_then_ends() -> None:
    channel = Channel[int]("x", 4)
    channel.put_nowait(1)
    channel.put_nowait(2)
    channel.close()
    channel.close()
    with pytest.raises(ChannelClosed):
        channel.put_nowait(3)
    assert [value async for value in channel] == [1, 2]
    with pytest.raises(ChannelClosed):
        await channel.get()


async def test_closing_wakes_the_waiting_sender_and_the_waiting_receiver() -> None:
    full = Channel[int]("full", 1)
    full.put_nowait(1)
    empty = Channel[int]("empty", 1)
    sender = asyncio.create_task(full.put(2))
    receiver = asyncio.create_task(empty.get())
    await turns()
    full.close()
    empty.close()
    with pytest.raises(ChannelClosed):
        await sender
    with pytest.raises(ChannelClosed):
        await receiver
    assert full.take_all() == [1]


async def test_cancelled_receiver_loses_no_value() -> None:
    channel = Channel[int]("x", 2)
    receiver = asyncio.create_task(channel.get())
    await turns()
    channel.put_nowait(1)
    receiver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiver
    assert await channel.get() == 1


async def test_cancelled_sender_sends_nothing_and_blocks_nobody() -> None:
    channel = Channel[int]("x", 1)
    channel.put_nowait(1)
    sender = asyncio.create_task(channel.put(2))
    await turns()
    sender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sender
    next_sender = asyncio.create_task(channel.put(3))
    await turns()
    assert channel.get_nowait() == 1
    await next_sender
    assert channel.take_all() == [3]


async def test_second_receiver_or_sender_is_a_bug_that_is_told() -> None:
    channel = Channel[int]("x", 1)
    receiver = asyncio.create_task(channel.get())
    await turns()
    with pytest.raises(InvariantError, match="two tasks wait to receive"):
        await channel.get()
    channel.put_nowait(1)
    assert await receiver == 1
    channel.put_nowait(1)
    sender = asyncio.create_task(channel.put(2))
    await turns()
    with pytest.raises(InvariantError, match="two tasks wait to send"):
        await channel.put(3)
    channel.close()
    with pytest.raises(ChannelClosed):
        await sender


async def test_statistics_tell_depth_capacity_and_peak() -> None:
    channel = Channel[int]("steps", 4)
    for value in range(3):
        channel.put_nowait(value)
    channel.get_nowait()
    statistics = channel.statistics()
    assert (statistics.name, statistics.depth, statistics.capacity, statistics.peak) == ("steps", 2, 4, 3)
    assert len(channel) == 2


async def test_first_ready_prefers_the_first_named_channel() -> None:
    first, second = Channel[int]("first", 1), Channel[str]("second", 1)
    second.put_nowait("b")
    assert await first_ready(first, second) is second
    first.put_nowait(1)
    assert await first_ready(first, second) is first


async def test_first_ready_waits_and_wakes_for_any_of_its_channels() -> None:
    first, second = Channel[int]("first", 1), Channel[int]("second", 1)
    for channel in (second, first):
        waiting = asyncio.create_task(first_ready(first, second))
        await turns()
        assert not waiting.done()
        channel.put_nowait(1)
        assert await waiting is channel
        channel.take_all()


async def test_first_ready_returns_a_closed_channel_only_when_none_holds_a_value() -> None:
    first, second = Channel[int]("first", 1), Channel[int]("second", 1)
    first.close()
    second.put_nowait(1)
    assert await first_ready(first, second) is second
    second.take_all()
    assert await first_ready(first, second) is first


async def test_two_stages_pass_everything_on_through_small_channels() -> None:
    numbers, doubled = Channel[int]("numbers", 1), Channel[int]("doubled", 2)

    async def produce() -> None:
        for value in range(1, 101):
            await numbers.put(value)
        numbers.close()

    async def double() -> None:
        async for value in numbers:
            await doubled.put(2 * value)
        doubled.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        group.create_task(double())
        received = [value async for value in doubled]
    assert received == [2 * value for value in range(1, 101)]
    assert doubled.statistics().peak <= 2
