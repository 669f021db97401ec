import asyncio
from typing import Any

import pytest

from asyncserve import __version__
from tests.fakes.executor import fake_continuation
from tests.fakes.tokenizer import BOS_ID, EOS_ID, FakeTokenizer
from tests.http.live import MODEL, Answer, live_server, spell, until
from tests.loop.beams import searched


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
        "system_fingerprint": f"asyncserve-{__version__}",
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
        {"return_token_ids": True},
        {"return_token_ids": True, "n": 2, "prompt": ["ab", "c"], "stop": "ef"},
        {"return_token_ids": True, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "max_tokens": 0, "logprobs": 2, "n": 2, "return_token_ids": True},
        {"echo": True, "truncate_prompt_tokens": 2, "prompt": ["abc", "d"], "logprobs": 0},
        {"bad_words": ["cd"], "allowed_token_ids": [97, 98]},
        {"spaces_between_special_tokens": False},
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
        assert "prompt_token_ids" not in choice, "the prompt's ids come once"
        if "token_ids" in choice:
            known["token_ids"] += choice["token_ids"]
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
        "allowed_token_ids": [5, 6, 97, 97],
        "bad_words": [" ab", "c"],
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
        "allowed_token_ids": (5, 6, 97, 97),
        "bad_words": (" ab", "c"),
    }
    assert assignment.bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))


async def test_a_failed_step_answers_500_or_ends_the_stream_with_an_error_event() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        live.executor.fail_from(0, "the device burnt")
        whole = await live.complete()
        live.executor.mend()
        live.executor.hold()
        streaming = asyncio.create_task(live.complete(stream=True, stream_options={"include_usage": True}))
        await live.until_running(1)
        await live.until_step_waits()
        live.executor.complete()
        await live.until_step_waits()
        live.executor.fail_from(live.executor.pending_step_ids[0])
        live.executor.resume()
        streamed = await streaming
        live.executor.mend()
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


def scored(token_id: int, text: str, *rivals: tuple[int, str]) -> dict[str, Any]:
    """One entry of `prompt_logprobs`, as the fake device scores."""
    return {
        str(each): {"logprob": -0.25 * (rank + 1), "rank": rank + 1, "decoded_token": name}
        for rank, (each, name) in enumerate([(token_id, text), *rivals])
    }


async def test_prompt_logprobs_have_null_and_then_each_token_with_its_rivals() -> None:
    async with live_server(next_token=spell("x")) as live:
        [none] = (await live.complete(prompt="aé", prompt_logprobs=0)).json["choices"]
        choices = (await live.complete(prompt=["a", "b"], prompt_logprobs=2, n=2)).json["choices"]
    bad = "\N{REPLACEMENT CHARACTER}"
    assert none["prompt_logprobs"] == [None, scored(97, "a"), scored(0xC3, bad), scored(0xA9, bad)]
    assert none["text"] == "x"
    assert none["logprobs"] is None
    a, b = scored(97, "a", (98, "b")), scored(98, "b", (99, "c"))
    assert [choice["prompt_logprobs"] for choice in choices] == [[None, each] for each in (a, a, b, b)]


async def test_prompt_logprobs_of_minus_one_are_as_many_as_the_server_gives() -> None:
    async with live_server(next_token=spell("x"), max_logprobs=3) as live:
        [choice] = (await live.complete(prompt="a", prompt_logprobs=-1)).json["choices"]
        refused = await live.complete(prompt="a", prompt_logprobs=4)
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3]
    assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize(("num_prompt", "num_echoed"), [(3, 1), (1, 3), (0, 2)])
async def test_prompt_logprobs_and_echoed_logprobs_have_each_as_many_rivals_as_were_asked_for(
    num_prompt: int, num_echoed: int
) -> None:
    async with live_server(next_token=spell("x")) as live:
        answer = await live.complete(prompt_logprobs=num_prompt, echo=True, logprobs=num_echoed)
    [choice] = answer.json["choices"]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [max(1, num_prompt)] * 2
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [num_echoed] * 4


async def test_token_ids_of_prompt_and_output_are_returned_and_held_back_text_costs_none() -> None:
    async with live_server(next_token=spell("é!")) as live:
        [whole] = (await live.complete(return_token_ids=True)).json["choices"]
        *events, _ = (await live.complete(return_token_ids=True, stream=True)).events
        [without] = (await live.complete()).json["choices"]
    assert whole["prompt_token_ids"] == [BOS_ID, 97, 98]
    assert whole["token_ids"] == [0xC3, 0xA9, ord("!"), EOS_ID]
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == [BOS_ID, 97, 98]
    assert [(choice["text"], choice["token_ids"]) for choice in choices] == [
        ("", [0xC3]),
        ("é", [0xA9]),
        ("!", [ord("!")]),
        ("", [EOS_ID]),
    ]
    assert not {"token_ids", "prompt_token_ids"} & set(without)


async def test_tokens_of_log_probabilities_can_be_named_by_their_ids() -> None:
    async with live_server(next_token=spell("x")) as live:
        fields = {"prompt": "<turn>a", "echo": True, "logprobs": 2}
        [texts] = (await live.complete(**fields)).json["choices"]
        [ids] = (await live.complete(**fields, return_tokens_as_token_ids=True)).json["choices"]
    names = [f"token_id:{token_id}" for token_id in (BOS_ID, 258, 97, ord("x"), EOS_ID)]
    assert ids["logprobs"]["tokens"] == names
    assert ids["logprobs"]["top_logprobs"][2] == {"token_id:97": -0.25, "token_id:98": -0.5}
    for name in ("token_logprobs", "text_offset"):
        assert ids["logprobs"][name] == texts["logprobs"][name]
    assert ids["text"] == texts["text"]


async def test_max_tokens_of_zero_with_echo_gives_the_prompt_alone() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        body = (await live.complete(prompt=["ab", "c"], echo=True, max_tokens=0, logprobs=1, n=2)).json
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        events = (await live.complete(echo=True, max_tokens=0, **options)).events
    assert [choice["text"] for choice in body["choices"]] == ["ab", "ab", "c", "c"]
    for choice in body["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        num_tokens = len(choice["text"]) + 1
        assert choice["logprobs"]["tokens"] == ["<bos>", *choice["text"]]
        assert {len(values) for values in choice["logprobs"].values()} == {num_tokens}
        assert choice["logprobs"]["token_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] == 5
    assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "ab"
    assert {event["usage"]["completion_tokens"] for event in events[:-1]} == {0}


async def test_a_harness_finds_the_likelihood_of_a_continuation() -> None:
    # As lm-eval's local-completions asks and reads.
    async with live_server(next_token=spell("x")) as live:
        answer = await live.complete(
            prompt=[[97, 98, 99], [97, 98]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
        )
    for choice, num_tokens in zip(answer.json["choices"], (3, 2), strict=True):
        lists = choice["logprobs"]
        assert len(lists["token_logprobs"]) == len(lists["top_logprobs"]) == num_tokens + 1
        assert sum(lists["token_logprobs"][1:-1]) == -0.25 * (num_tokens - 1)
        assert all(max(top.values()) == -0.25 for top in lists["top_logprobs"][1:-1])


async def test_only_the_last_tokens_of_a_prompt_are_kept_and_counted_and_echoed() -> None:
    fields = {"truncate_prompt_tokens": 4, "echo": True, "logprobs": 0, "return_token_ids": True}
    async with live_server(next_token=spell("z")) as live:
        body = (await live.complete(prompt=["abcdef", "xy"], **fields)).json
        [of_ids] = (await live.complete(prompt=list(b"abcde"), **fields)).json["choices"]
        special = (await live.complete(prompt="<turn>é", truncate_prompt_tokens=20, echo=True)).json
    kept = [list(b"cdef"), [BOS_ID, *b"xy"]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == kept
    assert [choice["text"] for choice in body["choices"]] == ["cdefz", "xyz"]
    assert (of_ids["prompt_token_ids"], of_ids["text"]) == (list(b"bcde"), "bcdez")
    assert body["choices"][0]["logprobs"]["tokens"] == ["c", "d", "e", "f", "z", "<eos>"]
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert body["usage"]["prompt_tokens"] == 7
    assert special["choices"][0]["text"] == "<turn>éz"


async def test_a_prompt_of_any_length_fits_when_it_may_be_truncated() -> None:
    async with live_server(next_token=spell("z" * 500)) as live:
        texts = await live.complete(prompt="a" * 100_000, truncate_prompt_tokens=-1, max_tokens=28)
        tokens = await live.complete(prompt=[97] * 1000, truncate_prompt_tokens=-1)
        chat = await live.chat(truncate_prompt_tokens=5, max_tokens=2)
        too_many = await live.complete(prompt="a" * 1000, truncate_prompt_tokens=200)
    assert texts.json["usage"]["prompt_tokens"] == 100
    assert texts.json["usage"]["completion_tokens"] == 28
    assert tokens.json["usage"]["prompt_tokens"] == 112
    assert chat.json["usage"]["prompt_tokens"] == 5
    assert (too_many.status, too_many.error["param"]) == (400, "prompt")


async def test_log_probabilities_of_a_prompt_in_chunks_are_all_there() -> None:
    async with live_server(next_token=spell("z"), info={"max_num_batched_tokens": 7}) as live:
        answer = await live.complete(prompt="a" * 60, truncate_prompt_tokens=40, prompt_logprobs=0)
    assert len(answer.json["choices"][0]["prompt_logprobs"]) == 40


async def test_a_long_list_of_allowed_tokens_is_taken() -> None:
    async with live_server(next_token=spell("x")) as live:
        answer = await live.complete(allowed_token_ids=list(range(512)) * 256)
        assert answer.status == 200
        answer = await live.complete(allowed_token_ids=[1] * (128 * 1024 + 1))
    assert (answer.status, answer.error["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"suffix": "x"}, "fills no gaps"),
        ({"truncation_side": "right"}, "left"),
        ({"regex": "a"}, "structured_outputs.regex"),
        ({"stream_interval": 4}, "not supported"),
    ],
)
async def test_what_does_not_exist_says_so(fields: dict[str, Any], word: str) -> None:
    async with live_server() as live:
        answer = await live.complete(**fields)
    assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))
    assert word in answer.error["message"]


async def test_best_of_gives_fewer_answers_than_are_generated_and_counts_all() -> None:
    async with live_server(next_token=spell("xyz")) as live:
        answer = (await live.complete(best_of=3)).json
        assert [choice["text"] for choice in answer["choices"]] == ["xyz"]
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 3 * 4
        answer = (await live.chat(best_of=4, n=2)).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["completion_tokens"] == 4 * 4
        answer = (await live.complete(prompt=["a", "b"], best_of=2, logprobs=1)).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert all(len(choice["logprobs"]["tokens"]) == 4 for choice in answer["choices"])


async def test_best_of_that_chooses_nothing_is_streamed() -> None:
    async with live_server(next_token=spell("xy")) as live:
        answer = await live.complete(best_of=2, n=2, stream=True)
    assert answer.status == 200
    texts = ["", ""]
    for event in answer.events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["xy", "xy"]


async def test_an_aborted_choice_of_the_best_leaves_nothing_behind() -> None:
    async with live_server(next_token=spell("x" * 100)) as live:
        task = asyncio.create_task(live.complete(best_of=3, max_tokens=90))
        await live.until_running(3)
        task.cancel()
        await until(lambda: live.engine.statistics().num_running == 0)


NEUTRAL = {
    "temperature": 0,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "seed": 3,
    "stream": False,
    "stop": [],
    "early_stopping": False,
    "length_penalty": 1,
}


async def test_a_beam_search_gives_the_best_of_its_width_and_counts_all_it_found() -> None:
    prompt = [5, 6, 7, 8, 9]
    found = searched(prompt, 3, 6, frozenset({EOS_ID, 40}), 512)
    async with live_server() as live:
        fields = {"use_beam_search": True, "max_tokens": 6, "stop_token_ids": [40], "return_token_ids": True}
        answer = (await live.complete(prompt=prompt, n=2, best_of=3, **fields, **NEUTRAL)).json
        as_wide_as_n = (await live.complete(prompt=prompt, n=3, **fields)).json
    expected = [each.token_ids.tolist() for each in found]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected[:2]
    assert [choice["token_ids"] for choice in as_wide_as_n["choices"]] == expected
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))
    assert as_wide_as_n["usage"]["completion_tokens"] == sum(map(len, expected))


async def test_a_beam_search_that_finds_fewer_answers_than_asked_for_gives_those() -> None:
    async with live_server() as live:
        fields = {"use_beam_search": True, "max_tokens": 1, "return_token_ids": True}
        two = {"prompt": [[5, 6], [7, 8]], "allowed_token_ids": [9, 10]}
        for few in ({"n": 3}, {"n": 3, "best_of": 4}):
            answer = await live.complete(**two, **few, **fields)
            assert answer.status == 200
            # Choices are numbered as if none were missing: which prompt one belongs to stays known.
            assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 3, 4]
            found = [choice["token_ids"] for choice in answer.json["choices"]]
            assert sorted(found[:2]) == sorted(found[2:]) == [[9], [10]]
            assert answer.json["usage"]["completion_tokens"] == 4
        assert live.engine.statistics().num_running == 0


async def test_a_beam_search_in_chat_answers_with_messages() -> None:
    async with live_server() as live:
        answer = (await live.chat(use_beam_search=True, n=2, max_tokens=4, early_stopping="never")).json
    assert [choice["message"]["role"] for choice in answer["choices"]] == ["assistant"] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2


async def test_a_beam_search_leaves_out_what_the_model_recommends_for_drawing() -> None:
    defaults = {"temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5}
    async with live_server(default_sampling=defaults) as live:
        assert (await live.complete(use_beam_search=True, n=2, max_tokens=2)).status == 200


async def test_a_beam_search_wider_than_the_server_names_the_field_that_says_so() -> None:
    async with live_server() as live:
        for field in ("n", "best_of"):
            answer = await live.complete(use_beam_search=True, max_tokens=2, **{field: 9})
            assert (answer.status, answer.error["param"]) == (400, field)


async def test_a_client_that_leaves_a_beam_search_leaves_nothing_behind() -> None:
    async with live_server(check_plans=False) as live:
        live.executor.hold()
        task = asyncio.create_task(live.complete(use_beam_search=True, n=4, max_tokens=20))
        await live.until_running(4)
        task.cancel()
        live.executor.resume()
        await until(lambda: live.engine.statistics().num_running == 0)
        assert live.engine.statistics().num_blocks_used == 0
