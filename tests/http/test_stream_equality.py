"""However a stream is cut into writes, its events are the same, and its text is that of a whole answer."""

import time
from typing import Any

import pytest

from asyncserve.http.write_pacing import JUDGED_TOKENS
from tests.http.live import Answer, live_server, spell

TEXT = 'The Größe of 東京 "quoted"\n 👩‍🚀 and\t🇳🇴, then END of it. ' * 2
LOAD = {"clock": lambda: time.monotonic() / 1000.0}
"""A clock that runs slowly makes any load a heavy one."""
PACES: dict[str, dict[str, Any]] = {
    "one": {"stream_interval": 1},
    "seven": {"stream_interval": 7},
    "clock under load": LOAD,
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["END of"]},
    "several": {"n": 2},
    "scored": {"logprobs": 2},
    "ids": {"return_token_ids": True},
    "counted": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


def shown(events: list[Any]) -> dict[int, list[Any]]:
    """Return the events by choice (the last ones under -1), without what differs from call to call."""
    by_choice: dict[int, list[Any]] = {}
    for event in events:
        index = -1
        if isinstance(event, dict):
            event = {name: value for name, value in event.items() if name not in ("id", "created")}
            if event["choices"]:
                index = event["choices"][0]["index"]
        by_choice.setdefault(index, []).append(event)
    return by_choice


def text_of(answer: Answer) -> str:
    choices = [event["choices"][0] for event in answer.events if isinstance(event, dict) and event["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
        if choice["index"] == 0
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
async def test_events_do_not_depend_on_how_many_go_into_one_write(call: str, is_chat: bool) -> None:
    fields = {"max_tokens": 150, **CALLS[call]}
    if is_chat and "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": 2}
    found = {}
    for pace, options in PACES.items():
        async with live_server(
            next_token=spell(TEXT),
            check_plans=False,
            info={"max_model_len": 1024, "num_blocks": 1024},
            **options,
        ) as live:
            if pace == "clock under load":
                await live.complete(stream=True, n=4, max_tokens=JUDGED_TOKENS // 4)
            ask = live.chat if is_chat else live.complete
            answer = await ask(stream=True, **fields)
            whole = await ask(**{name: value for name, value in fields.items() if name != "stream_options"})
        message = whole.json["choices"][0]
        assert text_of(answer) == (message["message"]["content"] if is_chat else message["text"]), pace
        found[pace] = shown(answer.events)
    for pace, events in found.items():
        assert events == found["one"], pace


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
async def test_bare_texts_give_the_events_of_outputs(is_chat: bool) -> None:
    async with live_server(
        next_token=spell(TEXT), check_plans=False, info={"max_model_len": 1024, "num_blocks": 1024}
    ) as live:
        ask = live.chat if is_chat else live.complete
        by_lane = await ask(stream=True, max_tokens=150)
        by_output = await ask(
            stream=True,
            max_tokens=150,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    content = "delta" if is_chat else "text"

    def choices(answer: Answer) -> list[Any]:
        found = [event["choices"][0] for event in answer.events[:-1] if event["choices"]]
        nothing: Any = {"content": ""} if is_chat else ""
        # Counts are given with every token, those of an unfinished character included.
        return [each for each in found if each["finish_reason"] or each[content] != nothing]

    assert choices(by_lane) == choices(by_output)
    assert len(choices(by_lane)) > 80


async def test_a_stream_under_load_takes_fewer_writes_than_it_has_tokens() -> None:
    body = b'{"prompt": "ab", "stream": true, "max_tokens": 1500}'
    async with live_server(
        next_token=spell(b"a" * 2000),
        check_plans=False,
        info={"max_model_len": 2048, "num_blocks": 1024},
        **LOAD,
    ) as live:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        reader, writer = await live.raw(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        data = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert data.count(b"data: ") == 1501
    assert data.count(b"\n\n\r\n") < 1000, "chunks"
