"""The last seconds of a server: nobody who still reads loses anything, nobody's socket is taken."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server_process import TINY, ServerProcess, running_server
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=65536)
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


@pytest.fixture
def server(model: Path) -> Iterator[ServerProcess]:
    options = ("--served-model-name", "tiny", "--kv-cache-memory-bytes", "32MiB", "--max-model-len", "32k")
    with running_server(model, *TINY, *options) as server:
        yield server


def streaming_request(num_tokens: int, **fields: object) -> bytes:
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(asked | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stop_twice_in_a_stream(server: ServerProcess, connection: socket.socket, *, num_tokens: int) -> int:
    """Send both signals while an answer that nobody reads is made; return the server's exit status."""
    connection.sendall(streaming_request(num_tokens))
    while server.metric("asyncserve:generation_tokens_total") < 100:
        time.sleep(0.05)
    server.signal(signal.SIGTERM)
    while server.get("/ready").status_code == 200:
        pass
    server.signal(signal.SIGTERM)
    return server.wait()


def test_a_client_that_reads_late_gets_the_whole_answer_after_sigterm(server: ServerProcess) -> None:
    """The drain once waited for the engine alone, and cut what a slow connection had not yet taken."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        # A small window, so that most of the answer has to wait in the server.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        # Events of over a kilobyte each.
        connection.sendall(streaming_request(2000, logprobs=20))
        deadline = time.monotonic() + 60
        # It is so far behind that its request rests, unfinished.
        while not server.metric("asyncserve:num_requests_paused"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.signal(signal.SIGTERM)
        received = b""
        while b"data: [DONE]" not in received:
            data = connection.recv(65536)
            assert data, received[-300:]
            received += data
    assert b'"finish_reason":"length"' in received
    assert server.wait() == 0


def test_a_client_that_never_reads_does_not_hold_up_the_second_signal(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        assert stop_twice_in_a_stream(server, connection, num_tokens=20000) == 0


def test_the_second_signal_still_ends_the_timeline_of_steps(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    with running_server(model, *TINY, "--served-model-name", "tiny", "--trace-steps", str(path)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            assert stop_twice_in_a_stream(server, connection, num_tokens=30000) == 0
    assert any(event["name"] == "detokenize" for event in json.loads(path.read_text()))


def test_a_unix_socket_in_use_is_not_taken_and_a_stale_one_is(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(path))
        holder.listen()
        done = subprocess.run(
            [sys.executable, "-m", "asyncserve", str(model), "--device", "cpu", "--uds", str(path)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1
        assert str(path) in done.stderr
    # Its owner is gone and the file is still there.
    assert path.is_socket()
    with running_server(model, *TINY, "--uds", str(path), "--disable-live-page") as server:
        assert server.url == f"unix:{path}"
        for asked, status in (("/ready", 200), ("/", 404), ("/pipeline/events", 404)):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(f"GET {asked} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                assert client.recv(100).startswith(f"HTTP/1.1 {status}".encode())


def test_the_second_signal_does_not_wait_for_a_huge_prompt_being_encoded(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    tokenize = json.dumps({"prompt": "word " * 780_000}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(tokenize)}\r\n\r\n"
        connection.sendall(head.encode() + tokenize)
        server.signal(signal.SIGTERM)
        while "draining" not in server.log:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
