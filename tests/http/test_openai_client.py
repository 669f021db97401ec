"""The official client, unchanged, against a live server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

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
        live.executor.fail(2)
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="step 2 failed"):
            async for _ in stream:
                pass
