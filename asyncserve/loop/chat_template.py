"""The chat template: messages in, one prompt text out, through a sandboxed jinja2 environment.

Set up as transformers does it, because templates are written for that: block trimming, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, the `generation` tag. Compiled once.
Knows neither token ids nor HTTP; what goes wrong while rendering is the request's fault.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncserve.errors import CheckpointError, InvalidRequest
from asyncserve.request import ChatPrompt

DEFAULT = "default"
TOOL_USE = "tool_use"
"""Names that a checkpoint with several templates gives them."""

_OPEN_END = "ASYNCSERVE-CONTINUES-HERE "
"""Marks where the last message ends, so that what the template puts behind it can be cut off."""

MAX_SHOWN_ERROR_LEN = 500
"""A template's error is shown up to so many characters: it may quote the request."""

_RENDERING_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """One checkpoint's template, or several by name.

    Args:
        sources: Name to jinja2 text; `default` is used, `tool_use` if tools are given.
        special_tokens: Names such as `bos_token` that templates may use, with the tokens' text.

    Raises:
        CheckpointError: A template does not parse, or none is named `default`.
    """

    def __init__(self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        if DEFAULT not in sources:
            raise CheckpointError(
                f"the model has chat templates {sorted(sources)} but none named {DEFAULT!r}; "
                "choose one with --chat-template"
            )
        environment = _environment()
        self.text = "\n".join(sources.values())
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template has an error in line {error.lineno}: {error.message}"
            ) from error
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            # Python's compiler, which has limits of its own.
            raise CheckpointError(f"the chat template cannot be compiled: {error}") from error

    def render(self, prompt: ChatPrompt) -> str:
        """Return the conversation as the model was trained to see it.

        Raises:
            InvalidRequest: The template refuses the messages or cannot deal with them.
        """
        messages = [_plain_message(index, message) for index, message in enumerate(prompt.messages)]
        if not messages:
            raise InvalidRequest("messages is empty; at least one message is needed", param="messages")
        if prompt.continue_final_message:
            content = messages[-1].get("content")
            if not isinstance(content, str):
                raise InvalidRequest("the final message has no text to continue", param="messages")
            messages[-1]["content"] = content + _OPEN_END
        tools = prompt.template_kwargs.get("tools")
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        values: dict[str, Any] = {**self._special_tokens, "tools": None, "documents": None}
        values.update(prompt.template_kwargs)
        values["messages"] = messages
        values["add_generation_prompt"] = prompt.add_generation_prompt and not prompt.continue_final_message
        try:
            text = self._templates[name].render(values)
        except _RENDERING_ERRORS as error:
            raise InvalidRequest(
                "the model's chat template does not accept these messages: "
                + str(error)[:MAX_SHOWN_ERROR_LEN],
                param="messages",
            ) from error
        return _cut_open(text) if prompt.continue_final_message else text


class RequestTemplates:
    """Templates that requests bring, compiled when first used; the latest used are kept. Thread-safe.

    Args:
        special_tokens: As of `ChatTemplate`.
    """

    MAX_KEPT = 32

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self.compiled = lru_cache(maxsize=self.MAX_KEPT)(self._compile)

    def render(self, template: str, prompt: ChatPrompt) -> str:
        """Return the conversation, put through `template`.

        Raises:
            InvalidRequest: The template cannot be compiled, or cannot deal with the messages.
        """
        return self.compiled(template).render(prompt)

    def _compile(self, template: str) -> ChatTemplate:
        try:
            return ChatTemplate({DEFAULT: template}, special_tokens=self._special_tokens)
        except CheckpointError as error:
            raise InvalidRequest(f"chat_template: {error}", param="chat_template") from error


def _cut_open(text: str) -> str:
    at = text.rfind(_OPEN_END.strip())
    if at < 0:
        raise InvalidRequest(
            "the final message cannot be continued: the chat template does not keep its text",
            param="continue_final_message",
        )
    # A template that trims messages has trimmed the space at the end of the mark, and would have trimmed
    # the message's own.
    return text[:at] if text.startswith(_OPEN_END, at) else text[:at].rstrip()


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"messages[{index}] is of the type {type(message).__name__}, not a mapping", param="messages"
        )
    # Absent and null are the same to a client, but many templates print or reject a null.
    plain = {key: value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = joined_text(plain["content"], f"messages[{index}].content")
    return plain


def joined_text(content: object, where: str) -> str:
    """Return a message's content as one string, a line for each part: templates take nothing else.

    Args:
        content: A string, or parts such as `{"type": "text", "text": "..."}`.
        where: Name of the field, for messages.

    Raises:
        InvalidRequest: It is neither, or holds something else than text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        fields: Mapping[str, Any] = part if isinstance(part, Mapping) else {"text": part}
        kind, text = fields.get("type", "text"), fields.get("text")
        if kind != "text":
            raise InvalidRequest(
                f"{where}[{index}] has the type {str(kind)[:64]!r}; this model takes only text",
                param=f"{where}[{index}].type",
            )
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{index}] has no text", param=f"{where}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loop_controls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it prints it."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2 as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    # The model is told the date where the server stands, as transformers does.
    return datetime.now().strftime(layout)
