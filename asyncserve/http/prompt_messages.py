"""Messages as clients send them → messages as chat templates expect them.

Roles get the names that templates know, parts are joined to one text, earlier tool calls have their arguments
as objects. Where a template knows nothing of tools, `without_tools` says in plain messages what the template
would have: which tools there are, what was called and what came back. Pure.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncserve.errors import InvalidRequest
from asyncserve.http.message_schema import FunctionCall, Message, MessageToolCall
from asyncserve.loop.chat_template import joined_text

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Role as clients spell it to role as chat templates know it."""

TOOLS_TEXT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""How a model is told of tools by whoever its template does not: the Hermes form, in Qwen's words."""
TOLD_TOOL_PARSER = "hermes"
"""Name of the parser that reads calls written as `TOOLS_TEXT` says."""


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates expect them.

    Raises:
        InvalidRequest: One of them has an unknown role, no content, or something this model cannot take.
    """
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Message) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role is {message.role[:64]!r}; roles are {', '.join(ROLES)}", param=f"{where}.role"
        )
    shown: dict[str, Any] = {"role": role, "content": _content(where, message)}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        shown["reasoning"] = shown["reasoning_content"] = reasoning
    calls = _calls(message)
    if calls:
        shown["tool_calls"] = [_tool_call(f"{where}.tool_calls", call) for call in calls]
    return shown


def _calls(message: Message) -> Sequence[MessageToolCall]:
    if not message.tool_calls and message.function_call is not None:
        return [MessageToolCall(function=message.function_call)]
    return message.tool_calls or ()


def _content(where: str, message: Message) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            if message.refusal is not None:
                return message.refusal
            if _calls(message):
                return ""
        raise InvalidRequest(f"{where} has no content", param=f"{where}.content")
    if isinstance(content, str):
        return content
    return joined_text(
        [
            part
            if isinstance(part, str)
            else {"text": part.refusal}
            if part.type == "refusal"
            else {"type": part.type, "text": part.text}
            for part in content
        ],
        f"{where}.content",
    )


def _tool_call(where: str, call: MessageToolCall) -> dict[str, Any]:
    """Return an earlier tool call as templates expect it: its arguments an object, not JSON text."""
    if call.type != "function":
        raise InvalidRequest(
            f"{where} holds a call of the type {call.type[:64]!r}; only function calls are supported",
            param=where,
        )
    function = call.function
    if function is None or not function.name:
        raise InvalidRequest(f"{where}: a call has no function with a name", param=where)
    shown: dict[str, Any] = {
        "type": "function",
        "function": {"name": function.name, "arguments": _arguments(where, function)},
    }
    if call.id is not None:
        shown["id"] = call.id
    return shown


def _arguments(where: str, function: FunctionCall) -> Any:
    if not isinstance(function.arguments, str):
        return function.arguments or {}
    try:
        return msgspec.json.decode(function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}: the arguments of a call are not valid JSON", param=where) from error


def without_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a conversation for a template that knows no tools: everything about them is in the texts.

    Args:
        messages: As `template_messages` gives them.
        tools: That may be called, in OpenAI's form; told in the system message.
    """
    plain: list[dict[str, Any]] = []
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        plain.append({"role": "system", "content": TOOLS_TEXT.format(tools=listed)})
    follows_tool = False
    for message in messages:
        if message["role"] == "system" and tools and len(plain) == 1 and message is messages[0]:
            plain[0] = {**message, "content": f"{message['content']}\n\n{plain[0]['content']}"}
        elif message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows_tool:
                plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{response}"}
            else:
                plain.append({"role": "user", "content": response})
        elif "tool_calls" in message:
            calls = [
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in message["tool_calls"]
            ]
            content = "\n".join([message["content"], *calls] if message["content"] else calls)
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**kept, "content": content})
        else:
            plain.append(message)
        follows_tool = message["role"] == "tool"
    return plain
