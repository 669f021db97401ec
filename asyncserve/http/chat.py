"""POST /v1/chat/completions: messages in, the assistant's message out, whole or in deltas.

Takes a `ChatBody`, makes one engine request with a `ChatPrompt`, and shows its output in OpenAI's shape.
A stream has, for each choice: a delta with the role, deltas with content, a delta with the finish reason;
then the usage if asked for, then `[DONE]`.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from asyncserve.errors import InvalidRequest, RequestError
from asyncserve.http.body import read_body
from asyncserve.http.generation import Shapes, engine_requests, includes_usage, respond, usage_object
from asyncserve.http.logprobs import TokenTexts, chat_content
from asyncserve.http.schema import (
    ChatBody,
    Message,
    TokenizeBody,
    check_common,
    check_num_logprobs,
    sampling_params,
)
from asyncserve.http.serving import SERVING, Serving, request_id_of
from asyncserve.loop.chat_template import joined_text
from asyncserve.request import ChatPrompt, RequestOutput, SamplingParams, Usage

LARGE_BODY_BYTES = 64 * 1024
"""Conversations in bodies above this are put together in a thread: their parts may be many thousands."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role as clients spell it to role as chat templates know it."""


async def chat(http_request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions."""
    serving = http_request.app[SERVING]
    arrival_s = serving.clock()
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    with serving.refusals_counted():
        body = serving.bodies.decode(data, ChatBody)
        model = serving.model_name(body.model)
        check_common(body)
        if body.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is not supported for chat: the template says which tokens a prompt has",
                param="add_special_tokens",
            )
        sampling = _sampling(body, serving)
        prompt = await chat_prompt(body, len(data))
    request_id = request_id_of(http_request, body.request_id)
    response_id = f"chatcmpl-{request_id}"
    shapes = ChatShapes(
        response_id=response_id,
        model=model,
        texts=serving.token_texts,
        gives_logprobs=sampling.num_logprobs is not None,
        includes_usage=includes_usage(body),
    )
    requests = engine_requests(
        serving, body, [prompt], sampling, response_id=response_id, arrival_s=arrival_s
    )
    try:
        return await respond(http_request, serving, body, requests, shapes, request_id=request_id)
    except RequestError as error:
        _name_as_asked(error, body)
        raise


def _sampling(body: ChatBody, serving: Serving) -> SamplingParams:
    if body.top_logprobs is not None:
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs is given; then logprobs must be true", param="top_logprobs")
        check_num_logprobs(body.top_logprobs, serving.max_logprobs, param="top_logprobs")
    try:
        return sampling_params(
            body,
            serving.default_sampling,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
    except RequestError as error:
        _name_as_asked(error, body)
        raise


def _name_as_asked(error: RequestError, body: ChatBody) -> None:
    """Name the output limit in an error as the client did."""
    if error.param == "max_tokens" and body.max_completion_tokens is not None:
        error.message = error.message.replace("max_tokens", "max_completion_tokens")
        error.args = (error.message,)
        error.param = "max_completion_tokens"


async def chat_prompt(body: ChatBody | TokenizeBody, num_bytes: int) -> ChatPrompt:
    """Return the prompt that a conversation's fields describe.

    Args:
        num_bytes: Length of the body it came in.

    Raises:
        InvalidRequest: There are no messages, or one of them cannot be shown to the model.
    """
    if num_bytes <= LARGE_BODY_BYTES:
        return _chat_prompt(body)
    return await asyncio.to_thread(_chat_prompt, body)


def _chat_prompt(body: ChatBody | TokenizeBody) -> ChatPrompt:
    if not body.messages:
        raise InvalidRequest("messages is missing or empty", param="messages")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatPrompt(
        messages=tuple(_message(index, message) for index, message in enumerate(body.messages)),
        add_generation_prompt=not continues
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
    )


def _message(index: int, message: Message) -> Mapping[str, Any]:
    where = f"messages[{index}]"
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role is {message.role[:64]!r}; roles are {', '.join(ROLES)}", param=f"{where}.role"
        )
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise InvalidRequest(f"{where} has no content", param=f"{where}.content")
    shown: dict[str, Any] = {"role": role, "content": joined_text(message.content or "", f"{where}.content")}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        shown["tool_calls"] = [_tool_call(f"{where}.tool_calls", call) for call in message.tool_calls]
    return shown


def _tool_call(where: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an earlier tool call as templates expect it: its arguments an object, not JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}: the arguments of a call are not valid JSON", param=where) from error
    return {**call, "function": {**function, "arguments": arguments}}


class ChatShapes(Shapes):
    """What answers of /v1/chat/completions look like."""

    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(
        self, *, response_id: str, model: str, texts: TokenTexts, gives_logprobs: bool, includes_usage: bool
    ) -> None:
        super().__init__(
            response_id=response_id, model=model, includes_usage=includes_usage, gives_logprobs=gives_logprobs
        )
        self._texts = texts

    def whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return one choice of an answer in one piece."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": None if output.finish_reason is None else output.finish_reason.value,
            "stop_reason": output.stop_reason,
        }

    def frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands around the text of an event with nothing but text."""
        before, separator, after = self._delta(index, {"content": ""}).rpartition(b'"content":"')
        return before + separator, after

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output of a choice: its role, its content, its end, as far as they are new."""
        events = []
        counts = None if usage is None else usage_object([usage])
        if is_first:
            none_yet = None if usage is None else usage_object([_before_output(usage)])
            events.append(self._delta(index, {"role": "assistant", "content": ""}, usage=none_yet))
        logprobs = self._logprobs(output) if output.logprobs else None
        if output.text or logprobs is not None:
            events.append(self._delta(index, {"content": output.text}, logprobs=logprobs, usage=counts))
        if output.finish_reason is not None:
            finish = {"finish_reason": output.finish_reason.value, "stop_reason": output.stop_reason}
            events.append(self._delta(index, {}, usage=counts, finish=finish))
        return events

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if not self.gives_logprobs:
            return None
        return {"content": chat_content(output.logprobs or (), self._texts), "refusal": None}

    def _delta(
        self,
        index: int,
        delta: Mapping[str, str],
        *,
        logprobs: Mapping[str, Any] | None = None,
        usage: Mapping[str, Any] | None = None,
        finish: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            **(finish or {}),
        }
        return self.chunk([choice], usage)


def _before_output(usage: Usage) -> Usage:
    return Usage(usage.num_prompt_tokens, 0, usage.num_cached_tokens)
