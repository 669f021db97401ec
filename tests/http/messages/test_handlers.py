"""Anthropic's Messages API, over a fake device that spells given answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from asyncserve.http.messages.shapes import MessageShapes
from asyncserve.http.reasoning_tokens import ReasoningCount
from asyncserve.request import FinishReason, RequestOutput, Usage
from tests.fakes.tokenizer import EOS_ID
from tests.http.live import MODEL, Answer, Live, live_server, spell

ROOMY = {"max_model_len": 4096, "num_blocks": 2048, "max_num_batched_tokens": 512}
"""A device whose context holds descriptions of tools."""
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
INPUT = '{"city": "Rome", "big": 123456789012345678901}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {INPUT}}}\n</tool_call>'


async def send(live: Live, path: str = "/v1/messages", **fields: Any) -> Answer:
    body = {"model": MODEL, "max_tokens": 400, "messages": HI, **fields}
    if path != "/v1/messages":
        del body["max_tokens"]
    return await live.call(path, body)


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream; each one's name is checked against its type."""
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == "", "the stream breaks off within an event"
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def error_of(answer: Answer) -> dict[str, Any]:
    """The error object; its envelope is checked."""
    envelope = answer.json
    assert set(envelope) == {"type", "error", "request_id"}
    assert envelope["type"] == "error"
    assert envelope["request_id"] == answer.headers["X-Request-Id"] == answer.headers["request-id"]
    error: dict[str, Any] = envelope["error"]
    assert set(error) == {"type", "message"}
    assert error["message"]
    return error


@asynccontextmanager
async def client_for(live: Live, *, api_key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    client = anthropic.AsyncAnthropic(base_url=live.url, api_key=api_key, max_retries=0)
    try:
        yield client
    finally:
        await client.close()


def comparable(message: Any) -> dict[str, Any]:
    """A message of the client, without what differs from call to call."""
    shown: dict[str, Any] = message.to_dict()
    del shown["id"]
    for block in shown["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return shown


async def both(client: anthropic.AsyncAnthropic, **fields: Any) -> tuple[Any, Any]:
    """The answer in one piece, and what a stream of the same adds up to."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": HI, **fields}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    return whole, streamed


async def test_an_answer_has_the_shape_of_the_messages_api() -> None:
    async with live_server(next_token=spell("Paris, é")) as live:
        answer = await send(live, metadata={"user_id": "u"}, service_tier="auto")
    assert answer.status == 200
    message = answer.json
    assert message.pop("id") == f"msg_{answer.headers['X-Request-Id']}"
    assert answer.headers["request-id"] == answer.headers["X-Request-Id"]
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Paris, é"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
    }
    assert usage["output_tokens"] == len("Paris, é".encode()) + 1
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0


async def test_tokens_from_the_cache_are_not_among_the_input_tokens() -> None:
    messages = [{"role": "user", "content": "x" * 64}]
    async with live_server(next_token=spell("y")) as live:
        first = (await send(live, messages=messages)).json["usage"]
        second = (await send(live, messages=messages)).json["usage"]
        counted = (await send(live, "/v1/messages/count_tokens", messages=messages)).json
    assert second["cache_read_input_tokens"] > 0
    assert counted == {"input_tokens": first["input_tokens"]}
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]


async def test_a_stream_has_the_events_in_order() -> None:
    async with live_server(next_token=spell("abc")) as live:
        answer = await send(live, stream=True)
    events = events_of(answer)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 0
    assert start["usage"]["input_tokens"] > 0
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    assert [event["delta"] for event in events[3:6]] == [
        {"type": "text_delta", "text": letter} for letter in "abc"
    ]
    assert {event["index"] for event in events[2:7]} == {0}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None}
    assert events[-2]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize(
    ("answer", "fields", "reason", "sequence"),
    [
        ("abc", {}, "end_turn", None),
        ("abc", {"max_tokens": 2}, "max_tokens", None),
        ("abcd", {"stop_sequences": ["x", "c"]}, "stop_sequence", "c"),
        ("a" * 2000, {"max_tokens": 10_000}, "model_context_window_exceeded", None),
        ("", {}, "end_turn", None),
        ("c", {"stop_sequences": ["c"]}, "stop_sequence", "c"),
        ("abc", {"max_tokens": 0}, "max_tokens", None),
        ("\U0001f30d", {"max_tokens": 3}, "max_tokens", None),
    ],
)
async def test_both_forms_of_an_answer_tell_why_it_ended(
    answer: str, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    async with live_server(next_token=spell(answer), check_plans=False) as live, client_for(live) as client:
        # Asked once before, so that both find the same in the cache.
        await send(live, **fields)
        whole, streamed = await both(client, **fields)
    assert comparable(whole) == comparable(streamed)
    assert whole.stop_reason == reason
    assert whole.stop_sequence == sequence


async def test_zero_max_tokens_only_fills_the_cache() -> None:
    messages = [{"role": "user", "content": "x" * 64}]
    async with live_server(next_token=spell("y")) as live:
        warmed = (await send(live, messages=messages, max_tokens=0)).json
        usage = (await send(live, messages=messages)).json["usage"]
    assert warmed["content"] == []
    assert warmed["usage"]["output_tokens"] == 0
    assert usage["cache_read_input_tokens"] > 0


@pytest.mark.parametrize(
    ("answer", "kinds", "reason"),
    [
        (CALL, ["tool_use"], "tool_use"),
        (f"Let me look.\n{CALL}{CALL}", ["text", "tool_use", "tool_use"], "tool_use"),
        ("No need.", ["text"], "end_turn"),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": Rome}}</tool_call>', ["text"], "end_turn"),
    ],
)
async def test_tools_are_called_alike_in_both_forms(answer: str, kinds: list[str], reason: str) -> None:
    async with live_server(next_token=spell(answer), info=ROOMY) as live, client_for(live) as client:
        await send(live, tools=[WEATHER])
        whole, streamed = await both(client, tools=[WEATHER])
    assert comparable(whole) == comparable(streamed)
    assert [block.type for block in whole.content] == kinds
    assert whole.stop_reason == reason
    for block in (*whole.content, *streamed.content):
        if block.type == "tool_use":
            assert block.id.startswith("toolu_")
            assert block.name == "get_weather"
            assert block.input == json.loads(INPUT)


async def test_a_call_that_the_limit_cuts_holds_what_was_complete() -> None:
    answer = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "when": "tomor'
    fields: dict[str, Any] = {"tools": [WEATHER], "max_tokens": len(answer)}
    async with live_server(next_token=spell(answer), info=ROOMY) as live, client_for(live) as client:
        await send(live, **fields)
        whole, streamed = await both(client, **fields)
    assert comparable(whole) == comparable(streamed)
    assert whole.content[0].input == {"city": "Rome"}
    assert whole.stop_reason == "max_tokens"


@pytest.mark.slow
async def test_the_input_of_an_eager_tool_is_streamed_in_pieces() -> None:
    async with live_server(next_token=spell(CALL), info=ROOMY) as live:
        held = events_of(await send(live, tools=[WEATHER], stream=True))
        eager = events_of(await send(live, tools=[{**WEATHER, "eager_input_streaming": True}], stream=True))
    inputs = [
        [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        for events in (held, eager)
    ]
    assert len(inputs[0]) == 1
    assert len(inputs[1]) > 5
    assert "".join(inputs[0]) == "".join(inputs[1])


async def test_no_tool_is_called_where_none_may_be() -> None:
    async with live_server(next_token=spell(CALL), info=ROOMY) as live:
        answer = await send(live, tools=[WEATHER], tool_choice={"type": "none"})
    assert answer.json["content"] == [{"type": "text", "text": CALL}]


async def test_results_of_tools_reach_the_model() -> None:
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sun"}]},
    ]
    asked: list[str] = []

    def next_token(token_ids: Sequence[int], prompt_len: int) -> int:
        asked.append(bytes(token_id for token_id in token_ids[:prompt_len] if token_id < 256).decode())
        return EOS_ID

    async with live_server(next_token=next_token, info=ROOMY) as live:
        answer = await send(live, messages=messages, tools=[WEATHER], system="be brief")
    assert answer.status == 200, answer.body
    assert "be brief" in asked[0]
    assert "sun" in asked[0]


THOUGHT = "<think>\nRome it is.\n</think>\n\nRome."


async def test_reasoning_is_shown_if_it_is_asked_for() -> None:
    fields: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with (
        live_server(next_token=spell(THOUGHT), info=ROOMY, reasoning_parser="think") as live,
        client_for(live) as client,
    ):
        await send(live, **fields)
        whole, streamed = await both(client, **fields)
        hidden = (await send(live)).json
        fields["thinking"]["display"] = "omitted"
        omitted = await both(client, **fields)
    assert comparable(whole) == comparable(streamed)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == "Rome it is."
    assert whole.stop_reason == "end_turn"
    assert whole.content[0].signature == streamed.content[0].signature == ""
    assert hidden["content"] == [{"type": "text", "text": "Rome."}]
    assert comparable(omitted[0]) == comparable(omitted[1])
    assert omitted[0].content[0].thinking == ""


async def test_a_started_answer_is_continued() -> None:
    prompts: list[bytes] = []

    def next_token(token_ids: Sequence[int], prompt_len: int) -> int:
        prompts.append(bytes(token_id for token_id in token_ids[:prompt_len] if token_id < 256))
        return EOS_ID if len(token_ids) > prompt_len else ord("4")

    async with live_server(next_token=next_token, info=ROOMY) as live:
        answer = await send(live, messages=[*HI, {"role": "assistant", "content": "2 + 2 = "}])
    assert prompts[0].endswith(b"2 + 2 = ")
    assert answer.json["content"] == [{"type": "text", "text": "4"}]


CODING_AGENT: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00a1;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,
            "defer_loading": False,
        }
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nthe date\n</system-reminder>"},
                {"type": "text", "text": "list files", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ls", "signature": ""},
                {"type": "text", "text": "Listing."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "Bash",
                    "input": {"command": "ls"},
                    "caller": None,
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False},
                {"type": "text", "text": "<system-reminder>\nbe brief\n</system-reminder>"},
            ],
        },
        {"role": "system", "content": "1000 tokens left", "clear_at": "next_user_message"},
    ],
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "user_0"},
    "diagnostics": {"previous_message_id": None},
    "a_field_of_next_year": True,
}


async def test_what_a_coding_agent_sends_is_served(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b-2026-01-01"}
    async with live_server(next_token=spell("a.py is there."), info=ROOMY) as live:
        await live.call("/v1/messages?beta=true", CODING_AGENT, headers=headers)
        answer = await live.call("/v1/messages?beta=true", CODING_AGENT, headers=headers)
        counted = await live.call(
            "/v1/messages/count_tokens?beta=true",
            {key: CODING_AGENT[key] for key in ("model", "messages", "tools", "system", "thinking")},
            headers=headers,
        )
    assert answer.status == 200, answer.body
    texts = [
        event["delta"].get("text", "") for event in events_of(answer) if event["type"].endswith("k_delta")
    ]
    assert "".join(texts) == "a.py is there."
    usage = events_of(answer)[-2]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted.json["input_tokens"]
    assert usage["cache_read_input_tokens"] > 0
    assert caplog.text.count("a_field_of_next_year") == 1


async def test_a_long_conversation_is_counted_in_a_thread() -> None:
    messages = [{"role": "user", "content": "x" * 100_000}]
    async with live_server() as live:
        answer = await send(live, "/v1/messages/count_tokens", messages=messages)
        threads = live.engine.tokenizer.encoding_threads
    assert answer.json["input_tokens"] > 100_000
    assert "MainThread" not in threads[-1:]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"system": 3}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "get_weather"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: messages"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_bad_input_is_refused_with_the_fields_name(fields: dict[str, Any], says: str) -> None:
    async with live_server() as live:
        answer = await send(live, **fields)
        after = await send(live, max_tokens=1)
    assert answer.status == 400, answer.body
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert after.status == 200


async def test_a_missing_field_is_named() -> None:
    async with live_server() as live:
        answer = await live.call("/v1/messages", {"model": MODEL, "messages": HI})
    assert error_of(answer) == {"type": "invalid_request_error", "message": "max_tokens is missing"}


async def test_every_error_has_the_envelope() -> None:
    async with live_server(api_keys=("key",), max_body_bytes=2000) as live:
        without_key = await send(live)
        live.headers["X-Api-Key"] = "key"
        others = {
            "not_found_error": await send(live, model="other"),
            "request_too_large": await send(live, system="x" * 3000),
            "invalid_request_error": await live.call("/v1/messages", method="GET"),
        }
        lost = await live.call("/v1/messages/batches", {"requests": []})
        own_id = await send(live, model="other", path="/v1/messages")
    assert error_of(without_key)["type"] == "authentication_error"
    for kind, answer in others.items():
        assert error_of(answer)["type"] == kind
    assert [answer.status for answer in others.values()] == [404, 413, 405]
    assert error_of(lost)["type"] == "not_found_error"
    assert own_id.status == 404


async def test_errors_carry_the_id_that_the_client_gave() -> None:
    async with live_server() as live:
        body = {"model": "other", "max_tokens": 1, "messages": HI}
        answer = await live.call("/v1/messages", body, headers={"X-Request-Id": "mine"})
    assert error_of(answer)["type"] == "not_found_error"
    assert answer.json["request_id"] == "mine"


async def test_other_paths_keep_the_other_envelope() -> None:
    async with live_server(api_keys=("key",)) as live:
        assert (await live.chat()).error["code"] == "invalid_api_key"


@pytest.mark.slow
async def test_the_client_raises_the_right_classes() -> None:
    async with live_server(api_keys=("key",)) as live:
        async with client_for(live, api_key="key") as client:
            asked: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": HI}
            assert (await client.messages.create(**asked)).role == "assistant"
            with pytest.raises(anthropic.BadRequestError) as bad:
                await client.messages.create(**asked, extra_body={"top_p": 3})
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**asked, "model": "other"})
        async with client_for(live, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**asked)
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id
    async with live_server() as live, client_for(live) as client:
        live.executor.fail_from(1)
        with pytest.raises(anthropic.InternalServerError) as failed:
            await client.messages.create(**asked)
    assert failed.value.type == "api_error"


async def test_a_full_queue_and_a_server_that_loads_are_told_apart() -> None:
    async with live_server(is_started=False) as live, client_for(live) as client:
        with pytest.raises(anthropic.ServiceUnavailableError) as loading:
            await client.messages.create(
                model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "a"}]
            )
    assert loading.value.type == "overloaded_error"
    async with (
        live_server(info={"num_slots": 1}, engine_options={"max_num_queued_requests": 1}) as live,
        client_for(live) as client,
    ):
        live.executor.hold()
        waiting = asyncio.create_task(send(live))
        await live.until_step_waits()
        queued = asyncio.create_task(send(live))
        await live.until_running(2)
        with pytest.raises(anthropic.RateLimitError) as full:
            await client.messages.create(
                model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "a"}]
            )
        live.executor.resume()
        assert [answer.status for answer in await asyncio.gather(waiting, queued)] == [200, 200]
    assert full.value.type == "rate_limit_error"
    assert full.value.response.headers["Retry-After"]


async def test_an_error_within_a_stream_is_raised_by_the_client() -> None:
    async with live_server(next_token=spell("xyz")) as live, client_for(live) as client:
        live.executor.fail_from(2)
        with pytest.raises(anthropic.APIStatusError) as failed:
            async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
                await stream.get_final_message()
    assert failed.value.type == "api_error"
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["request_id"] == failed.value.request_id


async def test_the_client_streams_text_and_counts_tokens() -> None:
    async with live_server(next_token=spell("Paris")) as live, client_for(live) as client:
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI, system="s") as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        counted = await client.messages.count_tokens(model=MODEL, messages=HI, system="s")
        with_tools = await client.messages.count_tokens(model=MODEL, messages=HI, system="s", tools=[WEATHER])
    assert texts == list("Paris")
    assert final.content[0].type == "text"
    assert final.content[0].text == "Paris"
    assert counted.input_tokens == final.usage.input_tokens
    assert with_tools.input_tokens > counted.input_tokens


async def test_models_are_listed_in_the_shape_of_the_client() -> None:
    async with live_server() as live, client_for(live) as client:
        page = await client.models.list()
        one = await client.models.retrieve(MODEL)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("other")
        openai_shape = (await live.call("/v1/models")).json
    assert [model.id for model in page.data] == [MODEL, "alias/of-it"]
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, "alias/of-it")
    assert one.display_name == MODEL
    assert one.created_at.year > 2000
    assert missing.value.type == "not_found_error"
    assert openai_shape["object"] == "list"


async def test_a_client_that_leaves_ends_its_message() -> None:
    async with live_server() as live:
        live.executor.hold()
        body = json.dumps({"model": MODEL, "max_tokens": 9, "messages": HI})
        head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await live.raw((head + body).encode())
        await live.until_running(1)
        writer.close()
        live.executor.resume()
        await live.until_running(0)


async def test_plain_text_takes_the_quick_path_of_streams() -> None:
    shapes = MessageShapes(message_id="m", request_id="r", model=MODEL, max_tokens=9, parser=None)
    frame = shapes.frame(0)
    assert frame is not None
    before, after = frame
    first, second = (RequestOutput(index=0, text=text, token_ids=[1]) for text in ("a", 'b"'))
    shapes.events(0, first, is_first=True, usage=None)
    [event] = shapes.events(0, second, is_first=False, usage=None)
    assert event == before + b'b\\"' + after


async def test_tokens_of_reasoning_are_counted_where_the_markers_are_tokens() -> None:
    count = ReasoningCount((1, 2), is_open=False, is_space=lambda token_id: False)
    shapes = MessageShapes(
        message_id="m", request_id="r", model=MODEL, max_tokens=9, parser=None, reasoning_count=count
    )
    output = RequestOutput(index=0, text="x", token_ids=[1, 7, 2, 8], finish_reason=FinishReason.STOP)
    usage = json.loads(shapes.answer(output, Usage(5, 4, 0)))["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}


async def test_headers_that_are_too_large_are_told_in_the_envelope() -> None:
    async with live_server() as live:
        answer = await live.call("/v1/messages", {}, headers={f"X-{index}": "x" * 900 for index in range(60)})
    assert answer.status == 431
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["type"] == "error"
