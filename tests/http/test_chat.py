from typing import Any

import pytest

from asyncserve import __version__
from tests.fakes.tokenizer import EOS_ID, FakeTokenizer
from tests.http.live import MODEL, live_server, spell


async def test_answer_has_openais_shape() -> None:
    async with live_server(next_token=spell("hello")) as live:
        answer = await live.chat()
    assert answer.status == 200
    body = answer.json
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("usage")["completion_tokens"] == 6
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": f"asyncserve-{__version__}",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }


async def test_stream_is_role_then_content_then_finish_then_usage_then_done() -> None:
    async with live_server(next_token=spell('hé\n"')) as live:
        answer = await live.chat(stream=True, stream_options={"include_usage": True})
    *events, usage, done = answer.events
    assert done == "[DONE]"
    assert len({(event["id"], event["created"], event["object"], event["model"]) for event in events}) == 1
    assert events[0]["id"].startswith("chatcmpl-")
    assert events[0]["object"] == "chat.completion.chunk"
    plain = {"index": 0, "logprobs": None, "finish_reason": None}
    assert [event["choices"] for event in events] == [
        [{**plain, "delta": {"role": "assistant", "content": ""}}],
        [{**plain, "delta": {"content": "h"}}],
        [{**plain, "delta": {"content": "é"}}],
        [{**plain, "delta": {"content": "\n"}}],
        [{**plain, "delta": {"content": '"'}}],
        [{**plain, "delta": {}, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert all(event["usage"] is None for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6


async def test_role_comes_with_the_first_token_even_if_it_has_no_text_yet() -> None:
    async with live_server(next_token=spell("é")) as live:
        events = (await live.chat(stream=True, max_tokens=1)).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[1]["choices"][0]["delta"] == {"content": "\N{REPLACEMENT CHARACTER}"}
    assert events[2]["choices"][0]["finish_reason"] == "length"


async def test_output_runs_to_the_end_of_the_context_when_no_limit_is_given() -> None:
    async with live_server(next_token=spell("x" * 500), info={"max_model_len": 64}) as live:
        body = (await live.chat()).json
    assert body["usage"]["total_tokens"] == 64
    assert body["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_wins_over_max_tokens() -> None:
    async with live_server(next_token=spell("x" * 50)) as live:
        both = (await live.chat(max_tokens=9, max_completion_tokens=3)).json
        old = (await live.chat(max_tokens=9)).json
    assert both["usage"]["completion_tokens"] == 3
    assert old["usage"]["completion_tokens"] == 9


async def test_messages_reach_the_template_with_their_roles_and_text_parts() -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "annotations": [], "refusal": None},
        {"role": "user", "content": "d"},
    ]
    expected = "<bos><turn>system:be kind<end><turn>user:a\nb<end><turn>assistant:c<end><turn>user:d<end>"
    async with live_server(next_token=spell("x")) as live:
        await live.chat(messages=messages)
        [assignment] = [each for plan in live.executor.plans for each in plan.admitted]
        prompt = FakeTokenizer().encode(expected + "<turn>assistant:", add_special_tokens=False)
    assert list(assignment.token_ids[: assignment.prompt_len]) == list(prompt)


async def test_final_message_is_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    async with live_server(next_token=spell("x")) as live:
        await live.chat(messages=messages, continue_final_message=True)
        await live.chat(messages=messages, add_generation_prompt=False, cache_salt="2")
        first, second = [each for plan in live.executor.plans for each in plan.admitted]
    tokenizer = FakeTokenizer()
    open_ended = tokenizer.encode("<bos><turn>user:a<end><turn>assistant:b", add_special_tokens=False)
    closed = tokenizer.encode("<bos><turn>user:a<end><turn>assistant:b<end>", add_special_tokens=False)
    assert list(first.token_ids[: first.prompt_len]) == list(open_ended)
    assert list(second.token_ids[: second.prompt_len]) == list(closed)


async def test_logprobs_have_the_vocabularys_bytes() -> None:
    async with live_server(next_token=spell("é")) as live:
        [choice] = (await live.chat(logprobs=True, top_logprobs=1)).json["choices"]
        [bare] = (await live.chat(logprobs=True)).json["choices"]
    replacement = "\N{REPLACEMENT CHARACTER}"
    first, second, end = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == (replacement, [0xC3], -0.25)
    assert (second["token"], second["bytes"]) == (replacement, [0xA9])
    assert (end["token"], end["bytes"]) == ("<eos>", list(b"<eos>"))
    assert first["top_logprobs"] == [{"token": replacement, "logprob": -0.25, "bytes": [0xC3]}]
    assert all(entry["top_logprobs"] == [] for entry in bare["logprobs"]["content"])
    assert choice["message"]["content"] == "é"


async def test_tokens_are_named_by_their_ids_if_that_is_asked() -> None:
    async with live_server(next_token=spell("a")) as live:
        fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        [choice] = (await live.chat(**fields)).json["choices"]
    first, end = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("token_id:97", [97])
    assert first["top_logprobs"][0]["token"] == "token_id:97"
    assert end["token"] == f"token_id:{EOS_ID}"


async def test_prompt_tokens_have_their_scores_if_that_is_asked() -> None:
    async with live_server(next_token=spell("a")) as live:
        body = (await live.chat(prompt_logprobs=1, n=2, return_token_ids=True)).json
    prompt = body["prompt_token_ids"]
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for token_id, scores in zip(prompt[1:], others, strict=True):
        assert scores[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
    [second] = {text["decoded_token"] for text in [others[0][str(prompt[1])]]}
    assert second == "<turn>"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"stop": ["cd", "zz"]},
        {"stop": "cd", "include_stop_str_in_output": True, "logprobs": True},
        {"stop_token_ids": [ord("e")]},
        {"max_tokens": 8},
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 20},
    ],
)
async def test_stream_joined_equals_the_answer_in_one_piece(fields: dict[str, Any]) -> None:
    text = "ab cd \N{GRINNING FACE}é efgh"
    async with live_server(next_token=spell(text)) as live:
        whole = (await live.chat(**fields, cache_salt="1")).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, usage, done = (await live.chat(**fields, **options, cache_salt="2")).events
    assert done == "[DONE]"
    joined: dict[int, dict[str, Any]] = {}
    for event in events:
        [choice] = event["choices"]
        delta = choice["delta"]
        if choice["index"] not in joined:
            assert delta == {"role": "assistant", "content": ""}
            joined[choice["index"]] = {
                "index": choice["index"],
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": {"content": [], "refusal": None} if "logprobs" in fields else None,
                "finish_reason": None,
                "stop_reason": None,
            }
            continue
        known = joined[choice["index"]]
        assert known["finish_reason"] is None, "something follows the finish reason"
        known["message"]["content"] += delta.get("content", "")
        if choice["logprobs"] is not None:
            known["logprobs"]["content"] += choice["logprobs"]["content"]
        if choice["finish_reason"] is not None:
            assert delta == {}
            known["finish_reason"], known["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    assert [joined[index] for index in sorted(joined)] == whole["choices"]
    for counts in (usage["usage"], whole["usage"]):
        counts.pop("prompt_tokens_details")
    assert usage["usage"] == whole["usage"]


async def test_stop_reason_names_what_ended_the_text() -> None:
    async with live_server(next_token=spell("abcd")) as live:
        by_string = (await live.chat(stop="cd")).json["choices"][0]
        by_id = (await live.chat(stop_token_ids=[ord("c")])).json["choices"][0]
        by_eos = (await live.chat()).json["choices"][0]
    assert (by_string["message"]["content"], by_string["stop_reason"]) == ("ab", "cd")
    assert (by_id["message"]["content"], by_id["stop_reason"]) == ("ab", ord("c"))
    assert (by_eos["finish_reason"], by_eos["stop_reason"]) == ("stop", None)


async def test_continuous_usage_starts_at_zero_with_the_role() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with live_server(next_token=spell("xy")) as live:
        *events, _, _ = (await live.chat(stream=True, stream_options=options)).events
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3]


async def test_fields_that_mean_off_and_harmless_ones_are_taken() -> None:
    fields = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "me",
        "best_of": 1,
        "modalities": ["text"],
        "logit_bias": {},
        "stop": None,
        "reasoning_effort": "low",
        "some_new_field": {"x": [1]},
    }
    async with live_server(next_token=spell("x")) as live:
        assert (await live.chat(**fields)).status == 200


async def test_earlier_tool_calls_are_shown_to_the_template_with_their_arguments_as_objects() -> None:
    seen: list[Any] = []

    class Recorder(FakeTokenizer):
        def render_chat(self, prompt: Any) -> str:
            seen.extend(prompt.messages)
            return "text"

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    tokenizer = Recorder(chat_template_text="{{ tools }}")
    async with live_server(next_token=spell("x", then=EOS_ID), tokenizer=tokenizer) as live:
        assert (await live.chat(messages=messages)).status == 200
    assert seen[1]["content"] == ""
    assert seen[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert seen[2] == {"role": "tool", "content": "2", "tool_call_id": "1"}
