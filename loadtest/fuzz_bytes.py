"""Bytes for a socket drawn with hypothesis: HTTP requests, whole, broken, cut, strung together, in drops.

A `RawCase` is what one connection sends, in pieces, and whether it ends its side then. Knows no schema: the
requests it starts from are few and plain.
"""

from dataclasses import dataclass

from hypothesis import strategies as st

PLAIN = b'{"prompt":"ab","max_tokens":3}'
STREAM = b'{"prompt":"ab","max_tokens":3,"stream":true}'
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":3}'
ODD_METHODS = (b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"BREW", b"get", b"CONNECT", b"")
GETS = (
    b"/v1/models",
    b"/v1/models/a%2Fb",
    b"/health",
    b"/metrics",
    b"/openapi.json",
    b"/docs",
    b"/health?" + b"q" * 300,
)
ODD_TARGETS = (
    b"/",
    b"*",
    b"//",
    b"/..//../etc/passwd",
    b"/%00",
    b"/%ff%fe",
    b"http://elsewhere/health",
    b"/" + b"a" * 9_000,
    "/é".encode(),
    b"elsewhere:443",
    b"",
)
HEADERS = (
    b"Connection: close",
    b"Content-Type: text/plain",
    b"X-Request-Id: an-id-of-mine",
    b"Origin: http://elsewhere",
    b"If-None-Match: *",
    b"anthropic-version: 2023-06-01",
    b"Cookie: " + b"c=d; " * 500,
    b"Connection: keep-alive, upgrade\r\nUpgrade: websocket",
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Expect: 100-continue",
)
ODD_HEADERS = (
    b"Host: y",
    b"Expect: nothing",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br",
    b"Content-Encoding: deflate",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: \x0bchunked",
    b"Content-Length: 0",
    b"Content-Length: 30",
    b"Content-Length: -1",
    b"Content-Length: +5",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 3\r\nContent-Length: 4",
    b"X-Request-Id: \xff\xfe",
    b"X-Request-Id: a b\tc",
    b"Authorization: Bearer \xc3\x28",
    b"X-Long: " + b"v" * 20_000,
    b"X-Nul: a\0b",
    b"X Space: a",
    b"X-Bare-LF: a\nX-Next: b",
    b" folded: a",
    b": no name",
    b"no colon",
    b"X-Many: 1\r\n" * 300 + b"X-Last: 1",
)
ODD_BODIES = (b"{", b"\0" * 20, b"\x1f\x8b\x08\x00garbage", b"[" * 5_000, b"\r\n\r\n")
ODD_CHUNKS = (
    b"zz\r\n0\r\n\r\n",
    b"-1\r\n0\r\n\r\n",
    b"5\r\nab0\r\n\r\n",
    b"fffffffffffffffff\r\na",
    b"1;ext=1\r\n \r\n0\r\n\r\n",
    b"",
    b"0\r\n",
    b"0\r\nTrailer: a\r\n\r\n",
    b"0\n\n",
)
ODD_VERSIONS = (b"HTTP/2.0", b"HTTP/1.2", b"HTTP/9.9", b"http/1.1", b"")


@dataclass(frozen=True, slots=True)
class RawCase:
    """What one connection does.

    Args:
        pieces: Sent one after the other, the loop turning in between.
        ends: It shuts its sending side down after them.
    """

    pieces: tuple[bytes, ...]
    ends: bool


ODD_PARTS = ("method", "target", "version", "host", "header", "header", "header", "body", "length", "chunks")
"""Where a request may be odd."""


@st.composite
def requests(draw: st.DrawFn, *, is_odd: bool) -> bytes:
    """Return one request, with one odd thing or none."""
    odd = draw(st.sampled_from(ODD_PARTS)) if is_odd else ""
    is_post = odd in ("body", "length", "chunks") or draw(st.booleans())
    body = draw(st.sampled_from((PLAIN, STREAM, CHAT))) if is_post else b""
    method = b"POST" if is_post else b"GET"
    target = draw(st.sampled_from(GETS))
    if is_post:
        target = b"/v1/chat/completions" if body is CHAT else b"/v1/completions"
    version = b"HTTP/1.0" if draw(st.integers(0, 7)) == 0 else b"HTTP/1.1"
    headers = [] if odd == "host" else [b"Host: x"]
    headers += draw(st.lists(st.sampled_from(HEADERS), max_size=2, unique=True))
    if odd == "method":
        method = draw(st.sampled_from(ODD_METHODS))
    elif odd == "target":
        target = draw(st.sampled_from(ODD_TARGETS))
    elif odd == "version":
        version = draw(st.sampled_from(ODD_VERSIONS))
    elif odd == "header":
        headers.append(draw(st.sampled_from(ODD_HEADERS)))
    elif odd == "body":
        body = draw(st.sampled_from(ODD_BODIES))
    if odd == "chunks" or (is_post and draw(st.integers(0, 2)) == 0):
        headers.append(b"Transfer-Encoding: chunked")
        body = draw(chunked(body, is_odd=odd == "chunks"))
    elif is_post:
        length = len(body) + (draw(st.sampled_from((-3, -1, 1, 5))) if odd == "length" else 0)
        headers.append(b"Content-Length: %d" % length)
    return b"\r\n".join([method + b" " + target + b" " + version, *headers, b"", b""]) + body


@st.composite
def chunked(draw: st.DrawFn, body: bytes, *, is_odd: bool) -> bytes:
    """Return a body in chunks."""
    size = draw(st.integers(1, max(1, len(body))))
    data = b"".join(
        b"%x\r\n%s\r\n" % (len(body[start : start + size]), body[start : start + size])
        for start in range(0, len(body), size)
    )
    if is_odd:
        return data + draw(st.sampled_from(ODD_CHUNKS))
    return data + b"0\r\n\r\n"


@st.composite
def raw_cases(draw: st.DrawFn) -> RawCase:
    """Return what a connection sends: requests in a row, damaged in places, whole or in pieces."""
    kind = draw(st.sampled_from(("sound", "odd", "odd", "damaged", "cut", "noise")))
    if kind == "noise":
        data = draw(st.binary(min_size=1, max_size=200))
    else:
        data = b"".join(draw(st.lists(requests(is_odd=False), max_size=3)))
        data += draw(requests(is_odd=kind == "odd"))
    if kind == "damaged":
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.integers(0, len(data)))
            cut = draw(st.integers(0, 3))
            data = data[:place] + draw(st.binary(max_size=4)) + data[place + cut :]
    elif kind == "cut":
        data = data[: draw(st.integers(1, len(data)))]
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    if draw(st.integers(0, 15)) == 0:
        places = list(range(min(len(data), 120)))
    pieces = tuple(data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True))
    return RawCase(tuple(piece for piece in pieces if piece), draw(st.booleans()))
