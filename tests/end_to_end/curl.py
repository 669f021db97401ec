"""curl's POST of JSON: by curl itself, or by the same bytes over a socket where there is no curl."""

import http.client
import shutil
import socket
import subprocess
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


def curl(url: str, body: str) -> bytes:
    """Return the body of the answer to `curl -sSN URL -H 'Content-Type: application/json' -d BODY`.

    Raises:
        subprocess.CalledProcessError: curl cannot reach the server or does not understand it.
        http.client.HTTPException: Likewise, without curl.
    """
    if shutil.which("curl") is None:
        return send(url, request_of_curl(url, body))
    command = ["curl", "-sSN", url, "-H", "Content-Type: application/json", "-d", body]
    return subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S).stdout


def request_of_curl(url: str, body: str) -> bytes:
    """Return the bytes that curl sends for such a command."""
    parts = urlsplit(url)
    data = body.encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def send(url: str, request: bytes) -> bytes:
    """Send the bytes of a request and return the body of the answer, de-chunked."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=TIMEOUT_S) as connection:
        connection.sendall(request)
        with http.client.HTTPResponse(connection, method="POST") as response:
            response.begin()
            return response.read()
