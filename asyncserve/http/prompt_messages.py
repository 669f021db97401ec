"""Messages as clients send them → messages as chat templates expect them.

Roles get the names that templates know, parts are joined to one text, earlier tool calls have their arguments
as objects and, where a template insists on it, ids of a certain length. Where a template knows nothing of
tools, `without_tools` says in plain messages what the template would have: which tools there are, what was
called and what came back. Pure.
"""

import hashlib
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
        "function": {"name": function.name, "arguments": _arguments(function)},
    }
    if call.id is not None:
        shown["id"] = call.id
    return shown


def _arguments(function: FunctionCall) -> Any:
    if not isinstance(function.arguments, str):
        return function.arguments or {}
    try:
        return msgspec.json.decode(function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        # A call that broke or was cut off, as answers give it; the model sees what it wrote.
        return function.arguments


def with_call_ids_of(length: int, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have ids of so many letters and digits; ids that are so stay.

    The same id always becomes the same, so that results find their calls and prompts their cached beginnings.
    """

    def fitting(call_id: str) -> str:
        if len(call_id) == length and call_id.isascii() and call_id.isalnum():
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:length]

    shown = []
    for message in messages:
        fitted = dict(message)
        if "tool_call_id" in fitted:
            fitted["tool_call_id"] = fitting(fitted["tool_call_id"])
        if "tool_calls" in fitted:
            fitted["tool_calls"] = [
                {**call, "id": fitting(call["id"])} if "id" in call else call for call in fitted["tool_calls"]
            ]
        shown.append(fitted)
    return shown


def without_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a conversation for a template that knows no tools: everything about them is in the texts.

    Args:
        messages: As `template_messages` gives them.
        tools: That may be called, in OpenAI's form; told in the system message.
    """
    turns: list[tuple[dict[str, Any], list[str]]] = []  # with what their texts are joined of
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        turns.append(({"role": "system"}, [TOOLS_TEXT.format(tools=listed)]))
    follows_tool = False
    for index, message in enumerate(messages):
        is_tool = message["role"] == "tool"
        plain = _plain_result(message) if is_tool else _plain_calls(message)
        if index == 0 and tools and plain["role"] == "system":
            turns[0] = (plain, [f"{plain['content']}\n", *turns[0][1]])
        elif (is_tool or follows_tool) and turns and turns[-1][0]["role"] == plain["role"] == "user":
            # Many templates want users and assistants to take turns.
            turns[-1][1].append(plain["content"])
        else:
            turns.append((plain, [plain["content"]]))
        follows_tool = is_tool
    return [{**turn, "content": "\n".join(texts)} for turn, texts in turns]


def _plain_result(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _plain_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    calls = plain.pop("tool_calls", ())
    texts = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    ]
    if calls:
        plain["content"] = "\n".join([plain["content"], *texts] if plain["content"] else texts)
    return plain
