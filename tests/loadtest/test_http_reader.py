"""Reading responses strictly: sound ones are read, all others are complained of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.http_reader import MalformedHTTP, read_responses

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b: c\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n"
EMPTY = b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"
CLOSED = b"HTTP/1.0 400 Bad Request\r\nConnection: close\r\n\r\nall that comes"


def test_responses_in_a_row_are_read() -> None:
    found = read_responses(PLAIN + CHUNKED + EMPTY + CLOSED)
    assert [(each.status, each.body, each.is_whole) for each in found] == [
        (200, b"hi", True),
        (200, b"hi!", True),
        (304, b"", True),
        (400, b"all that comes", True),
    ]
    assert found[0].headers == {"content-length": "2", "x-a": "b: c"}


@given(st.integers(0, 400))
def test_responses_that_are_cut_off_are_not_whole(length: int) -> None:
    data = PLAIN + CHUNKED
    cut = data[:length]
    ends_in_head = cut and b"\r\n\r\n" not in cut[len(PLAIN) if length > len(PLAIN) else 0 :]
    if ends_in_head and length not in (len(PLAIN), len(data)):
        with pytest.raises(MalformedHTTP):
            read_responses(cut)
        return
    wholes = [each.is_whole for each in read_responses(cut)]
    assert wholes == [
        end <= length for begin, end in ((0, len(PLAIN)), (len(PLAIN), len(data))) if begin < length
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        CHUNKED.replace(b"2\r\nhi", b"3\r\nhi"),
        CHUNKED.replace(b"2\r\nhi", b"z\r\nhi"),
        PLAIN + b"more",
    ],
)
def test_what_is_no_response_is_complained_of(data: bytes) -> None:
    with pytest.raises(MalformedHTTP):
        read_responses(data)
