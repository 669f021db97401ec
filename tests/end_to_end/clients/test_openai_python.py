"""The Python package `openai` against the demo model: completions, chat, streams, parsed models."""

from collections.abc import Iterator
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.end_to_end.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city, in few tokens: a small model does not always find the end of a string."""

    name: Annotated[str, Field(max_length=16)]
    is_capital: bool
    size: Literal["small", "large"]


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions_of_several_prompts_whole_and_streamed(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    whole = client.completions.create(
        model="smollm2", prompt=prompts, max_tokens=4, temperature=0, logprobs=2
    )
    texts = [choice.text for choice in whole.choices]
    assert "Paris" in texts[0]
    assert "Rome" in texts[1]
    assert all(len(choice.logprobs.token_logprobs) == 4 for choice in whole.choices if choice.logprobs)
    streamed = ["", ""]
    stream = client.completions.create(
        model="smollm2", prompt=prompts, max_tokens=4, temperature=0, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_a_model_class_is_filled_by_chat_and_by_responses(client: openai.OpenAI) -> None:
    question = "Describe Paris."
    chat = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        response_format=City,
        temperature=0,
        max_tokens=80,
    )
    city = chat.choices[0].message.parsed
    assert isinstance(city, City)
    response = client.responses.parse(
        model="smollm2", input=question, text_format=City, temperature=0, max_output_tokens=80
    )
    assert response.output_parsed == city


def test_several_choices_come_interleaved_and_are_told_apart(client: openai.OpenAI) -> None:
    settings = {"model": "smollm2", "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(messages=messages, **settings)  # type: ignore[call-overload]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    order = []
    for chunk in client.chat.completions.create(messages=messages, stream=True, **settings):  # type: ignore[call-overload]
        for choice in chunk.choices:
            order.append(choice.index)
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert order != sorted(order)


def test_a_refusal_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": QUESTION}], extra_body={"suffix": "x"}
        )
    assert refused.value.param == "suffix"


def test_a_beam_search_finds_answers_of_which_each_is_another(client: openai.OpenAI) -> None:
    settings = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    beams = {"use_beam_search": True, "length_penalty": 1.0}
    found = client.completions.create(n=2, best_of=4, extra_body=beams, **settings)  # type: ignore[call-overload]
    texts = [choice.text for choice in found.choices]
    assert len(set(texts)) == 2
    assert "Paris" in texts[0]
    assert 6 < found.usage.completion_tokens <= 4 * 6
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(n=2, extra_body=beams, stream=True, **settings)  # type: ignore[call-overload]
    assert refused.value.param == "stream"
