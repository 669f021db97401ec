"""LangChain's ChatOpenAI: invoke, stream, tools bound and called, structured output."""

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.end_to_end.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city and its country."""

    city: str
    country: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"It is sunny in {city}."


def chat_model(server: ServerProcess, **options: int) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        model="smollm2",
        temperature=0,
        max_retries=0,
        **{"max_tokens": 32, **options},  # type: ignore[arg-type]
    )


def test_an_invocation_and_a_stream_give_the_same(demo_server: ServerProcess) -> None:
    model = chat_model(demo_server)
    answer = model.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata is not None
    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert len(chunks) > 3
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content == answer.content
    assert joined.usage_metadata is not None
    for count in ("input_tokens", "output_tokens", "total_tokens"):
        assert joined.usage_metadata[count] == answer.usage_metadata[count]


def test_a_batch_gives_what_its_questions_give_alone(demo_server: ServerProcess) -> None:
    model = chat_model(demo_server)
    questions = [QUESTION, "Name a colour.", "What is two plus two?"]
    answers = model.batch(questions)  # in as many threads
    assert [answer.content for answer in answers] == [model.invoke(each).content for each in questions]


def test_a_bound_tool_is_called_and_its_result_is_taken(demo_server: ServerProcess) -> None:
    model = chat_model(demo_server, max_tokens=64).bind_tools(
        [get_weather], tool_choice="any", parallel_tool_calls=False
    )
    question = HumanMessage("What is the weather in Paris?")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)
    result = ToolMessage(get_weather(call["args"]["city"]), tool_call_id=call["id"])
    followed = chat_model(demo_server).invoke([question, AIMessage("", tool_calls=[call]), result])
    assert followed.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_becomes_the_class(demo_server: ServerProcess, method: str) -> None:
    model = chat_model(demo_server, max_tokens=64).with_structured_output(City, method=method)
    city = model.invoke("Give the capital of France and its country.")
    assert isinstance(city, City)
    assert city.city
