"""What answers of /v1/responses look like, as types: see `shapes`.

The response object and its output items; the input items of a stored response; the events of a stream, each
with a `type` and a number.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from asyncserve.http.openapi.shapes import NotNegative, Shape, TokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)]
    logprobs: list[TokenLogprob]


class ReasoningText(Shape, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class OutputMessage(Shape, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Shape, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

    id: str
    status: ItemStatus
    summary: Annotated[list[Any], Meta(max_length=0)]
    content: list[ReasoningText]
    encrypted_content: None


class OutputCall(Shape, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: ItemStatus
    arguments: Annotated[str, Meta(description="A JSON object, as text.")]
    call_id: str
    name: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseFailure(Shape):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None
    type: str


class IncompleteDetails(Shape):
    """Why a response is cut off."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Shape):
    """Of the input's tokens."""

    cached_tokens: NotNegative
    cache_write_tokens: NotNegative


class OutputTokensDetails(Shape):
    """Of the output's tokens."""

    reasoning_tokens: NotNegative


class ResponseUsage(Shape):
    """Token counts of a response."""

    input_tokens: NotNegative
    input_tokens_details: InputTokensDetails
    output_tokens: NotNegative
    output_tokens_details: OutputTokensDetails
    total_tokens: NotNegative


class ReasoningAsked(Shape):
    """How the model was to think."""

    effort: str | None
    summary: str | None


class TextAsked(Shape):
    """What the text was to be like."""

    format: dict[str, Any]
    verbosity: str


class ToolAsked(Shape):
    """A function that the model could call."""

    type: Literal["function"]
    name: str | None
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class ResponseObject(Shape):
    """A response: what was asked, and what came of it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    model: str
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningAsked
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextAsked
    tool_choice: str | dict[str, Any]
    tools: list[ToolAsked]
    top_logprobs: NotNegative
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class DeletedResponse(Shape):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(Shape):
    """A page of the input items of a stored response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class _Event(Shape):
    sequence_number: NotNegative


class _OfResponse(_Event):
    response: ResponseObject


class ResponseCreated(_OfResponse, tag_field="type", tag="response.created"):
    """The first event."""


class ResponseQueued(_OfResponse, tag_field="type", tag="response.queued"):
    """It waits."""


class ResponseInProgress(_OfResponse, tag_field="type", tag="response.in_progress"):
    """It is being made."""


class ResponseCompleted(_OfResponse, tag_field="type", tag="response.completed"):
    """The last event of a response that is whole."""


class ResponseIncomplete(_OfResponse, tag_field="type", tag="response.incomplete"):
    """The last event of a response that is cut off."""


class ResponseFailed(_OfResponse, tag_field="type", tag="response.failed"):
    """The last event of a response that failed."""


class ErrorEvent(_Event, tag_field="type", tag="error"):
    """What went wrong."""

    code: str
    message: str
    param: str | None


class _OfItem(_Event):
    output_index: NotNegative
    item: OutputItem


class ItemAdded(_OfItem, tag_field="type", tag="response.output_item.added"):
    """An item begins."""


class ItemDone(_OfItem, tag_field="type", tag="response.output_item.done"):
    """An item ends."""


class _InItem(_Event):
    item_id: str
    output_index: NotNegative


class _OfPart(_InItem):
    content_index: NotNegative
    part: OutputText | ReasoningText


class PartAdded(_OfPart, tag_field="type", tag="response.content_part.added"):
    """A part begins."""


class PartDone(_OfPart, tag_field="type", tag="response.content_part.done"):
    """A part ends."""


class TextDelta(_InItem, tag_field="type", tag="response.output_text.delta"):
    """New text."""

    content_index: NotNegative
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_InItem, tag_field="type", tag="response.output_text.done"):
    """All text of a part."""

    content_index: NotNegative
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_InItem, tag_field="type", tag="response.reasoning_text.delta"):
    """New reasoning."""

    content_index: NotNegative
    delta: str


class ReasoningDone(_InItem, tag_field="type", tag="response.reasoning_text.done"):
    """All reasoning of a part."""

    content_index: NotNegative
    text: str


class ArgumentsDelta(_InItem, tag_field="type", tag="response.function_call_arguments.delta"):
    """New text of a call's arguments."""

    delta: str


class ArgumentsDone(_InItem, tag_field="type", tag="response.function_call_arguments.done"):
    """A call's arguments."""

    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
