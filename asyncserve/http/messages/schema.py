"""Bodies of Anthropic's Messages API: every field, once, with its type and what becomes of it.

Decoded by `schema.BodyDecoder`, as the bodies of the other endpoints are. Blocks are told apart by their
`type`. Fields of blocks and tools that do not change what a local model answers (`cache_control`,
`citations`, `caller`) have no place here and are passed over. Translation into a conversation for the model
is `translation`'s business.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_MESSAGES = 100_000
"""Most messages of a conversation, as Anthropic has it: a program at work soon has some thousands."""
MAX_TOOLS = 4096
"""Most tools of a request."""


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: Annotated[str, Meta(description="The text.")]


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning in an earlier answer, given back."""

    thinking: Annotated[str, Meta(description="The reasoning; the chat template may show it to the model.")]
    signature: Annotated[str | None, Meta(description="Not checked: this server signs nothing.")] = None


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning of another server: passed over."""

    data: Annotated[str | None, Meta(description="Not used.")] = None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool in an earlier answer, given back."""

    id: Annotated[str, Meta(description="The call's id, which its result names.")]
    name: Annotated[str, Meta(description="The tool that was called.")]
    # Raw: it is passed on as the text it came as, however large its numbers are.
    input: Annotated[
        msgspec.Raw,
        Meta(description="The arguments, a JSON object.", extra_json_schema={"type": "object"}),
    ]


class ToolReferenceBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """A tool that a search found, shown to the model by its name."""

    tool_name: Annotated[str, Meta(description="The tool's name.")]


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """An image: refused, models here take text only."""


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    """A document: refused, models here take text only."""


class SearchResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="search_result"):
    """A search result: refused, give it as text."""


ResultBlock = TextBlock | ToolReferenceBlock | ImageBlock | DocumentBlock | SearchResultBlock
"""What the result of a tool may be made of."""


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """What a tool answered."""

    tool_use_id: Annotated[str, Meta(description="The call it answers.")]
    content: Annotated[str | list[ResultBlock] | None, Meta(description="The answer, as text.")] = None
    is_error: Annotated[bool | None, Meta(description="The tool failed: the model is told so.")] = None


ContentBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)
"""What a message may be made of."""


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation. Neighbours of the same role count as one message."""

    role: Annotated[
        Literal["user", "assistant", "system"],
        Meta(
            description="Who speaks. `system` behind the first message is shown to the model as a reminder in"
            " the user's message, because most chat templates take a system message at the beginning only."
        ),
    ]
    content: Annotated[
        str | list[ContentBlock],
        Meta(
            description="Text or blocks. The last message may be the assistant's: then the answer continues"
            " its text."
        ),
    ]
    clear_at: Annotated[
        Literal["next_user_message", "never"] | None,
        Meta(
            description="Of a `system` message: with `next_user_message` it is left out once a user's message"
            " follows."
        ),
    ] = None


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool the model may ask the client to run."""

    name: Annotated[str, Meta(description="Letters, digits, `_` and `-`, 1 to 128; no two tools share it.")]
    description: Annotated[str | None, Meta(description="What the tool does.")] = None
    input_schema: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema of the arguments, an object. Required.")
    ] = None
    type: Annotated[
        str | None,
        Meta(description="`custom` or nothing. Tools of Anthropic's servers and models are refused."),
    ] = None
    strict: Annotated[bool | None, Meta(description="The arguments must match the schema.")] = None
    eager_input_streaming: Annotated[
        bool | None,
        Meta(
            description="Stream the arguments as the model writes them, JSON or not. Else they come at once,"
            " when they are known to be an object, unless `tool_choice` makes sure of that."
        ),
    ] = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """How the tools may be used."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        Meta(description="The model decides, must call some tool, must call `name`, or calls none."),
    ]
    name: Annotated[str | None, Meta(description="The tool to call, with `tool`.")] = None
    disable_parallel_tool_use: Annotated[bool | None, Meta(description="At most one call in an answer.")] = (
        None
    )


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons before it answers, if it can."""

    type: Annotated[
        Literal["enabled", "adaptive", "between_tools", "disabled"],
        Meta(description="All but `disabled` turn reasoning on."),
    ]
    budget_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Given to the chat template as `thinking_budget`; most templates do not use it, and"
            " nothing ends the reasoning there.",
        ),
    ] = None
    display: Annotated[
        Literal["summarized", "omitted", "updates"] | None,
        Meta(description="With `omitted`, reasoning is not shown: its blocks are empty."),
    ] = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The shape the answer must have."""

    type: Annotated[Literal["json_schema"], Meta(description="Always `json_schema`.")]
    schema: Annotated[dict[str, Any], Meta(description="The JSON schema that the answer's text matches.")]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How the answer is to be."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="Given to the chat template as `reasoning_effort`."),
    ] = None
    format: Annotated[OutputFormat | None, Meta(description="The shape the answer must have.")] = None


class ConversationBody(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have: everything the prompt is made of."""

    model: Annotated[str, Meta(description="One of the names the model is served under.")]
    messages: Annotated[
        list[InputMessage],
        Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest message first."),
    ]
    system: Annotated[
        str | list[TextBlock] | None,
        Meta(
            description="The system prompt. Blocks that begin with `x-anthropic-billing-header` are left out:"
            " they are no prompt, and they change with every request."
        ),
    ] = None
    tools: Annotated[
        Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="Tools the model may ask the client to run."),
    ] = None
    tool_choice: Annotated[MessagesToolChoice | None, Meta(description="How the tools may be used.")] = None
    thinking: Annotated[
        Thinking | None,
        Meta(
            description="Whether the model reasons before it answers. Left out: it does not, as far as its"
            " chat template can turn that off, and reasoning is not shown."
        ),
    ] = None
    output_config: Annotated[OutputConfig | None, Meta(description="Effort and shape of the answer.")] = None
    output_format: Annotated[
        OutputFormat | None, Meta(description="Older spelling of `output_config.format`.")
    ] = None
    mcp_servers: Annotated[
        list[dict[str, Any]] | None, Meta(description="Refused unless empty: this server calls no others.")
    ] = None
    context_management: Annotated[
        dict[str, Any] | None, Meta(description="Taken and not used: nothing is cut from a conversation.")
    ] = None
    cache_control: Annotated[
        dict[str, Any] | None, Meta(description="Taken and not used: prefixes are cached by themselves.")
    ] = None
    speed: Annotated[str | None, Meta(description="Taken and not used.")] = None


class CountTokensBody(ConversationBody, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""


class MessagesBody(ConversationBody, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Most tokens to generate. More than the context leaves is cut to that; an answer that"
            " ends there says `model_context_window_exceeded`. 0 computes the prompt for the prefix cache and"
            " answers nothing.",
        ),
    ]
    stream: Annotated[bool | None, Meta(description="Answer with events.")] = None
    stop_sequences: Annotated[
        list[str] | None, Meta(description="Texts that end the answer and are not part of it.")
    ] = None
    temperature: Annotated[
        float | None,
        Meta(description="0 takes the likeliest token always. Above 1 is taken, too, unlike at Anthropic."),
    ] = None
    top_p: Annotated[
        float | None, Meta(description="Choose among the likeliest tokens that together reach it, in (0, 1].")
    ] = None
    top_k: Annotated[int | None, Meta(description="Choose among so many likeliest tokens; 0 is off.")] = None
    metadata: Annotated[
        dict[str, Any] | None, Meta(description="Taken and not used; `user_id` identifies the user.")
    ] = None
    service_tier: Annotated[str | None, Meta(description="Taken and not used.")] = None
    container: Annotated[
        str | dict[str, Any] | None, Meta(description="Refused: this server runs no code of its own.")
    ] = None
    inference_geo: Annotated[str | None, Meta(description="Taken and not used.")] = None
    diagnostics: Annotated[dict[str, Any] | None, Meta(description="Taken and not used.")] = None
