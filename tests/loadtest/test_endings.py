"""How a server ends, with a tiny one."""

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.endings import Crowd, Stopped, killed, main, terminated, to_markdown
from loadtest.workload import text
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    write_tiny_tokenizer(folder, vocab_size=320)
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_no_request_under_way_is_cut_by_sigterm_and_later_ones_are_refused(
    model: str, tmp_path: Path
) -> None:
    found = terminated(model, num_clients=16, after_s=0.5, output_len=64, log=tmp_path / "log")
    assert found["why"] == []
    # Whatever the moment: what the server had not read yet was refused, and its client sent no more.
    crossed = found["of these still on their way and refused"]
    assert found["in flight at SIGTERM"] == found["of these whole"] + crossed
    assert found["sent later and refused"] + crossed == 16
    assert found["of these whole"] > 0
    assert found["exit status"] == 0


class Stub:
    """A server that answers requests whole until it is stopped, and then does something else with them.

    Args:
        later: Sent in answer to a request that comes later, before the connection is closed.
    """

    def __init__(self, later: bytes) -> None:
        self._later = later
        self._stopped = asyncio.Event()
        self.held = asyncio.Semaphore(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                is_later = self._stopped.is_set()
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
                is_later = is_later or self._stopped.is_set()
                if is_later:
                    writer.write(self._later)
                    break
                if body:
                    self.held.release()
                    await self._stopped.wait()
                writer.write(answer(body))
        writer.close()

    def stop(self) -> None:
        self._stopped.set()


def answer(body: dict[str, Any]) -> bytes:
    """Return the whole answer to a question, or the list of models."""
    if not body:
        return http_response(b'{"data": [{"id": "m"}]}')
    usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}
    choices = [{"index": 0, "text": "a", "finish_reason": "length"}]
    data = json.dumps({"choices": choices, "usage": usage}).encode()
    return http_response(b"data: " + data + b"\n\ndata: [DONE]\n\n" if body["stream"] else data)


def http_response(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length or len(body)}\r\n\r\n".encode() + body


async def end(later: bytes | None) -> Stopped:
    """Stop a stub under the load of six clients; with None it listens no more, and closes what it has."""
    stub = Stub(later or b"")
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()

    def stop() -> None:
        if later is None:
            server.close()
        stub.stop()

    crowd = Crowd(f"http://{host}:{port}", 6, text(6, input_len=2, output_len=3, seed=0))

    async def all_held() -> None:
        for _ in range(6):
            await stub.held.acquire()

    stopped = await crowd.run(stop, all_held())
    server.close()
    return stopped


@pytest.mark.parametrize(
    "later", [None, http_response(b"{}", "503 Service Unavailable")], ids=["gone", "503"]
)
async def test_what_gets_no_connection_or_a_503_is_refused(later: bytes | None) -> None:
    stopped = await end(later)
    assert (stopped.in_flight, stopped.whole, stopped.cut, stopped.refused) == (6, 6, [], 6)


async def test_what_was_on_its_way_when_the_server_stopped_is_no_answer_cut() -> None:
    """A 503 for what was sent before is a refusal, not a broken promise."""
    stub = Stub(http_response(b"{}", "503 Service Unavailable"))
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    crowd = Crowd(f"http://{host}:{port}", 6, text(6, input_len=2, output_len=3, seed=0))
    # The clients have begun, and the server has read nothing of theirs.
    stopped = await crowd.run(stub.stop, asyncio.sleep(0))
    server.close()
    assert (stopped.in_flight, stopped.crossed, stopped.whole, stopped.cut) == (6, 6, 0, [])


@pytest.mark.parametrize(
    "later",
    [b"", b"HTTP/1.1 200 OK\r\n", http_response(b"data: {", length=100), http_response(b"{}", "500 Oh")],
    ids=["no byte", "part of a head", "part of a body", "500"],
)
async def test_what_is_accepted_and_then_breaks_off_is_cut(later: bytes) -> None:
    stopped = await end(later)
    assert (stopped.whole, stopped.refused, len(stopped.cut)) == (6, 0, 6)
    assert all(each.startswith("sent later: ") for each in stopped.cut)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_server_is_ready_again_on_its_port(model: str, tmp_path: Path) -> None:
    found = killed(model, times=1, num_clients=4, after_s=0.2, log=tmp_path / "log")
    live, ready, token = (found[f"seconds to {what}"]["median"] for what in ("live", "ready", "a token"))
    assert 0 < live <= ready <= token
    shown = to_markdown(
        {
            "date": "2026-01-01T00:00:00",
            "command": "c",
            "version": "1",
            "model": "tiny",
            "term": {"cut": 1, "why": ["gone"]},
            "kill": found,
        }
    )
    assert "| cut | 1 |\n| cut since | gone |" in shown
    assert "| seconds to ready |" in shown


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_server_that_does_not_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert "the server ended with status 2" in capsys.readouterr().err
