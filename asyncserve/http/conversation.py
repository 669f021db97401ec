"""A conversation as a client describes it → one engine request and the way to read its answer.

The one path for chat, Responses and Messages: each brings its body into the form of a `ChatBody`, calls
`chat_call`, runs `ChatCall.request`, and feeds each choice's text to a parser of its own from
`ChatCall.parser`. Here messages, tools and their choice, the shape of the answer and the chat template's
variables are checked and put together. Knows no response shapes and runs nothing.
"""

import asyncio
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncserve.errors import InvalidRequest, RequestError
from asyncserve.http.caller import Caller
from asyncserve.http.generation import engine_requests
from asyncserve.http.logprobs import TokenTexts
from asyncserve.http.parsers.interface import MessageParser, ToolChoice
from asyncserve.http.parsers.registry import MessageFormat
from asyncserve.http.prompt_messages import (
    TOLD_TOOL_PARSER,
    template_messages,
    with_call_ids_of,
    without_tools,
)
from asyncserve.http.reasoning_tokens import ReasoningCount
from asyncserve.http.schema import (
    ChatBody,
    TokenizeBody,
    check_common,
    check_num_logprobs,
    num_prompt_logprobs,
    sampling_params,
)
from asyncserve.http.serving import Serving
from asyncserve.http.structure import structured_output
from asyncserve.http.tools import shown_tool, tool_choice
from asyncserve.request import ChatPrompt, FinishReason, Request, SamplingParams, StructuredOutput

LARGE_BODY_BYTES = 64 * 1024
"""Conversations in bodies above this are put together in a thread: their parts may be many thousands."""
MAX_TEMPLATE_LEN = 256 * 1024
"""Longest chat template that a request may bring."""
SERVER_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "cls_token",
        "continue_final_message",
        "documents",
        "eos_token",
        "mask_token",
        "messages",
        "pad_token",
        "sep_token",
        "tokenize",
        "tools",
        "unk_token",
    }
)
"""Variables of chat templates that are not a client's to set."""
PROMPT_END_LEN = 256
"""So much of a prompt's end is looked at to see whether the answer starts within reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A conversation ready to run.

    Args:
        body: What the client asked.
        model: The name to report.
        request: For the engine; its choices are the answers.
        tool_choice: The tools that may be used, and how.
        message_format: How the model writes reasoning and tool calls.
        starts_in_reasoning: The prompt ends within reasoning.
        reasoning_ids: Tokens that open and close reasoning, if the model has them.
        echoed: What every answer begins with, since the client asked for it.
    """

    body: ChatBody
    model: str
    request: Request
    tool_choice: ToolChoice
    message_format: MessageFormat
    starts_in_reasoning: bool = False
    reasoning_ids: tuple[int, int] | None = None
    echoed: str = ""

    @property
    def sampling(self) -> SamplingParams:
        """How the request is sampled."""
        return self.request.sampling

    def parser(self) -> MessageParser | None:
        """Return a new parser, for one choice; None if all its text is content."""
        return self.message_format.parser(
            self.tool_choice,
            starts_in_reasoning=self.starts_in_reasoning,
            includes_reasoning=self.body.include_reasoning is not False,
        )

    def reasoning_count(self, texts: TokenTexts) -> ReasoningCount | None:
        """Return a new count of reasoning tokens, for one choice; None if they cannot be told.

        Args:
            texts: Of tokens: white space may stand before the reasoning.
        """
        if self.reasoning_ids is None:
            return None
        return ReasoningCount(
            self.reasoning_ids,
            is_open=self.starts_in_reasoning,
            is_space=lambda token_id: texts[token_id][0].isspace(),
        )

    def finish_reason(self, reason: FinishReason, *, calls_tools: bool) -> str:
        """Return why a choice ended, in OpenAI's words.

        Args:
            reason: Why the engine ended it. A limit that was reached is never hidden.
            calls_tools: The message holds tool calls.
        """
        if reason is FinishReason.STOP and calls_tools and self.tool_choice.mode in ("auto", "required"):
            return "tool_calls"
        return reason.value


async def chat_call(
    serving: Serving, body: ChatBody, *, num_bytes: int, response_id: str, caller: Caller
) -> ChatCall:
    """Check a conversation and make the engine request for it.

    Args:
        num_bytes: Length of the body it came in: what is large is worked on in a thread.
        response_id: Of the answer; the engine's id is made from it.
        caller: Who asks.

    Raises:
        InvalidRequest: A field, or what it asks for together with others, cannot be served.
        UnknownModel: The model is not served here.
    """
    with deep_json_refused():
        if num_bytes <= LARGE_BODY_BYTES and not _renders_early(serving):
            return _chat_call(serving, body, response_id, caller)
        return await asyncio.to_thread(_chat_call, serving, body, response_id, caller)


@contextmanager
def deep_json_refused() -> Iterator[None]:
    """Refuse a conversation for JSON in it that could be read, but not written again, inside."""
    try:
        yield
    except RecursionError as error:
        raise InvalidRequest("the conversation holds JSON that is nested too deeply") from error


def _renders_early(serving: Serving) -> bool:
    # A template may open the reasoning itself, and only the rendered prompt shows whether it did.
    return serving.message_format.reasoning_parser is not None


def _chat_call(serving: Serving, body: ChatBody, response_id: str, caller: Caller) -> ChatCall:
    model = serving.model_name(body.model)
    check_common(body)
    choice = tool_choice(body)
    structured = structured_output(body)
    if choice.mode in ("required", "named"):
        structured = None  # The shape is that of the content, and an answer that must call has none.
    prompt = chat_prompt(serving, body, [shown_tool(tool) for tool in choice.tools])
    message_format = serving.message_format
    if choice.tools and not _knows_tools(serving, body):
        # The model writes calls as it is told to.
        message_format = _as_told(message_format)
    starts_in_reasoning = False
    if _renders_early(serving):
        prompt = dataclasses.replace(prompt, rendered=serving.engine.tokenizer.render_chat(prompt))
        rendered = prompt.rendered or ""
        starts_in_reasoning = message_format.template_starts_reasoning(
            # A message that is continued may have reasoned for long already.
            rendered if prompt.continue_final_message else rendered[-PROMPT_END_LEN:]
        )
    constraint = message_format.constraint(choice, structured, starts_in_reasoning=starts_in_reasoning)
    sampling = _sampling(serving, body, constraint)
    if sampling.skip_special_tokens and message_format.needs_special_tokens(choice):
        sampling = dataclasses.replace(sampling, skip_special_tokens=False)
    [request] = engine_requests(serving, body, [prompt], sampling, response_id=response_id, caller=caller)
    return ChatCall(
        body=body,
        model=model,
        request=request,
        tool_choice=choice,
        message_format=message_format,
        starts_in_reasoning=starts_in_reasoning,
        reasoning_ids=serving.reasoning_ids,
        echoed=_echoed(body, prompt),
    )


def _sampling(serving: Serving, body: ChatBody, structured: StructuredOutput | None) -> SamplingParams:
    if body.top_logprobs is not None:
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs is given; then logprobs must be true", param="top_logprobs")
        check_num_logprobs(body.top_logprobs, serving.max_logprobs, param="top_logprobs")
    with limit_named_as_asked(body):
        return sampling_params(
            body,
            serving.default_sampling,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_prompt_logprobs=num_prompt_logprobs(body, serving.max_logprobs),
            structured=structured,
        )


@contextmanager
def limit_named_as_asked(body: ChatBody) -> Iterator[None]:
    """Name the output limit as the client did in an error that is raised inside."""
    try:
        yield
    except RequestError as error:
        if error.param == "max_tokens" and body.max_completion_tokens is not None:
            error.message = error.message.replace("max_tokens", "max_completion_tokens")
            error.args = (error.message,)
            error.param = "max_completion_tokens"
        raise


def chat_prompt(
    serving: Serving, body: ChatBody | TokenizeBody, tools: Sequence[Mapping[str, Any]]
) -> ChatPrompt:
    """Return the prompt that a conversation's fields describe. Thread-safe.

    Args:
        tools: That the model is told of, in OpenAI's form.

    Raises:
        InvalidRequest: There are no messages, one of them cannot be shown to the model, or a variable or a
            template is not the client's to give.
    """
    if not body.messages:
        raise InvalidRequest("messages is missing or empty", param="messages")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    variables = _variables(serving, body)
    messages = template_messages(body.messages)
    template = _own_template(serving, body)
    if _knows_tools(serving, body):
        if serving.message_format.call_id_len is not None:
            messages = with_call_ids_of(serving.message_format.call_id_len, messages)
        if tools:
            variables["tools"] = list(tools)
    else:
        messages = without_tools(messages, tools)
    return ChatPrompt(
        messages=tuple(messages),
        add_generation_prompt=not continues
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=variables,
        chat_template=template,
        add_special_tokens=bool(body.add_special_tokens),
    )


@lru_cache(maxsize=8)
def _as_told(message_format: MessageFormat) -> MessageFormat:
    """Return the format of a model that writes calls as `TOOLS_TEXT` tells it to."""
    return dataclasses.replace(message_format, tool_parser=TOLD_TOOL_PARSER)


@lru_cache(maxsize=8)
def _mentions_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _knows_tools(serving: Serving, body: ChatBody | TokenizeBody) -> bool:
    """Return whether the chat template of a request knows the variable `tools`."""
    template = body.chat_template or serving.engine.tokenizer.chat_template_text
    return template is not None and _mentions_tools(template)


def _variables(serving: Serving, body: ChatBody | TokenizeBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if not serving.trusts_request_templates:
        taken = SERVER_VARIABLES & variables.keys()
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {min(taken)!r}: this server sets it itself",
                param="chat_template_kwargs",
            )
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents is not None:
        variables["documents"] = body.documents
    return variables


def _own_template(serving: Serving, body: ChatBody | TokenizeBody) -> str | None:
    template = body.chat_template
    if template is None:
        return None
    if not serving.trusts_request_templates:
        raise InvalidRequest(
            "chat_template is not taken from requests by this server; start it with"
            " --trust-request-chat-template if all its clients are trusted",
            param="chat_template",
        )
    if len(template) > MAX_TEMPLATE_LEN:
        raise InvalidRequest(
            f"chat_template has {len(template)} characters; at most {MAX_TEMPLATE_LEN} are taken",
            param="chat_template",
        )
    return template


def _echoed(body: ChatBody, prompt: ChatPrompt) -> str:
    """Return the text that answers begin with: what the assistant has said already, if that is wanted."""
    last = prompt.messages[-1]
    return str(last["content"]) if body.echo and last["role"] == "assistant" else ""
