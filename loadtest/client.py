"""A cheap streaming client of OpenAI's API: HTTP/1.1 over plain asyncio transports.

It shares the machine with the server it measures, so it takes times once per read and looks at an event's
bytes instead of decoding its JSON; only the few events that are not content (role, usage, error) are
decoded. In a conversation, answers are decoded when they are complete: the next turn sends them again. Gives
one `Record` per request and never raises: what went wrong is in the record. A kept connection
that turns out to be closed is replaced once, and counted. Definitions of the times: `report`.
"""

import asyncio
import json
import re
import socket
import ssl
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from loadtest.workload import Conversation, Sample

# The value after the key is a string that is not empty. A quotation mark inside a JSON string is escaped,
# so that generated text cannot look like this.
_CONTENT_OR_END = re.compile(rb'"(?:text|content|reasoning|reasoning_content|finish_reason)"\s*:\s*"(?!")')
_FINISH = b'"finish_reason"'
_HAS_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"(?!")')
# Not the `"usage": null` that some servers put into every event.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')

Result = TypeVar("Result")


@dataclass(slots=True)
class Record:
    """What came of one request. Times are seconds of `time.perf_counter`.

    Args:
        started_s: When it was sent.
        first_s: When the first event with content came; 0 before.
        last_s: When the last event of the answer (content or finish reason) came.
        ended_s: When it was over, whatever came of it.
        gaps_s: Between successive events with content.
        num_prompt_tokens: From the server's usage.
        num_output_tokens: From the server's usage; the number of events if it sent none.
        num_asked_tokens: The output length asked for.
        num_cached_tokens: Prompt tokens found in the prefix cache; None if the server does not tell.
        has_usage: Whether it sent one.
        status: HTTP status, 0 if there was no answer.
        error: None if it was answered in full.
        turn: Its place in a conversation, from 0.
    """

    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_asked_tokens: int = 0
    num_cached_tokens: int | None = None
    has_usage: bool = False
    status: int = 0
    error: str | None = None
    turn: int = 0

    @property
    def has_wrong_length(self) -> bool:
        """Whether the server says that it generated more or less than was asked."""
        return self.has_usage and self.num_output_tokens != self.num_asked_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer that was not streamed."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


class ConnectionLost(Exception):
    """The server closed the connection before the answer was complete, or it was never opened."""


class CannotConnect(ConnectionLost):
    """There is no connection: nothing was sent, and the server knows of nothing."""


class KeptConnectionClosed(ConnectionLost):
    """A connection that has served before ended without a byte of the answer: the server had let go of it."""


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: one request at a time, answers de-chunked.

    Body bytes go to `on_body(data, now_s)` as they come, or are collected for `Answer.body` if it is None.
    """

    def __init__(self) -> None:
        self.on_body: Any = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_open = False
        self._num_answers = 0
        self._has_answer_begun = False
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._body: list[bytes] = []
        self._in_head = True
        self._is_chunked = False
        self._body_left = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that is out, unless its body ends with the connection."""
        self.is_open = False
        if self._done is None or self._done.done():
            return
        if not self._in_head and not self._is_chunked and self._body_left < 0:
            self._done.set_result(None)
        else:
            self._done.set_exception(self._loss(f"connection lost: {exc or 'closed by the server'}"))

    def _loss(self, message: str) -> ConnectionLost:
        is_unused = self._num_answers == 0 or self._has_answer_begun
        return ConnectionLost(message) if is_unused else KeptConnectionClosed(message)

    async def exchange(self, request: bytes, on_body: Any = None) -> Answer:
        """Send one request and wait for the whole answer.

        Raises:
            ConnectionLost: The answer is not complete.
            KeptConnectionClosed: Nothing of it came, on a connection that has given answers before.
        """
        self._has_answer_begun = False
        if self._transport is None or not self.is_open:
            raise self._loss("not connected")
        self.on_body = on_body
        self.status, self.headers, self._body, self._in_head = 0, {}, [], True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        self._num_answers += 1
        if self.headers.get("connection", "").lower() == "close":
            self.close()
        return Answer(self.status, self.headers, b"".join(self._body))

    def close(self) -> None:
        """Close the connection at once; an exchange under way fails with `ConnectionLost`."""
        if self._transport is not None and self.is_open:
            self.is_open = False
            self._transport.abort()

    def send(self, data: bytes) -> None:
        """Send bytes that are no whole request."""
        if self._transport is not None:
            self._transport.write(data)

    def end_sending(self) -> None:
        """Tell the server that no more will come, and go on reading."""
        if self._transport is not None:
            self._transport.write_eof()

    def pause_reading(self) -> None:
        """Leave what comes in the kernel's buffers."""
        if self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def set_socket_option(self, level: int, option: int, value: bytes) -> None:
        """Set an option of the socket."""
        if self._transport is not None and self.is_open:
            self._transport.get_extra_info("socket").setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        """Take the next bytes of the answer."""
        now_s = time.perf_counter()
        if self._done is not None and self._done.done():
            self.close()  # bytes that nobody asked for: what came next could not be told from an answer
            return
        self._has_answer_begun = True
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if self._in_head:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                return
            self._take_head(data[:end])
            data = data[end + 4 :]
        if self._is_chunked:
            self._take_chunks(data, now_s)
            return
        if self._body_left >= 0:
            self._body_left -= len(data)
        self._take_body(data, now_s)
        if self._body_left == 0:
            self._finish()

    def _take_head(self, head: bytes) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(status_line.split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        self._body_left = int(self.headers.get("content-length", -1))
        self._in_head = False

    def _take_chunks(self, data: bytes, now_s: float) -> None:
        # Several chunks in one read are handed on as one piece.
        pieces = []
        start = 0
        last = False
        while (line_end := data.find(b"\r\n", start)) >= 0:
            length = int(data[start:line_end].partition(b";")[0], 16)
            chunk_end = line_end + 2 + length
            if len(data) < chunk_end + 2:
                break
            if length == 0:
                last = True
                break
            pieces.append(data[line_end + 2 : chunk_end])
            start = chunk_end + 2
        if not last:
            self._buffer = data[start:]
        if pieces:
            self._take_body(pieces[0] if len(pieces) == 1 else b"".join(pieces), now_s)
        if last:
            self._finish()

    def _take_body(self, data: bytes, now_s: float) -> None:
        if self.on_body is not None and self.status == 200:
            self.on_body(data, now_s)
        else:
            self._body.append(data)

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class StreamReader:
    """Server-sent events → the times and counts of one `Record`.

    Args:
        record: To be filled in.
        keeps_text: Whether the events are kept, for `text`.
    """

    def __init__(self, record: Record, *, keeps_text: bool = False) -> None:
        self.record = record
        self._kept: list[bytes] | None = [] if keeps_text else None
        self.is_done = False
        self.num_content_events = 0
        self._rest = b""
        self._last_event = b""

    @property
    def is_complete(self) -> bool:
        """Whether the stream came to its end: `[DONE]`, or a finish reason where no `[DONE]` is sent."""
        return self.is_done or (not self._rest.strip() and _HAS_FINISHED.search(self._last_event) is not None)

    def text(self) -> str:
        """Return what was answered so far; "" if nothing was kept."""
        pieces = []
        for event in self._kept or ():
            choice = json.loads(_data(event))["choices"][0]
            pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        return "".join(pieces)

    def take(self, data: bytes, now_s: float) -> None:
        """Take the next piece of the body, read at `now_s`."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            found = _CONTENT_OR_END.search(event)
            if found is None:
                self._take_rare(event)
                continue
            record = self.record
            if event.startswith(_FINISH, found.start()):
                found = _CONTENT_OR_END.search(event, found.end())
            if found is not None:
                self.num_content_events += 1
                if self._kept is not None:
                    self._kept.append(event)
                if record.first_s:
                    record.gaps_s.append(now_s - record.last_s)
                else:
                    record.first_s = now_s
            record.last_s = now_s
            self._last_event = event
            if _USAGE.search(event) is not None:
                self._take_usage(json.loads(_data(event)))

    def _take_rare(self, event: bytes) -> None:
        data = _data(event)
        if data == b"[DONE]":
            self.is_done = True
        elif data.startswith(b"{"):
            content = json.loads(data)
            if content.get("error"):
                self.record.error = f"error in the stream: {content['error'].get('message')}"
            self._take_usage(content)

    def _take_usage(self, content: Mapping[str, Any]) -> None:
        usage = content.get("usage")
        if usage:
            self.record.num_prompt_tokens = usage["prompt_tokens"]
            self.record.num_output_tokens = usage["completion_tokens"]
            self.record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self.record.has_usage = True


def _data(event: bytes) -> bytes:
    """Return an event's data, without its comments and other fields."""
    lines = (line.removeprefix(b"data:").strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


class Client:
    """Sends samples to one server over kept connections.

    Args:
        url: Base, such as `http://127.0.0.1:8000`.
        model: Name to ask for.
        endpoint: `completions` or `chat`.
        api_key: Sent as a bearer token.
        temperature: Of every request; 0 is greedy.
        extra: Further fields of every request body.
        timeout_s: Most seconds for one request.

    Attributes:
        num_reconnects: Requests sent once more because a kept connection turned out to be closed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        endpoint: str = "completions",
        api_key: str | None = None,
        temperature: float = 0.0,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._host = parts.hostname or "127.0.0.1"
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[Connection] = []
        self.model = model
        self.endpoint = endpoint
        self.temperature = temperature
        self.extra = dict(extra or {})
        self.timeout_s = timeout_s
        self.num_reconnects = 0

    async def connect(self) -> Connection:
        """Take an idle connection, or open one.

        Raises:
            CannotConnect: The server cannot be reached.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self.open()

    async def open(self, via: socket.socket | None = None) -> Connection:
        """Open a connection.

        Args:
            via: An unconnected socket to use, of IPv4, that does not block.

        Raises:
            CannotConnect: The server cannot be reached.
        """
        loop = asyncio.get_running_loop()
        try:
            if via is not None:
                await loop.sock_connect(via, (self._host, self._port))
                _, connection = await loop.create_connection(Connection, sock=via)
                return connection
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise CannotConnect(
                f"cannot connect to {self._host}:{self._port}: {error.strerror or error}"
            ) from error
        return connection

    def release(self, connection: Connection) -> None:
        """Keep a connection for the next request, unless it is closed."""
        if connection.is_open:
            self._idle.append(connection)

    async def on_connection(self, send: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Call `send` with an idle connection or a new one, and keep it afterwards.

        A server may close a connection at rest just when the next request is under way. That is no failure of
        the request: it is sent once more, on a new connection.

        Raises:
            ConnectionLost: The server cannot be reached, or `send` raised it.
        """
        connection = await self.connect()
        while True:
            try:
                result = await send(connection)
            except KeptConnectionClosed:
                self.num_reconnects += 1
                connection = await self.open()  # one that is new never raises this
            except BaseException:
                connection.close()
                raise
            else:
                self.release(connection)
                return result

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Send one request whose answer is not streamed.

        Raises:
            ConnectionLost: There is no complete answer.
        """
        request = self.head(method, path, body)
        return await self.on_connection(lambda connection: connection.exchange(request))

    async def served_model(self) -> tuple[str, int | None]:
        """Return the name of the server's first model, and its context length if it tells.

        Raises:
            ConnectionLost: The server cannot be reached.
            ValueError: It lists no model.
        """
        answer = await self.ask("GET", "/v1/models")
        if answer.status != 200:
            raise ValueError(f"GET /v1/models: HTTP {answer.status}: {error_message(answer.body)}")
        model = answer.json()["data"][0]
        return model["id"], model.get("max_model_len")

    async def take(self, item: Sample | Conversation) -> list[Record]:
        """Send a sample or a conversation, and record what comes of each request."""
        if isinstance(item, Conversation):
            return await self.converse(item)
        return [await self.complete(item)]

    async def complete(self, sample: Sample) -> Record:
        """Send one sample, streaming, and record what comes."""
        record, _ = await self._answered(sample, keeps_text=False)
        return record

    async def converse(self, conversation: Conversation) -> list[Record]:
        """Send the turns of a conversation, each with all that was said before; record what comes of each.

        After a turn that failed the rest is not sent: there is nothing to go on from. They count as failed.
        """
        records: list[Record] = []
        history = [("system", conversation.system)] if conversation.system else []
        for number, turn in enumerate(conversation.turns):
            if records and records[-1].error is not None:
                now_s = time.perf_counter()
                record = Record(started_s=now_s, ended_s=now_s, num_asked_tokens=turn.max_tokens)
                record.error = "not sent, for an earlier turn failed"
            else:
                if number and conversation.pauses_s:
                    await asyncio.sleep(conversation.pauses_s[number - 1])
                record, text = await self._answered(replace(turn, history=tuple(history)), keeps_text=True)
                history += [("user", str(turn.prompt)), ("assistant", text)]
            record.turn = number
            records.append(record)
        return records

    async def _answered(self, sample: Sample, *, keeps_text: bool) -> tuple[Record, str]:
        record = Record(num_asked_tokens=sample.max_tokens)
        reader = StreamReader(record, keeps_text=keeps_text)
        body = self.body(sample)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.on_connection(lambda connection: self._stream(connection, body, reader))
        except (ConnectionLost, TimeoutError) as error:
            record.error = str(error) or f"no answer within {self.timeout_s:g} s"
        record.ended_s = time.perf_counter()
        # An answer that never got to be sent began and ended at once.
        record.started_s = record.started_s or record.ended_s
        return record, reader.text()

    async def stream(self, connection: Connection, body: bytes, record: Record) -> None:
        """Send one streaming request on `connection` and fill in `record`.

        A record that was started before keeps its start: what a second attempt takes counts from the first.

        Raises:
            ConnectionLost: The stream broke off.
        """
        await self._stream(connection, body, StreamReader(record))

    async def _stream(self, connection: Connection, body: bytes, reader: StreamReader) -> None:
        record = reader.record
        record.started_s = record.started_s or time.perf_counter()
        path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
        try:
            answer = await connection.exchange(self.head("POST", path, body), reader.take)
        finally:
            record.status = connection.status
            if not record.has_usage:
                record.num_output_tokens = reader.num_content_events
        if answer.status != 200:
            record.error = f"HTTP {answer.status}: {error_message(answer.body)}"
        elif record.error is None and not reader.is_complete:
            record.error = "the stream ended without [DONE] or a finish reason"
        elif record.error is None and not record.first_s:
            record.error = "the stream had no content"

    def body(self, sample: Sample, *, stream: bool = True) -> bytes:
        """Return the request body for one sample."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sample.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            fields["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            if not isinstance(sample.prompt, str):
                raise ValueError("chat takes text, not token ids")
            said = [*sample.history, ("user", sample.prompt)]
            fields["messages"] = [{"role": role, "content": content} for role, content in said]
        else:
            fields["prompt"] = _continued(sample) if sample.history else sample.prompt
        return json.dumps(fields | self.extra).encode()

    def head(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return a whole HTTP request."""
        length = (
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body is not None else ""
        )
        head = (
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"{self._authorization}{length}\r\n"
        )
        return head.encode() + (body or b"")


def _continued(sample: Sample) -> str:
    """Return a conversation as one text, which begins with prompt and answer of the turn before."""
    text = ""
    for role, content in (*sample.history, ("user", str(sample.prompt))):
        text += content if role == "assistant" or not text else f"\n{content}"
    return text


def error_message(body: bytes) -> str:
    """Return the message of an error body in OpenAI's shape, or the beginning of whatever it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
