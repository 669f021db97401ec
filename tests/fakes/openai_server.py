"""A server that answers OpenAI's API by a script, for tests of clients: every answer is known beforehand."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class ScriptedServer:
    """Answers completions with `max_tokens` events; keeps every request body.

    Args:
        failing: Given a request's body, returns the HTTP status to fail with, or 0.
        sends_usage: Whether the usage chunk is sent.
        sends_done: Whether the stream ends with `[DONE]`.
        sends_finish: Whether there is an event with a finish reason.
        line_end: What ends the lines of events.
        closes: Whether every answer says that the connection closes, and it does.
        num_cached: Prompt tokens said to come from the prefix cache; None to say nothing.
        num_missing: How many tokens fewer than asked for are sent.
        events_per_write: How many events go into one write; 0 splits every event in two.
        cut_after: Break the connection after this many content events.
        tokenizes: Whether there is a /tokenize, which counts words.
    """

    def __init__(
        self,
        *,
        failing: Callable[[dict[str, Any]], int] = lambda body: 0,
        sends_usage: bool = True,
        sends_done: bool = True,
        sends_finish: bool = True,
        line_end: str = "\n",
        closes: bool = False,
        num_cached: int | None = None,
        num_missing: int = 0,
        events_per_write: int = 1,
        cut_after: int | None = None,
        tokenizes: bool = True,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.connections: list[object] = []
        self.url = ""
        self._failing = failing
        self._sends_usage = sends_usage
        self._sends_done = sends_done
        self._sends_finish = sends_finish
        self._line_end = line_end
        self._closes = closes
        self._num_cached = num_cached
        self._num_missing = num_missing
        self._events_per_write = events_per_write
        self._cut_after = cut_after
        self._tokenizes = tokenizes

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedServer"]:
        """Listen on a free port for the duration of the block."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        if self._tokenizes:
            app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": 256}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"count": len(body["prompt"].split())})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.connections.append(request.transport)
        status = self._failing(body)
        if status:
            return web.json_response({"error": {"message": f"scripted {status}"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self._closes:
            response.force_close()
        await response.prepare(request)
        end = 2 * self._line_end
        events = [f"data: {json.dumps(chunk)}{end}".encode() for chunk in self._chunks(request.path, body)]
        if self._cut_after is not None:
            await response.write(b"".join(events[: self._cut_after]))
            assert request.transport is not None
            request.transport.abort()
            return response
        if self._sends_done:
            events.append(f"data: [DONE]{end}".encode())
        size = self._events_per_write
        writes = (
            [b"".join(events[start : start + size]) for start in range(0, len(events), size)]
            if size
            else [part for event in events for part in (event[:9], event[9:])]
        )
        for piece in writes:
            await response.write(piece)
        await response.write_eof()
        return response

    def _chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        # Text that looks like the protocol must not be taken for it.
        texts = ['a "text": "', "data: b", "\n\n", "é"]
        words = [texts[number % len(texts)] for number in range(body["max_tokens"] - self._num_missing)]
        if "chat" in path:
            chunks = [_chat({"role": "assistant", "content": ""})]
            chunks += [_chat({"content": word}) for word in words]
            last = _chat({}, "length")
        else:
            chunks = [_text(word) for word in words]
            last = _text("", "length")
        if self._sends_finish:
            chunks.append(last)
        if self._sends_usage:
            prompt = body.get("prompt") or body["messages"][0]["content"]
            num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            usage: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": len(words)}
            if self._num_cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self._num_cached}
            chunks.append({"choices": [], "usage": usage})
        return chunks


def _chat(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def _text(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None}
