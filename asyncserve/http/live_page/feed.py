"""GET /pipeline/events: what the live page shows, as server-sent events.

Takes a viewer's request, gives it the sampler's events for as long as it stays; a viewer that reads nothing
for a while is given up. The page reads it with `fetch`, which can send a key; `curl -N` does, too.
"""

import asyncio
from contextlib import aclosing

from aiohttp import web

from asyncserve.http.failures import ENDLESS, REQUEST_ID
from asyncserve.http.generation import event_stream
from asyncserve.http.live_page.sampler import PipelineSampler
from asyncserve.http.serving import SERVING

SAMPLER = web.AppKey("SAMPLER", PipelineSampler)


async def pipeline_events(request: web.Request) -> web.StreamResponse:
    """Answer /pipeline/events until the viewer leaves or the server stops."""
    stall_timeout_s = request.app[SERVING].stall_timeout_s
    response = event_stream(request, request[REQUEST_ID])
    async with aclosing(request.app[SAMPLER].watch()) as events:
        # Too many viewers show here, while the answer can still be an error.
        event = await anext(events, None)
        await response.prepare(request)
        request[ENDLESS] = True
        try:
            while event is not None:
                async with asyncio.timeout(stall_timeout_s):
                    await response.write(event)
                event = await anext(events, None)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
    return response
