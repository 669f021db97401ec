"""The usual way to stream, for comparison: FastAPI's StreamingResponse under uvicorn.

`python -m loadtest.frontend.baseline`, started by `loadtest.frontend`; needs the dependency group `baseline`.
Nothing but the HTTP side is here: a step puts the next token's text into a queue of each stream, and a
generator per stream makes an event of it, by orjson of a dict. It prints what `server` prints.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from asyncserve.checkpoint import open_checkpoint
from asyncserve.garbage import settle_collector
from asyncserve.loop.tokenizer import load_tokenizer
from loadtest.frontend.cost import Stopwatch
from loadtest.frontend.device import TEXT
from loadtest.frontend.machine import pin


class Steps:
    """Gives every stream a token at each step, once all of them are there."""

    def __init__(self, texts: list[str], num_streams: int, num_tokens: int) -> None:
        self._texts = texts
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._queues: list[asyncio.Queue[str | None]] = []
        self._running: asyncio.Task[None] | None = None

    async def stream(self) -> AsyncIterator[bytes]:
        """Give the events of one stream."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._queues.append(queue)
        if len(self._queues) == self._num_streams:
            queues, self._queues = self._queues, []
            self._running = asyncio.create_task(self._run(queues))
        facts = {
            "id": "cmpl-0123456789abcdef0123456789abcdef",
            "object": "text_completion",
            "created": int(time.time()),
            "model": "fake",
            "system_fingerprint": "baseline",
        }
        while (text := await queue.get()) is not None:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
            yield b"data: %b\n\n" % orjson.dumps({**facts, "choices": [choice]})
        yield b"data: [DONE]\n\n"

    async def _run(self, queues: list["asyncio.Queue[str | None]"]) -> None:
        stopwatch = Stopwatch()
        texts, num_texts = self._texts, len(self._texts)
        for step in range(self._num_tokens):
            for number, queue in enumerate(queues):
                queue.put_nowait(texts[(step + number) % num_texts])
            # The next step when every stream has taken this one.
            while not all(queue.empty() for queue in queues):  # noqa: ASYNC110 - it takes a turn or two
                await asyncio.sleep(0)
        cost = stopwatch.cost(self._num_tokens * len(queues))
        for queue in queues:
            queue.put_nowait(None)
        print(json.dumps({"cost": cost.as_object()}), flush=True)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    pin(0)
    tokenizer = load_tokenizer(open_checkpoint(arguments.model), chat_template=None)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    texts = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
    steps = Steps(texts, arguments.streams, arguments.tokens)
    app = FastAPI()

    async def complete(request: Request) -> StreamingResponse:
        orjson.loads(await request.body())
        return StreamingResponse(steps.stream(), media_type="text/event-stream")

    app.post("/v1/completions")(complete)
    listener = socket.create_server(("127.0.0.1", 0), backlog=arguments.streams)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    settle_collector()
    print(listener.getsockname()[1], flush=True)
    uvloop.run(_serve(server, listener))


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    main()
