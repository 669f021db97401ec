"""/v1/messages of the demo model, asked by the official client."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import pydantic
import pytest

from tests.end_to_end.server_process import ServerProcess

pytestmark = pytest.mark.slow

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION: dict[str, Any] = {
    "model": "smollm2",
    "max_tokens": 16,
    "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}],
    "extra_body": {"temperature": 0},
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}


class Weather(pydantic.BaseModel):
    sky: Literal["sun", "rain"]
    is_warm: bool


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_sentence_streamed_and_not_and_its_continuation(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**QUESTION)
    with client.messages.stream(**QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    counted = client.messages.count_tokens(**{key: QUESTION[key] for key in ("model", "system", "messages")})
    [block] = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert text == block.text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    usage = final.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    started = {"role": "assistant", "content": "The capital of France is the city of"}
    continued = client.messages.create(**{**QUESTION, "messages": [*QUESTION["messages"], started]})
    assert continued.content[0].type == "text"
    assert continued.content[0].text.startswith(" Paris")


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool"}])
def test_a_tool_that_must_be_called_and_its_result(client: anthropic.Anthropic, choice: Any) -> None:
    if choice["type"] == "tool":
        choice["name"] = TOOL["name"]
    asked = {**QUESTION, "tools": [TOOL], "max_tokens": 100}
    whole = client.messages.create(**asked, tool_choice=choice)
    with client.messages.stream(**asked, tool_choice=choice) as stream:
        final = stream.get_final_message()
    [call] = whole.content
    assert call.type == "tool_use"
    assert call.name == TOOL["name"]
    jsonschema.validate(call.input, SCHEMA)
    assert final.content[0].type == "tool_use"
    assert final.content[0].input == call.input
    assert whole.stop_reason == final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 24 degrees."}
    following = client.messages.create(
        **{
            **asked,
            "max_tokens": 8,
            "messages": [*QUESTION["messages"], whole.to_param(), {"role": "user", "content": [result]}],
        }
    )
    assert following.usage.input_tokens + (following.usage.cache_read_input_tokens or 0) > (
        whole.usage.input_tokens + whole.usage.output_tokens
    )


def test_an_answer_in_a_shape_is_valid(client: anthropic.Anthropic) -> None:
    asked = {**QUESTION, "max_tokens": 100}
    parsed = client.messages.parse(**asked, output_format=Weather).parsed_output
    assert isinstance(parsed, Weather)
    shape: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(**asked, output_config=shape)
    assert answer.content[0].type == "text"
    jsonschema.validate(json.loads(answer.content[0].text), SCHEMA)


def test_errors_have_the_clients_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**QUESTION, "model": "another"})
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**QUESTION, stop_sequences=[""])
