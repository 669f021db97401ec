"""The stand-in for curl is as good as curl."""

import re
import shutil
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.end_to_end.curl import curl, request_of_curl

BODY = '{"prompt": "é"}'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


class OneRequest:
    """A server of one connection: keeps what came, answers in chunks and leaves the connection open."""

    def __init__(self, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        self.request = b""
        self._listener = listener

    def serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(60)
            while not self.request.endswith(BODY.encode()):
                self.request += connection.recv(65536)
            connection.sendall(CHUNKED)
            connection.recv(1)  # b"" once the client has closed


@pytest.fixture
def server() -> Iterator[OneRequest]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        one = OneRequest(listener)
        thread = threading.Thread(target=one.serve)
        thread.start()
        yield one
        thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="compares with curl, which is not installed")
def test_the_stand_in_sends_the_bytes_that_curl_sends(server: OneRequest) -> None:
    assert curl(server.url, BODY) == b"abcde"
    of_any_version = re.sub(rb"curl/[\d.]+", b"curl/8.5.0", server.request)
    assert of_any_version == request_of_curl(server.url, BODY)


def test_without_curl_the_same_bytes_go_over_a_socket(
    server: OneRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert curl(server.url, BODY) == b"abcde"
    assert server.request == request_of_curl(server.url, BODY)
