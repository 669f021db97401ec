import json
from typing import Any

import msgspec
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.http.message_schema import Message
from asyncserve.http.prompt_messages import template_messages, with_call_ids_of, without_tools

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def shown(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(msgspec.convert(messages, list[Message]))


def test_roles_are_those_that_templates_know() -> None:
    roles = ["developer", "system", "user", "assistant", "tool", "function"]
    messages = shown(*({"role": role, "content": "a"} for role in roles))
    assert [message["role"] for message in messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]


def test_parts_are_joined_and_refusals_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    first, second = shown(
        {"role": "assistant", "content": parts}, {"role": "assistant", "content": None, "refusal": "no"}
    )
    assert first == {"role": "assistant", "content": "a\nb\nc"}
    assert second == {"role": "assistant", "content": "no"}


def test_older_form_of_a_call_is_a_tool_call() -> None:
    [message] = shown({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}})
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }


@pytest.mark.parametrize("arguments", ['{"a": [1]}', {"a": [1]}])
def test_arguments_are_objects_however_they_come(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    [message] = shown({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    ]


@pytest.mark.parametrize("arguments", ['{"a": 1', "no JSON", "[" * 5000])
def test_arguments_that_broke_come_back_as_the_model_wrote_them(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    [message] = shown({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_ids_fit_a_template_that_wants_a_length_and_still_belong_together() -> None:
    kept = {**CALL, "id": "abcDEF123"}
    nameless = {key: value for key, value in CALL.items() if key != "id"}
    messages = shown(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}, kept, nameless]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "tool", "content": "3", "tool_call_id": "abcDEF123"},
    )
    user, assistant, first, third = with_call_ids_of(9, messages)
    ids = [call.get("id") for call in assistant["tool_calls"]]
    assert all(len(each) == 9 and each.isalnum() for each in ids[:3])
    assert ids[0] != ids[1]
    assert ids[2:] == ["abcDEF123", None]
    assert (first["tool_call_id"], third["tool_call_id"]) == (ids[0], ids[2])
    assert user == messages[0]
    assert assistant["tool_calls"][1]["function"] == messages[1]["tool_calls"][1]["function"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_under_both_names(name: str) -> None:
    [message] = shown({"role": "assistant", "content": "a", name: "why"})
    assert (message["reasoning"], message["reasoning_content"]) == ("why", "why")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
    ],
)
def test_message_that_cannot_be_shown_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        shown(message)
    assert raised.value.param == param


def test_template_without_tools_is_told_of_them_in_the_system_message() -> None:
    messages = shown({"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"})
    system, user = without_tools(messages, [TOOL])
    assert system["role"] == "system"
    assert system["content"].startswith("Be kind.\n\n# Tools")
    listed = system["content"].split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == TOOL
    assert user == messages[1]
    [added, same] = without_tools(messages[1:], [TOOL])
    assert added["content"].startswith("# Tools")
    assert same == messages[1]


def test_template_without_tools_sees_calls_and_results_as_text() -> None:
    messages = shown(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "tool", "content": "2", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "done"},
    )
    call = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    assert without_tools(messages, []) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": f"Let me see.\n{call}\n{call}"},
        {
            "role": "user",
            "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        },
        {"role": "assistant", "content": "done"},
    ]


def test_template_without_tools_sees_users_and_assistants_take_turns() -> None:
    messages = shown(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
        {"role": "user", "content": "and now?"},
        {"role": "user", "content": "hello?"},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    )
    assert [message["role"] for message in without_tools(messages[:4], [])] == ["user", "assistant", "user"]
    *_, joined, last = without_tools(messages, [])
    assert joined["content"] == "<tool_response>\n1\n</tool_response>\nand now?"
    assert last["content"] == "hello?\n<tool_response>\n2\n</tool_response>"


def test_messages_without_anything_of_tools_stay_as_they_are() -> None:
    messages = shown({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    assert without_tools(messages, []) == messages
