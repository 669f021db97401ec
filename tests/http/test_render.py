from typing import Any

import pytest

from tests.fakes.tokenizer import BOS_ID, EOS_ID
from tests.http.live import MODEL, live_server, spell

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_every_prompt_of_a_completion_is_rendered_as_it_would_be_generated_from() -> None:
    async with live_server(next_token=spell("x"), default_sampling={"temperature": 0.5, "top_k": 7}) as live:
        body = {
            "model": "alias/of-it",
            "prompt": ["ab", "c"],
            "top_k": 3,
            "stop": "\n",
            "logit_bias": {"5": 1.5},
            "logprobs": 2,
            "priority": 4,
            "cache_salt": "s",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await live.call("/v1/completions/render", body, headers={"X-Request-Id": "mine"})
        assert live.executor.num_completed_steps == 0
        streamed = await live.call("/v1/completions", body)
    assert answer.status == 200
    assert answer.headers["X-Request-Id"] == "mine"
    first, second = answer.json
    assert first["token_ids"] == [BOS_ID, *b"ab"]
    assert second["token_ids"] == [BOS_ID, *b"c"]
    assert [entry["request_id"] for entry in answer.json] == ["cmpl-mine-0", "cmpl-mine-1"]
    assert {entry["model"] for entry in answer.json} == {"alias/of-it"}
    assert (first["priority"], first["cache_salt"]) == (4, "s")
    assert first["stream"] is True
    assert first["stream_options"]["include_usage"] is True
    assert first["features"] is None
    sampling = first["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["max_tokens"]) == (0.5, 3, 16)
    assert (sampling["stop"], sampling["logit_bias"], sampling["logprobs"]) == (["\n"], {"5": 1.5}, 2)
    assert sampling["structured_outputs"] is None
    usage = next(event["usage"] for event in reversed(streamed.events[:-1]) if event.get("usage"))
    assert usage["prompt_tokens"] == sum(len(entry["token_ids"]) for entry in answer.json)


async def test_a_conversation_is_rendered_through_the_template_with_what_the_context_leaves() -> None:
    async with live_server(next_token=spell("x")) as live:
        asked = {"model": MODEL, "messages": MESSAGES}
        rendered = (await live.call("/v1/chat/completions/render", asked)).json
        tokens = (await live.call("/tokenize", asked)).json["tokens"]
        shaped = await live.call(
            "/v1/chat/completions/render",
            {**asked, "response_format": {"type": "json_object"}, "max_completion_tokens": 9},
        )
    assert rendered["token_ids"] == tokens
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["sampling_params"]["max_tokens"] == 128 - len(tokens)
    assert rendered["stream_options"] is None
    assert shaped.json["sampling_params"]["structured_outputs"] == {"json_object": ""}
    assert shaped.json["sampling_params"]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": [1, 100_000]}, "prompt"),
        ("completions", {"prompt": ""}, None),
        ("completions", {"prompt": "a" * 200}, "prompt"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids"),
        ("completions", {"prompt": "a", "max_tokens": 500}, None),
        ("completions", {"prompt": "a", "stream_options": {}}, "stream_options"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, None),
        ("chat/completions", {"messages": MESSAGES, "max_completion_tokens": 500}, "max_completion_tokens"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ("completions", {"prompt": "a", "model": "other"}, "model"),
    ],
)
async def test_what_would_not_be_generated_is_not_rendered_and_refused_in_the_same_words(
    path: str, fields: dict[str, Any], param: str | None
) -> None:
    async with live_server(next_token=spell("x")) as live:
        rendered = await live.call(f"/v1/{path}/render", {"model": MODEL, **fields})
        generated = await live.call(f"/v1/{path}", {"model": MODEL, **fields})
    if fields == {"prompt": ""}:
        assert rendered.json[0]["token_ids"] == [BOS_ID]
        return
    assert rendered.status == generated.status >= 400
    assert rendered.error == generated.error
    assert param is None or rendered.error["param"] == param


async def test_rendering_takes_the_prompts_tokens_as_they_are() -> None:
    async with live_server() as live:
        answer = await live.call("/v1/completions/render", {"prompt": [[5, EOS_ID], [7]], "max_tokens": 1})
    assert [entry["token_ids"] for entry in answer.json] == [[5, EOS_ID], [7]]


async def test_a_server_that_loads_renders_nothing() -> None:
    async with live_server(is_started=False) as live:
        assert (await live.call("/v1/completions/render", {"prompt": "a"})).status == 503


async def test_a_long_prompt_is_rendered_without_holding_up_the_loop() -> None:
    """`no_blocking_calls` and the thread it is encoded in are the check."""
    async with live_server(info={"max_model_len": 4000, "num_blocks": 1100}) as live:
        answer = await live.call("/v1/completions/render", {"prompt": "a" * 3000})
        threads = live.engine.tokenizer.encoding_threads
    assert len(answer.json[0]["token_ids"]) == 3001
    assert "MainThread" not in threads
