from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.http.responses.input import response_input
from asyncserve.http.responses.schema import MAX_ITEMS, ResponsesBody
from asyncserve.http.responses.store import StoredResponse

LIMIT = 10**6


def body(**fields: Any) -> ResponsesBody:
    return msgspec.convert({"input": "hi", **fields}, ResponsesBody)


def messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages that items become, without what they do not have."""
    chat = response_input(body(input=items), None, max_bytes=LIMIT).chat
    return [
        {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
        for message in chat.messages or ()
    ]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def returned(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "o"}


def call_ids(message: Mapping[str, Any]) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    question, turn, first, second, answer = messages(
        [
            user("a"),
            thought("t"),
            said("s"),
            called("1"),
            called("2"),
            returned("1"),
            returned("2"),
            said("b"),
        ]
    )
    assert question == user("a")
    assert (turn["reasoning"], turn["content"], call_ids(turn)) == ("t", "s", ["1", "2"])
    assert [(each["role"], each["tool_call_id"]) for each in (first, second)] == [
        ("tool", "1"),
        ("tool", "2"),
    ]
    assert answer == said("b")


def test_what_cannot_follow_in_a_message_begins_another() -> None:
    turns = messages([said("a"), said("b"), thought("t"), thought("u"), called("1"), said("c")])
    assert [(turn.get("reasoning"), turn["content"], call_ids(turn)) for turn in turns] == [
        (None, "a", []),
        (None, "b", []),
        ("t", "", []),
        ("u", "", ["1"]),
        (None, "c", []),
    ]


def test_summaries_stand_in_for_reasoning_that_is_not_there() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    [turn] = messages([item])
    assert turn["reasoning"] == "s"


def test_items_keep_their_ids_and_get_one_if_they_have_none() -> None:
    given = [{**user("a"), "id": "msg_mine"}, user("b"), called("1"), returned("1"), thought("t")]
    items = orjson.loads(response_input(body(input=given), None, max_bytes=LIMIT).items)
    assert items[0]["id"] == "msg_mine"
    assert [item["id"].split("_")[0] for item in items] == ["msg", "msg", "fc", "fco", "rs"]


def test_what_is_kept_can_be_sent_again() -> None:
    given = [user("a"), thought("t"), said("s"), called("1"), returned("1")]
    kept = response_input(body(input=given), None, max_bytes=LIMIT)
    again = response_input(body(input=orjson.loads(kept.items)), None, max_bytes=LIMIT)
    assert again.items == kept.items
    assert again.chat == kept.chat


def test_a_conversation_may_not_grow_without_bound() -> None:
    with pytest.raises(InvalidRequest, match="at most 100 are taken") as refused:
        response_input(body(input=[user("a" * 200)]), None, max_bytes=100)
    assert refused.value.param == "input"
    items = orjson.dumps([{"type": "message"}] * MAX_ITEMS)
    previous = StoredResponse(response_id="r", owner=b"", body=b'{"output":[]}', items=items)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_ITEMS} items"):
        response_input(body(input="a"), previous, max_bytes=LIMIT)
