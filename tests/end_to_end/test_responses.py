"""/v1/responses of the demo model, asked by the official client."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.end_to_end.server_process import ServerProcess

pytestmark = pytest.mark.slow


class City(pydantic.BaseModel):
    name: str
    country: str


@pytest.fixture
def client(demo_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0)


def test_a_sentence_streamed_and_not_and_a_second_turn(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {
        "model": "smollm2",
        "input": "What is the capital of France?",
        "temperature": 0,
        "max_output_tokens": 32,
    }
    whole = client.responses.create(**question)
    with client.responses.stream(**question) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    following = client.responses.create(
        model="smollm2",
        previous_response_id=whole.id,
        input="Thank you!",
        temperature=0,
        max_output_tokens=8,
    )
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    assert "".join(deltas) == final.output_text == whole.output_text
    assert following.usage is not None
    assert whole.usage is not None
    assert following.usage.input_tokens > whole.usage.total_tokens


def test_a_function_that_must_be_called_and_a_schema_that_must_be_kept(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    response = client.responses.create(
        model="smollm2",
        input="What is the weather in Paris?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=100,
    )
    [call] = response.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert list(json.loads(call.arguments)) == ["city"]
    parsed = client.responses.parse(
        model="smollm2",
        input="Name a city and its country, as JSON.",
        text_format=City,
        temperature=0,
        max_output_tokens=100,
    )
    assert isinstance(parsed.output_parsed, City)
