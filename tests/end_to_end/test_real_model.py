"""The demo model behind a real server, asked by the clients people use."""

import json

import openai
import pytest

from tests.end_to_end.curl import curl
from tests.end_to_end.server_process import ServerProcess, sse_events

pytestmark = pytest.mark.slow


@pytest.fixture
def client(demo_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0)


def test_completion_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_chat_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_chat_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    question = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name three colours and an emoji for each."}],
        "temperature": 0,
        "max_tokens": 48,
    }
    whole = client.chat.completions.create(**question)
    chunks = list(
        client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_curl_gets_a_completion(demo_server: ServerProcess) -> None:
    body = {"model": "smollm2", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
    answer = json.loads(curl(f"{demo_server.url}/v1/completions", json.dumps(body)))
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "city" in answer["choices"][0]["text"]


def test_curl_gets_a_stream_that_ends_with_done(demo_server: ServerProcess) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
    }
    answer = curl(f"{demo_server.url}/v1/chat/completions", json.dumps(body))
    events = sse_events(answer.decode().splitlines())
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"


def test_seeded_sampling_repeats_itself_whatever_else_runs(client: openai.OpenAI) -> None:
    ask = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0, "seed": 7}
    alone = client.completions.create(**ask).choices[0].text
    together = client.completions.create(**{**ask, "prompt": ["One two", "Once upon a time", "Three"]})
    assert together.choices[1].text == alone


def test_logprobs_sum_to_a_distribution_and_carry_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert bytes(token.bytes or []).decode() == token.token
        assert len(token.top_logprobs) == 5


def test_prefix_cache_serves_a_repeated_prompt(client: openai.OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    ask = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    first = client.completions.create(**ask)
    second = client.completions.create(**ask)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= 96
