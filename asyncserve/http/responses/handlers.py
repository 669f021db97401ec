"""/v1/responses: OpenAI's Responses API over the same engine requests as chat.

POST makes a response, whole, as events, or in the background; GET, DELETE, `/cancel` and `/input_items` are
about stored ones, each visible only with the key that made it. A body becomes a `ChatBody`
(`input`) and goes the way of chat (`conversation`); what a response looks like is
`events`' business. A client that leaves ends its response, which then is not stored, unless it
runs in the background.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from aiohttp import hdrs, web

from asyncserve.errors import InvalidRequest
from asyncserve.http.auth import owner_of
from asyncserve.http.body import read_body
from asyncserve.http.conversation import LARGE_BODY_BYTES, ChatCall, chat_call
from asyncserve.http.generation import LARGE_TEXT_LEN, collect, event_stream, stream
from asyncserve.http.responses.background import BackgroundResponse
from asyncserve.http.responses.events import ResponseEvents, ResponseWriter, new_id
from asyncserve.http.responses.input import (
    FIELD_NAMES,
    ResponseInput,
    check_body,
    gives_logprobs,
    response_input,
)
from asyncserve.http.responses.schema import ResponsesBody, ResponseToolChoice
from asyncserve.http.responses.store import RunningResponse, StoredResponse
from asyncserve.http.serving import REQUEST_ID_HEADER, SERVING, Serving, request_id_of
from asyncserve.http.sse import KEEP_ALIVE
from asyncserve.request import RequestOutput, Usage

MAX_CONVERSATION_BYTES = 16 * 1024 * 1024
"""Most bytes of a conversation that responses carry on; twice a body's limit, if that is more."""
PROMPT_COPIES = 2
"""How often the engine holds what a body says until it is admitted: its messages, and the rendered prompt."""
MAX_EVENTS_AT_ONCE = 256
"""Kept events are written in such pieces, so that a client that reads slowly is not taken for one that
stalls, and does not have all of them piled up for it."""
Made = TypeVar("Made")

MAX_PAGE = 100
DEFAULT_PAGE = 20


async def create_response(http_request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/responses."""
    answer = await _answer(http_request)
    if isinstance(answer, web.StreamResponse):
        return answer
    # Not within `_answer`, where all that was asked is at hand: it would be held as long as the client stays.
    return await _follow(http_request, answer.running, answer.request_id)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A response that runs in the background, and whose client wants to see its events."""

    running: BackgroundResponse
    request_id: str


async def _answer(http_request: web.Request) -> web.StreamResponse | _Begun:
    serving = http_request.app[SERVING]
    arrival_s = serving.clock()
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    owner = owner_of(http_request)
    response_id = new_id("resp")
    with serving.refusals_counted(), FIELD_NAMES.errors_as_asked():
        caller = serving.caller(http_request, arrival_s)
        body = serving.bodies.decode(data, ResponsesBody)
        check_body(body)
        previous = _previous(serving, body, owner)
        num_bytes = len(data) + (0 if previous is None else len(previous.items) + len(previous.body))
        asked, facts = await _in_thread_if(
            num_bytes > LARGE_BODY_BYTES,
            lambda: _prepared(body, previous, max(MAX_CONVERSATION_BYTES, 2 * http_request.client_max_size)),
        )
        call = await chat_call(
            serving, asked.chat, num_bytes=num_bytes, response_id=response_id, caller=caller
        )
        if body.background:
            # Last: nothing is awaited between this and its taking the place.
            serving.responses.check_room(len(asked.items) + PROMPT_COPIES * num_bytes)
    response = _Response(
        serving, body, call, items=asked.items, facts=facts, response_id=response_id, owner=owner
    )
    request_id = request_id_of(http_request, body.request_id)
    if body.background:
        running = _run_in_background(response, num_prompt_bytes=PROMPT_COPIES * num_bytes)
        return _Begun(running, request_id) if body.stream else _json(running.body(), request_id)
    if body.stream:
        writer = response.writer()
        events = ResponseEvents(
            writer, on_complete=lambda: response.store(writer), shown_error=FIELD_NAMES.as_asked
        )
        with FIELD_NAMES.errors_as_asked():
            return await stream(http_request, serving, [call.request], events, request_id=request_id)
    with FIELD_NAMES.errors_as_asked():
        [collected] = await collect(serving, [call.request])
    [output] = collected.outputs
    text = await response.whole(output, collected.usage)
    return _json(text, request_id)


async def get_response(http_request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/responses/{response_id}; with `stream=true`, the events of a background response."""
    found = _found(http_request)
    request_id = request_id_of(http_request)
    if _is_true(http_request.query.get("stream", "")):
        if found.events is None:
            raise InvalidRequest(
                "the response has no events to stream: only those made with background and stream do",
                param="stream",
            )
        after = _integer(http_request.query, "starting_after", default=-1, low=-1, high=2**31)
        return await _follow(http_request, found, request_id, first=after + 1)
    return _json(found.body if isinstance(found, StoredResponse) else found.body(), request_id)


async def delete_response(http_request: web.Request) -> web.Response:
    """Answer DELETE /v1/responses/{response_id}; one that is running ends."""
    found = _found(http_request)
    if isinstance(found, StoredResponse):
        http_request.app[SERVING].responses.remove(found.response_id)
    else:
        found.discard()
    answer = {"id": found.response_id, "object": "response", "deleted": True}
    return _json(orjson.dumps(answer), request_id_of(http_request))


async def cancel_response(http_request: web.Request) -> web.Response:
    """Answer POST /v1/responses/{response_id}/cancel; nothing happens to a response that is done."""
    found = _found(http_request)
    if isinstance(found, StoredResponse):
        if not found.was_background:
            raise InvalidRequest(
                "only responses made with background can be cancelled; others end when their client leaves",
                param="id",
            )
        return _json(found.body, request_id_of(http_request))
    found.cancel()
    return _json(found.body(), request_id_of(http_request))


async def list_input_items(http_request: web.Request) -> web.Response:
    """Answer GET /v1/responses/{response_id}/input_items: the conversation that the response answers."""
    found = _found(http_request)
    query = http_request.query
    limit = _integer(query, "limit", default=DEFAULT_PAGE, low=1, high=MAX_PAGE)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    after = query.get("after")
    page = await _in_thread_if(
        len(found.items) > LARGE_BODY_BYTES, lambda: _page(found.items, limit, order, after)
    )
    return _json(page, request_id_of(http_request))


def _page(text: bytes, limit: int, order: str, after: str | None) -> bytes:
    items: list[dict[str, Any]] = orjson.loads(text)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = next((index + 1 for index, item in enumerate(items) if item["id"] == after), -1)
        if start < 0:
            raise InvalidRequest("after is the id of no input item of this response", param="after")
    shown = items[start : start + limit]
    return orjson.dumps(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else "",
            "last_id": shown[-1]["id"] if shown else "",
            "has_more": start + limit < len(items),
        }
    )


class _Response:
    """One response on its way from the body to the store.

    Args:
        items: What it is made from, as JSON.
        facts: What the body alone says of it.
    """

    def __init__(
        self,
        serving: Serving,
        body: ResponsesBody,
        call: ChatCall,
        *,
        items: bytes,
        facts: Mapping[str, Any],
        response_id: str,
        owner: bytes,
    ) -> None:
        self.serving = serving
        self.body = body
        self.call = call
        self.items = items
        self.response_id = response_id
        self.owner = owner
        self.is_stored = body.store is not False and serving.responses.is_on
        self._facts = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": call.model,
            **facts,
            "store": self.is_stored,
            "temperature": call.sampling.temperature,
            "top_p": call.sampling.top_p,
        }

    def writer(self, *, writes_events: bool = True) -> ResponseWriter:
        """Return what writes it down."""
        texts = self.serving.token_texts
        return ResponseWriter(
            self._facts,
            parser=self.call.parser(),
            texts=texts,
            reasoning_count=self.call.reasoning_count(texts),
            gives_logprobs=gives_logprobs(self.body),
            skips_special=self.call.sampling.skip_special_tokens,
            writes_events=writes_events,
        )

    async def whole(self, output: RequestOutput, usage: Usage) -> bytes:
        """Return the response in one piece, made of all output; it is stored by then."""
        writer = self.writer(writes_events=False)

        def write() -> bytes:
            writer.begin()
            writer.feed(output)
            writer.complete(usage)
            return orjson.dumps(writer.response())

        is_slow = output.logprobs is not None or len(output.text) > LARGE_TEXT_LEN
        text = await _in_thread_if(is_slow, write)
        self.store(writer, text)
        return text

    def store(self, writer: ResponseWriter, text: bytes | None = None) -> None:
        """Keep the response, which is complete, if that is asked for."""
        if self.is_stored:
            self.serving.responses.add(
                StoredResponse(
                    response_id=self.response_id,
                    owner=self.owner,
                    body=text or orjson.dumps(writer.response()),
                    items=self.items,
                )
            )


def _run_in_background(response: _Response, *, num_prompt_bytes: int) -> BackgroundResponse:
    engine, engine_id = response.serving.engine, response.call.request.request_id
    running = BackgroundResponse(
        response.response_id,
        owner=response.owner,
        items=response.items,
        num_prompt_bytes=num_prompt_bytes,
        writer=response.writer(writes_events=bool(response.body.stream)),
        store=response.serving.responses,
        keeps_events=bool(response.body.stream),
        abort=lambda: engine.abort(engine_id),
        shown_error=FIELD_NAMES.as_asked,
    )
    try:
        engine.submit(response.call.request, running)
    except BaseException:
        running.discard()
        raise
    return running


async def _follow(
    http_request: web.Request,
    found: StoredResponse | RunningResponse,
    request_id: str,
    *,
    first: int = 0,
) -> web.StreamResponse:
    """Write a response's events, those that are still to come included.

    Args:
        first: Number of the first event to write.
    """
    serving = http_request.app[SERVING]
    response = event_stream(http_request, request_id)
    await response.prepare(http_request)
    if http_request.method == hdrs.METH_HEAD:
        return response
    while found.events is not None:
        events = found.events[first : first + MAX_EVENTS_AT_ONCE]
        if events:
            first += len(events)
            try:
                async with asyncio.timeout(serving.stall_timeout_s):
                    await response.write(b"".join(events))
            except TimeoutError:
                if http_request.transport is not None:
                    http_request.transport.abort()
                break
        elif isinstance(found, StoredResponse) or found.is_done:
            break
        elif not await _news_came(found, serving.keep_alive_s):
            await response.write(KEEP_ALIVE)
    return response


async def _news_came(running: RunningResponse, within_s: float) -> bool:
    """Wait for a response's news, at most so many seconds (0: however long); return whether they came."""
    try:
        async with asyncio.timeout(within_s or None):
            await running.wait_for_news()
    except TimeoutError:
        return False
    return True


async def _in_thread_if(is_slow: bool, make: Callable[[], Made]) -> Made:
    return await asyncio.to_thread(make) if is_slow else make()


def _previous(serving: Serving, body: ResponsesBody, owner: bytes) -> StoredResponse | None:
    if body.previous_response_id is None:
        return None
    name = "previous_response_id"
    found = serving.responses.find(body.previous_response_id, owner, param=name)
    if not isinstance(found, StoredResponse):
        raise InvalidRequest("the previous response is still being made; wait for its end", param=name)
    if not found.can_continue:
        raise InvalidRequest("the previous response has no answer: it failed or was cancelled", param=name)
    return found


def _found(http_request: web.Request) -> StoredResponse | RunningResponse:
    store = http_request.app[SERVING].responses
    return store.find(http_request.match_info["response_id"], owner_of(http_request))


def _json(text: bytes, request_id: str) -> web.Response:
    return web.Response(body=text, content_type="application/json", headers={REQUEST_ID_HEADER: request_id})


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1")


def _integer(query: Mapping[str, str], name: str, *, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        number = int(text) if len(text) <= 20 else high + 1
    except ValueError:
        number = high + 1
    if not low <= number <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}", param=name)
    return number


# ---- what the body says of the response ----------------------------------------------------------------


def _prepared(
    body: ResponsesBody, previous: StoredResponse | None, max_bytes: int
) -> tuple[ResponseInput, dict[str, Any]]:
    return response_input(body, previous, max_bytes=max_bytes), _facts(body)


def _facts(body: ResponsesBody) -> dict[str, Any]:
    """Return the part of a response object that hands back what was asked.

    Raises:
        InvalidRequest: It cannot be written as JSON again.
    """
    reasoning = body.reasoning
    return {
        "background": bool(body.background),
        "instructions": _as_json("instructions", body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "text": _as_json("text", _text(body)),
        "tool_choice": _tool_choice(body.tool_choice),
        "tools": _as_json("tools", _tools(body)),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _as_json(name: str, value: object) -> orjson.Fragment:
    """Return a value written once, for all the times it is shown."""
    try:
        return orjson.Fragment(orjson.dumps(value))
    except orjson.JSONEncodeError as error:
        # JSON from outside may be nested more deeply, or hold greater integers, than JSON from here.
        raise InvalidRequest(
            f"{name} holds what cannot be written as JSON again: {error}", param=name
        ) from error


def _text(body: ResponsesBody) -> dict[str, Any]:
    given = None if body.text is None else body.text.format
    shown: dict[str, Any] = {"type": "text" if given is None else given.type}
    if given is not None and given.type == "json_schema":
        shown |= {"name": given.name or "", "description": given.description}
        shown |= {"schema": given.schema, "strict": given.strict is not False}
    verbosity = None if body.text is None else body.text.verbosity
    return {"format": shown, "verbosity": verbosity or "medium"}


def _tools(body: ResponsesBody) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": bool(tool.strict),
        }
        for tool in body.tools or ()
    ]


def _tool_choice(choice: str | ResponseToolChoice | None) -> Any:
    match choice:
        case None:
            return "auto"
        case str():
            return choice
        case ResponseToolChoice(type="allowed_tools"):
            tools = [{"type": tool.type, "name": tool.name} for tool in choice.tools or ()]
            return {"type": choice.type, "mode": choice.mode, "tools": tools}
        case ResponseToolChoice():
            return {"type": choice.type, "name": choice.name}
