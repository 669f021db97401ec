"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the one conversation path.

Takes a body, has it translated into a `ChatBody`, runs the engine request that `chat_call` makes of it, and
shows the answer in Anthropic's shapes. Errors take Anthropic's envelope by their path (see `failures`), and
responses carry their id as `request-id`, too. No version header is needed, and none is looked at.
"""

import asyncio
import dataclasses

import orjson
from aiohttp import web

from asyncserve.http.body import read_body
from asyncserve.http.caller import Caller
from asyncserve.http.conversation import LARGE_BODY_BYTES, ChatCall, chat_call
from asyncserve.http.failures import speaks_anthropic
from asyncserve.http.generation import LARGE_TEXT_LEN, collect, stream
from asyncserve.http.messages.schema import ConversationBody, CountTokensBody, MessagesBody
from asyncserve.http.messages.shapes import MessageShapes
from asyncserve.http.messages.translation import FIELD_NAMES, chat_body
from asyncserve.http.serving import REQUEST_ID_HEADER, SERVING, Serving, request_id_of
from asyncserve.request import ChatPrompt


async def messages(http_request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/messages."""
    serving = http_request.app[SERVING]
    arrival_s = serving.clock()
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    request_id = request_id_of(http_request)
    message_id = f"msg_{request_id}"
    with serving.refusals_counted():
        caller = serving.caller(http_request, arrival_s)
        body = serving.bodies.decode(data, MessagesBody)
        call = await _call(serving, body, len(data), message_id, caller)
    shapes = MessageShapes(
        message_id=message_id,
        request_id=request_id,
        model=call.model,
        max_tokens=body.max_tokens,
        parser=call.parser(),
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        eager_tools=_eager_tools(body, call),
        reasoning_count=call.reasoning_count(serving.token_texts),
    )
    # Clients that work on their own ask for far more tokens than they need, whatever the model's context.
    request = dataclasses.replace(call.request, cuts_max_tokens=True)
    with FIELD_NAMES.errors_as_asked():
        if body.stream:
            return await stream(
                http_request,
                serving,
                [request],
                shapes,
                request_id=request_id,
                on_begun=shapes.note_prompts,
            )
        [collected] = await collect(serving, [request])
    [output] = collected.outputs
    if len(output.text) > LARGE_TEXT_LEN:
        answer = await asyncio.to_thread(shapes.answer, output, collected.usage)
    else:
        answer = shapes.answer(output, collected.usage)
    return web.Response(body=answer, content_type="application/json", headers={REQUEST_ID_HEADER: request_id})


async def count_tokens(http_request: web.Request) -> web.Response:
    """Answer POST /v1/messages/count_tokens: how many tokens the prompt of such a message has."""
    serving = http_request.app[SERVING]
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    body = serving.bodies.decode(data, CountTokensBody)
    call = await _call(serving, body, len(data), "count", Caller())
    with FIELD_NAMES.errors_as_asked():
        num_tokens = await asyncio.to_thread(_num_tokens, serving, call)
    return web.Response(body=orjson.dumps({"input_tokens": num_tokens}), content_type="application/json")


async def name_request_id(http_request: web.Request, response: web.StreamResponse) -> None:
    """Give the response its id under the name that Anthropic's clients know; called when it is prepared."""
    if speaks_anthropic(http_request) and REQUEST_ID_HEADER in response.headers:
        response.headers["request-id"] = response.headers[REQUEST_ID_HEADER]


async def _call(
    serving: Serving, body: ConversationBody, num_bytes: int, message_id: str, caller: Caller
) -> ChatCall:
    serving.model_name(body.model)
    is_large = num_bytes > LARGE_BODY_BYTES
    asked = await asyncio.to_thread(chat_body, body) if is_large else chat_body(body)
    with FIELD_NAMES.errors_as_asked():
        return await chat_call(serving, asked, num_bytes=num_bytes, response_id=message_id, caller=caller)


def _eager_tools(body: MessagesBody, call: ChatCall) -> frozenset[str]:
    """Return the tools whose input is streamed as it comes."""
    names = {tool.name for tool in body.tools or () if tool.eager_input_streaming or tool.strict}
    if call.tool_choice.mode in ("required", "named"):
        # As with strict ones, a grammar sees to it.
        names |= {tool["name"] for tool in call.tool_choice.tools}
    return frozenset(names)


def _num_tokens(serving: Serving, call: ChatCall) -> int:
    tokenizer = serving.engine.tokenizer
    prompt = call.request.prompt
    assert isinstance(prompt, ChatPrompt)
    text = tokenizer.render_chat(prompt) if prompt.rendered is None else prompt.rendered
    return len(tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens))
