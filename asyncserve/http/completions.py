"""POST /v1/completions: prompts in four forms, several at once, echo, log-probabilities.

Takes a `CompletionBody`, makes one engine request per prompt, and shows their outputs in OpenAI's shape.
With `n` choices of each prompt, choice j of prompt i has the index i * n + j. One function renders a choice
whether it is streamed or not, so the two cannot differ.
"""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from asyncserve.errors import InvalidRequest
from asyncserve.http.body import read_body
from asyncserve.http.generation import Shapes, engine_requests, includes_usage, respond, usage_object
from asyncserve.http.logprobs import CompletionLogprobs, TokenTexts, join
from asyncserve.http.schema import (
    MAX_SEQUENCES,
    CompletionBody,
    check_common,
    check_num_logprobs,
    decode_prompt,
    sampling_params,
)
from asyncserve.http.serving import SERVING, Serving, request_id_of
from asyncserve.loop.detokenizer import strips_first_space
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import (
    DEFAULT_MAX_TOKENS,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
    Usage,
)


async def complete(http_request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions."""
    serving = http_request.app[SERVING]
    arrival_s = serving.clock()
    data = await read_body(http_request, timeout_s=serving.body_timeout_s)
    with serving.refusals_counted():
        body = serving.bodies.decode(data, CompletionBody)
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
    shapes = CompletionShapes(
        response_id=response_id,
        model=model,
        prompts=prompts,
        echoes=bool(body.echo),
        sampling=sampling,
        texts=serving.token_texts,
        tokenizer=serving.engine.tokenizer,
        includes_usage=includes_usage(body),
    )
    requests = engine_requests(serving, body, prompts, sampling, response_id=response_id, arrival_s=arrival_s)
    return await respond(
        http_request, serving, body, requests, shapes, request_id=request_id, on_begun=shapes.prepare
    )


def _prompts(body: CompletionBody) -> list[TextPrompt | TokensPrompt]:
    adds_special = body.add_special_tokens is not False
    return [
        TextPrompt(text=prompt, add_special_tokens=adds_special)
        if isinstance(prompt, str)
        else TokensPrompt(token_ids=prompt)
        for prompt in decode_prompt(body.prompt)
    ]


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


class CompletionShapes(Shapes):
    """What answers of /v1/completions look like.

    Args:
        prompts: Of the call, in order.
        echoes: Choices begin with their prompt.
        texts: Of tokens, for log-probabilities.
        tokenizer: Gives the text of prompts that came as token ids.
    """

    WHOLE = CHUNK = "text_completion"

    def __init__(
        self,
        *,
        response_id: str,
        model: str,
        prompts: Sequence[TextPrompt | TokensPrompt],
        echoes: bool,
        sampling: SamplingParams,
        texts: TokenTexts,
        tokenizer: Tokenizer,
        includes_usage: bool,
    ) -> None:
        super().__init__(
            response_id=response_id,
            model=model,
            includes_usage=includes_usage,
            gives_logprobs=sampling.num_logprobs is not None,
        )
        self._prompts = prompts
        self._echoes = echoes
        self._sampling = sampling
        self._texts = texts
        self._tokenizer = tokenizer
        self._echoed: list[tuple[array[int], str]] = []
        self._logprobs: list[CompletionLogprobs] = []

    async def prepare(self, tokenized: Sequence["array[int]"]) -> None:
        """Take note of the tokenized prompts, before anything is shown."""
        if self._echoes:
            self._echoed = [
                (token_ids, await self._text(prompt, token_ids))
                for prompt, token_ids in zip(self._prompts, tokenized, strict=True)
            ]
        if self.gives_logprobs:
            self._logprobs = [
                CompletionLogprobs(
                    self._texts,
                    skips_special=self._sampling.skip_special_tokens,
                    strips_prompt=self._tokenizer.strips_leading_space,
                    strips_output=strips_first_space(self._tokenizer, token_ids),
                )
                for token_ids in tokenized
                for _ in range(self._sampling.n)
            ]

    async def _text(self, prompt: TextPrompt | TokensPrompt, token_ids: "array[int]") -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await asyncio.to_thread(
            self._tokenizer.decode, token_ids, skip_special_tokens=self._sampling.skip_special_tokens
        )

    def whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return one choice of an answer in one piece."""
        return self._choice(index, output, is_first=True)

    def frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands around the text of an event with nothing but text."""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        before, separator, after = self.chunk([choice]).rpartition(b'"text":"')
        return before + separator, after

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output of a choice: at most one event."""
        choice = self._choice(index, output, is_first=is_first)
        is_news = is_first or output.finish_reason is not None or usage is not None
        if not is_news and not choice["text"] and not output.logprobs:
            return []
        return [self.chunk([choice], None if usage is None else usage_object([usage]))]

    def _choice(self, index: int, output: RequestOutput, *, is_first: bool) -> dict[str, Any]:
        text, echoed = output.text, ""
        prompt_ids: Sequence[int] = ()
        if is_first and self._echoes:
            prompt_ids, echoed = self._echoed[index // self._sampling.n]
        lists = None
        if self.gives_logprobs:
            scores = self._logprobs[index]
            lists = scores.prompt(prompt_ids, output.prompt_logprobs or (), echoed)
            lists = join(lists, scores.output(output.logprobs or ()))
        return {
            "index": index,
            "text": echoed + text,
            "logprobs": lists,
            "finish_reason": None if output.finish_reason is None else output.finish_reason.value,
            "stop_reason": output.stop_reason,
        }
