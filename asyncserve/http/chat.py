"""POST /v1/chat/completions: messages in, the assistant's message out, whole or in deltas.

Takes a `ChatBody`, makes one engine request of it (`conversation`), and shows its output in OpenAI's shape.
A stream has, for each choice: a delta with the role, deltas with reasoning, content and tool calls, a delta
with the finish reason; then the usage if asked for, then `[DONE]`. What a text means is decided in one place,
`ChatShapes._news`, whether it is streamed or not, so the two cannot differ.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from asyncserve.http.body import read_body
from asyncserve.http.conversation import ChatCall, chat_call, limit_named_as_asked
from asyncserve.http.generation import Shapes, includes_usage, respond, usage_object
from asyncserve.http.logprobs import TokenTexts, chat_content, prompt_scores
from asyncserve.http.parsers.interface import MessageDelta, ParsedMessage, ToolCallDelta
from asyncserve.http.reasoning_tokens import ReasoningCount
from asyncserve.http.schema import ChatBody
from asyncserve.http.serving import SERVING, request_id_of
from asyncserve.http.tools import new_call_id
from asyncserve.request import RequestOutput, Usage


async def chat(http_request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions."""
    serving = http_request.app[SERVING]
    arrival_s = serving.clock()
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    with serving.refusals_counted():
        caller = serving.caller(http_request, arrival_s)
        body = serving.bodies.decode(data, ChatBody)
        request_id = request_id_of(http_request, body.request_id)
        response_id = f"chatcmpl-{request_id}"
        call = await chat_call(serving, body, num_bytes=len(data), response_id=response_id, caller=caller)
    shapes = ChatShapes(call, response_id=response_id, texts=serving.token_texts)
    with limit_named_as_asked(body):
        return await respond(
            http_request,
            serving,
            body,
            [call.request],
            shapes,
            request_id=request_id,
            on_begun=shapes.prepare if body.return_token_ids else None,
        )


class ChatShapes(Shapes):
    """What answers of /v1/chat/completions look like.

    Args:
        call: What is answered.
        texts: Of tokens, for log-probabilities.
    """

    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, call: ChatCall, *, response_id: str, texts: TokenTexts) -> None:
        super().__init__(
            response_id=response_id,
            model=call.model,
            includes_usage=includes_usage(call.body),
            gives_logprobs=call.sampling.num_logprobs is not None,
        )
        self._call = call
        self._texts = texts
        self._names_ids = bool(call.body.return_tokens_as_token_ids)
        self._gives_ids = bool(call.body.return_token_ids)
        self._prompt_token_ids: Sequence[int] = ()
        self._parsers = [call.parser() for _ in range(call.sampling.n)]
        self._calls_tools = [False] * call.sampling.n
        counts = (call.reasoning_count(texts) for _ in range(call.sampling.n))
        self._reasoning_counts = [count for count in counts if count is not None]

    async def prepare(self, tokenized: Sequence["array[int]"]) -> None:
        """Take note of the tokenized prompt, before anything is shown."""
        [token_ids] = tokenized
        self._prompt_token_ids = token_ids.tolist()

    def _news(self, index: int, output: RequestOutput) -> Iterator[MessageDelta]:
        """Give what an output adds to its choice's message; note what its end and the usage need of it."""
        if self._reasoning_counts:
            self._reasoning_counts[index].take(output.token_ids)
        parser = self._parsers[index]
        if parser is None:
            yield MessageDelta(content=output.text)
            return
        deltas = [parser.feed(output.text)] if output.text else []
        if output.finish_reason is not None:
            deltas.append(parser.finish())
        for delta in deltas:
            if delta.tool_calls:
                self._calls_tools[index] = True
            if delta:
                yield delta

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Return the token counts of the call so far, those of reasoning with them if they are exact."""
        return self._usage(usages, self._reasoning_counts)

    def _usage(self, usages: Sequence[Usage], counts: Sequence[ReasoningCount]) -> dict[str, Any]:
        shown = usage_object(usages)
        if counts:
            num_tokens = sum(count.num_tokens for count in counts)
            shown["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return shown

    def _finish(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return why a choice ended; nothing if it has not."""
        reason = output.finish_reason
        return {
            "finish_reason": None
            if reason is None
            else self._call.finish_reason(reason, calls_tools=self._calls_tools[index]),
            "stop_reason": output.stop_reason,
        }

    def whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return one choice of an answer in one piece."""
        parsed = ParsedMessage(content=self._call.echoed)
        for delta in self._news(index, output):
            parsed.add(delta)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning:
            message |= _reasoning(parsed.reasoning)
        if parsed.tool_calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {
                    "id": new_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.tool_calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            **self._finish(index, output),
        }
        if self._gives_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    def whole_extras(self, outputs: Sequence[RequestOutput]) -> Mapping[str, Any]:
        """Return what is told of the prompt."""
        extras: dict[str, Any] = {}
        if self._gives_ids:
            extras["prompt_token_ids"] = self._prompt_token_ids
        num_top = self._call.sampling.num_prompt_logprobs
        if num_top is not None:
            # One choice's will do: the prompt is the same.
            extras["prompt_logprobs"] = prompt_scores(outputs[0].prompt_logprobs or (), self._texts, num_top)
        return extras

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what stands around the text of an event with nothing but text."""
        if self._gives_ids or self._parsers[index] is not None:
            return None
        before, separator, after = self._event(index, {"content": ""}).rpartition(b'"content":"')
        return before + separator, after

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output of a choice: its role, what is new in its message, its end."""
        events = []
        if is_first:
            none_yet = None if usage is None else usage_object([_before_output(usage)])
            role = {"role": "assistant", "content": self._call.echoed}
            prompt = {"prompt_token_ids": self._prompt_token_ids} if self._gives_ids else {}
            events.append(self._event(index, role, usage=none_yet, beside=prompt))
        pieces = [piece for delta in self._news(index, output) for piece in _pieces(delta)]
        counts = None if usage is None else self._usage([usage], self._reasoning_counts[index : index + 1])
        extras: dict[str, Any] = {}
        if output.logprobs:
            extras["logprobs"] = self._logprobs(output)
        if self._gives_ids and output.token_ids:
            extras["token_ids"] = list(output.token_ids)
        if extras and not pieces:
            pieces.append({} if self._parsers[index] is not None else {"content": ""})
        for piece in pieces:
            events.append(self._event(index, piece, usage=counts, choice=extras))
            extras = {}
        if output.finish_reason is not None:
            events.append(self._event(index, {}, usage=counts, choice=self._finish(index, output)))
        return events

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if not self.gives_logprobs:
            return None
        content = chat_content(output.logprobs or (), self._texts, names_ids=self._names_ids)
        return {"content": content, "refusal": None}

    def _event(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        usage: Mapping[str, Any] | None = None,
        choice: Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Render one event with one choice.

        Args:
            delta: What is new in its message.
            usage: Counts so far.
            choice: What else is new of the choice.
            beside: What stands beside the choices.
        """
        plain = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk([plain | dict(choice or {})], usage, beside)


def _reasoning(text: str) -> dict[str, str]:
    # OpenAI has no field for it; clients know one of these two.
    return {"reasoning": text, "reasoning_content": text}


def _pieces(delta: MessageDelta) -> Iterator[dict[str, Any]]:
    """Give a delta as OpenAI's clients expect it: one thing at a time, a call's head before its arguments."""
    if delta.reasoning:
        yield _reasoning(delta.reasoning)
    if delta.content:
        yield {"content": delta.content}
    for call in delta.tool_calls:
        yield from _call_pieces(call)


def _call_pieces(call: ToolCallDelta) -> Iterator[dict[str, Any]]:
    if call.name is not None:
        head = {"name": call.name, "arguments": ""}
        yield {
            "tool_calls": [{"index": call.index, "id": new_call_id(), "type": "function", "function": head}]
        }
    if call.arguments:
        yield {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}


def _before_output(usage: Usage) -> Usage:
    return Usage(usage.num_prompt_tokens, 0, usage.num_cached_tokens)
