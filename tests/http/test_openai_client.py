"""The official client, unchanged, against a live server."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pydantic
import pytest

from asyncserve.request import ChatPrompt, StructureKind
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tokenizer import FakeTokenizer
from tests.http.live import MODEL, Live, live_server, spell

pytestmark = pytest.mark.slow


@asynccontextmanager
async def client_for(live: Live, *, api_key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(base_url=live.url + "/v1", api_key=api_key, max_retries=0)
    try:
        yield client
    finally:
        await client.close()


async def test_chat_whole_and_streamed() -> None:
    async with live_server(next_token=spell("Paris, é")) as live, client_for(live) as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
        )
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        request_id = whole._request_id
    [choice] = whole.choices
    assert choice.message.content == "Paris, é"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].bytes == [ord("P")]
    assert whole.usage is not None
    assert request_id is not None
    assert whole.id == f"chatcmpl-{request_id}"
    *deltas, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == "Paris, é"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens


async def test_completions_whole_and_streamed() -> None:
    async with live_server(next_token=spell("xyz")) as live, client_for(live) as client:
        whole = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1, echo=True)
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in whole.choices] == ["axyz", "axyz", "bxyz", "bxyz"]
    assert text == "xyz"


async def test_models_and_errors() -> None:
    async with live_server(api_keys=("key",)) as live:
        async with client_for(live, api_key="key") as client:
            assert MODEL in [model.id async for model in client.models.list()]
            assert (await client.models.retrieve(MODEL)).id == MODEL
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model="other", prompt="a")
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model=MODEL, prompt="a", max_tokens=-1)
        async with client_for(live, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
    assert missing.value.code == "model_not_found"
    assert bad.value.param == "max_tokens"


async def test_error_within_a_stream_is_raised_by_the_client() -> None:
    async with live_server(next_token=spell("xyz")) as live, client_for(live) as client:
        live.executor.fail_from(2)
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match=r"step \d failed"):
            async for _ in stream:
                pass


def weather_tools() -> list[Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return [{"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}]


def scripted(text: str, *, template: str = "{{ tools }}<tool_call><think></think>") -> ScriptedEngine:
    return ScriptedEngine(
        [text[start : start + 5] for start in range(0, len(text), 5)],
        tokenizer=FakeTokenizer(chat_template_text=template),
    )


ASKED: list[Any] = [{"role": "user", "content": "hi"}]
CALLS = (
    '<think>two cities</think><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
)


async def test_tool_calls_whole_and_streamed() -> None:
    async with live_server(engine=scripted(CALLS)) as live, client_for(live) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=ASKED, tools=weather_tools())
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=ASKED, tools=weather_tools(), stream=True
            )
        ]
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "two cities"
    assert choice.message.tool_calls is not None
    cities = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert cities == ["Rome", "Köln"]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    arguments = ["", ""]
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            arguments[call.index] += call.function.arguments or ""
    assert [json.loads(text)["city"] for text in arguments] == ["Rome", "Köln"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_streaming_helper_puts_the_message_together() -> None:
    engine = scripted(CALLS)
    options: Any = {"include_usage": True}
    async with (
        live_server(engine=engine) as live,
        client_for(live) as client,
        client.chat.completions.stream(
            model=MODEL, messages=ASKED, tools=weather_tools(), stream_options=options
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    message = final.choices[0].message
    assert message.tool_calls is not None
    assert [call.function.parsed_arguments for call in message.tool_calls] == [
        {"city": "Rome"},
        {"city": "Köln"},
    ]
    assert final.usage is not None
    assert final.usage.prompt_tokens == 3


async def test_result_of_a_tool_goes_back_with_the_answer_as_it_came() -> None:
    class AnyRole(FakeTokenizer):
        def render_chat(self, prompt: ChatPrompt) -> str:
            return "text"

    engine = scripted(CALLS)
    engine.tokenizer = AnyRole(chat_template_text="{{ tools }}<tool_call><think></think>")
    async with live_server(engine=engine) as live, client_for(live) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=ASKED, tools=weather_tools())
        message = whole.choices[0].message
        assert message.tool_calls is not None
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
        ]
        messages = [*ASKED, message, *results]
        await client.chat.completions.create(model=MODEL, messages=messages, tools=weather_tools())
    prompt = engine.requests[1].prompt
    assert isinstance(prompt, ChatPrompt)
    _, called, *answered = prompt.messages
    assert called["reasoning_content"] == "two cities"
    assert [call["function"]["arguments"]["city"] for call in called["tool_calls"]] == ["Rome", "Köln"]
    assert [result["tool_call_id"] for result in answered] == [call["id"] for call in called["tool_calls"]]


class Reading(pydantic.BaseModel):
    city: str
    degrees: float


async def test_answer_is_parsed_into_a_model() -> None:
    engine = scripted('{"city": "Rome", "degrees": 21.5}', template="{{ messages }}")
    async with live_server(engine=engine) as live, client_for(live) as client:
        parsed = await client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Reading)
        async with client.chat.completions.stream(
            model=MODEL, messages=ASKED, response_format=Reading
        ) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
    assert parsed.choices[0].message.parsed == Reading(city="Rome", degrees=21.5)
    assert streamed.choices[0].message.parsed == Reading(city="Rome", degrees=21.5)
    structured = engine.requests[0].sampling.structured
    assert structured is not None
    assert structured.kind is StructureKind.JSON_SCHEMA
    assert json.loads(structured.source)["required"] == ["city", "degrees"]


async def test_named_tool_is_parsed_into_a_model() -> None:
    text = '<tool_call>{"name": "Reading", "arguments": {"city": "Rome", "degrees": 1}}</tool_call>'
    engine = scripted(text, template="{{ tools }}<tool_call>")
    async with live_server(engine=engine) as live, client_for(live) as client:
        parsed = await client.chat.completions.parse(
            model=MODEL,
            messages=ASKED,
            tools=[openai.pydantic_function_tool(Reading)],
            tool_choice={"type": "function", "function": {"name": "Reading"}},
        )
    [choice] = parsed.choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.parsed_arguments == Reading(city="Rome", degrees=1)
