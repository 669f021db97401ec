"""A batch over the whole application and engine, on a device that is a fake; processes are in end_to_end."""

import asyncio
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from asyncserve.errors import EngineError
from asyncserve.http.batch_file import URLS, BatchOutput, LineError, input_lines
from asyncserve.run_batch import Batch, TokenCounter
from asyncserve.step import StepPlan
from tests.http.live import MODEL, Live, live_server, spell, until


def request(name: str, **body: Any) -> bytes:
    asked = {"custom_id": name, "url": "/v1/completions", "body": {"model": MODEL, "prompt": "ab", **body}}
    return json.dumps(asked).encode()


def chat(name: str) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": name, "url": "/v1/chat/completions", "body": body}).encode()


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes | LineError]]:
    return enumerate(lines, 1)


async def run(
    live: Live, path: Path, lines: Iterator[tuple[int, bytes | LineError]], *, concurrency: int = 4
) -> Batch:
    output = await asyncio.to_thread(BatchOutput, str(path))
    try:
        with tqdm(file=io.StringIO()) as bar:
            batch = Batch(output, live.session, live.url, live.engine, bar, TokenCounter())
            await batch.run(lines, concurrency=concurrency)
    finally:
        output.close()
    return batch


def answers(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {str(each["custom_id"]): each for each in found}
    assert len(by_name) == len(found), "an answer was given twice"
    return by_name


async def test_every_line_gets_the_answer_it_would_get_from_the_server(tmp_path: Path) -> None:
    path = tmp_path / "out"
    async with live_server(next_token=spell("xy")) as live:
        lines = [request("one"), chat("two"), request("three", prompt=["a", "b"], n=2)]
        batch = await run(live, path, numbered(lines))
        direct = (await live.complete()).json
    found = answers(path)
    assert sorted(found) == ["one", "three", "two"]
    one = found["one"]["response"]
    assert (one["status_code"], found["one"]["error"]) == (200, None)
    assert one["body"]["choices"] == direct["choices"]
    assert one["body"]["id"] == f"cmpl-{one['request_id']}"
    assert found["two"]["response"]["body"]["choices"][0]["message"]["content"] == "xy"
    assert len(found["three"]["response"]["body"]["choices"]) == 4
    assert (batch.num_good, batch.num_failed, batch.num_skipped) == (3, 0, 0)


async def test_lines_that_fail_are_reported_and_stop_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    lines = [
        b"{no json",
        request("bad field", temperature=-1),
        request("stream", stream=True),
        json.dumps({"custom_id": "embed", "url": "/v1/embeddings", "body": {"input": "x"}}).encode(),
        json.dumps({"custom_id": "lost", "url": "/v1/../ping", "body": {}}).encode(),
        request("good"),
    ]
    async with live_server(next_token=spell("x")) as live:
        batch = await run(live, path, numbered(lines))
        found = answers(path)
        assert found["None"]["error"]["line"] == 1
        assert found["bad field"]["response"]["status_code"] == 400
        assert found["bad field"]["response"]["body"]["error"]["param"] == "temperature"
        assert "stream" in found["stream"]["error"]["message"]
        assert "/v1/embeddings" in found["embed"]["error"]["message"]
        assert "/v1/../ping" in found["lost"]["error"]["message"]
        assert found["good"]["response"]["status_code"] == 200
        assert (batch.num_failed, batch.num_skipped) == (5, 0)
        again = await run(live, path, numbered(lines))
    assert answers(path) == found
    assert (again.num_good, again.num_failed, again.num_skipped) == (0, 0, 6)


async def test_a_run_goes_on_where_one_was_broken_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    names = [str(number) for number in range(30)]
    async with live_server(next_token=spell("xyz")) as live:
        working = asyncio.create_task(run(live, path, numbered(map(request, names)), concurrency=3))
        await until(lambda: path.exists() and path.stat().st_size > 0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await until(lambda: live.num_sequences == 0)
        first = answers(path)
        assert 0 < len(first) < len(names)
        batch = await run(live, path, numbered(map(request, names)))
    found = answers(path)
    assert sorted(found) == sorted(names)
    assert {name: found[name] for name in first} == first
    assert batch.num_skipped == len(first)
    assert batch.num_good == len(names) - len(first)


async def test_a_name_that_comes_twice_is_answered_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "out"
    async with live_server(next_token=spell("x")) as live:
        batch = await run(live, path, numbered([request("a"), request("a"), request("b")]))
    assert sorted(answers(path)) == ["a", "b"]
    assert batch.num_failed == 1
    assert "line 2: custom_id 'a' stands in an earlier line" in caplog.text


async def test_so_many_requests_are_worked_on_at_once_and_no_more_lines_are_read_than_that_needs(
    tmp_path: Path,
) -> None:
    num_read = 0

    def lines() -> Iterator[tuple[int, bytes | LineError]]:
        nonlocal num_read
        for number in range(1, 1001):
            num_read = number
            yield number, request(str(number), max_tokens=2)

    async with live_server(next_token=spell("x" * 9)) as live:
        live.executor.hold()
        working = asyncio.create_task(run(live, tmp_path / "out", lines(), concurrency=5))
        await live.until_running(5)
        await live.until_step_waits()
        assert (live.num_sequences, num_read) == (5, 5)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        live.executor.resume()


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "out"
    async with live_server(
        next_token=spell("xyz"), engine_options={"max_num_queued_requests": 2}, info={"num_slots": 1}
    ) as live:
        batch = await run(live, path, numbered(request(str(number)) for number in range(6)), concurrency=6)
    assert {each["response"]["status_code"] for each in answers(path).values()} == {200}
    assert (batch.num_good, batch.num_failed) == (6, 0)


async def test_an_engine_that_fails_ends_the_run_without_answers_made_up(tmp_path: Path) -> None:
    path = tmp_path / "out"
    async with live_server(next_token=spell("x")) as live:

        def burn(plan: StepPlan) -> Any:
            raise ValueError("the device thread is gone")

        live.executor.submit = burn  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="the engine failed"):
            await run(live, path, numbered(request(str(number)) for number in range(100)))
    assert path.read_bytes() == b""


async def test_an_input_that_cannot_be_read_on_ends_the_run(tmp_path: Path) -> None:
    def lines() -> Iterator[tuple[int, bytes | LineError]]:
        yield 1, request("a")
        raise OSError("the disk is gone")

    async with live_server(next_token=spell("x")) as live:
        with pytest.raises(OSError, match="the disk is gone"):
            await run(live, tmp_path / "out", lines())


async def test_an_output_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    async with live_server(next_token=spell("x")) as live:
        with pytest.raises(OSError, match="No space left"):
            await run(live, Path("/dev/full"), numbered([request("a"), request("b")]))


async def test_lines_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n".join([request("a"), b"", request("b")]))
    async with live_server(next_token=spell("x")) as live:
        await run(live, tmp_path / "out", input_lines(str(path), max_line_bytes=10_000))
    assert sorted(answers(tmp_path / "out")) == ["a", "b"]


async def test_any_endpoint_that_generates_can_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "out"
    message = {"role": "user", "content": "hi"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [message]},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"model": MODEL, "max_tokens": 9, "messages": [message]},
    }
    lines = [
        json.dumps({"custom_id": url, "url": url, "body": body}).encode() for url, body in bodies.items()
    ]
    async with live_server(next_token=spell("xy")) as live:
        await run(live, path, numbered(lines))
    found = answers(path)
    assert sorted(bodies) == sorted(URLS)
    assert [found[url]["response"]["status_code"] for url in bodies] == [200] * len(URLS)
    assert found["/v1/messages"]["response"]["body"]["content"] == [{"type": "text", "text": "xy"}]
    assert found["/v1/responses"]["response"]["body"]["status"] == "completed"


async def test_the_bar_counts_every_line_and_the_counter_every_token(tmp_path: Path) -> None:
    counter = TokenCounter()
    async with live_server(next_token=spell("xy"), engine_options={"observer": counter}) as live:
        output = await asyncio.to_thread(BatchOutput, str(tmp_path / "out"))
        with tqdm(file=io.StringIO()) as bar:
            batch = Batch(output, live.session, live.url, live.engine, bar, counter)
            await batch.run(numbered([request("a"), b"no json", request("b"), request("a")]), concurrency=2)
            assert bar.n == 4
        output.close()
    # Two letters and the end, twice.
    assert counter.num_tokens == 6
