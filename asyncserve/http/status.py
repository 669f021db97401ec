"""What the server says of itself: health, readiness, models, version, metrics.

Three questions, three answers. `/health`: is there progress? Work that waits while no step finishes, or a
device that is being opened anew, is bad health, however alive the process is. `/ready`: should new requests
come here? `/live`: is this process alive, or to be ended? All answers come from the memory of the loop;
nothing here asks the device.
"""

from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import web

import asyncserve
from asyncserve.errors import EngineStopped, NotReady, UnknownModel
from asyncserve.http.failures import speaks_anthropic
from asyncserve.http.kv_ledger import kv_ledger
from asyncserve.http.serving import SERVING, Serving
from asyncserve.kv_spec import RecurrentState, pool_bytes_per_block
from asyncserve.metrics.exposition import CONTENT_TYPE


async def health(request: web.Request) -> web.Response:
    """Answer /health and /ping: 503 if the engine is loading, has failed, or makes no progress.

    Good health comes with what it was judged by: steps unfinished, sequences that run and wait, and for how
    many seconds no step has ended while there was work.
    """
    serving = request.app[SERVING]
    engine = serving.engine
    if engine.failure is not None:
        raise EngineStopped(f"the engine failed: {engine.failure}")
    _ = engine.info  # raises NotReady while the model is loading
    statistics = engine.statistics()
    if statistics.device_is_lost:
        raise NotReady(
            f"the device was lost and is being opened anew; {statistics.num_waiting} sequences wait for it"
        )
    # An idle engine counts as making progress, so this is the age of work that stands still.
    stuck_s = serving.clock() - statistics.last_progress_s
    if stuck_s > serving.health_timeout_s:
        raise EngineStopped(
            f"no step has finished for {stuck_s:.0f} s, while {statistics.num_running} sequences run and"
            f" {statistics.num_waiting} wait"
        )
    return _json(
        {
            "status": "ok",
            "num_device_restarts": statistics.num_device_restarts,
            "num_explained_losses": statistics.num_explained_losses,
            "num_unapplied_steps": statistics.num_unapplied_steps,
            "num_running": statistics.num_running,
            "num_waiting": statistics.num_waiting,
            "seconds_without_progress": round(max(0.0, stuck_s), 3),
        }
    )


async def live(request: web.Request) -> web.Response:
    """Answer /live: 200 unless the engine has died, while loading and draining too."""
    failure = request.app[SERVING].engine.failure
    if failure is not None:
        raise EngineStopped(f"the engine failed: {failure}")
    return _json({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    """Answer /ready: 200 if new requests are taken, and a device is there to compute them."""
    engine = request.app[SERVING].engine
    if not engine.is_accepting:
        raise NotReady("the server takes no new requests: it is loading or draining")
    if engine.statistics().device_is_lost:
        raise NotReady("the device was lost and is being opened anew; new requests wait")
    return _json({"status": "ready"})


async def version(request: web.Request) -> web.Response:
    """Answer /version."""
    return _json({"version": asyncserve.__version__})


async def load(request: web.Request) -> web.Response:
    """Answer /load: how much work is here, `server_load` as vLLM's clients read it."""
    serving = request.app[SERVING]
    statistics = serving.engine.statistics()
    num_blocks = statistics.num_blocks
    return _json(
        {
            "server_load": statistics.num_running + statistics.num_waiting,
            "num_running": statistics.num_running,
            "num_waiting": statistics.num_waiting,
            "max_num_seqs": serving.engine.info.num_slots,
            "kv_cache_usage": statistics.num_blocks_used / num_blocks if num_blocks else 0.0,
        }
    )


async def kv_cache(request: web.Request) -> web.Response:
    """Answer /kv_cache: the memory ledger of the KV cache."""
    engine = request.app[SERVING].engine
    return _json(kv_ledger(engine.info, engine.statistics()))


async def server_info(request: web.Request) -> web.Response:
    """Answer /server_info: versions, options without secrets, and what came of them on this device."""
    serving = request.app[SERVING]
    info = serving.engine.info
    groups = [
        {
            "num_layers": len(group.layer_ids),
            "dtype": "uint8" if isinstance(group.spec, RecurrentState) else group.spec.dtype,
            "block_size": group.spec.block_len,
            "num_blocks": group.num_blocks,
            "num_bytes": group.num_blocks * pool_bytes_per_block(info.kv_groups),
        }
        for group in info.kv_groups
    ]
    return _json(
        {
            "version": asyncserve.__version__,
            "model_names": serving.model_names,
            "device": info.device_name,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.num_slots,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "vocab_size": info.vocab_size,
            "kv_cache": groups,
            "default_sampling": serving.default_sampling,
            **serving.server_info,
        }
    )


async def tokenizer_info(request: web.Request) -> web.Response:
    """Answer /tokenizer_info: what a client must know to count tokens and to write prompts itself."""
    serving = request.app[SERVING]
    tokenizer = serving.engine.tokenizer
    return _json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": serving.engine.info.max_model_len,
            "eos_token_ids": sorted(tokenizer.eos_token_ids),
            "special_tokens": sorted(tokenizer.special_tokens),
            "chat_template": tokenizer.chat_template_text,
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """Answer /metrics in Prometheus' text format."""
    body = await request.app[SERVING].metrics_renderer()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def models(request: web.Request) -> web.Response:
    """Answer /v1/models: the names under which the one model is served, in the shape of the API asked."""
    serving = request.app[SERVING]
    if speaks_anthropic(request):
        names = serving.model_names
        listed = [_anthropic_model(serving, name) for name in names]
        return _json({"data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return _json({"object": "list", "data": [_model(serving, name) for name in serving.model_names]})


async def model(request: web.Request) -> web.Response:
    """Answer /v1/models/{name}."""
    serving = request.app[SERVING]
    name = request.match_info["name"]
    if name not in serving.model_names:
        raise UnknownModel(f"the model {name[:200]!r} is not served here", param="model")
    shown = _anthropic_model if speaks_anthropic(request) else _model
    return _json(shown(serving, name))


def _anthropic_model(serving: Serving, name: str) -> dict[str, Any]:
    max_model_len = serving.engine.info.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(serving.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


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
