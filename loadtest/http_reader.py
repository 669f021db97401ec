"""Bytes of a connection → the HTTP/1.1 responses in them, read strictly: what is not well formed is an error.

For tests that send what no client would: nothing is repaired, nothing is skipped. Takes all that a
connection gave until it ended or fell silent; knows nothing of what was asked, but that it was not HEAD.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9]) [\x20-\x7e]*")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\x20-\x7e\x80-\xff]*)")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")
BODILESS = frozenset({100, 101, 204, 304})


class MalformedHTTP(Exception):
    """These bytes are no HTTP/1.1 responses."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response.

    Args:
        headers: Names in lower case.
        is_whole: Its body came to its end; false only for the last response, cut off.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_whole: bool


def read_responses(data: bytes) -> list[Response]:
    """Return the responses in `data`, the last of which may be cut off within its body.

    Raises:
        MalformedHTTP: There is something else in it.
    """
    responses = []
    at = 0
    while at < len(data):
        head_end = data.find(b"\r\n\r\n", at)
        if head_end < 0:
            raise MalformedHTTP(f"a head that does not end: {data[at : at + 200]!r}")
        status, headers = _head(data[at:head_end])
        at = head_end + 4
        if status in BODILESS:
            body, is_whole = b"", True
        elif "transfer-encoding" in headers:
            body, at, is_whole = _chunked(data, at)
        elif "content-length" in headers:
            end = at + int(headers["content-length"])
            body, at, is_whole = data[at:end], end, len(data) >= end
        else:
            # Ends with the connection, as for clients of HTTP/1.0.
            body, at, is_whole = data[at:], len(data), True
        responses.append(Response(status, headers, body, is_whole))
    return responses


def _head(head: bytes) -> tuple[int, Mapping[str, str]]:
    first, *lines = head.split(b"\r\n")
    found = _STATUS_LINE.fullmatch(first)
    if found is None:
        raise MalformedHTTP(f"no status line: {first[:200]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise MalformedHTTP(f"no header: {line[:200]!r}")
        name = header[1].decode().lower()
        if name in headers and name in ("content-length", "transfer-encoding", "content-type"):
            raise MalformedHTTP(f"two headers {name}")
        headers[name] = header[2].decode("latin-1")
    if headers.get("transfer-encoding", "chunked") != "chunked":
        raise MalformedHTTP(f"transfer encoding {headers['transfer-encoding']!r}")
    if "transfer-encoding" in headers and "content-length" in headers:
        raise MalformedHTTP("both a length and a transfer encoding")
    return int(found[1]), headers


def _chunked(data: bytes, at: int) -> tuple[bytes, int, bool]:
    """Return the body that begins at `at`, where it ends, and whether its last chunk came."""
    body = bytearray()
    while True:
        line_end = data.find(b"\r\n", at)
        line = data[at : line_end if line_end >= 0 else len(data)]
        if not _CHUNK_SIZE.fullmatch(line if line_end >= 0 else line.rstrip(b"\r") or b"0"):
            raise MalformedHTTP(f"no size of a chunk: {line[:50]!r}")
        if line_end < 0:
            return bytes(body), len(data), False
        size = int(line, 16)
        at = line_end + 2
        body += data[at : at + size]
        end = data[at + size : at + size + 2]
        if len(end) < 2:
            return bytes(body), len(data), False
        if end != b"\r\n":
            raise MalformedHTTP(f"a chunk is longer than its size {size}")
        at += size + 2
        if size == 0:
            return bytes(body), at, True
