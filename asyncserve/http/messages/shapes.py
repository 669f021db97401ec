"""What answers of /v1/messages look like: the message in one piece, or Anthropic's named events.

A stream has: message_start, ping; for each block content_block_start, deltas, content_block_stop; then
message_delta with the reason and the counts, and message_stop. Reasoning carries an empty signature. Input
tokens are counted as Anthropic counts them: those from the cache are not among `input_tokens`.
"""

import json
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import orjson

from asyncserve.http.failures import anthropic_error, failure_of
from asyncserve.http.messages.blocks import BlockStep, BlockWriter
from asyncserve.http.messages.partial_json import is_object, partial_object
from asyncserve.http.parsers.interface import MessageParser
from asyncserve.http.reasoning_tokens import ReasoningCount
from asyncserve.http.sse import named_event
from asyncserve.request import FinishReason, RequestOutput, Usage

DELTAS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Kind of block to the type of its deltas, and the field that holds what is new."""


class MessageShapes:
    """One answer, and its events; a `ChunkRenderer`.

    Args:
        message_id: The answer's id.
        request_id: Of the call, for errors.
        model: The name the client used.
        max_tokens: What the client asked for; with 0 only the prompt is computed, and the answer is empty.
        parser: Reads the answer's text; None if all of it is text.
        shows_thinking: The text of reasoning is shown.
        eager_tools: Tools whose input is streamed as it comes.
        reasoning_count: Counts the tokens of reasoning, where that can be done.
    """

    def __init__(
        self,
        *,
        message_id: str,
        request_id: str,
        model: str,
        max_tokens: int,
        parser: MessageParser | None,
        shows_thinking: bool = True,
        eager_tools: Collection[str] = (),
        reasoning_count: ReasoningCount | None = None,
    ) -> None:
        self._message_id = message_id
        self._request_id = request_id
        self._model = model
        self._max_tokens = max_tokens
        self._is_plain = parser is None
        self._writer = BlockWriter(parser, shows_thinking=shows_thinking, eager_tools=eager_tools)
        self._reasoning_count = reasoning_count
        self._num_prompt_tokens = 0

    async def note_prompts(self, prompts: "Sequence[array[int]]") -> None:
        """Take note of how long the prompt is: a stream says it at its beginning."""
        self._num_prompt_tokens = len(prompts[0])

    def answer(self, output: RequestOutput, usage: Usage) -> bytes:
        """Return the whole answer."""
        content = [] if self._max_tokens == 0 else _blocks(self._steps(output))
        ending = self._ending(output, usage)
        return orjson.dumps({**self._message(content), **ending, "usage": self._total_usage(usage)})

    def first_events(self) -> list[bytes]:
        """Render the beginning: the message without content."""
        message = {
            **self._message([]),
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": self._usage(Usage(self._num_prompt_tokens, 0, 0)),
        }
        return [_event("message_start", message=message), self.keep_alive()]

    def keep_alive(self) -> bytes:
        """Render a ping, which Anthropic's clients expect at any time."""
        return _event("ping")

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what stands around the text of an event with nothing but text."""
        if not self._is_plain or self._max_tokens == 0:
            return None
        delta = _block_event(BlockStep(0, "text", ""))
        before, separator, after = delta.rpartition(b'"text":"')
        return before + separator, after

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output: blocks and the reason of the end, as far as they are new."""
        events: list[bytes] = []
        if self._max_tokens > 0:
            if is_first and self._is_plain:
                events += map(_block_event, self._writer.open_text())
            for step in self._steps(output):
                if step.ends and step.kind == "thinking":
                    signature = {"type": "signature_delta", "signature": ""}
                    events.append(_event("content_block_delta", index=step.index, delta=signature))
                events.append(_block_event(step))
        if output.finish_reason is not None and output.usage is not None:
            delta = self._ending(output, output.usage)
            events.append(_event("message_delta", delta=delta, usage=self._total_usage(output.usage)))
        return events

    def last_events(self, usages: Sequence[Usage]) -> list[bytes]:
        """Render the end."""
        return [_event("message_stop")]

    def error(self, error: BaseException) -> bytes:
        """Render the event that ends a stream in failure."""
        return named_event(b"error", orjson.dumps(anthropic_error(failure_of(error), self._request_id)))

    def _steps(self, output: RequestOutput) -> Iterable[BlockStep]:
        if self._reasoning_count is not None:
            self._reasoning_count.take(output.token_ids)
        yield from self._writer.feed(output.text)
        if output.finish_reason is not None:
            is_cut = output.finish_reason is FinishReason.LENGTH or isinstance(output.stop_reason, str)
            yield from self._writer.finish(is_cut=is_cut)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _ending(self, output: RequestOutput, usage: Usage) -> dict[str, str | None]:
        """Return why the answer ended; valid when all its text has been taken."""
        stop_sequence = None
        if output.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
            if usage.num_output_tokens < self._max_tokens:
                reason = "model_context_window_exceeded"
        elif isinstance(output.stop_reason, str):
            reason, stop_sequence = "stop_sequence", output.stop_reason
        else:
            reason = "tool_use" if self._writer.num_calls else "end_turn"
        if self._max_tokens == 0:
            reason, stop_sequence = "max_tokens", None
        return {"stop_reason": reason, "stop_sequence": stop_sequence, "stop_details": None}

    def _total_usage(self, usage: Usage) -> dict[str, Any]:
        shown: dict[str, Any] = self._usage(usage)
        if self._reasoning_count is not None:
            shown["output_tokens_details"] = {"thinking_tokens": self._reasoning_count.num_tokens}
        return shown

    def _usage(self, usage: Usage) -> dict[str, int]:
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": min(usage.num_output_tokens, self._max_tokens),
        }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind.encode(), orjson.dumps({"type": kind, **fields}))


def _block_event(step: BlockStep) -> bytes:
    if step.ends:
        return _event("content_block_stop", index=step.index)
    if step.text is None:
        return _event("content_block_start", index=step.index, content_block=_block(step, ""))
    kind, field = DELTAS[step.kind]
    return _event("content_block_delta", index=step.index, delta={"type": kind, field: step.text})


def _blocks(steps: Iterable[BlockStep]) -> list[dict[str, Any]]:
    """Return the blocks that the steps make."""
    begun: list[tuple[BlockStep, list[str]]] = []
    for step in steps:
        if step.text is not None:
            begun[-1][1].append(step.text)
        elif not step.ends:
            begun.append((step, []))
    return [_block(step, "".join(texts)) for step, texts in begun]


def _block(step: BlockStep, text: str) -> dict[str, Any]:
    match step.kind:
        case "text":
            return {"type": "text", "text": text}
        case "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "tool_use":
            return {"type": "tool_use", "id": step.call_id, "name": step.name, "input": _input(text)}


def _input(arguments: str) -> orjson.Fragment:
    """Return a call's input as it was written, or what is complete of it, where the answer was cut off."""
    if is_object(arguments):
        return orjson.Fragment(arguments)
    # Only an eager tool's: others are checked before.
    return orjson.Fragment(json.dumps(partial_object(arguments) or {}))
