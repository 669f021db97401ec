"""Who uses the server in a soak, and how: patient clients, and every kind of client that is not.

Each guest sends one request after the other, of a kind drawn anew each time, and enters each in the ledger.
Answers are held against what an undisturbed server said, those that were left against its beginning. Knows no
process: a server is its address.
"""

import asyncio
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from loadtest.chaos import BAD_BODIES
from loadtest.client import Answer, Client, Connection, ConnectionLost, error_message
from loadtest.soak.ledger import End, Ledger, Visit
from loadtest.soak.questions import Question, Questions

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""
SMALL_WINDOW = 4096
TRUNCATED_AT = 0.6
"""Share of a request that a half-open connection sends."""
STRUCK = "injected fault"
"""What the error says of a request that was alone when a fault struck: by design, whatever it asks."""

Texts = tuple[str, ...]


class Transcript:
    """A stream as it comes, read when it has ended.

    Args:
        wants: Set when so many bytes have come.
        event: Set then.
    """

    def __init__(self, wants: int | None = None, event: asyncio.Event | None = None) -> None:
        self.data = bytearray()
        self._wants = wants
        self._event = event

    def take(self, data: bytes, now_s: float) -> None:
        """Take the next piece of the body."""
        self.data += data
        if self._event is not None and self._wants is not None and len(self.data) >= self._wants:
            self._event.set()

    def read(self, num_choices: int) -> "Told":
        """Return what the events say that have come in full."""
        texts = [""] * num_choices
        error, is_done = "", False
        for event in bytes(self.data).split(b"\n\n")[:-1]:
            if not event.startswith(b"data: "):
                continue  # a comment that keeps the connection alive
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                is_done = True
                continue
            content = orjson.loads(data)
            if "error" in content:
                error = str(content["error"]["message"])
                continue
            for choice in content["choices"]:
                delta = choice.get("delta") or {}
                texts[choice["index"]] += choice.get("text") or delta.get("content") or ""
        return Told(tuple(texts), error, is_done and not error)


@dataclass(frozen=True, slots=True)
class Told:
    """What a server told.

    Args:
        texts: By choice.
        error: Its message, "" if there is none.
        is_whole: Whether it is the whole answer.
    """

    texts: Texts
    error: str
    is_whole: bool


def told_at_once(answer: Answer, num_choices: int) -> Told:
    """Read an answer that was not streamed."""
    if answer.status != 200:
        return Told(("",) * num_choices, error_message(answer.body), False)
    choices = orjson.loads(answer.body)["choices"]
    texts = [""] * num_choices
    for choice in choices:
        message = choice.get("message") or {}
        texts[choice["index"]] = choice.get("text") or message.get("content") or ""
    return Told(tuple(texts), "", True)


class Guests:
    """All clients of one soak.

    Args:
        url: Of the server.
        model: To ask for.
        keys: API keys, of which each request takes one; none if the server wants none.
        questions: What is asked.
        expected: What sound questions are answered with, by place.
        ledger: Gets every visit.
        weights: Of the kinds of visit, by name of a method without its underscore.
        seed: Of everything drawn.
        timeout_s: Most seconds for one answer: a request that has none by then is lost.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        keys: Sequence[str],
        questions: Questions,
        expected: Sequence[Texts],
        ledger: Ledger,
        weights: Mapping[str, float],
        seed: int,
        timeout_s: float = 120.0,
    ) -> None:
        self._random = random.Random(seed)
        self._clients = [Client(url, model=model, api_key=key) for key in keys or (None,)]
        self._strangers = Client(url, model=model, api_key="no-such-key") if keys else None
        self._questions = questions
        self._expected = expected
        self._ledger = ledger
        self._timeout_s = timeout_s
        kinds: dict[str, Callable[[Client], Awaitable[None]]] = {
            name.removeprefix("visit_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("visit_")
        }
        unknown = set(weights) - set(kinds)
        if unknown:
            raise ValueError(f"no kind of visit: {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
        self._kinds = [kinds[name] for name in weights]
        self._weights = list(weights.values())

    async def live(self, stop_s: float) -> None:
        """Be one guest until the time is over."""
        while time.perf_counter() < stop_s:
            await self.visit(self._random.choices(self._kinds, self._weights)[0])

    async def burst(self, count: int) -> None:
        """Let so many guests come at once, each with a stream."""
        await asyncio.gather(*(self.visit(self.visit_stream) for _ in range(count)))

    async def visit(self, visit: Callable[[Client], Awaitable[None]]) -> None:
        """Make one visit; one that takes too long is lost."""
        client = self._random.choice(self._clients)
        name = visit.__name__.removeprefix("visit_").replace("_", " ")
        try:
            async with asyncio.timeout(self._timeout_s):
                await visit(client)
        except (ConnectionLost, TimeoutError, OSError) as error:
            reason = str(error) or f"no answer within {self._timeout_s:g} s"
            self._ledger.take(Visit(kind=name, end=End.LOST))
            self._ledger.complain(f"{name}: {reason}")

    def close(self) -> None:
        """Close the connections that are kept."""
        for client in (*self._clients, *([self._strangers] if self._strangers else [])):
            client.close()

    # ---- clients that stay -------------------------------------------------------------------------------

    async def visit_plain(self, client: Client) -> None:
        """Wait for a whole answer."""
        index, question = self._sound()
        answer = await client.ask("POST", question.path, self._body(client, question, stream=False))
        self._judge("plain", question, answer, told_at_once(answer, question.num_choices), index)

    async def visit_stream(self, client: Client) -> None:
        """Read a stream to its end."""
        index, question = self._sound()
        await self._stream("stream", client, question, index)

    async def visit_slow_reader(self, client: Client) -> None:
        """Read a stream to its end, with a small window and long breaks."""
        index, question = self._sound()
        connection = await self._narrow_connection(client)
        transcript = Transcript()
        request = client.head("POST", question.path, self._body(client, question, stream=True))
        reading = asyncio.ensure_future(connection.exchange(request, transcript.take))
        try:
            for _ in range(self._random.randint(1, 3)):
                connection.pause_reading()
                await asyncio.wait({reading}, timeout=self._random.uniform(0.05, 1.5))
                connection.resume_reading()
                await asyncio.wait({reading}, timeout=0.02)
            answer = await reading
        finally:
            await _end(connection, reading)
        told = transcript.read(question.num_choices)
        self._judge("slow reader", question, answer, self._told(answer, told), index)

    async def visit_failing(self, client: Client) -> None:
        """Ask what must fail, and see that it does."""
        why = self._random.choice(sorted(self._questions.failing))
        question = self._questions.failing[why]
        if self._random.random() < 0.5:
            await self._stream(f"fails: {why}", client, question, None)
            return
        answer = await client.ask("POST", question.path, self._body(client, question, stream=False))
        self._judge(f"fails: {why}", question, answer, told_at_once(answer, question.num_choices), None)

    async def visit_hurried(self, client: Client) -> None:
        """Give the server too little time, or just enough."""
        index, question = self._sound()
        timeout = {"X-Request-Timeout": f"{self._random.choice((0.001, 0.1, 1.0)):g}"}
        body = self._body(client, question, stream=False)
        request = _with_headers(client.head("POST", question.path, body), timeout)
        answer = await client.on_connection(lambda connection: connection.exchange(request))
        told = told_at_once(answer, question.num_choices)
        if answer.status == 504:
            self._enter("hurried", End.ABORTED, question.num_choices, answer)
            return
        self._judge("hurried", question, answer, told, index)

    async def visit_cancelled(self, client: Client) -> None:
        """Let a response be made in the background, and call it off."""
        fields = {
            "model": client.model,
            "input": "Once upon a time",
            "max_output_tokens": 64,
            "background": True,
        }
        answer = await client.ask("POST", "/v1/responses", orjson.dumps(fields))
        if answer.status != 200:
            self._refused("cancelled", answer, 1)
            return
        await asyncio.sleep(self._random.uniform(0, 0.2))
        path = f"/v1/responses/{answer.json()['id']}"
        cancelled = await client.ask("POST", f"{path}/cancel", b"{}")
        status = (await client.ask("GET", path)).json().get("status")
        if cancelled.status == 200 and status == "cancelled":
            self._enter("cancelled", End.ABORTED, 1, answer)
        elif status in ("completed", "incomplete"):
            self._enter("cancelled", End.ANSWERED, 1, answer)
        else:
            self._enter("cancelled", End.LOST, 1, answer)
            self._ledger.complain(f"cancelled: HTTP {cancelled.status}, the response is {status}")

    async def visit_malformed(self, client: Client) -> None:
        """Ask what cannot be asked."""
        name, body = self._random.choice(BAD_BODIES)
        answer = await client.ask("POST", "/v1/completions", body)
        if not 400 <= answer.status < 500:
            self._ledger.complain(f"malformed, {name}: HTTP {answer.status}")
        self._enter("malformed", End.REFUSED, 1, answer)

    async def visit_stranger(self, client: Client) -> None:
        """Come with a wrong key."""
        if self._strangers is None:
            return
        _, question = self._sound()
        answer = await self._strangers.ask("POST", question.path, question.body(stream=True))
        if answer.status != 401:
            self._ledger.complain(f"a wrong key gets HTTP {answer.status}")
        self._enter("wrong key", End.REFUSED, question.num_choices, answer)

    # ---- clients that leave ------------------------------------------------------------------------------

    async def visit_leaver(self, client: Client) -> None:
        """Leave before the answer has come: at once, while waiting for it, or in the middle of a stream."""
        index, question = self._sound()
        connection = await client.open()
        is_stream = self._random.random() < 0.7
        event = asyncio.Event()
        transcript = Transcript(self._random.choice((1, 500, 5_000)), event)
        request = client.head("POST", question.path, self._body(client, question, stream=is_stream))
        reading = asyncio.ensure_future(connection.exchange(request, transcript.take if is_stream else None))
        begun = asyncio.ensure_future(event.wait())
        try:
            patience_s = self._random.choice((0.0, 0.001, self._random.uniform(0, 0.5), 5.0))
            await asyncio.wait({reading, begun}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                answer = reading.result()
                told = transcript.read(question.num_choices)
                told = self._told(answer, told) if is_stream else told_at_once(answer, question.num_choices)
                self._judge("leaver", question, answer, told, index)
                return
            if self._random.random() < 0.3:  # in the middle of a write: what comes now stays unread
                connection.pause_reading()
                await asyncio.sleep(self._random.uniform(0, 0.3))
            _leave(connection, resets=self._random.random() < 0.5)
        finally:
            begun.cancel()
            await _end(connection, reading)
        self._enter("leaver", End.LEFT, question.num_choices, status=connection.status)
        self._hold(question, index, transcript.read(question.num_choices))

    async def visit_half_open(self, client: Client) -> None:
        """Send a part of a request, be silent for a while, and vanish."""
        _, question = self._sound()
        request = client.head("POST", question.path, self._body(client, question, stream=True))
        connection = await client.open()
        try:
            connection.send(request[: max(1, int(self._random.random() * TRUNCATED_AT * len(request)))])
            await asyncio.sleep(self._random.uniform(0.1, 1))
            _leave(connection, resets=self._random.random() < 0.5)
        finally:
            connection.close()
        self._enter("half-open", End.LEFT, question.num_choices, status=connection.status)

    async def visit_half_closed(self, client: Client) -> None:
        """End the sending side after the request, and read whatever comes."""
        index, question = self._sound()
        connection = await client.open()
        transcript = Transcript()
        request = client.head("POST", question.path, self._body(client, question, stream=True))
        reading = asyncio.ensure_future(connection.exchange(request, transcript.take))
        try:
            await asyncio.sleep(0)  # so that the request is written
            connection.end_sending()
            await asyncio.wait({reading})
        finally:
            await _end(connection, reading)
        told = transcript.read(question.num_choices)
        if reading.exception() is not None or not told.is_whole:
            self._enter("half-closed", End.LEFT, question.num_choices, status=connection.status)
            self._hold(question, index, told)
            return
        self._judge("half-closed", question, reading.result(), told, index)

    # ---- what came of it ---------------------------------------------------------------------------------

    async def _stream(self, kind: str, client: Client, question: Question, index: int | None) -> None:
        transcript = Transcript()
        request = client.head("POST", question.path, self._body(client, question, stream=True))
        answer = await client.on_connection(lambda connection: connection.exchange(request, transcript.take))
        told = self._told(answer, transcript.read(question.num_choices))
        self._judge(kind, question, answer, told, index)

    def _told(self, answer: Answer, told: Told) -> Told:
        return told if answer.status == 200 else Told(told.texts, error_message(answer.body), False)

    def _judge(self, kind: str, question: Question, answer: Answer, told: Told, index: int | None) -> None:
        """Enter a request whose client stayed."""
        if answer.status == 429:
            self._refused(kind, answer, question.num_choices)
        elif question.fails:
            if told.is_whole:
                self._ledger.complain(f"what must fail ({question.fails}) was answered")
            num_sequences = question.num_choices if question.is_encodable else 0
            self._enter(kind, End.FAILED_BY_DESIGN, num_sequences, answer)
        elif told.is_whole:
            self._enter(kind, End.ANSWERED, question.num_choices, answer)
            self._hold(question, index, told)
        elif STRUCK in told.error:
            self._enter(f"{kind}, struck alone", End.FAILED_BY_DESIGN, question.num_choices, answer)
            self._hold(question, index, told)
        else:
            self._enter(kind, End.LOST, question.num_choices, answer)
            self._ledger.complain(f"{kind}: HTTP {answer.status}: {told.error or 'the stream breaks off'}")

    def _hold(self, question: Question, index: int | None, told: Told) -> None:
        """Compare what was said with what an undisturbed server says."""
        if index is None:
            return
        for said, expected in zip(told.texts, self._expected[index], strict=True):
            if said == expected or (not told.is_whole and expected.startswith(said)):
                continue
            self._ledger.num_wrong += 1
            self._ledger.complain(f"question {index} is answered with {said[:80]!r}, not {expected[:80]!r}")

    def _refused(self, kind: str, answer: Answer, num_sequences: int) -> None:
        if answer.status != 429:
            self._ledger.complain(f"{kind}: HTTP {answer.status}: {error_message(answer.body)}")
        self._enter(kind, End.REFUSED if answer.status == 429 else End.LOST, num_sequences, answer)

    def _enter(
        self, kind: str, end: End, num_sequences: int, answer: Answer | None = None, *, status: int = 0
    ) -> None:
        if answer is not None:
            status = answer.status
            self._ledger.request_ids.append(answer.headers.get("x-request-id", ""))
        self._ledger.take(Visit(kind=kind, end=end, status=status, num_sequences=num_sequences))

    def _sound(self) -> tuple[int, Question]:
        index = self._random.randrange(len(self._questions.sound))
        return index, self._questions.sound[index]

    def _body(self, client: Client, question: Question, *, stream: bool) -> bytes:
        return question.body(
            stream=stream, model=client.model, priority=self._random.choice((0, 0, 0, -1, 5))
        )

    async def _narrow_connection(self, client: Client) -> Connection:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW)
        narrow.setblocking(False)
        return await client.open(narrow)


def _leave(connection: Connection, *, resets: bool) -> None:
    """Close a connection: with a reset, or in order though nothing more is read."""
    if resets:
        connection.set_socket_option(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()


async def _end(connection: Connection, reading: "asyncio.Future[Any]") -> None:
    connection.close()
    await asyncio.gather(reading, return_exceptions=True)


def _with_headers(request: bytes, headers: Mapping[str, str]) -> bytes:
    line, _, rest = request.partition(b"\r\n")
    added = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return line + b"\r\n" + added.encode() + rest
