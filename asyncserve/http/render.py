"""POST /v1/completions/render and /v1/chat/completions/render: a call up to the engine, and no further.

Takes the bodies of the generating endpoints, checks them as these do, and gives what would be generated from:
token ids and sampling parameters, defaults filled in. Routers use it to find the server that has a prompt's
beginning in its cache. Shapes are vLLM's; its fields for what there is none of here are null.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from aiohttp import web

from asyncserve.http.body import read_body
from asyncserve.http.caller import Caller
from asyncserve.http.completions import checked_completion
from asyncserve.http.conversation import chat_call, limit_named_as_asked
from asyncserve.http.generation import engine_requests
from asyncserve.http.schema import ChatBody, CompletionBody, GenerationBody
from asyncserve.http.serving import REQUEST_ID_HEADER, SERVING, Serving, request_id_of
from asyncserve.request import Request, SamplingParams

_FIELD_NAMES = {
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "structured": "structured_outputs",
}
"""Sampling parameters whose name in the API is another."""


async def render_completion(http_request: web.Request) -> web.Response:
    """Answer POST /v1/completions/render: a list with one entry per prompt."""
    serving = http_request.app[SERVING]
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    body = serving.bodies.decode(data, CompletionBody)
    request_id = request_id_of(http_request, body.request_id)
    response_id = f"cmpl-{request_id}"
    model = serving.model_name(body.model)
    prompts, sampling = await checked_completion(serving, body, num_bytes=len(data))
    requests = engine_requests(serving, body, prompts, sampling, response_id=response_id, caller=Caller())
    entries = await _rendered(serving, body, requests, model=model, response_id=response_id)
    return _answer(b"[%b]" % b",".join(entries), request_id)


async def render_chat(http_request: web.Request) -> web.Response:
    """Answer POST /v1/chat/completions/render: one entry."""
    serving = http_request.app[SERVING]
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    body = serving.bodies.decode(data, ChatBody)
    request_id = request_id_of(http_request, body.request_id)
    response_id = f"chatcmpl-{request_id}"
    call = await chat_call(serving, body, num_bytes=len(data), response_id=response_id, caller=Caller())
    with limit_named_as_asked(body):
        [entry] = await _rendered(serving, body, [call.request], model=call.model, response_id=response_id)
    return _answer(entry, request_id)


async def _rendered(
    serving: Serving, body: GenerationBody, requests: Sequence[Request], *, model: str, response_id: str
) -> list[bytes]:
    stream_options = None if body.stream_options is None else msgspec.to_builtins(body.stream_options)

    def render() -> list[bytes]:
        entries = []
        for index, request in enumerate(requests):
            tokenized = serving.engine.tokenized(request)
            entry = {
                "request_id": response_id if len(requests) == 1 else f"{response_id}-{index}",
                "model": model,
                "token_ids": tokenized.prompt_token_ids.tolist(),
                "sampling_params": _sampling_object(request.sampling, tokenized.max_output_len),
                "stream": bool(body.stream),
                "stream_options": stream_options,
                "cache_salt": request.cache_salt,
                "priority": request.priority,
                "features": None,
                "kv_transfer_params": None,
            }
            entries.append(orjson.dumps(entry, option=orjson.OPT_NON_STR_KEYS))
        return entries

    return await asyncio.to_thread(render)


def _sampling_object(sampling: SamplingParams, max_output_len: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(sampling):
        values[_FIELD_NAMES.get(field.name, field.name)] = getattr(sampling, field.name)
    values["max_tokens"] = max_output_len
    if sampling.structured is not None:
        values["structured_outputs"] = {sampling.structured.kind.value: sampling.structured.source}
    return values


def _answer(body: bytes, request_id: str) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers={REQUEST_ID_HEADER: request_id})
