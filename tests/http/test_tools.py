from typing import Any

import msgspec
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.schema import ChatBody
from asyncserve.http.tools import shown_tool, tool_choice

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}
TIME = {"name": "time"}


def function(definition: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": definition}


def choice_of(**fields: Any) -> ToolChoice:
    return tool_choice(msgspec.convert(fields, ChatBody))


def test_tools_may_be_used_if_nothing_is_said() -> None:
    choice = choice_of(tools=[function(WEATHER), function(TIME)])
    assert (choice.mode, choice.name, choice.parallel) == ("auto", None, True)
    weather, time = choice.tools
    assert weather == WEATHER
    assert time == {
        "name": "time",
        "description": None,
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tool_choice": "auto"},
        {"tools": [function(WEATHER)], "tool_choice": "none"},
    ],
)
def test_without_tools_to_use_nothing_is_parsed(fields: dict[str, Any]) -> None:
    assert choice_of(**fields) == ToolChoice()


def test_mode_name_and_number_of_calls_are_taken_over() -> None:
    tools = [function(WEATHER), function(TIME)]
    required = choice_of(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert (required.mode, required.name, required.parallel) == ("required", None, False)
    named = choice_of(tools=tools, tool_choice=function({"name": "time"}))
    assert (named.mode, named.name, len(named.tools)) == ("named", "time", 2)


def test_only_allowed_tools_are_left() -> None:
    allowed = {"mode": "required", "tools": [function({"name": "time"})]}
    choice = choice_of(
        tools=[function(WEATHER), function(TIME)],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    assert choice.mode == "required"
    assert [tool["name"] for tool in choice.tools] == ["time"]


def test_templates_see_openais_form_without_the_servers_fields() -> None:
    [weather, time] = choice_of(tools=[function(WEATHER), function(TIME)]).tools
    shown = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
    assert shown_tool(weather) == function(shown)
    assert shown_tool(time) == function({"name": "time", "parameters": {"type": "object", "properties": {}}})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "only function tools"),
        ({"tools": [function(TIME)] * 2}, "tools[1].function.name", "as another's"),
        ({"tools": [function({"name": "a\n"})]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [function(TIME)], "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": [function(TIME)], "tool_choice": function({"name": "x"})},
            "tool_choice",
            "none of the tools",
        ),
    ],
)
def test_tools_that_cannot_be_meant_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        choice_of(**fields)
    assert raised.value.param == param
