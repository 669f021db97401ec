"""What answers of /v1/messages look like, as types: see `shapes`.

The message in one piece, the events of a stream, counts, and Anthropic's error envelope.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from asyncserve.http.openapi.shapes import NotNegative, Shape

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesErrorDetail(Shape):
    """What went wrong."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]
    message: Annotated[str, Meta(min_length=1)]


class MessagesError(Shape, tag_field="type", tag="error"):
    """Anthropic's error envelope; in a stream, the event that ends it in failure."""

    error: MessagesErrorDetail
    request_id: str | None


class TextContent(Shape, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingContent(Shape, tag_field="type", tag="thinking"):
    """The model's reasoning."""

    thinking: str
    signature: Annotated[str, Meta(max_length=0)]


class ToolUseContent(Shape, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessagesOutputDetails(Shape):
    """Of the generated tokens."""

    thinking_tokens: Annotated[int, Meta(ge=0, description="Spent on reasoning.")]


class MessagesUsage(Shape):
    """Token counts of a message."""

    input_tokens: Annotated[int, Meta(ge=0, description="Those that were not in the prefix cache.")]
    cache_creation_input_tokens: NotNegative
    cache_read_input_tokens: NotNegative
    output_tokens: NotNegative
    output_tokens_details: MessagesOutputDetails | UnsetType = UNSET


class _Message(Shape):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[Content]
    usage: MessagesUsage


class MessagesAnswer(_Message, tag_field="type", tag="message"):
    """Answer of POST /v1/messages."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None


class BegunMessage(_Message, tag_field="type", tag="message"):
    """A message that has nothing yet."""

    stop_reason: None
    stop_sequence: None
    stop_details: None


class MessageStart(Shape, tag_field="type", tag="message_start"):
    """The first event."""

    message: BegunMessage


class Ping(Shape, tag_field="type", tag="ping"):
    """Nothing."""


class _InBlock(Shape):
    index: NotNegative


class BlockStart(_InBlock, tag_field="type", tag="content_block_start"):
    """A block begins."""

    content_block: Content


class TextBlockDelta(Shape, tag_field="type", tag="text_delta"):
    """New text."""

    text: str


class ThinkingBlockDelta(Shape, tag_field="type", tag="thinking_delta"):
    """New reasoning."""

    thinking: str


class SignatureDelta(Shape, tag_field="type", tag="signature_delta"):
    """The signature of reasoning, always empty."""

    signature: Annotated[str, Meta(max_length=0)]


class InputDelta(Shape, tag_field="type", tag="input_json_delta"):
    """New text of a call's input."""

    partial_json: str


class BlockDelta(_InBlock, tag_field="type", tag="content_block_delta"):
    """News of a block."""

    delta: TextBlockDelta | ThinkingBlockDelta | SignatureDelta | InputDelta


class BlockStop(_InBlock, tag_field="type", tag="content_block_stop"):
    """A block ends."""


class Ending(Shape):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None


class MessageEnd(Shape, tag_field="type", tag="message_delta"):
    """Why it ended, and the counts."""

    delta: Ending
    usage: MessagesUsage


class MessageStop(Shape, tag_field="type", tag="message_stop"):
    """The last event."""


MessagesEvent = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageEnd | MessageStop | MessagesError
)


class TokenCount(Shape):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: NotNegative


class MessagesModel(Shape, tag_field="type", tag="model"):
    """A name under which the model is served, as Anthropic shows models."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: Annotated[int, Meta(ge=1)]
    max_tokens: Annotated[int, Meta(ge=1)]


class MessagesModelList(Shape):
    """Served names, as Anthropic lists models."""

    data: list[MessagesModel]
    has_more: Literal[False]
    first_id: str
    last_id: str
