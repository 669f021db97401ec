"""Tools and shapes with a model whose template knows neither: what is asked for comes, and is valid."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.end_to_end.server_process import ServerProcess

pytestmark = pytest.mark.slow

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["metric", "imperial"]},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}},
]
ASKED: Any = [{"role": "user", "content": "What will the weather be like in Paris tomorrow?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def called(answer: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls]


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_call_that_must_be_made_fits_its_tool(client: openai.OpenAI, choice: Any, reason: str) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=ASKED, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=3
    )
    assert answer.choices[0].finish_reason == reason
    assert answer.choices[0].message.content is None
    [(name, arguments)] = called(answer)
    assert name in (["get_weather", "get_time"] if choice == "required" else ["get_time"])
    jsonschema.validate(json.loads(arguments), PARAMETERS)


def test_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "tools": TOOLS, "temperature": 0}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    assert called(streamed) == called(whole)


def test_answer_in_a_shape_is_valid(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}}
    answer = client.chat.completions.create(model="smollm2", messages=ASKED, response_format=shape, seed=1)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PARAMETERS)
