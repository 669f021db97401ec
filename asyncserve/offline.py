"""The engine without a server: `LLM(model).generate(prompts, params)`.

Runs the same engine as the server, on an event loop in a thread of its own, and collects whole outputs.
Takes prompts and sampling parameters, gives `Completion`s in the order of the prompts. Knows no HTTP.
"""

import asyncio
import atexit
import operator
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

from asyncserve.config import ServerConfig
from asyncserve.errors import AsyncserveError, ConfigError, EngineStopped, InvalidRequest
from asyncserve.garbage import IdleCollector, settle_collector
from asyncserve.observer import EngineStatistics, Observer
from asyncserve.request import (
    ChatPrompt,
    FinishReason,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokenLogprobs,
    TokensPrompt,
    merge_all,
)
from asyncserve.serve import build_engine, default_sampling, open_model

Result = TypeVar("Result")

_WARM_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt.

    Args:
        index: Which of the `n` asked for.
        text: The generated text.
        token_ids: The generated tokens.
        logprobs: One per token, if asked for.
        finish_reason: Why it ended.
        stop_reason: The stop string or stop token that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one prompt gave.

    Args:
        prompt: As it was passed in.
        prompt_token_ids: The prompt as the model saw it.
        prompt_logprobs: One per prompt token from the second on, if asked for.
        outputs: The `n` continuations, by index.
        num_cached_tokens: Prompt tokens taken from the prefix cache, by the first continuation.
    """

    prompt: Any
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int


class LLM:
    """A model loaded into this process, for batches of prompts.

    Args:
        model: A Hugging Face folder, a hub id or a `.gguf` file.
        observer: Told of every step and every end, on the engine's thread; must not raise. None for nobody.
        options: Any option of the server that concerns the engine, by its field name
            (`max_model_len=4096`, `dtype="float32"`, …).

    Raises:
        StartupError: The model cannot be loaded; says why.
    """

    def __init__(self, model: str, *, observer: Observer | None = None, **options: Any) -> None:
        unknown = options.keys() - set(ServerConfig.engine_options())
        if unknown:
            raise ConfigError(f"{', '.join(sorted(unknown))}: no such option of the engine")
        # A queue bound protects a server from its clients; here the caller is the only one.
        config = ServerConfig(model=model, **{"max_num_queued_requests": 2**31, **options})
        config.validate()
        checkpoint = open_model(config)
        self._default_sampling = SamplingParams(**default_sampling(config, checkpoint))
        self._engine = build_engine(config, checkpoint, observer)
        self._num_requests = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncserve-offline", daemon=True)
        self._thread.start()
        # A step may still run when a script ends, one ahead of the last answer, and a thread that is inside
        # torch when the interpreter goes would abort the process.
        atexit.register(self.close)
        self._put_collector_back: Callable[[], None] | None = None
        try:
            self._call(self._engine.start())
        except BaseException:
            self.close()
            raise
        self._put_collector_back = settle_collector()
        self._collector = IdleCollector()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Continue each prompt.

        Args:
            prompts: One text, several, one list of token ids, or several.
            sampling: For all prompts, or one for each; None takes the values the model's authors recommend
                (`generation_config.json`).
            truncate_prompt_tokens: Keep only so many of each prompt's last tokens; -1 keeps as many as leave
                room for the output.
            progress: Show a progress bar on stderr.

        Returns:
            One `Completion` per prompt, in their order.

        Raises:
            RequestError: A prompt or parameter is bad; the others are aborted.
        """
        given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if given and _is_token_id(given[0]):
            given = [prompts]
        built = [_as_prompt(prompt) for prompt in given]
        return self._complete(given, built, sampling, truncate_prompt_tokens, progress=progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer each conversation, rendered through the model's chat template.

        Args:
            messages: One conversation (a list of messages with `role` and `content`), or several.
            sampling: For all conversations, or one for each; None as in `generate`.
            truncate_prompt_tokens: As in `generate`, of each rendered conversation.
            progress: Show a progress bar on stderr.

        Returns:
            One `Completion` per conversation, in their order.

        Raises:
            RequestError: A conversation or parameter is bad; the others are aborted.
        """
        given: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        for conversation in given:
            if isinstance(conversation, str) or not isinstance(conversation, Sequence):
                raise InvalidRequest(
                    f"a conversation is a list of messages, not {conversation!r}", param="messages"
                )
        built: list[Prompt] = [ChatPrompt(messages=tuple(conversation)) for conversation in given]
        return self._complete(given, built, sampling, truncate_prompt_tokens, progress=progress)

    def statistics(self) -> EngineStatistics:
        """Return the state of the engine: running, waiting, blocks, preemptions, cache hits."""

        async def read() -> EngineStatistics:
            return self._engine.statistics()

        return self._call(read())

    def wait_until_warm(self) -> None:
        """Return when everything that makes steps faster is there; prompts are answered before that, too."""
        while self.statistics().graphs_pending:
            time.sleep(_WARM_POLL_S)

    def close(self) -> None:
        """Stop the engine and free the device. Idempotent."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        if self._put_collector_back is not None:
            self._put_collector_back()
        self._call(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete(
        self,
        given: list[Any],
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        truncate_prompt_tokens: int | None,
        *,
        progress: bool,
    ) -> list[Completion]:
        if sampling is None or isinstance(sampling, SamplingParams):
            each = [sampling or self._default_sampling] * len(prompts)
        else:
            each = list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        arrival_s = time.monotonic()
        requests = []
        for prompt, params in zip(prompts, each, strict=True):
            self._num_requests += 1
            requests.append(
                Request(
                    request_id=f"offline-{self._num_requests}",
                    prompt=prompt,
                    sampling=params,
                    arrival_s=arrival_s,
                    truncate_prompt_tokens=truncate_prompt_tokens,
                )
            )
        completions = self._call(self._run(given, requests, progress=progress))
        self._collector.look()
        return completions

    async def _run(self, given: list[Any], requests: list[Request], *, progress: bool) -> list[Completion]:
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            sinks = [_CollectingSink(request, bar) for request in requests]
            try:
                for request, sink in zip(requests, sinks, strict=True):
                    self._engine.submit(request, sink)
                await asyncio.gather(*(sink.done for sink in sinks))
            except BaseException:
                for request, sink in zip(requests, sinks, strict=True):
                    sink.done.cancel()
                    self._engine.abort(request.request_id)
                raise
        return [sink.completion(prompt) for sink, prompt in zip(sinks, given, strict=True)]

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            work.close()
            raise EngineStopped("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the calling thread: what was asked for is not wanted any more.
            future.cancel()
            raise


def _as_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    if type(prompt) is list and set(map(type, prompt)) == {int}:
        return TokensPrompt(token_ids=prompt)  # the usual case, twenty times as quick
    if isinstance(prompt, bytes | Mapping) or not (isinstance(prompt, Sequence) or _is_array(prompt)):
        raise InvalidRequest(f"a prompt is text or a list of token ids, not {prompt!r}", param="prompts")
    for token_id in prompt:
        if not _is_token_id(token_id):
            raise InvalidRequest(f"a token id is a whole number, not {token_id!r}", param="prompts")
    return TokensPrompt(token_ids=list(map(operator.index, prompt)))


def _is_array(prompt: Any) -> bool:
    """Whether it is one row of numbers, numpy's or torch's."""
    return getattr(prompt, "ndim", None) == 1


def _is_token_id(element: Any) -> bool:
    """Whether it is a whole number of any library's; a truth value is none."""
    if isinstance(element, bool) or getattr(element, "ndim", 0) != 0:
        return False
    try:
        operator.index(element)
    except TypeError:
        return False
    return True


class _CollectingSink:
    """Gathers a request's outputs and resolves `done` when all its choices have ended."""

    wants_usage = False

    def __init__(self, request: Request, bar: "tqdm[Any]") -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bar = bar
        self._prompt_token_ids: Sequence[int] = ()
        self._outputs: list[list[RequestOutput]] = [[] for _ in range(request.sampling.n)]
        self._num_unfinished = request.sampling.n

    def begin(self, prompt_token_ids: "array[int]") -> None:
        self._prompt_token_ids = prompt_token_ids

    def put(self, output: RequestOutput) -> None:
        self._outputs[output.index].append(output)
        if output.error is not None:
            self.fail(output.error)
        elif output.finish_reason is not None:
            self._num_unfinished -= 1
            if self._num_unfinished == 0 and not self.done.done():
                self._bar.update()
                self.done.set_result(None)

    def fail(self, error: AsyncserveError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def completion(self, prompt: Any) -> Completion:
        merged = [merge_all(outputs) for outputs in self._outputs]
        prompt_logprobs = merged[0].prompt_logprobs
        usage = merged[0].usage
        return Completion(
            prompt=prompt,
            prompt_token_ids=tuple(self._prompt_token_ids),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            outputs=tuple(
                _completion_output(each) for each in merged if each.finish_reason is not FinishReason.MISSING
            ),
            num_cached_tokens=usage.num_cached_tokens if usage is not None else 0,
        )


def _completion_output(whole: RequestOutput) -> CompletionOutput:
    assert whole.finish_reason is not None
    return CompletionOutput(
        index=whole.index,
        text=whole.text,
        token_ids=tuple(whole.token_ids),
        logprobs=None if whole.logprobs is None else tuple(whole.logprobs),
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
    )
