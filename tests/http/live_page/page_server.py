"""A live server with the live page, for the tests of both."""

import time
from collections.abc import Mapping
from typing import Any

from asyncserve.http.live_page.recorder import PipelineRecorder


def page_options(*, engine_options: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return options of `live_server` with which it has the page, fed by the engine."""
    recorder = PipelineRecorder(time.monotonic)
    return {
        "engine_options": {"observer": recorder, **(engine_options or {})},
        "pipeline_recorder": recorder,
        **options,
    }
