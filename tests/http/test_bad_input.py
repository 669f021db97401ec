"""What bad input gets: a 4xx in OpenAI's shape, naming the field, and a server that goes on."""

import asyncio
import io
import json
from typing import Any

import pytest

from asyncserve.errors import InvalidRequest, PromptTooLong
from asyncserve.http.message_schema import MAX_MESSAGES, MAX_TOOLS
from asyncserve.http.schema import MAX_FIELDS, MAX_TOKEN_IDS
from tests.fakes.observer import RecordingObserver
from tests.fakes.tokenizer import FakeTokenizer
from tests.http.live import live_server, spell

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
PROMPT = {"prompt": "ab"}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2}
MESSAGES = {"messages": USER}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    # prompts
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": "", "add_special_tokens": False}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": 7}, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, [2]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [512]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [2**31]]}, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 500}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], ["a"]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * 2049}, "prompt"),
    (COMPLETIONS, {"prompt": [-1] * 129}, "prompt"),
    (COMPLETIONS, {**PROMPT, "max_tokens": 126}, "max_tokens"),
    # messages
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages"),
    (CHAT, {"messages": [*USER, {"role": "wizard", "content": "a"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "messages[0].tool_calls",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 500}]}, "messages"),
    (CHAT, {**MESSAGES, "max_completion_tokens": 10_000}, "max_completion_tokens"),
    (
        CHAT,
        {**MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
    (CHAT, {**MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {**MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {**MESSAGES, "chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs"),
    (CHAT, {**MESSAGES, "chat_template": "{{ messages }}"}, "chat_template"),
    (CHAT, {**MESSAGES, "documents": ["a"]}, "documents"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}]},
        "messages[0].tool_calls",
    ),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content"),
    # tools
    (CHAT, {**MESSAGES, "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {**MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {**MESSAGES, "tools": [{"type": "function", "function": {}}]}, "tools"),
    (CHAT, {**MESSAGES, "tools": [named("a b")]}, "tools[0].function.name"),
    (CHAT, {**MESSAGES, "tools": [named("")]}, "tools[0].function.name"),
    (CHAT, {**MESSAGES, "tools": [named("f"), named("f")]}, "tools[1].function.name"),
    (CHAT, {**MESSAGES, "tools": [named("f")] * (MAX_TOOLS + 1)}, "tools"),
    (CHAT, {**MESSAGES, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {**MESSAGES, "tools": [named("f")], "tool_choice": "any"}, "tool_choice"),
    (CHAT, {**MESSAGES, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {**MESSAGES, "tool_choice": named("f")}, "tool_choice"),
    (CHAT, {**MESSAGES, "tools": [named("f")], "tool_choice": named("g")}, "tool_choice"),
    (CHAT, {**MESSAGES, "tools": [named("f")], "tool_choice": {"type": "custom"}}, "tool_choice"),
    (CHAT, {**MESSAGES, "tools": [named("f")], "tool_choice": {"type": "function"}}, "tool_choice"),
    (CHAT, {**MESSAGES, "tools": [named("f")], "tool_choice": allowed("auto", "g")}, "tool_choice"),
    (CHAT, {**MESSAGES, "tools": [named("f")], "tool_choice": allowed("auto")}, "tool_choice"),
    (CHAT, {**MESSAGES, "tools": [named("f")], "tool_choice": allowed("none", "f")}, "tool_choice"),
    (CHAT, {**MESSAGES, "function_call": {"name": "f"}}, "function_call"),
    # the answer's shape
    (CHAT, {**MESSAGES, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {**MESSAGES, "response_format": {}}, "response_format"),
    (CHAT, {**MESSAGES, "response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {**MESSAGES, "response_format": {"type": "structural_tag"}}, "response_format"),
    (CHAT, {**MESSAGES, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    (CHAT, {**MESSAGES, "structured_outputs": {"choice": []}}, "structured_outputs"),
    (
        CHAT,
        {
            **MESSAGES,
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
        },
        "structured_outputs",
    ),
    # limits
    (COMPLETIONS, {**PROMPT, "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "max_tokens": 2.5}, "max_tokens"),
    (CHAT, {**MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {**MESSAGES, "max_tokens": -5}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "min_tokens": -1}, "min_tokens"),
    (COMPLETIONS, {**PROMPT, "min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {**PROMPT, "n": 0}, "n"),
    (COMPLETIONS, {**PROMPT, "n": 129}, "n"),
    # sampling
    (COMPLETIONS, {**PROMPT, "temperature": -1}, "temperature"),
    (COMPLETIONS, {**PROMPT, "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {**PROMPT, "temperature": True}, "temperature"),
    (COMPLETIONS, {**PROMPT, "temperature": [1]}, "temperature"),
    (COMPLETIONS, {**PROMPT, "top_p": 0}, "top_p"),
    (COMPLETIONS, {**PROMPT, "top_p": 1.1}, "top_p"),
    (COMPLETIONS, {**PROMPT, "top_k": -2}, "top_k"),
    (COMPLETIONS, {**PROMPT, "min_p": 1.5}, "min_p"),
    (COMPLETIONS, {**PROMPT, "presence_penalty": 3}, "presence_penalty"),
    (COMPLETIONS, {**PROMPT, "frequency_penalty": -2.5}, "frequency_penalty"),
    (COMPLETIONS, {**PROMPT, "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {**PROMPT, "seed": 2**63}, "seed"),
    (COMPLETIONS, {**PROMPT, "seed": 1.5}, "seed"),
    (COMPLETIONS, {**PROMPT, "stop": ["a"] * 65}, "stop"),
    (COMPLETIONS, {**PROMPT, "stop": ""}, "stop"),
    (COMPLETIONS, {**PROMPT, "stop": [1]}, "stop"),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": [512]}, "stop_token_ids"),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": 5}, "stop_token_ids"),
    (COMPLETIONS, {**PROMPT, "stop_token_ids": [7] * (MAX_TOKEN_IDS + 1)}, "stop_token_ids"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"512": 1}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": {"5": "x"}}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": [5]}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "logit_bias": dict.fromkeys(range(MAX_TOKEN_IDS + 1), 1)}, "logit_bias"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [512]}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [5, -1]}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [2**70]}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [2**31]}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": "5"}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "allowed_token_ids": [257], "min_tokens": 1}, "allowed_token_ids"),
    (CHAT, {**MESSAGES, "allowed_token_ids": [600]}, "allowed_token_ids"),
    (COMPLETIONS, {**PROMPT, "bad_words": [""]}, "bad_words"),
    (COMPLETIONS, {**PROMPT, "bad_words": "a"}, "bad_words"),
    (COMPLETIONS, {**PROMPT, "bad_words": [5]}, "bad_words"),
    (COMPLETIONS, {**PROMPT, "bad_words": ["a"] * 1025}, "bad_words"),
    (CHAT, {**MESSAGES, "bad_words": ["a" * 4097]}, "bad_words"),
    (COMPLETIONS, {**PROMPT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {**PROMPT, "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (COMPLETIONS, {**PROMPT, "truncate_prompt_tokens": 2**70}, "truncate_prompt_tokens"),
    (CHAT, {**MESSAGES, "truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
    # what comes back
    (COMPLETIONS, {**PROMPT, "prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {**PROMPT, "prompt_logprobs": -2}, "prompt_logprobs"),
    (COMPLETIONS, {**PROMPT, "prompt_logprobs": True}, "prompt_logprobs"),
    (COMPLETIONS, {**PROMPT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {**PROMPT, "return_token_ids": 1}, "return_token_ids"),
    (COMPLETIONS, {**PROMPT, "return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids"),
    (COMPLETIONS, {**PROMPT, "echo": True, "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {**PROMPT, "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    (COMPLETIONS, {**PROMPT, "guided_choice": []}, "guided_choice"),
    (COMPLETIONS, {**PROMPT, "guided_json": "{"}, "guided_json"),
    (COMPLETIONS, {**PROMPT, "structured_outputs": {}}, "structured_outputs"),
    (COMPLETIONS, {**PROMPT, "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {**PROMPT, "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {**PROMPT, "logprobs": True}, "logprobs"),
    (CHAT, {**MESSAGES, "logprobs": 3}, "logprobs"),
    (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {**MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (COMPLETIONS, {**PROMPT, "stream": "yes"}, "stream"),
    (COMPLETIONS, {**PROMPT, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {**MESSAGES, "stream": False, "stream_options": {}}, "stream_options"),
    (CHAT, {**MESSAGES, "stream": True, "stream_options": {"include_usage": "a"}}, "stream_options"),
    (COMPLETIONS, {**PROMPT, "priority": "high"}, "priority"),
    (COMPLETIONS, {**PROMPT, "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {**PROMPT, "cache_salt": "s" * 129}, "cache_salt"),
    (COMPLETIONS, {**PROMPT, "request_id": "a b"}, "request_id"),
    (COMPLETIONS, {**PROMPT, "user": 7}, "user"),
    (COMPLETIONS, {**PROMPT, "model": 7}, "model"),
    (COMPLETIONS, {**PROMPT, "best_of": 0}, "best_of"),
    (COMPLETIONS, {**PROMPT, "best_of": 129}, "best_of"),
    (CHAT, {**MESSAGES, "best_of": 2, "n": 3}, "best_of"),
    (COMPLETIONS, {**PROMPT, "best_of": 3, "n": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {**PROMPT, "length_penalty": 2}, "length_penalty"),
    (CHAT, {**MESSAGES, "early_stopping": True}, "early_stopping"),
    (CHAT, {**MESSAGES, "use_beam_search": 1}, "use_beam_search"),
    *(
        (url, {**BEAMS, **base, **fields}, next(iter(fields)))
        for url, base in ((COMPLETIONS, PROMPT), (CHAT, MESSAGES))
        for fields in (
            {"stream": True},
            {"length_penalty": 10.5},
            {"early_stopping": "always"},
            {"temperature": 0.5},
            {"top_p": 0.9},
            {"top_k": 5},
            {"min_p": 0.1},
            {"presence_penalty": 0.5},
            {"frequency_penalty": 0.5},
            {"repetition_penalty": 1.5},
            {"stop": ["a"]},
            {"stop_token_ids": list(range(65))},
            {"prompt_logprobs": 1},
            {"response_format": {"type": "json_object"}},
            {"guided_regex": "a+"},
        )
    ),
    (COMPLETIONS, {**BEAMS, **PROMPT, "logprobs": 1}, "logprobs"),
    (CHAT, {**BEAMS, **MESSAGES, "logprobs": True}, "logprobs"),
    # not implemented
    (COMPLETIONS, {**PROMPT, "suffix": "x"}, "suffix"),
    (CHAT, {**MESSAGES, "prompt_logprobs": 21}, "prompt_logprobs"),
    (CHAT, {**MESSAGES, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, {**PROMPT, "tools": [named("f")]}, "tools"),
    (COMPLETIONS, {**PROMPT, "chat_template": "x"}, "chat_template"),
    (CHAT, {**MESSAGES, "audio": {"voice": "alloy"}}, "audio"),
    (CHAT, {**MESSAGES, "modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {**MESSAGES, "web_search_options": {}}, "web_search_options"),
    # tokenization
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [512]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
]


@pytest.mark.parametrize("batch", range(8))
async def test_bad_field_is_named_in_a_400(batch: int) -> None:
    async with live_server(next_token=spell("x")) as live:
        for path, body, param in BAD_FIELDS[batch::8]:
            answer = await live.call(path, body)
            case = f"{path} {body!r:.200} gave {answer.status} {answer.body!r:.300}"
            assert answer.status == 400, case
            assert answer.error["param"] == param, case
            assert answer.error["type"] == "invalid_request_error", case
            if answer.error["code"] != "context_length_exceeded":
                assert param.split("[")[0] in answer.error["message"], case
        assert live.num_sequences == 0
        assert (await live.complete()).status == 200


async def test_bad_fields_of_a_stream_are_refused_before_it_begins() -> None:
    cases = (
        {"prompt": "a" * 500},
        {"prompt": ["a", "b" * 500]},
        {"prompt": [600]},
        {"temperature": -1},
        {"max_tokens": 500},
    )
    async with live_server(next_token=spell("x")) as live:
        for fields in cases:
            answer = await live.complete(**fields, stream=True)
            assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        await live.until_running(0)


async def test_over_long_prompt_is_refused_with_the_numbers() -> None:
    async with live_server() as live:
        answer = await live.complete(prompt="a" * 300)
    assert answer.error["code"] == "context_length_exceeded"
    assert "128" in answer.error["message"]
    assert "301" in answer.error["message"]


async def test_lists_as_long_as_they_may_be_are_taken() -> None:
    limits = {
        "stop_token_ids": [7] * MAX_TOKEN_IDS,
        "logit_bias": {str(token_id): 0.5 for token_id in range(512)},
        **{f"unknown{number}": 0 for number in range(MAX_FIELDS - 3)},
    }
    async with live_server(next_token=spell("x")) as live:
        assert (await live.call(COMPLETIONS, {**PROMPT, **limits})).status == 200
        answer = await live.call(COMPLETIONS, {**PROMPT, **limits, "one": 0})
        assert answer.status == 400
        assert f"{MAX_FIELDS + 1} fields" in answer.error["message"]
        answer = await live.call(CHAT, {"messages": USER * (MAX_MESSAGES + 1)})
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert f"length <= {MAX_MESSAGES}" in answer.error["message"]


async def test_output_length_nobody_asked_for_is_cut_to_the_context_and_one_asked_for_is_refused() -> None:
    async with live_server(next_token=spell("x" * 50)) as live:
        [choice] = (await live.complete(prompt="a" * 120)).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("x" * (128 - 121), "length")
        answer = await live.complete(prompt="a" * 120, max_tokens=16)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")


async def test_errors_are_raised_with_the_cause_they_have_and_not_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejected: list[BaseException] = []
    async with live_server(on_rejected=rejected.append) as live:
        await live.chat(max_completion_tokens=0)
    [error] = rejected
    assert error.__cause__ is not error
    assert "max_completion_tokens" in str(error)


@pytest.mark.parametrize(
    ("data", "param", "word"),
    [
        (b"", None, "no body"),
        (b"  \n", None, "no body"),
        (b"{", None, "JSON"),
        (b'{"prompt": "ab"', None, "JSON"),
        (b'{"prompt": "ab"} x', None, "JSON"),
        (b"[]", None, "object"),
        (b"null", None, "object"),
        (b'"prompt"', None, "object"),
        (b'{"prompt": "\xff\xfe"}', None, "UTF-8"),
        (b'{"unknown": "\xff"}', None, "UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "a"}', None, "JSON"),
        (b'{"prompt": "a\nb"}', None, "JSON"),
        (b'{"prompt": "\\ud800 and more"}', "prompt", "surrogate"),
        (b'{"model": "a", "user": "\\uDC00", "prompt": "\\ud83d\\ude00"}', "user", "surrogate"),
        (b'{"prompt": "ab", "unknown": "\\ud83d\\ud83d"}', "prompt", "surrogate"),
        (b'{"suffix": "\\ud800"}', None, "surrogate"),
        (b'{"prompt": "\\\\ud800', None, "JSON"),
        (b'{"prompt": "\\ud83d\\ude00', None, "JSON"),
        (b'{"prompt": "ab", "suffix": 1e999}', "suffix", "out of range"),
        (b'{"prompt": "ab", "user": 1e999}', "user", "out of range"),
        (b'{"prompt": "ab", "' + b"k" * 100_000 + b'": NaN}', None, "a value is not a finite"),
        (b'{"prompt": "ab", "temperature": NaN}', "temperature", "finite"),
        (b'{"prompt": "ab", "temperature": Infinity}', "temperature", "finite"),
        (b'{"prompt": "ab", "temperature": -Infinity}', "temperature", "finite"),
        (b'{"prompt": "ab", "temperature": 1e400}', "temperature", "out of range"),
        (b'{"prompt": "ab", "logit_bias": {"5": NaN}}', "5", "finite"),
        (b'{"prompt": ' + b"[" * 100_000, None, "nested"),
        (b'{"unknown": ' + b'{"a":' * 100_000, None, "nested"),
    ],
)
async def test_body_that_is_no_json_object_is_a_400(data: bytes, param: str | None, word: str) -> None:
    async with live_server() as live:
        answer = await live.call("/v1/completions", data=data, method="POST")
    assert answer.status == 400
    assert answer.error["param"] == param
    assert word in answer.error["message"]
    assert len(answer.body) < 400, "what a client names is shown in part"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "HUGE"),
        ("top_k", "HUGE"),
        ("max_tokens", "HUGE"),
        ("min_tokens", "HUGE"),
        ("seed", "HUGE"),
        ("logprobs", "HUGE"),
        ("stop_token_ids", "[HUGE]"),
        ("logit_bias", '{"HUGE": 1}'),
        ("prompt", "[HUGE]"),
    ],
)
async def test_a_huge_integer_is_a_400_that_names_the_field_and_does_not_show_the_number(
    field: str, value: str
) -> None:
    fields = {"prompt": '"ab"', field: value.replace("HUGE", "1" * 401)}
    data = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"
    async with live_server() as live:
        answer = await live.call("/v1/completions", data=data.encode(), method="POST")
    assert answer.status == 400
    assert answer.error["param"] == field
    assert len(answer.body) < 300


async def test_a_long_path_is_shown_in_part() -> None:
    async with live_server() as live:
        answer = await live.call("/" + "a" * 4000)
    assert answer.status == 404
    assert len(answer.body) < 300


async def test_large_body_is_a_413_and_the_server_goes_on() -> None:
    body = json.dumps({"prompt": "a" * 5_000_000}).encode()
    async with live_server(next_token=spell("x")) as live:
        answer = await live.call("/v1/completions", data=io.BytesIO(body))
        assert answer.status == 413
        assert answer.error["code"] == "body_too_large"
        assert str(4 * 1024 * 1024) in answer.error["message"]
        assert (await live.complete()).status == 200


async def test_unknown_model_is_a_404() -> None:
    async with live_server() as live:
        for path, body in ((COMPLETIONS, PROMPT), (CHAT, MESSAGES), ("/tokenize", PROMPT)):
            answer = await live.call(path, {"model": "other", **body})
            assert answer.status == 404
            assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")


async def test_alias_is_reported_as_asked_and_a_missing_model_as_the_first_name() -> None:
    async with live_server(next_token=spell("x")) as live:
        assert (await live.complete(model="alias/of-it")).json["model"] == "alias/of-it"
        assert (await live.complete(model=None)).json["model"] == "fake-model"


async def test_content_type_does_not_matter() -> None:
    async with live_server(next_token=spell("x")) as live:
        answer = await live.call("/v1/completions", PROMPT, headers={"Content-Type": "text/plain"})
    assert answer.status == 200


async def test_chat_without_a_template_is_a_400() -> None:
    async with live_server(tokenizer=FakeTokenizer(has_chat_template=False)) as live:
        for path in (CHAT, "/tokenize"):
            answer = await live.call(path, MESSAGES)
            assert answer.status == 400
            assert answer.error["param"] == "messages"
            assert "template" in answer.error["message"]


async def test_full_queue_is_a_429_with_retry_after_for_the_whole_call() -> None:
    options = {"max_num_queued_requests": 4}
    async with live_server(next_token=spell("x"), info={"num_slots": 1}, engine_options=options) as live:
        live.executor.hold()
        waiting = [asyncio.create_task(live.complete(prompt=["a"] * 2)) for _ in range(2)]
        await live.until_step_waits()
        await live.until_running(4)  # one of them runs
        for fields in ({"prompt": ["a", "b"]}, {"n": 2}, {"prompt": ["a", "b"], "stream": True}):
            answer = await live.complete(**fields)
            assert answer.status == 429
            assert answer.error["code"] == "overloaded"
            assert int(answer.headers["Retry-After"]) >= 1
            assert live.num_sequences == 4, "nothing of the call was taken"
        live.executor.resume()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_call_that_could_never_wait_whole_is_a_400_with_both_numbers() -> None:
    async with live_server(next_token=spell("x"), engine_options={"max_num_queued_requests": 4}) as live:
        for fields in ({"prompt": ["a"] * 5}, {"n": 5}, {"prompt": ["a"] * 5, "stream": True}):
            answer = await live.complete(**fields)
            assert answer.status == 400
            assert "5 sequences" in answer.error["message"]
            assert "at most 4" in answer.error["message"]
        assert (await live.complete(prompt=["a"] * 4)).status == 200


async def test_what_http_refuses_is_reported_once_and_what_the_engine_refuses_is_not_reported_twice() -> None:
    rejected: list[str] = []
    observer = RecordingObserver()
    async with live_server(
        next_token=spell("x"),
        engine_options={"observer": observer},
        on_rejected=lambda error: rejected.append(type(error).__name__),
    ) as live:
        await live.complete(model="other")
        await live.chat(model="other")
        await live.complete(temperature=-1)
        await live.chat(messages=[])
        assert rejected == ["UnknownModel", "UnknownModel", "InvalidRequest", "InvalidRequest"]
        await live.complete(max_tokens=500)
        await live.chat(max_tokens=500)
        await live.complete(prompt=[600])
        assert (await live.complete()).status == 200
        await live.call("/tokenize", {"model": "other", "prompt": "a"})
    assert len(rejected) == 4
    assert [type(error) for error in observer.rejected] == [PromptTooLong, PromptTooLong, InvalidRequest]


async def test_nothing_is_taken_before_the_engine_has_started() -> None:
    async with live_server(is_started=False) as live:
        for path, body in (
            (COMPLETIONS, PROMPT),
            (CHAT, {**MESSAGES, "stream": True}),
            ("/detokenize", {"tokens": [1]}),
        ):
            answer = await live.call(path, body)
            assert answer.status == 503
            assert answer.error["code"] == "not_ready"


async def test_a_bug_is_a_500_without_details() -> None:
    async def burn() -> bytes:
        raise ZeroDivisionError("secret")

    async with live_server(metrics_renderer=burn) as live:
        answer = await live.call("/metrics")
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    assert b"secret" not in answer.body
