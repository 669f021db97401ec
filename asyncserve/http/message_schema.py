"""The JSON of a conversation: messages, their parts and tool calls, tools, and how tools are chosen.

Structures that `ChatBody` is made of, as OpenAI's clients send them. They say what is read and of which type;
what a role needs and what this model can take is checked in `prompt_messages` and `tools`. Fields that nobody
reads are ignored, as clients send back whole answers as messages.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_MESSAGES = 4096
"""Most messages of a conversation."""
MAX_TOOLS = 512
"""Most tools of a request (OpenAI takes 128)."""


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. This model reads text, and what an assistant refused with."""

    type: Annotated[str, Meta(description="`text`, or `refusal` in an assistant's message")] = "text"
    text: Annotated[str | None, Meta(description="The text of a `text` part")] = None
    refusal: Annotated[str | None, Meta(description="The text of a `refusal` part")] = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """What the assistant called."""

    name: Annotated[str, Meta(description="The function's name")] = ""
    arguments: Annotated[
        str | dict[str, Any] | None, Meta(description="The arguments: a JSON object, usually as text")
    ] = None


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an earlier message of the assistant."""

    id: Annotated[str | None, Meta(description="The id that the tool's message refers to")] = None
    type: Annotated[str, Meta(description="Only `function`")] = "function"
    function: Annotated[FunctionCall | None, Meta(description="What was called")] = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(description="`system`, `developer`, `user`, `assistant`, `tool` or `function`")]
    content: Annotated[
        str | list[ContentPart | str] | None, Meta(description="The text, or parts of text")
    ] = None
    name: Annotated[str | None, Meta(description="Who speaks, for templates that show it")] = None
    refusal: Annotated[
        str | None, Meta(description="What the assistant refused with; shown if there is no content")
    ] = None
    tool_calls: Annotated[list[MessageToolCall] | None, Meta(description="What the assistant called")] = None
    function_call: Annotated[
        FunctionCall | None, Meta(description="Older form of `tool_calls` with one call")
    ] = None
    tool_call_id: Annotated[str | None, Meta(description="Which call a tool's message answers")] = None
    reasoning: Annotated[
        str | None, Meta(description="What the assistant thought, for templates that show it")
    ] = None
    reasoning_content: Annotated[str | None, Meta(description="The same as `reasoning`")] = None


Messages = Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(description="1 to 128 letters, digits and `_ - . : /`")]
    description: Annotated[str | None, Meta(description="What it does, for the model")] = None
    parameters: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema of its arguments; left out: any object")
    ] = None
    strict: Annotated[
        bool | None, Meta(description="Arguments must follow the schema even if the model may choose")
    ] = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may use."""

    type: Annotated[str, Meta(description="Only `function`")] = "function"
    function: Annotated[FunctionDefinition | None, Meta(description="The function")] = None


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class FunctionName(msgspec.Struct, kw_only=True):
    """A function, by name."""

    name: Annotated[str, Meta(description="The function's name")]


class AllowedTool(msgspec.Struct, kw_only=True):
    """A tool that may be used, by name."""

    type: Annotated[str, Meta(description="Only `function`")] = "function"
    function: Annotated[FunctionName | None, Meta(description="The function")] = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """Which of the tools may be used, and whether one has to be."""

    mode: Annotated[str, Meta(description="`auto` or `required`")] = "auto"
    tools: Annotated[
        Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)], Meta(description="The tools, by name")
    ] = msgspec.field(default_factory=list)


class ChosenTool(msgspec.Struct, kw_only=True):
    """A choice of tools that is more than a word."""

    type: Annotated[str, Meta(description="`function` or `allowed_tools`")] = "function"
    function: Annotated[FunctionName | None, Meta(description="The one function to call")] = None
    allowed_tools: Annotated[AllowedTools | None, Meta(description="The tools that may be used")] = None
