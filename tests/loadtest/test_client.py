import itertools
from collections.abc import Sequence

import pytest

from loadtest.client import Client, Connection, Record, StreamReader
from loadtest.workload import Sample
from tests.fakes.openai_server import ScriptedServer


def client_of(server: ScriptedServer, endpoint: str = "completions") -> Client:
    return Client(server.url, model="scripted", endpoint=endpoint, timeout_s=5)


@pytest.mark.parametrize("events_per_write", [0, 1, 3, 100])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_tokens_and_events_are_counted_however_the_stream_is_cut(
    endpoint: str, events_per_write: int
) -> None:
    async with ScriptedServer(events_per_write=events_per_write).running() as server:
        client = client_of(server, endpoint)
        record = await client.complete(Sample("one two three", 6))
        client.close()
    assert (record.status, record.error) == (200, None)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (3, 6)
    assert len(record.gaps_s) == 5
    assert record.started_s <= record.first_s <= record.last_s
    assert sum(record.gaps_s) <= record.last_s - record.first_s + 1e-9


async def test_the_request_forces_the_output_length_and_asks_for_usage() -> None:
    async with ScriptedServer().running() as server:
        client = client_of(server)
        await client.complete(Sample((11, 12), 3))
        client.close()
    (body,) = server.bodies
    assert body["prompt"] == [11, 12]
    assert body["max_tokens"] == 3
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}


async def test_one_connection_serves_request_after_request() -> None:
    async with ScriptedServer().running() as server:
        client = client_of(server)
        first = await client.connect()
        client.release(first)
        await client.complete(Sample("a", 2))
        assert await client.connect() is first
        first.close()
        client.close()


async def test_an_answer_without_usage_is_counted_in_events_and_says_so() -> None:
    async with ScriptedServer(sends_usage=False).running() as server:
        client = client_of(server)
        record = await client.complete(Sample("a", 4))
        client.close()
    assert record.error is None
    assert (record.num_output_tokens, record.has_usage) == (4, False)


async def test_an_error_status_is_recorded_with_the_servers_words() -> None:
    async with ScriptedServer(failing=lambda body: 429).running() as server:
        client = client_of(server)
        record = await client.complete(Sample("a", 4))
        client.close()
    assert record.status == 429
    assert record.error == "HTTP 429: scripted 429"


async def test_a_stream_that_breaks_off_is_a_failure_that_keeps_what_came() -> None:
    async with ScriptedServer(cut_after=2).running() as server:
        client = client_of(server)
        record = await client.complete(Sample("a", 4))
        client.close()
    assert record.error is not None
    assert "connection lost" in record.error
    assert record.status == 200


async def test_a_stream_without_its_end_mark_is_a_failure() -> None:
    async with ScriptedServer(sends_done=False).running() as server:
        client = client_of(server)
        record = await client.complete(Sample("a", 4))
        client.close()
    assert record.error == "the stream ended without [DONE]"


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with ScriptedServer().running() as server:
        client = client_of(server)
    record = await client.complete(Sample("a", 4))
    assert record.error is not None
    assert "cannot connect" in record.error
    assert record.status == 0


async def test_a_plain_answer_of_known_length_is_read() -> None:
    async with ScriptedServer().running() as server:
        client = client_of(server)
        answer = await client.ask("GET", "/v1/models")
        missing = await client.ask("GET", "/nothing")
        client.close()
    assert answer.json()["data"][0]["id"] == "scripted"
    assert missing.status == 404


def read_in_pieces(pieces: Sequence[bytes]) -> tuple[Record, StreamReader]:
    record = Record()
    reader = StreamReader(record)
    for number, piece in enumerate(pieces, start=1):
        reader.take(piece, float(number))
    return record, reader


def test_first_token_is_the_first_event_with_content_and_the_last_time_is_the_finish_events() -> None:
    record, reader = read_in_pieces(
        [
            b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
            b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
            b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
            b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
            b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n',
            b"data: [DONE]\n\n",
        ]
    )
    assert (record.first_s, record.last_s, list(record.gaps_s)) == (2.0, 4.0, [1.0])
    assert reader.is_done
    assert record.num_output_tokens == 2


def test_content_and_finish_reason_in_one_event_count_as_content_whatever_their_order() -> None:
    for event in (
        b'data: {"choices":[{"text":"b","finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[{"finish_reason":"stop","text":"b"}]}\n\n',
    ):
        record, reader = read_in_pieces([b'data: {"choices":[{"text":"a"}]}\n\n', event])
        assert (reader.num_content_events, record.last_s) == (2, 2.0)


def test_an_error_inside_the_stream_fails_the_request() -> None:
    record, _ = read_in_pieces([b'data: {"error":{"message":"it broke"}}\n\n'])
    assert record.error == "error in the stream: it broke"


def test_generated_text_that_looks_like_the_protocol_is_text() -> None:
    event = b'data: {"choices":[{"text":"","logprobs":{"tokens":["\\"text\\": \\"x"]}}]}\n\n'
    record, reader = read_in_pieces([event])
    assert reader.num_content_events == 0
    assert record.first_s == 0


def test_chunks_are_joined_wherever_reads_split_them() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n7;ext=1\r\n\r\nworld\r\n0\r\n\r\n"
    )
    for split in range(1, len(answer)):
        for second in range(split, len(answer), 7):
            connection = Connection()
            body: list[bytes] = []
            connection.on_body = lambda data, now_s, body=body: body.append(data)
            for start, end in itertools.pairwise([0, split, second, len(answer)]):
                if end > start:
                    connection.data_received(answer[start:end])
            assert b"".join(body) == b"hello\r\nworld"
