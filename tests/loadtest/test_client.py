import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from loadtest.client import Client, Connection, ConnectionLost, Record, StreamReader
from loadtest.workload import Conversation, Sample
from tests.fakes.openai_server import ScriptedServer


def client_of(server: ScriptedServer, endpoint: str = "completions") -> Client:
    return Client(server.url, model="scripted", endpoint=endpoint)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("events_per_write", [0, 1, 3, 100])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_tokens_and_events_are_counted_however_the_stream_is_cut(
    endpoint: str, events_per_write: int, line_end: str
) -> None:
    async with ScriptedServer(events_per_write=events_per_write, line_end=line_end).running() as server:
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


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_stream_with_a_finish_reason_is_complete_without_its_end_mark(endpoint: str) -> None:
    async with ScriptedServer(sends_done=False).running() as server:
        client = client_of(server, endpoint)
        record = await client.complete(Sample("a", 4))
        client.close()
    assert (record.error, record.num_output_tokens, len(record.gaps_s)) == (None, 4, 3)


async def test_a_stream_without_end_mark_and_finish_reason_is_a_failure() -> None:
    async with ScriptedServer(sends_done=False, sends_finish=False).running() as server:
        client = client_of(server)
        record = await client.complete(Sample("a", 4))
        client.close()
    assert record.error == "the stream ended without [DONE] or a finish reason"


@pytest.mark.parametrize("num_cached", [None, 0, 2])
async def test_prompt_tokens_from_the_cache_are_recorded_where_the_server_tells(
    num_cached: int | None,
) -> None:
    async with ScriptedServer(num_cached=num_cached).running() as server:
        client = client_of(server)
        record = await client.complete(Sample("a b c", 4))
        client.close()
    assert record.num_cached_tokens == num_cached


@pytest.mark.parametrize(("num_missing", "is_wrong"), [(0, False), (1, True)])
async def test_an_answer_of_another_length_than_asked_for_is_known(num_missing: int, is_wrong: bool) -> None:
    async with ScriptedServer(num_missing=num_missing).running() as server:
        client = client_of(server)
        record = await client.complete(Sample("a", 4))
        client.close()
    assert record.error is None
    assert record.has_wrong_length is is_wrong


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    async with ScriptedServer(closes=True).running() as server:
        client = client_of(server)
        records = [await client.complete(Sample("a", 2)) for _ in range(3)]
        client.close()
    assert [record.error for record in records] == [None] * 3
    assert len(set(map(id, server.connections))) == 3
    assert client.num_reconnects == 0


MODELS = b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"data": [{"id": "m"}]}'


@asynccontextmanager
async def server_of_answers(*connections: Sequence[bytes]) -> AsyncIterator[tuple[Client, list[int]]]:
    """Give each connection its answers, one a request, and close it after the last."""
    waiting = iter(connections)
    num_requests: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(num_requests)
        num_requests.append(0)
        for answer in next(waiting):
            await reader.read(65536)
            num_requests[number] += 1
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield client, num_requests
        client.close()


async def test_a_kept_connection_that_turns_out_closed_is_replaced_once() -> None:
    async with server_of_answers([MODELS, b""], [MODELS]) as (client, num_requests):
        assert await client.served_model() == ("m", None)
        assert await client.served_model() == ("m", None)
        assert num_requests == [2, 1]
        assert client.num_reconnects == 1


async def test_a_new_connection_that_is_closed_without_an_answer_is_a_failure() -> None:
    async with server_of_answers([b""], [MODELS]) as (client, num_requests):
        with pytest.raises(ConnectionLost):
            await client.served_model()
        assert num_requests == [1]


async def test_the_replacement_of_a_kept_connection_is_not_replaced_again() -> None:
    async with server_of_answers([MODELS, b""], [b""], [MODELS]) as (client, num_requests):
        await client.served_model()
        with pytest.raises(ConnectionLost):
            await client.served_model()
        assert num_requests == [2, 1]


async def test_a_kept_connection_that_ends_within_the_answer_is_a_failure() -> None:
    async with server_of_answers([MODELS, MODELS[:20]], [MODELS]) as (client, num_requests):
        await client.served_model()
        with pytest.raises(ConnectionLost):
            await client.served_model()
        assert num_requests == [2]
        assert client.num_reconnects == 0


async def test_a_stream_that_is_sent_again_counts_from_its_first_sending() -> None:
    events = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    stream = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(events) + events
    async with server_of_answers([MODELS, b""], [stream]) as (client, num_requests):
        await client.served_model()
        record = Record(started_s=1.0)
        await client.on_connection(lambda connection: client.stream(connection, b"{}", record))
        assert (record.error, record.started_s) == (None, 1.0)
        assert num_requests == [2, 1]


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


def test_lines_may_end_in_crlf_wherever_reads_split_them() -> None:
    stream = (
        b': a comment\r\n\r\nevent: chunk\r\ndata: {"choices":[{"text":"a"}]}\r\nid: 1\r\n\r\n'
        b'data: {"choices":[{"text":"b","finish_reason":"stop"}]}\r\n\r\n'
        b'id: 3\r\ndata: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\r\n\r\n'
        b"data: [DONE]\r\n\r\n"
    )
    for split in range(1, len(stream)):
        record, reader = read_in_pieces([stream[:split], stream[split:]])
        assert (reader.num_content_events, reader.is_done, record.num_output_tokens) == (2, True, 2), split


def test_a_stream_that_ends_within_an_event_is_not_complete() -> None:
    finish = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n'
    assert read_in_pieces([finish])[1].is_complete
    assert not read_in_pieces([finish, b'data: {"choi'])[1].is_complete
    assert not read_in_pieces([finish.replace(b'"stop"', b"null")])[1].is_complete


def test_usage_within_a_content_event_is_taken_and_null_is_not() -> None:
    record, _ = read_in_pieces(
        [
            b'data: {"choices":[{"text":"a"}],"usage":null}\n\n',
            b'data: {"choices":[{"text":"b"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
        ]
    )
    assert (record.num_prompt_tokens, record.num_output_tokens, record.has_usage) == (3, 2, True)


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


async def test_a_turn_sends_again_what_was_said_and_answered_before() -> None:
    talk = Conversation((Sample("one two", 2), Sample("three", 1), Sample("four", 1)), system="be brief")
    async with ScriptedServer().running() as server:
        client = client_of(server, "chat")
        records = await client.take(talk)
        client.close()
    answers = ['a "text": "data: b', 'a "text": "']
    assert [record.turn for record in records] == [0, 1, 2]
    assert [record.error for record in records] == [None] * 3
    assert server.bodies[2]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": answers[1]},
        {"role": "user", "content": "four"},
    ]
    assert [body["max_tokens"] for body in server.bodies] == [2, 1, 1]


async def test_without_chat_each_prompt_begins_with_the_prompt_and_the_answer_before() -> None:
    talk = Conversation((Sample("one", 2), Sample("two", 2), Sample("three", 1)))
    async with ScriptedServer(events_per_write=0).running() as server:
        client = client_of(server)
        await client.take(talk)
        client.close()
    first, second, third = (body["prompt"] for body in server.bodies)
    answer = 'a "text": "data: b'
    assert (first, second) == ("one", f"one{answer}\ntwo")
    assert third == f"{second}{answer}\nthree"


async def test_after_a_failed_turn_the_rest_is_counted_and_not_sent() -> None:
    talk = Conversation((Sample("one", 2), Sample("two", 13), Sample("three", 2), Sample("four", 2)))
    failing = ScriptedServer(failing=lambda body: 500 if body["max_tokens"] == 13 else 0)
    async with failing.running() as server:
        client = client_of(server)
        records = await client.take(talk)
        client.close()
    errors = [record.error for record in records]
    assert errors == [None, "HTTP 500: scripted 500", *["not sent, for an earlier turn failed"] * 2]
    assert len(server.bodies) == 2
    assert all(record.started_s <= record.ended_s for record in records)
    assert records[0].ended_s >= records[0].last_s > 0
