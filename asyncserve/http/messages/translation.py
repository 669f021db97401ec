"""Anthropic's conversation in, the `ChatBody` that asks the same out.

Neighbouring messages of one role become one; results of tools become `tool` messages and stand before the
text of their turn; a last message of the assistant is continued. What only Anthropic's own servers and models
can do is refused with the name of the field. Pure: knows neither the engine nor what answers look like.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asyncserve.errors import InvalidRequest
from asyncserve.http.field_names import FieldNames
from asyncserve.http.message_schema import (
    ChosenTool,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Message,
    MessageToolCall,
    Tool,
)
from asyncserve.http.messages.schema import (
    ContentBlock,
    ConversationBody,
    InputMessage,
    MessagesBody,
    MessagesTool,
    OutputFormat,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from asyncserve.http.schema import ChatBody
from asyncserve.http.structure import JsonSchemaFormat, ResponseFormat

BILLING_MARK = "x-anthropic-billing-header"
"""How Claude Code begins a system block that is meant for a bill. It differs in every request: as a part of
the prompt it would keep any two requests from sharing a prefix."""

FIELD_NAMES = FieldNames(
    {
        "messages": "messages",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "chat_template_kwargs": "thinking",
    }
)


def chat_body(body: ConversationBody) -> ChatBody:
    """Return the chat request that asks what `body` asks.

    Raises:
        InvalidRequest: A block, a tool or a choice cannot be served or contradicts another.
    """
    _refuse_foreign(body)
    messages = list(_messages(body))
    continues = messages[-1].role == "assistant"
    asked = ChatBody(
        model=body.model,
        messages=messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tools=[_tool(index, tool) for index, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        chat_template_kwargs=_template_kwargs(body),
        include_reasoning=reasons(body),
        response_format=_response_format(body),
    )
    if body.output_config is not None:
        asked.reasoning_effort = body.output_config.effort
    if isinstance(body, MessagesBody):
        asked.stream = body.stream
        asked.max_completion_tokens = max(1, body.max_tokens)
        asked.stop = body.stop_sequences or None
        asked.temperature = body.temperature
        asked.top_p = body.top_p
        asked.top_k = body.top_k
    return asked


def reasons(body: ConversationBody) -> bool:
    """Return whether the client wants the model to reason."""
    return body.thinking is not None and body.thinking.type != "disabled"


def _refuse_foreign(body: ConversationBody) -> None:
    if body.mcp_servers:
        raise InvalidRequest("mcp_servers: this server calls no other servers", param="mcp_servers")
    if isinstance(body, MessagesBody) and body.container:
        raise InvalidRequest("container: this server runs no code of its own", param="container")


@dataclass(slots=True)
class _Turn:
    """What one side says before the other does."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[MessageToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


def _messages(body: ConversationBody) -> Iterator[Message]:
    system = _system_texts(body)
    turns = _turns(body.messages, system)
    if system:
        yield Message(role="system", content="\n".join(system))
    if not turns:
        raise InvalidRequest("messages holds no message of the user or the assistant", param="messages")
    for turn in turns[:-1]:
        yield from _turn_messages(turn)
    last = turns[-1]
    if last.role == "assistant":
        if last.calls:
            raise InvalidRequest(
                "the last message calls tools; their results must follow it", param="messages"
            )
        if not last.texts:
            if last.reasoning:
                raise InvalidRequest("the last message has no text to continue", param="messages")
            if len(turns) > 1:
                return  # an empty beginning: the model begins by itself
    yield from _turn_messages(last)


def _turn_messages(turn: _Turn) -> Iterator[Message]:
    text = "\n".join(turn.texts)
    if turn.role == "assistant":
        yield Message(
            role="assistant",
            content=text,
            reasoning="\n".join(turn.reasoning) or None,
            tool_calls=turn.calls or None,
        )
        return
    yield from turn.results
    if turn.texts or not turn.results:
        yield Message(role="user", content=text)


def _system_texts(body: ConversationBody) -> list[str]:
    if body.system is None:
        return []
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
    return [text for text in texts if text and not text.startswith(BILLING_MARK)]


def _turns(messages: Sequence[InputMessage], system: list[str]) -> list[_Turn]:
    """Return the turns; system messages before the first are added to `system`."""
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    turns: list[_Turn] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "system":
            if message.clear_at == "next_user_message" and index < last_user:
                continue
            text = _system_message_text(where, blocks)
            if not turns:
                system.append(text)
                continue
            blocks = [TextBlock(text=f"<system-reminder>\n{text}\n</system-reminder>")]
        role = "assistant" if message.role == "assistant" else "user"
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role))
        for number, block in enumerate(blocks):
            _add_block(turns[-1], block, f"{where}[{number}]", names)
    return turns


def _system_message_text(where: str, blocks: Sequence[ContentBlock]) -> str:
    texts = []
    for number, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise _unsuited(block, f"{where}[{number}]", "a system message")
        texts.append(block.text)
    return "\n".join(texts)


def _add_block(turn: _Turn, block: ContentBlock, where: str, names: dict[str, str]) -> None:
    """Put one block into its turn.

    Args:
        names: Call ids to the names of the tools, as far as the conversation has come.
    """
    match turn.role, block:
        case _, TextBlock():
            if block.text:
                turn.texts.append(block.text)
        case "assistant", ThinkingBlock():
            if block.thinking:
                turn.reasoning.append(block.thinking)
        case "assistant", RedactedThinkingBlock():
            pass
        case "assistant", ToolUseBlock():
            names[block.id] = block.name
            turn.calls.append(_call(block, where))
        case "user", ToolResultBlock():
            turn.results.append(
                Message(
                    role="tool",
                    content=_result_text(block, where),
                    tool_call_id=block.tool_use_id,
                    name=names.get(block.tool_use_id),
                )
            )
        case _:
            raise _unsuited(block, where, f"a message of the {turn.role}")


def _unsuited(block: ContentBlock | ResultBlock, where: str, place: str) -> InvalidRequest:
    kind = str(block.__struct_config__.tag)
    if isinstance(block, ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock):
        return InvalidRequest(f"{where}: {place} has no blocks of the type {kind}", param=f"{where}.type")
    return InvalidRequest(f"{where} has the type {kind!r}; this model takes only text", param=f"{where}.type")


def _call(block: ToolUseBlock, where: str) -> MessageToolCall:
    arguments = bytes(block.input).decode()
    if not arguments.lstrip().startswith("{"):
        raise InvalidRequest(f"{where}.input must be an object", param=f"{where}.input")
    return MessageToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments))


def _result_text(block: ToolResultBlock, where: str) -> str:
    if isinstance(block.content, str):
        text = block.content
    else:
        texts = []
        for number, part in enumerate(block.content or ()):
            if isinstance(part, TextBlock):
                texts.append(part.text)
            elif isinstance(part, ToolReferenceBlock):
                texts.append(part.tool_name)
            else:
                raise _unsuited(part, f"{where}.content[{number}]", "the result of a tool")
        text = "\n".join(texts)
    return f"Error: {text}" if block.is_error else text


def _tool(index: int, tool: MessagesTool) -> Tool:
    where = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where} has the type {tool.type[:64]!r}; this server takes custom tools only, each with an"
            " input_schema",
            param=f"{where}.type",
        )
    if tool.input_schema is None:
        raise InvalidRequest(f"{where} has no input_schema", param=f"{where}.input_schema")
    return Tool(
        function=FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
    )


def _tool_choice(body: ConversationBody) -> str | ChosenTool | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if not body.tools:
        if choice.type in ("any", "tool"):
            raise InvalidRequest("tool_choice asks for a tool, but tools is empty", param="tool_choice")
        return None
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if choice.name not in {tool.name for tool in body.tools}:
                raise InvalidRequest(
                    "tool_choice.name is not the name of one of the tools", param="tool_choice.name"
                )
            return ChosenTool(function=FunctionName(name=choice.name))


def _template_kwargs(body: ConversationBody) -> dict[str, bool | int]:
    """Return what chat templates know of reasoning: Qwen's switch, DeepSeek's, the budget of Seed's."""
    wanted = reasons(body)
    kwargs: dict[str, bool | int] = {"enable_thinking": wanted, "thinking": wanted}
    if wanted and body.thinking is not None and body.thinking.budget_tokens is not None:
        kwargs["thinking_budget"] = body.thinking.budget_tokens
    return kwargs


def _response_format(body: ConversationBody) -> ResponseFormat | None:
    asked: OutputFormat | None = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        asked = body.output_config.format
    if asked is None:
        return None
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(name="output", schema=asked.schema, strict=True)
    )
