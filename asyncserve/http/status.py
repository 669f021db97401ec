"""What the server says of itself: health, readiness, models, version, metrics.

Health is judged by progress: work that waits while no step finishes is bad health, however alive the
process is. All answers come from the loop's own memory; nothing here asks the device.
"""

from typing import Any

import orjson
from aiohttp import web

import asyncserve
from asyncserve.errors import EngineStopped, NotReady, UnknownModel
from asyncserve.http.serving import SERVING, Serving
from asyncserve.metrics.observer import CONTENT_TYPE


async def health(request: web.Request) -> web.Response:
    """Answer /health and /ping: 503 if the engine is loading, has failed, or makes no progress."""
    serving = request.app[SERVING]
    engine = serving.engine
    if engine.failure is not None:
        raise EngineStopped(f"the engine failed: {engine.failure}")
    _ = engine.info  # raises NotReady while the model is loading
    statistics = engine.statistics()
    # An idle engine counts as making progress, so this is the age of work that stands still.
    stuck_s = serving.clock() - statistics.last_progress_s
    if stuck_s > serving.health_timeout_s:
        raise EngineStopped(
            f"no step has finished for {stuck_s:.0f} s, while {statistics.num_running} sequences run and"
            f" {statistics.num_waiting} wait"
        )
    return _json({"status": "ok"})


async def live(request: web.Request) -> web.Response:
    """Answer /live: 200 unless the engine has died, while loading and draining too."""
    failure = request.app[SERVING].engine.failure
    if failure is not None:
        raise EngineStopped(f"the engine failed: {failure}")
    return _json({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    """Answer /ready: 200 if new requests are taken."""
    if not request.app[SERVING].engine.is_accepting:
        raise NotReady("the server takes no new requests: it is loading or draining")
    return _json({"status": "ready"})


async def version(request: web.Request) -> web.Response:
    """Answer /version."""
    return _json({"version": asyncserve.__version__})


async def metrics(request: web.Request) -> web.Response:
    """Answer /metrics in Prometheus' text format."""
    return web.Response(body=request.app[SERVING].metrics_renderer(), headers={"Content-Type": CONTENT_TYPE})


async def models(request: web.Request) -> web.Response:
    """Answer /v1/models: the names under which the one model is served."""
    serving = request.app[SERVING]
    return _json({"object": "list", "data": [_model(serving, name) for name in serving.model_names]})


async def model(request: web.Request) -> web.Response:
    """Answer /v1/models/{name}."""
    serving = request.app[SERVING]
    name = request.match_info["name"]
    if name not in serving.model_names:
        raise UnknownModel(f"the model {name[:200]!r} is not served here", param="model")
    return _json(_model(serving, name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "asyncserve",
        "root": serving.model_names[0],
        "parent": None,
        "max_model_len": serving.engine.info.max_model_len,
    }


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
