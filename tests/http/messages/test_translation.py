"""From Anthropic's conversation to the one that chat takes."""

import json
from typing import Any

import msgspec
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.http.message_schema import Message
from asyncserve.http.messages.schema import CountTokensBody, MessagesBody
from asyncserve.http.messages.translation import chat_body
from asyncserve.http.schema import ChatBody

TOOL = {
    "name": "f",
    "description": "d",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 123456789012345678901234567890}}
REMINDER = "<system-reminder>\n{}\n</system-reminder>"


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}, "citations": None}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def translated(messages: list[dict[str, Any]], **fields: Any) -> ChatBody:
    body = {"model": "m", "max_tokens": 5, "messages": messages, **fields}
    return chat_body(msgspec.json.decode(json.dumps(body).encode(), type=MessagesBody))


def shown(message: Message) -> tuple[Any, ...]:
    """Role, content, and whatever else is set."""
    calls = message.tool_calls
    return (
        message.role,
        message.content,
        *([message.reasoning] if message.reasoning else []),
        *([[(call.id, call.function and call.function.name) for call in calls]] if calls else []),
        *([message.tool_call_id, message.name] if message.role == "tool" else []),
    )


def conversation(messages: list[dict[str, Any]], **fields: Any) -> list[tuple[Any, ...]]:
    return [shown(message) for message in translated(messages, **fields).messages or ()]


def test_text_comes_as_a_string_or_in_blocks() -> None:
    assert conversation([user("hi")]) == conversation([user(text("hi"))]) == [("user", "hi")]
    assert conversation([user(text("a"), text(""), text("b"))]) == [("user", "a\nb")]


@pytest.mark.parametrize(
    "system",
    [
        "be brief\nbe kind",
        [text("be brief"), text("be kind")],
        [text("x-anthropic-billing-header: cc_version=2; cch=0f3a;"), text("be brief"), text("be kind")],
    ],
)
def test_the_system_prompt_stands_first_and_without_what_is_meant_for_a_bill(system: Any) -> None:
    assert conversation([user("hi")], system=system) == [("system", "be brief\nbe kind"), ("user", "hi")]


def test_neighbours_of_one_role_are_one_message() -> None:
    messages = [user("a"), user(text("b")), assistant("c"), assistant("d"), user("e")]
    assert conversation(messages) == [("user", "a\nb"), ("assistant", "c\nd"), ("user", "e")]


def test_calls_and_results_become_tool_messages_before_the_text_of_their_turn() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sun"), text("rain")]}
    messages = [user("a"), assistant(text("b"), CALL), user(text("c"), result)]
    assert conversation(messages) == [
        ("user", "a"),
        ("assistant", "b", [("toolu_1", "f")]),
        ("tool", "sun\nrain", "toolu_1", "f"),
        ("user", "c"),
    ]


def test_a_calls_input_is_passed_on_as_it_came() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    messages = translated([user("a"), assistant(CALL), user(result)]).messages
    assert messages is not None
    assert messages[1].tool_calls is not None
    [call] = messages[1].tool_calls
    assert call.function is not None
    assert call.function.arguments == json.dumps(CALL["input"])
    assert messages[2].content == ""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("no such city", "Error: no such city"),
        ([{"type": "tool_reference", "tool_name": "g"}], "Error: g"),
        (None, "Error: "),
    ],
)
def test_the_model_is_told_that_a_tool_failed(content: Any, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": True}
    assert conversation([user("a"), assistant(CALL), user(result)])[-1] == ("tool", expected, "toolu_1", "f")


def test_reasoning_is_given_back_to_the_template() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    hidden = {"type": "redacted_thinking", "data": "x"}
    messages = [user("a"), assistant(thought, hidden, text("b")), user("c")]
    assert conversation(messages)[1] == ("assistant", "b", "hm")


def test_system_messages_on_the_way_are_reminders() -> None:
    first = {"role": "system", "content": "s"}
    late = {"role": "system", "content": [text("t")]}
    assert conversation([first, user("a"), late, assistant("b"), late, user("c")], system="r") == [
        ("system", "r\ns"),
        ("user", f"a\n{REMINDER.format('t')}"),
        ("assistant", "b"),
        ("user", f"{REMINDER.format('t')}\nc"),
    ]


def test_a_system_message_of_one_turn_is_left_out_later() -> None:
    once = {"role": "system", "content": "t", "clear_at": "next_user_message"}
    assert conversation([user("a"), once, assistant("b"), user("c"), once]) == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", f"c\n{REMINDER.format('t')}"),
    ]


@pytest.mark.parametrize(
    ("last", "expected", "continues"),
    [
        ([assistant("The answer is (")], [("user", "a"), ("assistant", "The answer is (")], True),
        ([assistant(text(""))], [("user", "a")], False),
        ([], [("user", "a")], False),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(
    last: list[Any], expected: list[Any], continues: bool
) -> None:
    body = translated([user("a"), *last])
    assert [shown(message) for message in body.messages or ()] == expected
    assert (body.continue_final_message, body.add_generation_prompt) == (continues, not continues)


def test_fields_of_sampling_keep_their_meaning() -> None:
    body = translated([user("a")], temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"], stream=True)
    assert (body.temperature, body.top_p, body.top_k, body.stop, body.stream) == (0.5, 0.9, 3, ["x"], True)
    assert body.max_completion_tokens == 5


def test_tools_become_functions() -> None:
    body = translated([user("a")], tools=[{**TOOL, "strict": True, "type": "custom"}])
    assert body.tools is not None
    [tool] = body.tools
    function = tool.function
    assert function is not None
    assert (function.name, function.description, function.strict) == ("f", "d", True)
    assert function.parameters == {"type": "object"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        (None, None),
    ],
)
def test_choices_of_tools_are_spelled_as_chat_does(choice: Any, expected: str | None) -> None:
    assert translated([user("a")], tools=[TOOL], tool_choice=choice).tool_choice == expected


def test_one_tool_can_be_named() -> None:
    chosen = translated([user("a")], tools=[TOOL], tool_choice={"type": "tool", "name": "f"}).tool_choice
    assert not isinstance(chosen, str | None)
    assert chosen.function is not None
    assert chosen.function.name == "f"


@pytest.mark.parametrize("disable", [True, False])
def test_parallel_calls_can_be_turned_off(disable: bool) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": disable}
    assert translated([user("a")], tools=[TOOL], tool_choice=choice).parallel_tool_calls is not disable


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 2000}, True),
    ],
)
def test_the_model_reasons_only_if_it_is_asked_to(thinking: Any, expected: bool) -> None:
    body = translated([user("a")], thinking=thinking)
    assert body.include_reasoning is expected
    assert body.chat_template_kwargs is not None
    assert body.chat_template_kwargs["enable_thinking"] is expected
    budget = (thinking or {}).get("budget_tokens")
    assert body.chat_template_kwargs.get("thinking_budget") == budget


@pytest.mark.parametrize(
    "fields",
    [
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ],
)
def test_the_shape_of_the_answer_has_two_spellings(fields: dict[str, Any]) -> None:
    body = translated([user("a")], **fields)
    assert body.response_format is not None
    assert body.response_format.json_schema is not None
    assert body.response_format.json_schema.schema == {"type": "object"}
    assert body.reasoning_effort == fields.get("output_config", {}).get("effort")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([user("a"), user(text("b"), IMAGE)], {}, "messages[1].content[1].type"),
        ([user({"type": "document", "source": {}})], {}, "messages[0].content[0].type"),
        ([user({**RESULT, "content": [IMAGE]})], {}, "messages[0].content[0].content[0].type"),
        ([user(CALL)], {}, "messages[0].content[0].type"),
        ([user({"type": "thinking", "thinking": "x"})], {}, "messages[0].content[0].type"),
        ([user("a"), assistant(RESULT)], {}, "messages[1].content[0].type"),
        ([user("a"), {"role": "system", "content": [IMAGE]}], {}, "messages[1].content[0].type"),
        ([user("a"), assistant({**CALL, "input": [1]})], {}, "messages[1].content[0].input"),
        ([user("a"), assistant(CALL)], {}, "messages"),
        ([user("a"), assistant({"type": "thinking", "thinking": "x"})], {}, "messages"),
        ([{"role": "system", "content": "s"}], {}, "messages"),
        ([user("a")], {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ([user("a")], {"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ([user("a")], {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ([user("a")], {"tool_choice": {"type": "any"}}, "tool_choice"),
        ([user("a")], {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ([user("a")], {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ([user("a")], {"mcp_servers": [{"type": "url", "name": "n", "url": "u"}]}, "mcp_servers"),
        ([user("a")], {"container": "c"}, "container"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    messages: list[Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        translated(messages, **fields)
    assert refused.value.param == param


def test_counting_takes_the_same_conversation() -> None:
    body = {"model": "m", "system": "s", "messages": [user("a")], "tools": [TOOL]}
    asked = chat_body(msgspec.json.decode(json.dumps(body).encode(), type=CountTokensBody))
    assert [message.role for message in asked.messages or ()] == ["system", "user"]
    assert asked.tools
