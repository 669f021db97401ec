"""POST /v1/completions: prompts in four forms, several at once, echo, log-probabilities.

Takes a `CompletionBody`, makes one engine request per prompt, and shows their outputs in OpenAI's shape.
With `n` choices of each prompt, choice j of prompt i has the index i * n + j. One function renders a choice
whether it is streamed or not, so the two cannot differ.
"""

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web

from asyncserve.errors import InvalidRequest
from asyncserve.http.failures import failure_of
from asyncserve.http.generation import collect, stream, usage_object
from asyncserve.http.logprobs import CompletionLogprobs, TokenTexts, join
from asyncserve.http.schema import (
    DEFAULT_MAX_TOKENS,
    MAX_SEQUENCES,
    CompletionBody,
    check_common,
    check_num_logprobs,
    sampling_params,
)
from asyncserve.http.serving import REQUEST_ID_HEADER, SERVING, ServedTokenizer, Serving, request_id_of
from asyncserve.request import Request, RequestOutput, SamplingParams, TextPrompt, TokensPrompt, Usage


async def complete(http_request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions."""
    serving = http_request.app[SERVING]
    arrival_s = serving.clock()
    body = serving.bodies.decode(await http_request.read(), CompletionBody)
    model = serving.model_name(body.model)
    check_common(body)
    prompts = _prompts(body)
    sampling = _sampling(body, serving)
    if len(prompts) * sampling.n > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {sampling.n}; at most {MAX_SEQUENCES} sequences are taken",
            param="prompt",
        )
    request_id = request_id_of(http_request, body.request_id)
    response_id = f"cmpl-{request_id}"
    requests = [
        Request(
            request_id=serving.engine_id(response_id),
            prompt=prompt,
            sampling=sampling,
            arrival_s=arrival_s,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        for prompt in prompts
    ]
    shapes = CompletionShapes(
        response_id=response_id,
        model=model,
        created=int(time.time()),
        sampling=sampling,
        texts=serving.token_texts,
        num_choices=len(prompts) * sampling.n,
        includes_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )
    echo = _Echo(shapes, prompts, sampling, serving.engine.tokenizer) if body.echo else None
    if body.stream:
        return await stream(
            http_request,
            serving,
            requests,
            shapes,
            request_id=request_id,
            wants_usage=shapes.includes_usage
            and body.stream_options is not None
            and bool(body.stream_options.continuous_usage_stats),
            on_begun=None if echo is None else echo.prepare,
        )
    collected = await collect(serving, requests)
    if echo is not None:
        await echo.prepare([each.prompt_token_ids for each in collected])
    outputs = [output for each in collected for output in each.outputs]
    usages = [each.usage for each in collected]
    if body.logprobs is None:
        answer = shapes.answer(outputs, usages)
    else:
        # Thousands of tokens with twenty rivals each take a while to write down.
        answer = await asyncio.to_thread(shapes.answer, outputs, usages)
    return web.Response(body=answer, content_type="application/json", headers={REQUEST_ID_HEADER: request_id})


def _prompts(body: CompletionBody) -> list[TextPrompt | TokensPrompt]:
    """Return the prompts of a body: one string, several, one list of ids, or several."""
    given = body.prompt
    adds_special = body.add_special_tokens is not False
    if given is None:
        raise InvalidRequest("prompt is missing", param="prompt")
    if isinstance(given, str):
        return [TextPrompt(text=given, add_special_tokens=adds_special)]
    if not given:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if all(isinstance(item, int) for item in given):
        return [TokensPrompt(token_ids=[item for item in given if isinstance(item, int)])]
    prompts: list[TextPrompt | TokensPrompt] = []
    for item in given:
        if isinstance(item, int) or isinstance(item, str) != isinstance(given[0], str):
            raise InvalidRequest(
                "prompt must be a string, a list of strings, a list of token ids or a list of such lists,"
                " not a mixture",
                param="prompt",
            )
        if isinstance(item, str):
            prompts.append(TextPrompt(text=item, add_special_tokens=adds_special))
        else:
            prompts.append(TokensPrompt(token_ids=item))
    return prompts


def _sampling(body: CompletionBody, serving: Serving) -> SamplingParams:
    if body.logprobs is not None:
        check_num_logprobs(body.logprobs, serving.max_logprobs, param="logprobs")
    return sampling_params(
        body,
        serving.default_sampling,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.logprobs if body.echo else None,
    )


class CompletionShapes:
    """What answers of /v1/completions look like; one object per call, a `ChunkRenderer` too."""

    def __init__(
        self,
        *,
        response_id: str,
        model: str,
        created: int,
        sampling: SamplingParams,
        texts: TokenTexts,
        num_choices: int,
        includes_usage: bool,
    ) -> None:
        self.includes_usage = includes_usage
        self.echoes: Mapping[int, tuple[array[int], str]] = {}
        """Prompt index to the tokens and the text to show before its choices' own."""
        self._head = {
            "id": response_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._num_per_prompt = sampling.n
        self._logprobs: list[CompletionLogprobs] | None = None
        if sampling.num_logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(texts, skips_special=sampling.skip_special_tokens)
                for _ in range(num_choices)
            ]

    def answer(self, outputs: Sequence[RequestOutput], usages: Sequence[Usage]) -> bytes:
        """Return the whole answer, from one output per choice and one usage per prompt."""
        choices = [self._choice(index, output, is_first=True) for index, output in enumerate(outputs)]
        return orjson.dumps({**self._head, "choices": choices, "usage": usage_object(usages)})

    def frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands around the text of an event with nothing but text."""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        before, separator, after = self._chunk([choice]).rpartition(b'"text":"')
        return before + separator, after

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output of a choice: at most one event."""
        choice = self._choice(index, output, is_first=is_first)
        is_news = is_first or output.finish_reason is not None or usage is not None
        if not is_news and not choice["text"] and not output.logprobs:
            return []
        return [self._chunk([choice], usage=None if usage is None else usage_object([usage]))]

    def last_events(self, usages: Sequence[Usage]) -> list[bytes]:
        """Render the usage, if asked for, and the end mark."""
        if not self.includes_usage:
            return [b"[DONE]"]
        return [self._chunk([], usage=usage_object(usages)), b"[DONE]"]

    def error(self, error: BaseException) -> bytes:
        """Render the event that ends a stream in failure."""
        return orjson.dumps(failure_of(error).as_object())

    def _chunk(
        self, choices: Sequence[Mapping[str, Any]], *, usage: Mapping[str, Any] | None = None
    ) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self.includes_usage:
            chunk["usage"] = usage
        return orjson.dumps(chunk)

    def _choice(self, index: int, output: RequestOutput, *, is_first: bool) -> dict[str, Any]:
        text = output.text
        lists = None
        if self._logprobs is not None:
            scores = self._logprobs[index]
            if is_first and index // self._num_per_prompt in self.echoes:
                token_ids, echoed = self.echoes[index // self._num_per_prompt]
                lists = scores.prompt(token_ids, output.prompt_logprobs or (), echoed)
                lists = join(lists, scores.output(output.logprobs or ()))
            else:
                lists = scores.output(output.logprobs or ())
        if is_first and index // self._num_per_prompt in self.echoes:
            text = self.echoes[index // self._num_per_prompt][1] + text
        return {
            "index": index,
            "text": text,
            "logprobs": lists,
            "finish_reason": None if output.finish_reason is None else output.finish_reason.value,
            "stop_reason": output.stop_reason,
        }


class _Echo:
    """Finds the texts to show before the choices of each prompt; token prompts are decoded in a thread."""

    def __init__(
        self,
        shapes: CompletionShapes,
        prompts: Sequence[TextPrompt | TokensPrompt],
        sampling: SamplingParams,
        tokenizer: ServedTokenizer,
    ) -> None:
        self._shapes = shapes
        self._prompts = prompts
        self._skips_special = sampling.skip_special_tokens
        self._tokenizer = tokenizer

    async def prepare(self, tokenized: Sequence["array[int]"]) -> None:
        """Give the shapes the texts of the tokenized prompts."""
        self._shapes.echoes = {
            index: (token_ids, await self._text(self._prompts[index], token_ids))
            for index, token_ids in enumerate(tokenized)
        }

    async def _text(self, prompt: TextPrompt | TokensPrompt, token_ids: "array[int]") -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await asyncio.to_thread(
            self._tokenizer.decode, token_ids, skip_special_tokens=self._skips_special
        )
