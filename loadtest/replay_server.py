"""A server that costs next to nothing: it streams the same event again and again, as many as were asked for.

What the clients reach with it is at least what they could take of any server. One event of every stream is
written in turn, as a server does that decodes a batch. Knows HTTP/1.1 only as far as the clients of this
package speak it.
"""

import asyncio
import json
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, cast

import uvloop

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, *, finish_reason: str | None = None, is_chat: bool = False) -> bytes:
    """Return one event of a completion or of a chat, as a chunk."""
    choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    fields = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1_700_000_000,
        "model": "replay",
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}],
    }
    return _chunk(b"data: %b\n\n" % json.dumps(fields).encode())


EVENTS = {is_chat: event(" qwrtzps", is_chat=is_chat) for is_chat in (False, True)}


class _Stream:
    """One answer that is being written."""

    __slots__ = ("event", "is_chat", "num_left", "num_prompt", "num_tokens", "write")

    def __init__(self, write: Any, *, is_chat: bool, num_prompt: int, num_tokens: int) -> None:
        self.write = write
        self.is_chat = is_chat
        self.event = EVENTS[is_chat]
        self.num_prompt = num_prompt
        self.num_tokens = self.num_left = num_tokens

    def end(self) -> bytes:
        """Return the last events and the end of the body."""
        usage = {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_tokens}
        fields = json.dumps({"choices": [], "usage": usage}).encode()
        last = _chunk(b"data: %b\n\ndata: [DONE]\n\n" % fields)
        return event(" end", finish_reason="length", is_chat=self.is_chat) + last + _chunk(b"")


class _Connection(asyncio.Protocol):
    def __init__(self, streams: "deque[_Stream]", wake: asyncio.Event) -> None:
        self._streams = streams
        self._wake = wake
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._received = b""
        fields = json.loads(body)
        assert self._transport is not None
        self._transport.write(_HEAD)
        is_chat = "messages" in fields
        prompt = fields["messages"][0]["content"].split() if is_chat else fields["prompt"]
        stream = _Stream(
            self._transport.write, is_chat=is_chat, num_prompt=len(prompt), num_tokens=fields["max_tokens"]
        )
        self._streams.append(stream)
        self._wake.set()


async def _stream(streams: "deque[_Stream]", wake: asyncio.Event) -> None:
    while True:
        await wake.wait()
        for _ in range(len(streams)):
            stream = streams.popleft()
            stream.num_left -= 1
            if stream.num_left:
                stream.write(stream.event)
                streams.append(stream)
            else:
                stream.write(stream.end())
        if not streams:
            wake.clear()
        await asyncio.sleep(0)


async def _serve(pipe: "Connection[int, None]") -> None:
    streams: deque[_Stream] = deque()
    wake = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(streams, wake), "127.0.0.1", 0, backlog=1024)
    streaming = asyncio.create_task(_stream(streams, wake))
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(_wait_for_end, pipe)
    streaming.cancel()
    server.close()


def _wait_for_end(pipe: "Connection[int, None]") -> None:
    try:
        pipe.recv()
    except EOFError:
        return  # whoever started this is gone


def serve(pipe: "Connection[int, None]") -> None:
    """Serve on a free port, which is sent through the pipe, until something or its end comes back."""
    uvloop.run(_serve(pipe))
