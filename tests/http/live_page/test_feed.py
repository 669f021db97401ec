"""GET /pipeline/events: who may read it, what it tells of a running engine, how it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from asyncserve.http.failures import REQUEST_ID
from asyncserve.http.live_page.feed import SAMPLER, pipeline_events
from asyncserve.http.live_page.sampler import MAX_VIEWERS
from asyncserve.http.serving import SERVING
from tests.http.live import Live, live_server, spell, until
from tests.http.live_page.page_server import page_options

FEED = "/pipeline/events"


@asynccontextmanager
async def viewer(live: Live, **headers: str) -> AsyncIterator["Viewer"]:
    async with live.session.get(live.url + FEED, headers=headers) as response:
        assert response.status == 200
        yield Viewer(response)


class Viewer:
    """Reads the feed, event by event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next event, or None at the feed's end."""
        try:
            text = (await self.response.content.readuntil(b"\n\n")).decode()
        except asyncio.IncompleteReadError:
            return None
        if not text:
            return None
        name, data = text.removesuffix("\n\n").split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_the_feed_is_a_stream_of_events_nobody_keeps() -> None:
    async with live_server(**page_options()) as live, viewer(live) as events:
        assert events.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert events.response.headers["Cache-Control"] == "no-cache"
        first, second = await events.next(), await events.next()
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == ("snapshot", "update")
    assert first[1]["model"] == "fake-model"
    assert (first[1]["max_num_seqs"], first[1]["device"]) == (8, "fake")


async def test_the_feed_needs_a_key_where_the_page_does_not() -> None:
    async with live_server(**page_options(api_keys=("secret",))) as live:
        assert (await live.call(FEED)).status == 401
        assert (await live.call(FEED, headers={"Authorization": "Bearer other"})).status == 401
        async with viewer(live, Authorization="Bearer secret") as events:
            assert await events.next() is not None


async def test_requests_show_in_the_feed() -> None:
    async with live_server(next_token=spell("abcd"), **page_options()) as live, viewer(live) as events:
        snapshot = await events.next()
        assert snapshot is not None
        assert snapshot[1]["state"]["running"] == 0
        live.executor.hold()
        call = asyncio.create_task(live.complete())
        await live.until_running(1)
        update = await events.next()
        while update is not None and not update[1]["state"]["running"]:
            update = await events.next()
        live.executor.resume()
        await call
        while update is not None and not update[1]["steps"]:
            update = await events.next()
        assert update is not None
        number, prefill_tokens, decode_tokens, _, _ = update[1]["steps"][0]
        assert (number, prefill_tokens > 1, decode_tokens) == (1, True, 0)
        totals = dict(zip(snapshot[1]["total_fields"], update[1]["state"]["totals"], strict=True))
        assert totals["steps"] >= 1


async def test_before_the_model_is_loaded_the_feed_says_so() -> None:
    async with live_server(is_started=False, **page_options()) as live, viewer(live) as events:
        first = await events.next()
        assert first is not None
        assert (first[1]["state"]["phase"], "device" in first[1]) == ("loading", False)
        await live.engine.start()
        event = await events.next()
        while event is not None and event[0] != "snapshot":
            event = await events.next()
        assert event is not None
        assert (event[1]["state"]["phase"], event[1]["device"]) == ("ready", "fake")
        await live.engine.drain(0.0)
        event = await events.next()
        while event is not None and event[0] != "snapshot":
            event = await events.next()
        assert event is not None
        assert event[1]["state"]["phase"] == "draining"


async def test_a_failed_engine_shows_as_failed() -> None:
    async with live_server(next_token=lambda tokens, length: 1 // 0, **page_options()) as live:
        await live.complete()
        await live.engine.wait_stopped()
        async with viewer(live) as events:
            first = await events.next()
    assert first is not None
    assert first[1]["state"]["phase"] == "failed"


async def test_a_viewer_that_leaves_is_forgotten() -> None:
    async with live_server(**page_options()) as live:
        sampler = live.runner.app[SAMPLER]
        async with viewer(live) as events:
            await events.next()
            assert (sampler.num_viewers, sampler.is_running) == (1, True)
            events.response.close()
        await until(lambda: sampler.num_viewers == 0)
        assert not sampler.is_running


async def test_a_viewer_that_reads_nothing_is_given_up() -> None:
    class Flood:
        """In place of the sampler: more than any connection's buffers hold."""

        has_ended = False

        async def watch(self) -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(1 << 20)
            finally:
                self.has_ended = True

    @web.middleware
    async def name_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = "r"
        return await handler(request)

    flood = Flood()
    app = web.Application(middlewares=[name_request])
    app[SAMPLER] = flood  # type: ignore[misc]
    app[SERVING] = SimpleNamespace(stall_timeout_s=0.01)  # type: ignore[misc]
    app.router.add_get(FEED, pipeline_events)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
    writer.write(f"GET {FEED} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await until(lambda: flood.has_ended)
    writer.close()
    await runner.cleanup()


async def test_viewers_beyond_the_bound_get_429() -> None:
    async with live_server(**page_options()) as live:
        watching = [live.runner.app[SAMPLER].watch() for _ in range(MAX_VIEWERS)]
        for each in watching:
            await anext(each)
        refused = await live.call(FEED)
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert int(refused.headers["Retry-After"]) > 0
        for each in watching:
            async with aclosing(each):
                pass


async def test_a_stopping_server_does_not_wait_for_viewers() -> None:
    async with live_server(**page_options()) as live, viewer(live) as events:
        await events.next()
        stopping = asyncio.create_task(live.runner.cleanup())
        while await events.next() is not None:
            pass
        assert events.response.content.at_eof()
        await stopping


async def test_a_feed_has_no_head() -> None:
    async with live_server(**page_options()) as live:
        assert (await live.call(FEED, method="HEAD")).status == 405
