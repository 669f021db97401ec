"""What the live page adds to the application: its files' routes, its feed, the sampler behind it."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

import asyncserve
from asyncserve.errors import NotReady
from asyncserve.http.live_page.feed import SAMPLER, pipeline_events
from asyncserve.http.live_page.page import PAGE_PATHS, page_file
from asyncserve.http.live_page.recorder import PipelineRecorder
from asyncserve.http.live_page.sampler import PipelineSampler
from asyncserve.http.serving import Serving


def add_live_page(app: web.Application, serving: Serving, recorder: PipelineRecorder) -> None:
    """Let an application serve the page.

    Args:
        serving: What its handlers share.
        recorder: Told by the engine what happens.
    """
    engine = serving.engine

    def facts() -> Mapping[str, Any]:
        shown: dict[str, Any] = {"version": asyncserve.__version__, "model": serving.model_names[0]}
        try:
            info = engine.info
        except NotReady:
            return shown
        return shown | {
            "device": info.device_name,
            "max_num_seqs": info.num_slots,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_model_len": info.max_model_len,
            "max_unapplied": info.max_unapplied,
        }

    def phase() -> str:
        if engine.failure is not None:
            return "failed"
        if engine.is_accepting:
            return "ready"
        try:
            _ = engine.info
        except NotReady:
            return "loading"
        return "draining"

    sampler = PipelineSampler(
        recorder, statistics=engine.statistics, facts=facts, phase=phase, clock=serving.clock
    )
    app[SAMPLER] = sampler
    app.add_routes([web.get(path, page_file) for path in PAGE_PATHS])
    # A HEAD of what never ends has no answer.
    app.add_routes([web.get("/pipeline/events", pipeline_events, allow_head=False)])

    async def close(app: web.Application) -> None:
        # Before the runner waits for handlers to end: these would not.
        sampler.close()

    app.on_shutdown.append(close)
