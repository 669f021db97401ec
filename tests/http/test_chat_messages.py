"""What a model wrote, as a message: streamed or whole, however the text is cut."""

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncserve.http.chat import ChatShapes
from asyncserve.http.conversation import ChatCall
from asyncserve.http.generation import LARGE_TEXT_LEN
from asyncserve.http.logprobs import TokenTexts
from asyncserve.http.parsers.interface import ToolChoice
from asyncserve.http.parsers.registry import message_format
from asyncserve.http.schema import ChatBody
from asyncserve.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokenLogprobs,
    merge_all,
    total_usage,
)
from tests.fakes.scripted_engine import ScriptedEngine, scripted_outputs
from tests.fakes.tokenizer import FakeTokenizer
from tests.http.live import live_server

TOOLS = tuple(
    {"name": name, "description": None, "parameters": {"type": "object"}, "strict": False}
    for name in ("f", "get_weather")
)
TEXTS = [
    "",
    "Hello, é \N{GRINNING FACE}!",
    "<think>why\n</think>\n\nBecause.",
    "<think>no end",
    '<tool_call>\n{"name": "f", "arguments": {"a": "x\\n\\"}", "b": [1, {"c": null}]}}\n</tool_call>',
    '<think>a call</think>Let me see.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}'
    '</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1',
    "<tool_call>\nnot JSON at all\n</tool_call>",
    '<tool_call>{"name": "f"}</tool_call> and then <tool_c text </think>',
    '{"a": 1}',
]


def shapes_for(
    *, mode: str = "auto", n: int = 1, num_logprobs: int | None = None, **fields: Any
) -> ChatShapes:
    """Shapes of a chat whose model reasons and calls tools in tags."""
    written_as = message_format(
        tool_call_parser="hermes", reasoning_parser="think", chat_template=None, special_tokens=()
    )
    request = Request(
        request_id="r",
        prompt=TextPrompt(text="a"),
        sampling=SamplingParams(n=n, num_logprobs=num_logprobs),
        arrival_s=0.0,
    )
    tokenizer = FakeTokenizer()
    call = ChatCall(
        body=ChatBody(**fields),
        model="m",
        request=request,
        tool_choice=ToolChoice(tools=TOOLS, mode=mode) if mode != "none" else ToolChoice(),
        message_format=written_as,
        reasoning_ids=(900, 901),
    )
    texts = TokenTexts(tokenizer.token_bytes, tokenizer.is_special)
    return ChatShapes(call, response_id="chatcmpl-1", texts=texts)


def cut(text: str, places: Sequence[int]) -> list[str]:
    places = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def choices_of(events: Sequence[bytes]) -> list[dict[str, Any]]:
    choices = []
    for event in events:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
        choices.append(choice)
    return choices


def joined(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One choice's events, as the choice of an answer in one piece; checks their order on the way."""
    first, *others = choices
    assert first["delta"] == {"role": "assistant", "content": ""}
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    whole: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    for choice in others:
        delta = choice["delta"]
        assert "finish_reason" not in whole, "something follows the finish reason"
        assert len(delta) <= 1 or set(delta) == {"reasoning", "reasoning_content"}, "one thing at a time"
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert list(call) == ["index", "id", "type", "function"]
                assert call["function"]["arguments"] == ""
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert list(call) == ["index", "function"]
                assert list(call["function"]) == ["arguments"]
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"] is not None:
            whole["logprobs"] = whole["logprobs"] or {"content": [], "refusal": None}
            whole["logprobs"]["content"] += choice["logprobs"]["content"]
        if "token_ids" in choice:
            whole["token_ids"] = whole.get("token_ids", []) + choice["token_ids"]
        if choice["finish_reason"] is not None:
            assert delta == {}
            whole |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    for call in message.get("tool_calls", ()):
        del call["index"]
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    return whole


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice["message"].get("tool_calls", ()):
        assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    return choice


def streamed(shapes: ChatShapes, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    events = [
        event
        for number, output in enumerate(outputs)
        for event in shapes.events(0, output, is_first=number == 0, usage=None)
    ]
    return without_ids(joined(choices_of(events)))


def whole(shapes: ChatShapes, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    answer = json.loads(shapes.answer([merge_all(outputs)], [total_usage([outputs[-1].usage])]))  # type: ignore[list-item]
    [choice] = answer["choices"]
    return without_ids(choice)


@given(
    st.sampled_from(TEXTS),
    st.lists(st.integers(0, 200), max_size=30),
    st.sampled_from(["none", "auto", "required", "named"]),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_streamed_message_is_the_whole_one_however_it_is_cut(
    text: str, places: list[int], mode: str, reason: FinishReason
) -> None:
    outputs = scripted_outputs(cut(text, places), reason=reason)
    for output in outputs:
        output.logprobs = [TokenLogprobs(token_id, -0.5, 1, ()) for token_id in output.token_ids]
    fields: dict[str, Any] = {"mode": mode, "num_logprobs": 0, "return_token_ids": True}
    assert streamed(shapes_for(**fields), outputs) == whole(shapes_for(**fields), outputs)


@given(st.lists(st.integers(0, 200), max_size=30))
def test_streamed_arguments_joined_are_json(places: list[int]) -> None:
    message = streamed(shapes_for(), scripted_outputs(cut(TEXTS[5], places)))["message"]
    assert (message["reasoning"], message["content"].strip()) == ("a call", "Let me see.")
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]
    assert calls == [("get_weather", {"city": "Köln"}), ("f", {})]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_any_text_becomes_a_message(text: str, mode: str) -> None:
    choice = whole(shapes_for(mode=mode), scripted_outputs(list(text)))
    calls = choice["message"].get("tool_calls")
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert calls is None or all(call["type"] == "function" for call in calls)


def test_call_that_a_limit_cuts_is_given_with_that_reason() -> None:
    choice = whole(shapes_for(mode="required"), scripted_outputs([TEXTS[6]], reason=FinishReason.LENGTH))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1'}}
    ]


def test_model_that_neither_reasons_nor_calls_keeps_the_quick_way() -> None:
    plain = message_format(
        tool_call_parser="auto", reasoning_parser="auto", chat_template="{{ messages }}", special_tokens=()
    )
    shapes = shapes_for(mode="none")
    assert shapes.frame(0) is None
    request = Request(
        request_id="r", prompt=TextPrompt(text="a"), sampling=SamplingParams(n=2), arrival_s=0.0
    )
    call = ChatCall(
        body=ChatBody(), model="m", request=request, tool_choice=ToolChoice(), message_format=plain
    )
    tokenizer = FakeTokenizer()
    shapes = ChatShapes(
        call, response_id="chatcmpl-1", texts=TokenTexts(tokenizer.token_bytes, tokenizer.is_special)
    )
    frame = shapes.frame(1)
    assert frame is not None
    [choice] = choices_of([frame[0] + b"x" + frame[1]])
    assert (choice["index"], choice["delta"]) == (1, {"content": "x"})


def test_reasoning_tokens_are_counted_over_all_choices() -> None:
    shapes = shapes_for(n=2)
    for index, token_ids in enumerate([(900, 1, 901, 2), (900, 1, 1, 901)]):
        output = RequestOutput(index=index, text="", token_ids=token_ids)
        shapes.events(index, output, is_first=True, usage=None)
    usage = shapes.usage([total_usage([scripted_outputs([""])[0].usage])])  # type: ignore[list-item]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 7}


CHAT = {"tools": [{"type": "function", "function": {"name": tool["name"]}} for tool in TOOLS]}


def engine_for(text: str, template: str = "{{ tools }}<tool_call>", size: int = 3) -> ScriptedEngine:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return ScriptedEngine(pieces, tokenizer=FakeTokenizer(chat_template_text=template))


async def test_choices_are_streamed_side_by_side() -> None:
    async with live_server(engine=engine_for(TEXTS[5])) as live:
        *events, done = (await live.chat(**CHAT, n=3, stream=True)).events
    assert done == "[DONE]"
    by_index: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        [choice] = event["choices"]
        by_index.setdefault(choice["index"], []).append(choice)
    messages = [without_ids(joined(by_index[index]))["message"] for index in range(3)]
    assert messages[0] == messages[1] == messages[2]
    assert len(messages[0]["tool_calls"]) == 2


async def test_one_call_at_most_if_that_is_asked() -> None:
    async with live_server(engine=engine_for(TEXTS[5])) as live:
        [choice] = (await live.chat(**CHAT, parallel_tool_calls=False)).json["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("is_long", [False, True])
async def test_long_text_is_read_in_a_thread_when_it_comes_in_one_piece(is_long: bool) -> None:
    threads: list[str] = []

    class Watched(FakeTokenizer):
        """Has markers of one token each, and so is asked for what stands before them."""

        def encode(self, text: str, *, add_special_tokens: bool) -> Any:
            marks = {"<think>": "\5", "</think>": "\6"}
            return super().encode(marks.get(text, text), add_special_tokens=add_special_tokens)

        def token_bytes(self, token_id: int) -> bytes:
            threads.append(threading.current_thread().name)
            return super().token_bytes(token_id)

    text = "a" * (LARGE_TEXT_LEN + is_long)
    engine = ScriptedEngine([text], tokenizer=Watched(chat_template_text="<think></think>"))
    async with live_server(engine=engine) as live:
        threads.clear()
        answer = await live.chat()
    assert answer.json["choices"][0]["message"]["content"] == text
    assert ["MainThread" not in thread for thread in threads] == [is_long]


async def test_usage_of_each_event_counts_reasoning() -> None:
    class Thinks(FakeTokenizer):
        """Opens its reasoning with the token 0 and closes it with the token 2."""

        def encode(self, text: str, *, add_special_tokens: bool) -> Any:
            marks = {"<think>": b"\0", "</think>": b"\2"}
            if text in marks:
                return super().encode(marks[text].decode(), add_special_tokens=False)
            return super().encode(text, add_special_tokens=add_special_tokens)

    engine = ScriptedEngine(
        ["<think>", "a", "</think>", "b", "c"],
        tokenizer=Thinks(chat_template_text="<think></think>"),
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with live_server(engine=engine) as live:
        whole_usage = (await live.chat(n=2)).json["usage"]
        *_, last, _ = (await live.chat(stream=True, stream_options=options)).events
    assert whole_usage["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_answer_begins_with_what_the_assistant_has_said_if_that_is_asked() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is "}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    async with live_server(engine=engine_for("done.")) as live:
        whole_answer = (await live.chat(**fields)).json["choices"][0]["message"]["content"]
        *events, _ = (await live.chat(**fields, stream=True)).events
        unasked = (await live.chat(**{**fields, "echo": False})).json["choices"][0]["message"]["content"]
    assert whole_answer == "It is done."
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "It is done."
    assert unasked == "done."


async def test_token_ids_of_prompt_and_answer_are_given_if_asked() -> None:
    async with live_server(engine=engine_for("abcdef", size=2)) as live:
        body = (await live.chat(return_token_ids=True)).json
        first, *events, _ = (await live.chat(return_token_ids=True, stream=True)).events
        plain = (await live.chat()).json
    assert body["prompt_token_ids"] == [1, 2, 3]
    assert body["choices"][0]["token_ids"] == [0, 1, 2]
    assert first["prompt_token_ids"] == [1, 2, 3]
    ids = [token_id for event in events for token_id in event["choices"][0].get("token_ids", ())]
    assert ids == [0, 1, 2]
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
