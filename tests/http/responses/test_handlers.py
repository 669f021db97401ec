"""/v1/responses over a live server: what is asked, what is answered, what is kept."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from asyncserve.http.conversation import ChatCall
from asyncserve.http.message_schema import Message
from asyncserve.http.responses.handlers import MAX_EVENTS_AT_ONCE
from asyncserve.http.responses.schema import ResponsesBody
from asyncserve.http.schema import ChatBody
from asyncserve.http.serving import SERVING
from asyncserve.request import ChatPrompt
from tests.fakes.tokenizer import FakeTokenizer
from tests.http.live import MODEL, Answer, Live, live_server, spell, until

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ADD: Mapping[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}


async def respond(live: Live, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
    return await live.call("/v1/responses", {"model": MODEL, "input": "hi", **fields}, headers=headers)


async def made(live: Live, **fields: Any) -> dict[str, Any]:
    """Make a response; its shape must be the one that OpenAI's client declares."""
    answer = await respond(live, **fields)
    assert answer.status == 200, answer.body
    response: dict[str, Any] = answer.json
    Response.model_validate(response)
    return response


def events_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *frames, end = answer.body.decode().split("\n\n")
    assert end == "", "the stream breaks off within an event"
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def prompts(live: Live) -> list[str]:
    """Return what the device was given, as text."""
    return [
        FakeTokenizer().decode(each.token_ids[: each.prompt_len], skip_special_tokens=False)
        for plan in live.executor.plans
        for each in plan.admitted
    ]


def text_of(response: Mapping[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


def without_ids(value: Any) -> Any:
    """Return a response without what differs from one to the next."""
    if isinstance(value, dict):
        own = ("id", "call_id", "created_at", "completed_at", "cached_tokens")
        return {name: without_ids(each) for name, each in value.items() if name not in own}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


# ---- answers -------------------------------------------------------------------------------------------


async def test_answer_hands_back_what_was_asked() -> None:
    asked = {
        "instructions": "be kind",
        "max_output_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "truncation": "auto",
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "tools": [ADD],
        "tool_choice": "none",
    }
    async with live_server(next_token=spell("hello")) as live:
        response = await made(live, **asked, text={"verbosity": "low"}, reasoning={"summary": "auto"})
    assert {name: response[name] for name in asked} == asked
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert response["reasoning"] == {"effort": None, "summary": "auto"}
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", MODEL)
    assert (response["background"], response["store"], response["service_tier"]) == (False, True, "default")
    assert (response["error"], response["incomplete_details"]) == (None, None)
    [message] = response["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert text_of(response) == "hello"
    assert response["usage"]["output_tokens"] == 6
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 6


async def test_a_limit_makes_the_answer_incomplete() -> None:
    async with live_server(next_token=spell("hello")) as live:
        response = await made(live, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert text_of(response) == "hel"


async def test_logprobs_are_given_when_included_or_when_rivals_are_asked_for() -> None:
    async with live_server(next_token=spell("é")) as live:
        included = await made(live, include=["message.output_text.logprobs"], top_logprobs=1)
        asked = await made(live, top_logprobs=1)
        bare = await made(live)
    [part] = included["output"][0]["content"]
    assert [entry["bytes"] for entry in part["logprobs"]] == [[0xC3], [0xA9], list(b"<eos>")]
    assert all(len(entry["top_logprobs"]) == 1 for entry in part["logprobs"])
    assert asked["output"][0]["content"][0]["logprobs"] == part["logprobs"]
    assert bare["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("text", ["hello <world>", f"<think>so</think>Well. {CALL}\n{CALL}", ""])
@pytest.mark.parametrize("limit", [None, 12])
async def test_a_stream_ends_with_what_is_answered_in_one_piece(text: str, limit: int | None) -> None:
    asked = {
        "tools": [ADD],
        "max_output_tokens": limit,
        "include": ["message.output_text.logprobs"],
        "store": False,
    }
    async with live_server(
        next_token=spell(text), reasoning_parser="think", info={"max_model_len": 1024, "num_blocks": 512}
    ) as live:
        whole = await made(live, **asked)
        answer = await respond(live, **asked, stream=True)
    events = events_of(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == (
        "response.completed" if whole["status"] == "completed" else "response.incomplete"
    )
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert "[DONE]" not in answer.body.decode()


async def test_calls_have_an_item_each_and_reasoning_has_its_own() -> None:
    async with live_server(
        next_token=spell(f"<think>so</think>{CALL}"),
        reasoning_parser="think",
        info={"max_model_len": 1024, "num_blocks": 512},
    ) as live:
        response = await made(live, tools=[ADD])
    reasoning, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert json.loads(call["arguments"]) == {"a": 1, "b": 2}
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


# ---- input ---------------------------------------------------------------------------------------------


async def test_items_of_every_form_reach_the_template() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"role": "user", "content": "c"},
    ]
    async with live_server(next_token=spell("x")) as live:
        await made(live, input=items, instructions="be kind")
        [prompt] = prompts(live)
    assert prompt == (
        "<bos><turn>system:be kind<end><turn>system:be brief<end><turn>user:a<end>"
        "<turn>assistant:b\nno<end><turn>user:c<end><turn>assistant:"
    )


async def test_calls_and_their_outputs_reach_the_template() -> None:
    items = [
        {"role": "user", "content": "1 + 2?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r"}],
        },
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
    ]
    async with live_server(next_token=spell("x"), info={"max_model_len": 1024, "num_blocks": 512}) as live:
        await made(live, input=items)
        [prompt] = prompts(live)
    # The fake template knows no tools, so all is said in texts.
    assert prompt.count("<turn>assistant:") == 2
    call, answer, _ = prompt.split("<turn>")[2:]
    assert call.startswith("assistant:Let me see.")
    assert call.index('{"a": 1}') < call.index('{"a": 2}')
    assert answer.startswith("user:")
    assert answer.index("3") < answer.index("4")


async def test_a_response_goes_on_from_a_stored_one_without_its_instructions() -> None:
    async with live_server(next_token=spell("x")) as live:
        first = await made(live, input="a", instructions="be kind")
        second = await made(live, input="b", previous_response_id=first["id"])
        third = await made(live, input=[], previous_response_id=second["id"])
        last = prompts(live)[-2]
        items = (await live.call(f"/v1/responses/{third['id']}/input_items?order=asc")).json
    assert last == "<bos><turn>user:a<end><turn>assistant:x<end><turn>user:b<end><turn>assistant:"
    assert second["previous_response_id"] == first["id"]
    assert [item["role"] for item in items["data"]] == ["user", "assistant", "user", "assistant"]
    assert items["data"][1]["id"] == first["output"][0]["id"]


async def test_logprobs_of_an_answer_are_no_part_of_the_conversation() -> None:
    async with live_server(next_token=spell("x")) as live:
        first = await made(live, top_logprobs=1)
        second = await made(live, previous_response_id=first["id"])
        items = (await live.call(f"/v1/responses/{second['id']}/input_items?order=asc")).json["data"]
    assert items[1]["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": "x"}]


async def test_allowed_tools_are_all_the_model_hears_of() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    async with live_server(next_token=spell("x"), info={"max_model_len": 2048, "num_blocks": 1024}) as live:
        response = await made(live, tools=[ADD, {**ADD, "name": "subtract"}], tool_choice=choice)
        [prompt] = prompts(live)
    assert "add" in prompt
    assert "subtract" not in prompt
    assert response["tool_choice"] == choice
    assert [tool["name"] for tool in response["tools"]] == ["add", "subtract"]


async def test_truncation_drops_the_beginning_of_what_is_too_long() -> None:
    async with live_server(next_token=spell("x")) as live:
        refused = await respond(live, input="a" * 500)
        response = await made(live, input="a" * 500, truncation="auto", max_output_tokens=4)
    assert refused.status == 400
    assert refused.error["code"] == "context_length_exceeded"
    assert refused.error["param"] == "input"
    assert response["usage"]["input_tokens"] < 128


BAD: Sequence[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "input[0].call_id"),
    ({"input": [{"role": "user", "content": "a", "id": "x" * 300}]}, "input[0].id"),
    ({"input": [{"role": "user", "content": ""}] * 5000}, "input"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"truncation": "some"}, "truncation"),
    ({"include": ["everything"]}, "include"),
    ({"background": True, "store": False}, "background"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"model": "other"}, "model"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [ADD, ADD]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [ADD]}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
    ({"user": "x" * 1000}, "user"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[json.dumps(fields)[:60] for fields, _ in BAD])
async def test_bad_input_is_refused_and_the_field_named(fields: dict[str, Any], param: str) -> None:
    async with live_server(next_token=spell("x")) as live:
        answer = await respond(live, **fields)
        assert text_of(await made(live)) == "x"
    assert answer.status == (404 if param in ("model", "previous_response_id") else 400), answer.body
    assert answer.error["param"] == param, answer.body


async def test_a_schema_that_json_cannot_hold_again_is_refused() -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    async with live_server(next_token=spell("x")) as live:
        answer = await respond(live, tools=[{**ADD, "parameters": deep}])
    assert answer.status == 400
    assert answer.error["param"] == "tools"


# ---- the store -----------------------------------------------------------------------------------------


async def test_a_response_is_kept_listed_and_deleted() -> None:
    async with live_server(next_token=spell("x")) as live:
        response = await made(live)
        again = await live.call(f"/v1/responses/{response['id']}")
        deleted = await live.call(f"/v1/responses/{response['id']}", method="DELETE")
        gone = [
            await live.call(f"/v1/responses/{response['id']}"),
            await live.call(f"/v1/responses/{response['id']}", method="DELETE"),
            await live.call(f"/v1/responses/{response['id']}/cancel", method="POST"),
            await live.call(f"/v1/responses/{response['id']}/input_items"),
            await respond(live, previous_response_id=response["id"]),
        ]
    assert again.json == response
    assert deleted.json == {"id": response["id"], "object": "response", "deleted": True}
    for answer in gone:
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")


async def test_nothing_is_kept_unless_it_may_be() -> None:
    async with live_server(next_token=spell("x")) as live:
        unwanted = await made(live, store=False)
        assert (await live.call(f"/v1/responses/{unwanted['id']}")).status == 404
    async with live_server(next_token=spell("x"), response_store_size=0) as live:
        response = await made(live)
        assert (await live.call(f"/v1/responses/{response['id']}")).status == 404
        assert (await respond(live, background=True)).error["param"] == "background"
    assert (unwanted["store"], response["store"]) == (False, False)


async def test_the_oldest_goes_when_there_are_too_many() -> None:
    async with live_server(next_token=spell("x"), response_store_size=2) as live:
        ids = [(await made(live))["id"] for _ in range(3)]
        statuses = [(await live.call(f"/v1/responses/{response_id}")).status for response_id in ids]
    assert statuses == [404, 200, 200]


async def test_a_response_is_there_only_for_the_key_that_made_it() -> None:
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with live_server(next_token=spell("x"), api_keys=("one", "two")) as live:
        path = f"/v1/responses/{(await respond(live, mine)).json['id']}"
        seen = await live.call(path, headers=mine)
        unseen = [
            await live.call(path, headers=other),
            await live.call(path, method="DELETE", headers=other),
            await live.call(f"{path}/input_items", headers=other),
            await live.call(f"{path}/cancel", method="POST", headers=other),
            await respond(live, other, previous_response_id=seen.json["id"]),
        ]
        still = await live.call(path, headers=mine)
    assert [answer.status for answer in unseen] == [404] * 5
    assert still.json == seen.json


async def test_input_items_come_in_pages() -> None:
    items = [{"role": "user", "content": text} for text in "abc"]
    async with live_server(next_token=spell("x")) as live:
        path = f"/v1/responses/{(await made(live, input=items))['id']}/input_items"
        first = (await live.call(f"{path}?limit=2")).json
        rest = (await live.call(f"{path}?limit=2&after={first['last_id']}")).json
        ascending = (await live.call(f"{path}?order=asc")).json
        bad = [
            await live.call(f"{path}?{query}")
            for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_none")
        ]
    assert [item["content"][0]["text"] for item in first["data"]] == ["c", "b"]
    assert (first["object"], first["has_more"], first["first_id"]) == ("list", True, first["data"][0]["id"])
    assert [item["content"][0]["text"] for item in rest["data"]] == ["a"]
    assert rest["has_more"] is False
    assert [item["content"][0]["text"] for item in ascending["data"]] == ["a", "b", "c"]
    assert [(answer.status, answer.error["param"]) for answer in bad] == [
        (400, "limit"),
        (400, "limit"),
        (400, "limit"),
        (400, "order"),
        (400, "after"),
    ]


async def test_a_streamed_response_can_be_fetched_as_soon_as_it_is_complete() -> None:
    async with live_server(next_token=spell("x")) as live:
        final = events_of(await respond(live, stream=True))[-1]["response"]
        assert (await live.call(f"/v1/responses/{final['id']}")).json == final
        resumed = await live.call(f"/v1/responses/{final['id']}?stream=true")
    assert (resumed.status, resumed.error["param"]) == (400, "stream")


async def test_items_with_the_same_id_are_told_apart_so_that_pages_come_to_an_end() -> None:
    items = [{"role": "user", "content": text, "id": "same"} for text in "abc"]
    seen: list[str] = []
    async with live_server(next_token=spell("x")) as live:
        path = f"/v1/responses/{(await made(live, input=items))['id']}/input_items?order=asc&limit=1"
        after, has_more = "", True
        while has_more and len(seen) <= len(items):
            page = (await live.call(path + after)).json
            seen += [item["content"][0]["text"] for item in page["data"]]
            after, has_more = f"&after={page['last_id']}", page["has_more"]
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_response_which_is_not_kept(stream: bool) -> None:
    async with live_server(next_token=spell("x" * 100)) as live:
        live.executor.hold()
        call = asyncio.create_task(respond(live, stream=stream))
        await live.until_step_waits()
        live.executor.complete()
        await live.until_step_waits()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        live.executor.resume()
        await live.until_running(0)
        assert len(live.runner.app[SERVING].responses) == 0


async def test_a_step_that_fails_ends_a_stream_with_an_error_and_a_failed_response() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        live.executor.fail_from(2)
        events = events_of(await respond(live, stream=True))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"


# ---- in the background ---------------------------------------------------------------------------------


async def test_a_background_response_goes_on_without_its_client() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        live.executor.hold()
        queued = await made(live, background=True)
        path = f"/v1/responses/{queued['id']}"
        early = await respond(live, previous_response_id=queued["id"])
        await live.until_step_waits()
        live.executor.complete()
        await live.until_step_waits()
        running = (await live.call(path)).json
        live.executor.resume()
        await live.until_running(0)
        done = (await live.call(path)).json
        after = (await live.call(f"{path}/cancel", method="POST")).json
        following = await made(live, previous_response_id=queued["id"])
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    assert early.error["param"] == "previous_response_id"
    assert running["status"] == "in_progress"
    assert (done["status"], text_of(done), done["usage"]["output_tokens"]) == ("completed", "xyz", 4)
    assert after == done
    assert following["status"] == "completed"


async def test_cancelling_ends_a_background_response_at_once() -> None:
    async with live_server(next_token=spell("x" * 100)) as live:
        live.executor.hold()
        queued = await made(live, background=True)
        path = f"/v1/responses/{queued['id']}"
        await live.until_step_waits()
        cancelled = (await live.call(f"{path}/cancel", method="POST")).json
        live.executor.resume()
        await live.until_running(0)
        kept = (await live.call(path)).json
        again = (await live.call(f"{path}/cancel", method="POST")).json
        refused = await respond(live, previous_response_id=queued["id"])
        assert live.executor.num_completed_steps < 5
    assert cancelled["status"] == "cancelled"
    assert kept == cancelled == again
    assert refused.error["param"] == "previous_response_id"


async def test_only_background_responses_can_be_cancelled() -> None:
    async with live_server(next_token=spell("x")) as live:
        path = f"/v1/responses/{(await made(live))['id']}/cancel"
        answer = await live.call(path, method="POST")
    assert (answer.status, answer.error["param"]) == (400, "id")


async def test_deleting_a_running_response_ends_it() -> None:
    async with live_server(next_token=spell("x" * 100)) as live:
        live.executor.hold()
        path = f"/v1/responses/{(await made(live, background=True))['id']}"
        await live.until_step_waits()
        deleted = await live.call(path, method="DELETE")
        live.executor.resume()
        await live.until_running(0)
        assert live.executor.num_completed_steps < 5
        assert (await live.call(path)).status == 404
    assert deleted.json["deleted"] is True


async def test_a_background_response_that_fails_says_so() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        live.executor.fail_from(2)
        path = f"/v1/responses/{(await made(live, background=True))['id']}"
        await live.until_running(0)
        response = (await live.call(path)).json
        Response.model_validate(response)
        long = await respond(live, background=True, input="a" * 500)
        await live.until_running(0)
        too_long = (await live.call(f"/v1/responses/{long.json['id']}")).json
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert (too_long["status"], too_long["error"]["code"]) == ("failed", "invalid_prompt")
    assert too_long["error"]["param"] == "input"


async def test_background_responses_are_bounded_like_all_requests() -> None:
    async with live_server(
        next_token=spell("x" * 100), response_store_size=2, engine_options={"max_num_queued_requests": 8}
    ) as live:
        live.executor.hold()
        first, second = [await made(live, background=True) for _ in range(2)]
        full = await respond(live, background=True)
        await live.call(f"/v1/responses/{first['id']}/cancel", method="POST")
        again = await respond(live, background=True)
        kept = [await live.call(f"/v1/responses/{each['id']}") for each in (second, again.json)]
        live.executor.resume()
    assert (full.status, again.status) == (429, 200)
    assert [answer.status for answer in kept] == [200, 200]


async def test_background_responses_that_come_at_once_are_bounded_too() -> None:
    async with live_server(
        next_token=spell("x"),
        response_store_size=1,
        info={"max_model_len": 200_000, "num_blocks": 30_000, "max_num_batched_tokens": 8192},
    ) as live:
        live.executor.hold()
        # Large ones are put together in threads: all of them are looked at before one is there.
        asked = [respond(live, background=True, input="a" * 100_000) for _ in range(3)]
        answers = await asyncio.gather(*asked)
        live.executor.resume()
    assert sorted(answer.status for answer in answers) == [200, 429, 429]


async def test_background_responses_are_bounded_by_what_they_take_together() -> None:
    async with live_server(next_token=spell("x" * 100), response_store_bytes=50_000) as live:
        store = live.runner.app[SERVING].responses
        large: dict[str, Any] = {"background": True, "truncation": "auto", "input": "a" * 10_000}
        live.executor.hold()
        first = await made(live, **large)
        assert 30_000 < store.num_running_bytes < 35_000, "the prompt has not been cut yet"
        await until(lambda: 10_000 < store.num_running_bytes < 15_000)
        await made(live, **large)
        await until(lambda: store.num_running_bytes < 25_000)
        full = await respond(live, **large)
        small = await respond(live, background=True)
        await live.call(f"/v1/responses/{first['id']}", method="DELETE")
        again = await respond(live, **large)
        live.executor.resume()
        await live.until_running(0)
    assert (full.status, full.headers["Retry-After"]) == (429, "1")
    assert (small.status, again.status) == (200, 200)
    assert store.num_running_bytes == 0


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"include": ["message.output_text.logprobs"]}])
async def test_what_a_background_response_has_written_counts(more: dict[str, Any]) -> None:
    async with live_server(next_token=spell("x" * 100)) as live:
        store = live.runner.app[SERVING].responses
        live.executor.hold()
        body = {"model": MODEL, "input": "hi", "background": True, **more}
        async with live.session.post(live.url + "/v1/responses", json=body) as response:
            sizes = [0]
            for _ in range(4):
                await live.until_step_waits()
                sizes.append(store.num_running_bytes)
                live.executor.complete()
                await until(lambda: store.num_running_bytes > sizes[-1])
            live.executor.resume()
            await response.read()
        await live.until_running(0)
    assert store.num_running_bytes == 0


async def test_what_a_background_response_was_asked_with_is_not_held_while_it_runs() -> None:
    kinds = (ResponsesBody, ChatBody, ChatCall, ChatPrompt, Message)

    def asked_with() -> list[Any]:
        return [each for each in gc.get_objects() if type(each) in kinds]

    others = asked_with()
    async with live_server(next_token=spell("x" * 100)) as live:
        live.executor.hold()
        body = {"model": MODEL, "input": "hi", "tools": [ADD], "background": True, "stream": True}
        body["truncation"] = "auto"
        async with live.session.post(live.url + "/v1/responses", json=body) as response:
            await live.until_step_waits()
            gc.collect()
            held = [each for each in asked_with() if not any(each is known for known in others)]
            live.executor.resume()
            await response.read()
    assert held == []


async def test_a_refused_background_response_is_not_kept() -> None:
    async with live_server(next_token=spell("x"), is_started=False) as live:
        answer = await respond(live, background=True)
        assert len(live.runner.app[SERVING].responses) == 0
    assert answer.status == 503


async def test_a_background_stream_can_be_left_and_taken_up_again() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        live.executor.hold()
        body = json.dumps({"model": MODEL, "input": "hi", "background": True, "stream": True})
        async with live.session.post(live.url + "/v1/responses", data=body) as response:
            created = json.loads((await response.content.readuntil(b"\n\n")).split(b"data: ")[1])
        path = f"/v1/responses/{created['response']['id']}?stream=true"
        await live.until_step_waits()
        following = asyncio.create_task(live.call(f"{path}&starting_after=1"))
        await until(lambda: bool(following))
        live.executor.resume()
        rest = events_of(await following)
        all_events = events_of(await live.call(path))
        none = events_of(await live.call(f"{path}&starting_after={len(all_events)}"))
        bad = await live.call(f"{path}&starting_after=x")
        head = await live.raw(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        _, _, body_of_head = (await head[0].read()).partition(b"\r\n\r\n")
        head[1].close()
    assert body_of_head == b""
    assert [event["type"] for event in all_events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert all_events[2:] == rest
    assert all_events[-1]["type"] == "response.completed"
    assert text_of(all_events[-1]["response"]) == "xyz"
    assert none == []
    assert (bad.status, bad.error["param"]) == (400, "starting_after")


async def test_a_long_stream_that_is_kept_comes_whole() -> None:
    num_tokens = MAX_EVENTS_AT_ONCE + 50
    async with live_server(
        next_token=spell("x" * num_tokens), info={"max_model_len": 1024, "num_blocks": 512}
    ) as live:
        events = events_of(await respond(live, background=True, stream=True))
        again = events_of(await live.call(f"/v1/responses/{events[0]['response']['id']}?stream=true"))
    assert again == events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert len(events) > num_tokens


async def test_events_that_are_too_large_are_not_kept_but_the_response_is() -> None:
    async with live_server(next_token=spell("x" * 60), response_store_bytes=4000) as live:
        answer = await respond(live, background=True, stream=True)
        created = json.loads(answer.body.split(b"\n\n")[0].split(b"data: ")[1])
        await live.until_running(0)
        path = f"/v1/responses/{created['response']['id']}"
        kept = await live.call(path)
        resumed = await live.call(f"{path}?stream=true")
    assert text_of(kept.json) == "x" * 60
    assert resumed.error["param"] == "stream"


async def test_readers_of_a_cancelled_response_are_let_go() -> None:
    async with live_server(next_token=spell("x" * 100)) as live:
        live.executor.hold()
        body = json.dumps({"model": MODEL, "input": "hi", "background": True, "stream": True})
        async with live.session.post(live.url + "/v1/responses", data=body) as response:
            created = json.loads((await response.content.readuntil(b"\n\n")).split(b"data: ")[1])
            await live.until_step_waits()
            await live.call(f"/v1/responses/{created['response']['id']}/cancel", method="POST")
            rest = await response.content.read()
        live.executor.resume()
    assert b"response.completed" not in rest


# ---- the official client -------------------------------------------------------------------------------


@asynccontextmanager
async def client_for(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.slow
async def test_the_official_client_makes_streams_and_keeps_responses() -> None:
    async with (
        live_server(next_token=spell("Paris, é"), response_store_size=10) as live,
        client_for(live) as client,
    ):
        whole = await client.responses.create(model=MODEL, input="hi", instructions="be kind")
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        async with client.responses.stream(model=MODEL, input="hi") as helper:
            async for _ in helper:
                pass
            final = await helper.get_final_response()
        async with client.responses.with_streaming_response.create(model=MODEL, input="hi") as raw:
            parsed = await raw.parse()
        kept = await client.responses.retrieve(whole.id)
        items = [item async for item in client.responses.input_items.list(whole.id, limit=1)]
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model=MODEL, input="hi", max_output_tokens=-1)
    assert whole.output_text == final.output_text == parsed.output_text == "Paris, é"
    assert "".join(deltas) == "Paris, é"
    assert kept == whole
    assert len(items) == 1
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    assert bad.value.param == "max_output_tokens"


@pytest.mark.slow
async def test_the_official_client_runs_tools_to_an_answer() -> None:
    async with (
        live_server(next_token=spell(CALL), info={"max_model_len": 2048, "num_blocks": 1024}) as live,
        client_for(live) as client,
    ):
        tools: Any = [ADD]
        async with client.responses.stream(model=MODEL, input="1 + 2?", tools=tools) as helper:
            arguments = [
                event.delta
                async for event in helper
                if event.type == "response.function_call_arguments.delta"
            ]
            response = await helper.get_final_response()
        [call] = response.output
        assert call.type == "function_call"
        following = await client.responses.create(
            model=MODEL,
            previous_response_id=response.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "3"}],
        )
    assert json.loads("".join(arguments)) == json.loads(call.arguments) == {"a": 1, "b": 2}
    assert following.status == "completed"


@pytest.mark.slow
async def test_the_official_client_works_in_the_background() -> None:
    async with live_server(next_token=spell("x" * 100)) as live, client_for(live) as client:
        live.executor.hold()
        queued = await client.responses.create(model=MODEL, input="hi", background=True)
        cancelled = await client.responses.cancel(queued.id)
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        first = await anext(aiter(stream))
        assert first.type == "response.created"
        await stream.close()
        live.executor.resume()
        async with client.responses.stream(response_id=first.response.id, starting_after=1) as helper:
            final = await helper.get_final_response()
    assert (queued.status, cancelled.status) == ("queued", "cancelled")
    assert final.status == "completed"
