"""POST /v1/completions: prompts in four forms, several at once, echo, log-probabilities.

Takes a `CompletionBody`, makes one engine request per prompt, and shows their outputs in OpenAI's shape.
With `n` choices of each prompt, choice j of prompt i has the index i * n + j. One function renders a choice
whether it is streamed or not, so the two cannot differ.
"""

import asyncio
import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from asyncserve.errors import InvalidRequest
from asyncserve.http.body import read_body
from asyncserve.http.conversation import LARGE_BODY_BYTES
from asyncserve.http.generation import Shapes, engine_requests, includes_usage, respond, usage_object
from asyncserve.http.logprobs import CompletionLogprobs, TokenTexts, join, prompt_scores
from asyncserve.http.schema import (
    MAX_SEQUENCES,
    CompletionBody,
    check_common,
    check_num_logprobs,
    decode_prompt,
    num_prompt_logprobs,
    sampling_params,
)
from asyncserve.http.serving import SERVING, Serving, request_id_of
from asyncserve.http.structure import structured_output
from asyncserve.loop.detokenizer import strips_first_space
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.request import (
    DEFAULT_MAX_TOKENS,
    FinishReason,
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
        caller = serving.caller(http_request, arrival_s)
        body = serving.bodies.decode(data, CompletionBody)
        request_id = request_id_of(http_request, body.request_id)
        response_id = f"cmpl-{request_id}"
        model = serving.model_name(body.model)
        prompts, sampling = await checked_completion(serving, body, num_bytes=len(data))
        requests = engine_requests(serving, body, prompts, sampling, response_id=response_id, caller=caller)
    shapes = CompletionShapes(
        body,
        response_id=response_id,
        model=model,
        prompts=prompts,
        sampling=sampling,
        texts=serving.token_texts,
        tokenizer=serving.engine.tokenizer,
    )
    return await respond(
        http_request, serving, body, requests, shapes, request_id=request_id, on_begun=shapes.prepare
    )


async def checked_completion(
    serving: Serving, body: CompletionBody, *, num_bytes: int
) -> tuple[list[TextPrompt | TokensPrompt], SamplingParams]:
    """Return the prompts of a call and how they are sampled.

    Args:
        num_bytes: Length of the body: what is large is checked in a thread.

    Raises:
        InvalidRequest: A field, or what it asks for together with others, cannot be served.
    """
    if num_bytes <= LARGE_BODY_BYTES:
        return _checked_completion(serving, body)
    return await asyncio.to_thread(_checked_completion, serving, body)


def _checked_completion(
    serving: Serving, body: CompletionBody
) -> tuple[list[TextPrompt | TokensPrompt], SamplingParams]:
    check_common(body)
    prompts = _prompts(body)
    sampling = _sampling(body, serving)
    if len(prompts) * sampling.num_sequences > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {sampling.num_sequences} answers each; at most {MAX_SEQUENCES}"
            " sequences are taken",
            param="prompt",
        )
    return prompts, sampling


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
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    asked = [num_prompt_logprobs(body, serving.max_logprobs), body.logprobs if body.echo else None]
    return sampling_params(
        body,
        serving.default_sampling,
        # The engine always makes a token; it is not shown.
        max_tokens=1 if _wants_only_prompt(body) else max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=max((num for num in asked if num is not None), default=None),
        structured=structured_output(body),
    )


def _wants_only_prompt(body: CompletionBody) -> bool:
    """Whether nothing is to be generated: the prompt is echoed, as a rule for its log-probabilities."""
    return bool(body.echo) and body.max_tokens == 0


class CompletionShapes(Shapes):
    """What answers of /v1/completions look like.

    Args:
        body: What was asked.
        prompts: Of the call, in order.
        sampling: As the engine is given it.
        texts: Of tokens, for log-probabilities.
        tokenizer: Gives the text of prompts that came as token ids.
    """

    WHOLE = CHUNK = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        *,
        response_id: str,
        model: str,
        prompts: Sequence[TextPrompt | TokensPrompt],
        sampling: SamplingParams,
        texts: TokenTexts,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(
            response_id=response_id,
            model=model,
            includes_usage=includes_usage(body),
            gives_logprobs=body.logprobs is not None,
        )
        self._asked = body
        self._prompts = prompts
        self._echoes = bool(body.echo)
        self._gives_ids = bool(body.return_token_ids)
        self._gives_output = not _wants_only_prompt(body)
        # More than asked for may have come for the sake of `echo`.
        self._num_prompt_logprobs = body.prompt_logprobs
        if body.prompt_logprobs == -1:
            self._num_prompt_logprobs = sampling.num_prompt_logprobs
        self._sampling = sampling
        self._texts = texts
        self._tokenizer = tokenizer
        self._prompt_ids: Sequence[array[int]] = ()
        self._echoed: list[str] = []
        self._logprobs: list[CompletionLogprobs] = []

    async def prepare(self, tokenized: Sequence["array[int]"]) -> None:
        """Take note of the tokenized prompts, before anything is shown."""
        self._prompt_ids = tokenized
        if self._echoes:
            self._echoed = [
                await self._text(prompt, token_ids)
                for prompt, token_ids in zip(self._prompts, tokenized, strict=True)
            ]
        if self.gives_logprobs:
            self._logprobs = [
                CompletionLogprobs(
                    self._texts,
                    skips_special=self._sampling.skip_special_tokens,
                    strips_prompt=self._tokenizer.strips_leading_space,
                    strips_output=strips_first_space(self._tokenizer, token_ids),
                    num_top=self._sampling.num_logprobs or 0,
                    names_ids=bool(self._asked.return_tokens_as_token_ids),
                )
                for token_ids in tokenized
                for _ in range(self._sampling.n)
            ]

    async def _text(self, prompt: TextPrompt | TokensPrompt, token_ids: "array[int]") -> str:
        num_kept = self._asked.truncate_prompt_tokens
        is_whole = num_kept is None or len(token_ids) < num_kept
        if isinstance(prompt, TextPrompt) and is_whole:
            return prompt.text
        return await asyncio.to_thread(
            self._tokenizer.decode, token_ids, skip_special_tokens=self._sampling.skip_special_tokens
        )

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Return the token counts of the call so far; a token that is not shown is not counted."""
        if not self._gives_output:
            usages = [dataclasses.replace(usage, num_output_tokens=0) for usage in usages]
        return usage_object(usages)

    def whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return one choice of an answer in one piece."""
        return self._choice(index, output, is_first=True)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what stands around the text of an event with nothing but text."""
        if self._gives_ids:
            return None
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        before, separator, after = self.chunk([choice]).rpartition(b'"text":"')
        return before + separator, after

    def events(
        self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | None
    ) -> list[bytes]:
        """Render any output of a choice: at most one event."""
        choice = self._choice(index, output, is_first=is_first)
        is_news = is_first or output.finish_reason is not None or usage is not None
        if not is_news and not choice["text"] and not output.logprobs and not choice.get("token_ids"):
            return []
        return [self.chunk([choice], None if usage is None else self.usage([usage]))]

    def _choice(self, index: int, output: RequestOutput, *, is_first: bool) -> dict[str, Any]:
        if not self._gives_output:
            output = _without_tokens(output)
        prompt = index // self._sampling.n
        echoed = self._echoed[prompt] if is_first and self._echoes else ""
        lists = None
        if self.gives_logprobs:
            scores = self._logprobs[index]
            prompt_ids: Sequence[int] = self._prompt_ids[prompt] if is_first and self._echoes else ()
            lists = scores.prompt(prompt_ids, output.prompt_logprobs or (), echoed)
            lists = join(lists, scores.output(output.logprobs or ()))
        choice = {
            "index": index,
            "text": echoed + output.text,
            "logprobs": lists,
            "finish_reason": None if output.finish_reason is None else output.finish_reason.value,
            "stop_reason": output.stop_reason,
        }
        if self._gives_ids:
            choice["token_ids"] = list(output.token_ids)
            if is_first:
                choice["prompt_token_ids"] = self._prompt_ids[prompt].tolist()
        if self._num_prompt_logprobs is not None:
            entries = output.prompt_logprobs or ()
            choice["prompt_logprobs"] = prompt_scores(entries, self._texts, self._num_prompt_logprobs)
        return choice


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """Return the output as if no token had been made; the prompt's log-probabilities stay."""
    return RequestOutput(
        index=output.index,
        text="",
        token_ids=(),
        logprobs=None,
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=None if output.finish_reason is None else FinishReason.LENGTH,
        usage=output.usage,
    )
