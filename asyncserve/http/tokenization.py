"""POST /tokenize and /detokenize: the model's tokenizer, in vLLM's shapes.

All work on text runs in threads: a prompt may be megabytes, and the event loop serves everybody.
"""

import asyncio
from array import array
from functools import partial

import orjson
from aiohttp import web

from asyncserve.errors import InvalidRequest
from asyncserve.http.body import read_body
from asyncserve.http.conversation import LARGE_BODY_BYTES, chat_prompt, deep_json_refused
from asyncserve.http.schema import DetokenizeBody, TokenizeBody
from asyncserve.http.serving import SERVING, Serving
from asyncserve.http.tools import shown_tool, tools_of
from asyncserve.loop.admission import check_token_ids
from asyncserve.request import ChatPrompt, TextPrompt


async def tokenize(request: web.Request) -> web.Response:
    """Answer POST /tokenize: {prompt} or {messages} to {tokens, count, max_model_len}."""
    serving = request.app[SERVING]
    data = await read_body(request, timeout_s=serving.body_timeout_s)
    body = serving.bodies.decode(data, TokenizeBody)
    serving.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    prompt: TextPrompt | ChatPrompt
    if body.prompt is not None:
        prompt = TextPrompt(text=body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        build = partial(chat_prompt, serving, body, [shown_tool(tool) for tool in tools_of(body)])
        with deep_json_refused():
            prompt = await asyncio.to_thread(build) if len(data) > LARGE_BODY_BYTES else build()
    answer = await asyncio.to_thread(_tokenized, serving, prompt, bool(body.return_token_strs))
    return web.Response(body=answer, content_type="application/json")


def _tokenized(serving: Serving, prompt: TextPrompt | ChatPrompt, gives_strings: bool) -> bytes:
    tokenizer = serving.engine.tokenizer
    token_ids: array[int]
    if isinstance(prompt, TextPrompt):
        token_ids = tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
    else:
        token_ids = tokenizer.encode(
            tokenizer.render_chat(prompt), add_special_tokens=prompt.add_special_tokens
        )
    tokens = token_ids.tolist()
    return orjson.dumps(
        {
            "count": len(tokens),
            "max_model_len": serving.engine.info.max_model_len,
            "tokens": tokens,
            "token_strs": [serving.token_texts[token_id][0] for token_id in tokens]
            if gives_strings
            else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """Answer POST /detokenize: {tokens} to {prompt}."""
    serving = request.app[SERVING]
    data = await read_body(request, timeout_s=serving.body_timeout_s)
    body = serving.bodies.decode(data, DetokenizeBody)
    serving.model_name(body.model)
    answer = await asyncio.to_thread(_detokenized, serving, body.tokens)
    return web.Response(body=answer, content_type="application/json")


def _detokenized(serving: Serving, token_ids: list[int]) -> bytes:
    check_token_ids(token_ids, serving.engine.info.vocab_size, field="tokens")
    return orjson.dumps({"prompt": serving.engine.tokenizer.decode(token_ids, skip_special_tokens=False)})
