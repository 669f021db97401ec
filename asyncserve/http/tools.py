"""The tools of a request and how they may be used: `tools` and `tool_choice` → `ToolChoice`.

Takes a `ChatBody`, checks what it says of tools, and gives the tools that the model may use: where a client
allows only some of them, the model hears of no others. Knows neither how a model writes calls nor templates.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from asyncserve.errors import InvalidRequest
from asyncserve.http.message_schema import (
    AllowedTools,
    ChosenTool,
    FunctionDefinition,
    FunctionName,
    Tool,
)
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.schema import ChatBody, TokenizeBody

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""What is taken as the name of a function."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Parameters of a function that declares none, as chat templates expect them."""


def tool_choice(body: ChatBody) -> ToolChoice:
    """Return the tools that the model may use, and how.

    Raises:
        InvalidRequest: A tool is not a function, has a bad name or one that another has; or the choice names
            a tool that is not there.
    """
    tools = tools_of(body)
    parallel = body.parallel_tool_calls is not False
    mode = "auto" if tools else "none"
    name: str | None = None
    match body.tool_choice:
        case None:
            pass
        case "none" | "auto" | "required" as mode:
            pass
        case ChosenTool(type="allowed_tools", allowed_tools=AllowedTools() as allowed):
            mode, tools = allowed.mode, _allowed(tools, allowed)
        case ChosenTool(type="function", function=FunctionName(name=name)):
            mode = "named"
        case choice:
            shown = repr(choice[:64]) if isinstance(choice, str) else "an object of another kind"
            raise InvalidRequest(
                f"tool_choice is {shown}; it must be none, auto or required, name a function, or list"
                " allowed tools",
                param="tool_choice",
            )
    if mode == "none" or (mode == "auto" and not tools):
        return ToolChoice(parallel=parallel)
    if not tools:
        raise InvalidRequest("tool_choice asks for a tool call, but there are no tools", param="tool_choice")
    if name is not None and name not in (tool["name"] for tool in tools):
        raise InvalidRequest(
            f"tool_choice names {name[:128]!r}, which is none of the tools", param="tool_choice"
        )
    return ToolChoice(tools=tuple(tools), mode=mode, name=name, parallel=parallel)


def shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as chat templates expect it: in OpenAI's form, without what only the server uses."""
    function: dict[str, Any] = {"name": tool["name"]}
    if tool["description"] is not None:
        function["description"] = tool["description"]
    function["parameters"] = tool["parameters"]
    return {"type": "function", "function": function}


def tools_of(body: ChatBody | TokenizeBody) -> list[Mapping[str, Any]]:
    """Return all tools of a request, as `ToolChoice` holds them.

    Raises:
        InvalidRequest: A tool is not a function, has a bad name or one that another has.
    """
    functions = [_function(index, tool) for index, tool in enumerate(body.tools or ())]
    names: set[str] = set()
    for index, function in enumerate(functions):
        where = f"tools[{index}].function"
        if not FUNCTION_NAME.fullmatch(function.name):
            raise InvalidRequest(
                f"{where}.name is {function.name[:128]!r}; it must have 1 to 128 letters, digits and _-.:/",
                param=f"{where}.name",
            )
        if function.name in names:
            raise InvalidRequest(f"{where}.name is {function.name!r}, as another's", param=f"{where}.name")
        names.add(function.name)
    return [
        {
            "name": function.name,
            "description": function.description,
            "parameters": ANY_OBJECT if function.parameters is None else function.parameters,
            "strict": bool(function.strict),
        }
        for function in functions
    ]


def _function(index: int, tool: Tool) -> FunctionDefinition:
    if tool.type != "function":
        raise InvalidRequest(
            f"tools[{index}] has the type {tool.type[:64]!r}; only function tools are supported",
            param=f"tools[{index}].type",
        )
    if tool.function is None:
        raise InvalidRequest(f"tools[{index}] has no function", param=f"tools[{index}].function")
    return tool.function


def _allowed(tools: Sequence[Mapping[str, Any]], allowed: AllowedTools) -> list[Mapping[str, Any]]:
    if allowed.mode not in ("auto", "required"):
        raise InvalidRequest(
            f"tool_choice.allowed_tools.mode is {allowed.mode[:64]!r}; it must be auto or required",
            param="tool_choice",
        )
    names = set()
    for tool in allowed.tools:
        if tool.type != "function" or tool.function is None:
            raise InvalidRequest("tool_choice.allowed_tools may hold only functions", param="tool_choice")
        names.add(tool.function.name)
    unknown = names - {tool["name"] for tool in tools}
    if unknown or not names:
        shown = repr(min(unknown)[:128]) if unknown else "no tool"
        raise InvalidRequest(
            f"tool_choice.allowed_tools names {shown}" + (", which is none of the tools" if unknown else ""),
            param="tool_choice",
        )
    return [tool for tool in tools if tool["name"] in names]


def new_call_id() -> str:
    """Return an id for a tool call, which its result will name."""
    return f"call_{uuid.uuid4().hex[:24]}"
