import asyncio
from typing import Any

import pytest

from tests.fakes.executor import fake_continuation
from tests.fakes.tokenizer import BOS_ID, EOS_ID, FakeTokenizer
from tests.http.live import MODEL, Answer, live_server, spell


async def test_answer_has_openais_shape() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        answer = await live.complete(max_tokens=10)
    assert answer.status == 200
    body = answer.json
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {"index": 0, "text": "xyz", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_max_tokens_is_sixteen_when_left_out() -> None:
    async with live_server(next_token=spell("x" * 100)) as live:
        body = (await live.complete()).json
    assert body["choices"][0]["text"] == "x" * 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS_ID, 97, 98]]),
        (["ab", "c"], [[BOS_ID, 97, 98], [BOS_ID, 99]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_all_four_forms_of_prompt_reach_the_engine(prompt: Any, expected: list[list[int]]) -> None:
    async with live_server() as live:
        body = (await live.complete(prompt=prompt, max_tokens=5, logprobs=0, ignore_eos=True)).json
        admitted = [
            list(each.token_ids[: each.prompt_len]) for plan in live.executor.plans for each in plan.admitted
        ]
    assert admitted == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    texts = [
        [
            live.engine.tokenizer.token_bytes(each).decode(errors="replace")
            for each in fake_continuation(ids, 5, 512)
        ]
        for ids in expected
    ]
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == texts


async def test_add_special_tokens_false_leaves_the_prompt_as_it_is() -> None:
    async with live_server() as live:
        body = (await live.complete(add_special_tokens=False)).json
    assert body["usage"]["prompt_tokens"] == 2


async def test_choices_are_numbered_prompt_by_prompt() -> None:
    def echo_first(token_ids: Any, prompt_len: int) -> int:
        return int(token_ids[1]) if len(token_ids) - prompt_len < 2 else EOS_ID

    async with live_server(next_token=echo_first) as live:
        whole = (await live.complete(prompt=["p", "q"], n=2)).json
        streamed = (await live.complete(prompt=["p", "q"], n=2, stream=True)).events
    assert [(each["index"], each["text"]) for each in whole["choices"]] == [
        (0, "pp"),
        (1, "pp"),
        (2, "qq"),
        (3, "qq"),
    ]
    texts = dict.fromkeys(range(4), "")
    for event in streamed[:-1]:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "pp", 1: "pp", 2: "qq", 3: "qq"}
    assert whole["usage"]["prompt_tokens"] == 4  # each prompt once, whatever n
    assert whole["usage"]["completion_tokens"] == 12


async def test_stream_is_text_events_then_done() -> None:
    async with live_server(next_token=spell("xy")) as live:
        answer = await live.complete(stream=True)
    assert answer.status == 200
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    *events, done = answer.events
    assert done == "[DONE]"
    assert len({(event["id"], event["created"], event["object"], event["model"]) for event in events}) == 1
    assert events[0]["id"].startswith("cmpl-")
    assert events[0]["object"] == "text_completion"
    assert all("usage" not in event for event in events)
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}]
        for text, reason in (("x", None), ("y", None), ("", "stop"))
    ]


async def test_usage_comes_last_and_other_events_have_null() -> None:
    async with live_server(next_token=spell("xy")) as live:
        *events, usage, done = (
            await live.complete(stream=True, stream_options={"include_usage": True})
        ).events
    assert done == "[DONE]"
    assert all(event["usage"] is None for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["total_tokens"] == 6


async def test_continuous_usage_counts_with_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with live_server(next_token=spell("xy")) as live:
        *events, _, _ = (await live.complete(stream=True, stream_options=options)).events
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}


async def test_cached_tokens_are_reported() -> None:
    async with live_server(next_token=spell("x")) as live:
        prompt = "a prompt of several blocks"
        await live.complete(prompt=prompt)
        usage = (await live.complete(prompt=prompt)).json["usage"]
        salted = (await live.complete(prompt=prompt, cache_salt="other")).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 16
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


async def test_logprobs_are_parallel_lists() -> None:
    async with live_server(next_token=spell("xy")) as live:
        logprobs = (await live.complete(logprobs=2)).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["x", "y", "<eos>"]
    assert logprobs["token_logprobs"] == [-0.25, -0.25, -0.25]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0] == {"x": -0.25, "y": -0.5}


async def test_echo_puts_the_prompt_before_the_text_in_both_modes() -> None:
    async with live_server(next_token=spell("xy")) as live:
        whole = (await live.complete(prompt="<turn>é", echo=True)).json
        streamed = (await live.complete(prompt="<turn>é", echo=True, stream=True)).events
        ids = (await live.complete(prompt=[97, 98], echo=True, n=2)).json
    assert whole["choices"][0]["text"] == "<turn>éxy"
    assert streamed[0]["choices"][0]["text"] == "<turn>éx"
    assert [choice["text"] for choice in ids["choices"]] == ["abxy", "abxy"]


async def test_echo_with_logprobs_scores_the_prompt_but_its_first_token() -> None:
    async with live_server(next_token=spell("x")) as live:
        [choice] = (await live.complete(prompt="aé<turn>b", echo=True, logprobs=1)).json["choices"]
        *events, _ = (await live.complete(prompt="aé<turn>b", echo=True, logprobs=1, stream=True)).events
    assert choice["text"] == "aé<turn>bx"
    lists = choice["logprobs"]
    bad = "\N{REPLACEMENT CHARACTER}"
    assert lists["tokens"] == ["<bos>", "a", bad, bad, "<turn>", "b", "x", "<eos>"]
    assert lists["token_logprobs"] == [None, *[-0.25] * 7]
    assert lists["top_logprobs"][0] is None
    assert lists["text_offset"] == [0, 0, 1, 1, 2, 8, 9, 10]
    joined: dict[str, list[Any]] = {name: [] for name in lists}
    for event in events:
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == lists


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets", "text"),
    [
        # SentencePiece puts a space before the prompt, which is not in its text, nor in the output after BOS
        # alone.
        ("ab", ["<bos>", " ", "a", "b", " ", "x"], [0, 0, 0, 1, 2, 3], "ab x"),
        (" ab", ["<bos>", " ", " ", "a", "b", " ", "x"], [0, 0, 0, 1, 2, 3, 4], " ab x"),
        ([256, 32, 97], ["<bos>", " ", "a", " ", "x"], [0, 0, 0, 1, 2], "a x"),
        ([256], ["<bos>", " ", "x"], [0, 0, 0], "x"),
    ],
)
async def test_offsets_are_those_of_the_shown_text_where_a_space_is_stripped(
    prompt: Any, tokens: list[str], offsets: list[int], text: str, stream: bool
) -> None:
    tokenizer = FakeTokenizer(strips_leading_space=True)
    async with live_server(next_token=spell(" x"), tokenizer=tokenizer) as live:
        fields = {"prompt": prompt, "max_tokens": 2, "logprobs": 0, "stream": stream}
        echoed = await live.complete(**fields, echo=True)
        plain = await live.complete(**fields)
    assert _joined(echoed, stream) == (text, tokens, offsets)
    num_prompt = len(tokens) - 2
    num_shown = offsets[num_prompt]
    assert _joined(plain, stream) == (
        text[num_shown:],
        tokens[num_prompt:],
        [offset - num_shown for offset in offsets[num_prompt:]],
    )


def _joined(answer: Answer, is_stream: bool) -> tuple[str, list[str], list[int]]:
    """Return text, tokens and offsets of the one choice of an answer."""
    bodies = answer.events[:-1] if is_stream else [answer.json]
    choices = [body["choices"][0] for body in bodies]
    return (
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["logprobs"]["tokens"]],
        [offset for choice in choices for offset in choice["logprobs"]["text_offset"]],
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"prompt": ["ab", "cd", "ef"], "n": 2},
        {"logprobs": 3},
        {"stop": ["cd", "zz"]},
        {"stop": "cd", "include_stop_str_in_output": True},
        {"stop": "ef", "logprobs": 1, "n": 2},
        {"stop_token_ids": [ord("e")]},
        {"max_tokens": 4},
        {"skip_special_tokens": False},
        {"echo": True, "logprobs": 1, "prompt": ["ab", "c"]},
        {"ignore_eos": True, "max_tokens": 20},
    ],
)
async def test_stream_joined_equals_the_answer_in_one_piece(fields: dict[str, Any]) -> None:
    text = "ab cd \N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE} efgh"
    async with live_server(next_token=spell(text)) as live:
        fields = {"max_tokens": 30, **fields}
        whole = (await live.complete(**fields, cache_salt="1")).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await live.complete(**fields, **options, cache_salt="2")
    *events, usage, done = answer.events
    assert done == "[DONE]"
    joined: dict[int, dict[str, Any]] = {}
    for event in events:
        [choice] = event["choices"]
        known = joined.setdefault(choice["index"], choice)
        if known is choice:
            continue
        assert known["finish_reason"] is None, "something follows the finish reason"
        known["text"] += choice["text"]
        known["finish_reason"] = choice["finish_reason"]
        known["stop_reason"] = choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                known["logprobs"][name] += values
    assert [joined[index] for index in sorted(joined)] == whole["choices"]
    whole_usage, stream_usage = whole["usage"], usage["usage"]
    for counts in (whole_usage, stream_usage):
        counts.pop("prompt_tokens_details")  # what is cached depends on the steps the sequences meet in
    assert stream_usage == whole_usage


async def test_ids_follow_the_clients_request_id() -> None:
    async with live_server(next_token=spell("x")) as live:
        by_header = await live.call(
            "/v1/completions", {"prompt": "a", "request_id": "body"}, headers={"X-Request-Id": "abc-1"}
        )
        streamed = await live.call(
            "/v1/completions", {"prompt": "a", "stream": True}, headers={"X-Request-Id": "abc-1"}
        )
        by_body = await live.complete(request_id="body")
        unusable = await live.call("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "a b\u00e9"})
    assert (by_header.json["id"], by_header.headers["X-Request-Id"]) == ("cmpl-abc-1", "abc-1")
    assert (streamed.events[0]["id"], streamed.headers["X-Request-Id"]) == ("cmpl-abc-1", "abc-1")
    assert (by_body.json["id"], by_body.headers["X-Request-Id"]) == ("cmpl-body", "body")
    assert unusable.status == 200
    assert " " not in unusable.headers["X-Request-Id"]


async def test_the_same_request_id_can_be_in_flight_twice() -> None:
    async with live_server(next_token=spell("x")) as live:
        live.executor.hold()
        calls = [asyncio.create_task(live.complete(request_id="twice")) for _ in range(2)]
        await live.until_running(2)
        live.executor.resume()
        answers = await asyncio.gather(*calls)
    assert [answer.status for answer in answers] == [200, 200]


async def test_unset_sampling_fields_come_from_the_model_and_null_means_unset() -> None:
    defaults = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}
    async with live_server(default_sampling=defaults) as live:
        await live.complete(temperature=None, top_p=0.5, top_k=3)
        [assignment] = [each for plan in live.executor.plans for each in plan.admitted]
    sampling = assignment.sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.25, 3, 1.5)
    assert (sampling.top_p, sampling.min_p) == (0.5, 0.0)


async def test_every_sampling_field_reaches_the_device() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "stop": ["s"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "max_tokens": 3,
    }
    async with live_server() as live:
        await live.complete(**fields, logit_bias={"5": -1, "6": 2.5})
        [assignment] = [each for plan in live.executor.plans for each in plan.admitted]
    sampling = assignment.sampling
    assert dict(sampling.logit_bias) == {5: -1.0, 6: 2.5}
    assert {name: getattr(sampling, name) for name in fields} == {
        **fields,
        "stop": ("s",),
        "stop_token_ids": (7,),
    }


async def test_a_failed_step_answers_500_or_ends_the_stream_with_an_error_event() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        live.executor.fail(0, "the device burnt")
        whole = await live.complete()
        live.executor.hold()
        streaming = asyncio.create_task(live.complete(stream=True, stream_options={"include_usage": True}))
        await live.until_running(1)
        await live.until_step_waits()
        live.executor.complete()
        await live.until_step_waits()
        live.executor.fail(live.executor.pending_step_ids[0])
        live.executor.resume()
        streamed = await streaming
        assert live.num_sequences == 0
        assert (await live.complete()).status == 200
    assert whole.status == 500
    assert whole.error["type"] == "server_error"
    assert "the device burnt" in whole.error["message"]
    assert streamed.status == 200
    first, *_, last = streamed.events
    assert first["choices"][0]["text"] == "x"
    assert list(last) == ["error"]
    assert last["error"]["code"] == "step_failed"
    assert "[DONE]" not in streamed.events


async def test_fault_in_one_answer_ends_that_answer_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == ord("y"):  # a rival of x, so that only log-probabilities ask for it
                raise ZeroDivisionError("secret")
            return super().token_bytes(token_id)

    async with live_server(next_token=spell("xx"), tokenizer=Faulty()) as live:
        streamed = await live.complete(stream=True, logprobs=2)
        whole = await live.complete(logprobs=2)
        assert (await live.complete()).json["choices"][0]["text"] == "xx"
        await live.until_running(0)
    assert [list(event) for event in streamed.events] == [["error"]]
    assert whole.status == 500
    assert b"secret" not in streamed.body + whole.body
    assert "ZeroDivisionError" in caplog.text


async def test_one_bad_prompt_among_several_refuses_them_all() -> None:
    async with live_server(next_token=spell("x")) as live:
        answer = await live.complete(prompt=["a", "b" * 500, "c"], n=2)
        assert answer.status == 400
        await live.until_running(0)
