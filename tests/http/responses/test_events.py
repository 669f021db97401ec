"""The writer of responses: whatever the pieces, the same items, and events that add up to them."""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from asyncserve.errors import EngineStopped, InvalidRequest, Overloaded
from asyncserve.http.logprobs import TokenTexts
from asyncserve.http.parsers.interface import MessageParser, ToolChoice
from asyncserve.http.parsers.registry import message_format
from asyncserve.http.reasoning_tokens import ReasoningCount
from asyncserve.http.responses.events import ResponseEvents, ResponseWriter
from asyncserve.request import FinishReason, RequestOutput, TokenLogprobs, Usage

FACTS: Mapping[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
EOS = 256
TEXTS = TokenTexts(
    lambda token_id: b"<eos>" if token_id == EOS else bytes([token_id]), lambda id_: id_ == EOS
)
USAGE = Usage(num_prompt_tokens=7, num_output_tokens=5, num_cached_tokens=4)
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'

event_types: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def new_parser() -> MessageParser | None:
    """Reads `<think>` reasoning and calls of the function `f` in tags."""
    tools = ({"name": "f", "description": None, "parameters": {}, "strict": False},)
    return message_format(
        tool_call_parser="hermes", reasoning_parser="think", chat_template=None, special_tokens=()
    ).parser(ToolChoice(tools=tools, mode="auto"))


def new_writer(parser: MessageParser | None = None, **options: Any) -> ResponseWriter:
    return ResponseWriter(FACTS, parser=parser, texts=TEXTS, gives_logprobs=True, **options)


def outputs(
    data: bytes, cuts: Sequence[int], *, reason: FinishReason = FinishReason.STOP
) -> Iterator[RequestOutput]:
    """Give a text, a token for each byte and one for its end, as outputs that end at `cuts`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    start = 0
    for end in ends:
        is_last = end == len(data)
        token_ids = [*data[start:end], *([EOS] if is_last else [])]
        yield RequestOutput(
            index=0,
            text=decoder.decode(data[start:end], final=is_last),
            token_ids=token_ids,
            logprobs=[TokenLogprobs(token_id, -0.5, 1, ()) for token_id in token_ids],
            finish_reason=reason if is_last else None,
            usage=USAGE if is_last else None,
        )
        start = end


def parsed(frames: Sequence[bytes]) -> list[Any]:
    """Return events; each must be one of those that OpenAI's client knows, with all it must have."""
    events = []
    for frame in frames:
        name, data, *rest = frame.decode().split("\n")
        assert rest == ["", ""]
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        event_types.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """Return a response without ids and times."""
    if isinstance(value, dict):
        return {
            name: without_ids(each)
            for name, each in value.items()
            if name not in ("id", "call_id", "completed_at")
        }
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def final(writer: ResponseWriter) -> dict[str, Any]:
    """Return the response as a client sees it."""
    response: dict[str, Any] = orjson.loads(orjson.dumps(writer.response()))
    Response.model_validate(response)
    return response


def written(data: bytes, cuts: Sequence[int], *, has_parser: bool = True) -> tuple[list[Any], dict[str, Any]]:
    writer = new_writer(new_parser() if has_parser else None)
    frames = writer.begin()
    for output in outputs(data, cuts):
        frames += writer.feed(output)
    frames += writer.complete(USAGE)
    return parsed(frames), final(writer)


def whole(data: bytes, *, has_parser: bool = True) -> dict[str, Any]:
    """Return the response to the same text in one piece."""
    writer = new_writer(new_parser() if has_parser else None, writes_events=False)
    assert writer.begin() == []
    for output in outputs(data, []):
        assert writer.feed(output) == []
    assert writer.complete(USAGE) == []
    return final(writer)


def replayed(events: Sequence[Any]) -> list[Any]:
    """Return the output items that the events of a stream add up to."""
    items: list[Any] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta":
                part = items[event["output_index"]]["content"][0]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "response.reasoning_text.delta":
                items[event["output_index"]]["content"][0]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                part = items[event["output_index"]]["content"][0]
                assert event["text"] == part["text"]
                assert event.get("logprobs") == part.get("logprobs")
            case "response.function_call_arguments.done":
                assert event["arguments"] == items[event["output_index"]]["arguments"]
            case "response.content_part.done":
                assert event["part"] == items[event["output_index"]]["content"][0]
            case "response.output_item.done":
                item = items[event["output_index"]]
                item["status"] = event["item"]["status"]
                assert event["item"] == item
                assert event["item"]["id"] == item["id"]
    return items


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        '{"name": "f", "arguments": {"x": 1}}',
        "</tool_call>",
        CALL,
        CALL.replace('{"x": 1}', '{"y": "<é>"}'),
        " ",
        "\n",
        "é",
        "word",
        "<",
        "{",
        "]",
    ]
)


@pytest.mark.slow
@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(0, 2**16)), st.booleans())
def test_items_are_the_same_wherever_the_text_is_cut_and_events_add_up_to_them(
    text: str, cuts: list[int], has_parser: bool
) -> None:
    events, response = written(text.encode(), cuts, has_parser=has_parser)
    assert without_ids(response) == without_ids(whole(text.encode(), has_parser=has_parser))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1] == {
        "type": "response.completed",
        "sequence_number": len(events) - 1,
        "response": response,
    }
    assert replayed(events) == response["output"]


def test_reasoning_message_and_calls_are_items_in_the_order_of_the_text() -> None:
    text = f"<think>so</think>\n\nWell: {CALL}\n{CALL} done"
    _, response = written(text.encode(), range(len(text)))
    reasoning, message, first, second, last = response["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert message["content"][0]["text"].strip() == "Well:"
    for call in (first, second):
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"x": 1}')
        assert call["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]
    assert last["content"][0]["text"].strip() == "done"
    assert len({item["id"] for item in response["output"]}) == 5


def test_events_of_one_message_come_in_openais_order() -> None:
    events, _ = written(b"ab", [1], has_parser=False)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["a", "b"]


def test_tokens_of_reasoning_are_counted_and_have_no_logprobs() -> None:
    _, response = written(b"<think>abc</think>de", [3])
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>abc</think>")}
    [part] = response["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["d", "e", "<eos>"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert response["usage"]["total_tokens"] == 12


def test_tokens_of_reasoning_are_counted_by_its_markers_where_they_are_tokens() -> None:
    count = ReasoningCount((ord("("), ord(")")), is_open=False, is_space=lambda token_id: False)
    writer = new_writer(reasoning_count=count)
    writer.begin()
    for output in outputs(b"(ab)cd", [1, 3]):
        writer.feed(output)
    writer.complete(USAGE)
    assert final(writer)["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    for has_parser in (False, True):
        events, response = written(b"", [], has_parser=has_parser)
        assert [item["type"] for item in response["output"]] == ["message"]
        assert response["output"][0]["content"][0]["text"] == ""
        assert replayed(events) == response["output"]


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item() -> None:
    writer = new_writer(new_parser())
    frames = writer.begin()
    for output in outputs(b"<think>a</think>b", [], reason=FinishReason.LENGTH):
        frames += writer.feed(output)
    frames += writer.complete(USAGE)
    response = final(writer)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None
    assert parsed(frames)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineStopped("over"), "server_error"),
        (InvalidRequest("bad", param="input"), "invalid_prompt"),
        (Overloaded("full", retry_after_s=1.0), "rate_limit_exceeded"),
    ],
)
def test_a_failure_is_an_error_event_and_a_failed_response(error: Exception, code: str) -> None:
    writer = new_writer()
    events = parsed(writer.fail(error))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert events[2]["message"] == str(error)
    assert events[3]["response"]["status"] == "failed"
    assert events[3]["response"]["error"]["code"] == code
    assert final(writer)["error"]["message"] == str(error)


def test_a_failure_keeps_what_was_written() -> None:
    writer = new_writer()
    writer.begin()
    writer.feed(RequestOutput(index=0, text="ab", token_ids=[97, 98]))
    writer.fail(EngineStopped("over"))
    [item] = final(writer)["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "ab")


def test_a_queued_response_says_when_it_is_being_made() -> None:
    writer = new_writer()
    events = parsed([*writer.begin(is_queued=True), *writer.progress(), *writer.progress()])
    assert [(event["type"], event["response"]["status"]) for event in events] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]


def test_a_response_that_is_being_made_shows_what_it_has() -> None:
    writer = new_writer()
    writer.begin()
    writer.feed(RequestOutput(index=0, text="ab", token_ids=[97, 98]))
    response = final(writer)
    assert response["status"] == "in_progress"
    assert response["output"][0]["status"] == "in_progress"
    assert response["output"][0]["content"][0]["text"] == "ab"


def test_the_store_has_a_response_before_the_client_hears_that_it_is_complete() -> None:
    writer = new_writer()
    told: list[str] = []
    renderer = ResponseEvents(writer, on_complete=lambda: told.append(writer.response()["status"]))
    [output] = outputs(b"a", [])
    frames = renderer.events(0, output, is_first=True, usage=None)
    assert told == []
    frames += renderer.last_events([USAGE])
    assert told == ["completed"]
    assert parsed(frames)[-1]["type"] == "response.completed"
    assert renderer.frame(0) is None
