"""`asyncserve run-batch`: a file of requests through the engine, without a server's port.

Takes a `BatchConfig`; serves the HTTP application on a Unix socket that only this process knows, so that a
request in a file is checked and answered exactly as one from the network, and sends it the input's lines,
as many at once as keep the engine busy. Answers are written as they come; a run that is broken off goes on
where it stopped. Knows neither fields nor shapes of requests.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from tqdm import tqdm

from asyncserve.config import BatchConfig
from asyncserve.errors import ConfigError, EngineError
from asyncserve.garbage import settle_collector
from asyncserve.http.app import make_runner
from asyncserve.http.batch_file import (
    STANDARD,
    BatchOutput,
    BatchRequest,
    LineError,
    answer_line,
    count_lines,
    input_lines,
    parse_line,
)
from asyncserve.http.serving import REQUEST_ID_HEADER
from asyncserve.loop.engine import Engine
from asyncserve.metrics.exposition import new_registry, render
from asyncserve.observer import NullObserver, RequestTimeline
from asyncserve.serve import (
    StopRequests,
    build_engine,
    build_http,
    configure_logging,
    first_of,
    open_model,
    stop_serving,
)
from asyncserve.step import StepOutput, StepPlan

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_LINES_FAILED = 3
"""Status if every line has been worked on, but some answers are errors."""
ROOM_FOR_ENVELOPE = 64 * 1024
"""So much may stand in a line around the body."""
RETRY_S = 1.0
"""How long to wait when the queue is full and nothing else is said."""
SHOW_INTERVAL_S = 1.0
MAX_SHOWN_BYTES = 500

InputLine = tuple[int, bytes | LineError]


async def run_batch(config: BatchConfig) -> int:
    """Answer every request of the input file that the output file has no answer to.

    Returns:
        Exit status: 0 if all answers are good, 1 if the run could not go on, 3 if some answers are errors;
        130 or 143 after SIGINT or SIGTERM. After all but 0 and 3 the same command goes on with what is left.

    Raises:
        StartupError: The files cannot be used, or the engine cannot start.
    """
    configure_logging(config.log_level)
    num_lines = await asyncio.to_thread(_checked_input, config.input_file)
    output = await asyncio.to_thread(BatchOutput, config.output_file, input_path=config.input_file)
    stop_requests = StopRequests()
    stop_requests.install()
    try:
        with tempfile.TemporaryDirectory(prefix="asyncserve-") as folder:
            return await _run(config, output, num_lines, Path(folder) / "socket", stop_requests)
    finally:
        stop_requests.uninstall()
        output.close()


async def _run(
    config: BatchConfig, output: BatchOutput, num_lines: int | None, socket: Path, stop_requests: StopRequests
) -> int:
    counter = TokenCounter()
    checkpoint = await asyncio.to_thread(open_model, config)
    engine = await asyncio.to_thread(build_engine, config, checkpoint, counter)
    app = build_http(
        dataclasses.replace(config, disable_access_log=True, root_path=None),
        engine,
        checkpoint,
        api_keys=(),
        api_key_file=None,
        metrics_renderer=partial(render, new_registry()),
        on_rejected=lambda error: None,
    )
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket)).start()
        starting = asyncio.create_task(engine.start(), name="engine-start")
        await first_of(starting, stop_requests.first)
        if not starting.done():
            # A load cannot be interrupted; nothing has been written.
            shutil.rmtree(socket.parent)
            os._exit(stop_requests.exit_status)
        await starting
        settle_collector()
        with tqdm(
            total=num_lines,
            unit="request",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
        ) as bar:
            async with aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(socket), limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session:
                batch = Batch(output, session, "http://batch", engine, bar, counter)
                lines = input_lines(
                    config.input_file, max_line_bytes=config.max_body_bytes + ROOM_FOR_ENVELOPE
                )
                work = asyncio.create_task(
                    batch.run(lines, concurrency=config.max_concurrency or 2 * engine.info.num_slots)
                )
                await first_of(work, stop_requests.first)
                if not work.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                    logger.warning("stopped; the same command goes on with what is left")
                    return stop_requests.exit_status
        try:
            await work
        except (OSError, EngineError, aiohttp.ClientError) as error:
            logger.error("the batch cannot go on: %s; the same command goes on with what is left", error)
            return EXIT_FAILED
        logger.info(
            "answers written: %d good, %d errors; had one already: %d",
            batch.num_good,
            batch.num_failed,
            batch.num_skipped,
        )
        return EXIT_LINES_FAILED if batch.num_failed else 0
    finally:
        await stop_serving(engine, runner, now=False)


class TokenCounter(NullObserver):
    """Counts the tokens the engine makes."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Count one step's; what it computed for sequences that had ended is no token of anybody's."""
        self.num_tokens += len(inter_token_s)

    def first_token(self, timeline: RequestTimeline, num_tokens: int) -> None:
        """Count a sequence's first, and what came with it."""
        self.num_tokens += num_tokens


class Batch:
    """The work on one input.

    Args:
        output: Where answers go.
        session: Reaches the application,
        url: under this address.
        engine: Behind it.
        bar: Shows how far it is.
        counter: Of the engine's tokens.
    """

    def __init__(
        self,
        output: BatchOutput,
        session: aiohttp.ClientSession,
        url: str,
        engine: Engine,
        bar: "tqdm[Any]",
        counter: TokenCounter,
    ) -> None:
        self.num_good = 0
        self.num_failed = 0
        self.num_skipped = 0
        self._started: set[str] = set()
        self._output = output
        # One thread, so that lines do not mix; what it has begun to write it finishes.
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "batch-output")
        self._session = session
        self._url = url
        self._engine = engine
        self._bar = bar
        self._counter = counter

    async def run(self, lines: Iterator[InputLine], *, concurrency: int) -> None:
        """Work on all lines.

        Args:
            lines: What `input_lines` yields.
            concurrency: So many requests are sent at once.

        Raises:
            OSError: Input or output failed.
            EngineError: The engine failed.
        """
        reader = _Reader(lines)
        try:
            async with asyncio.TaskGroup() as group:
                showing = group.create_task(self._show())
                workers = [group.create_task(self._work(reader)) for _ in range(concurrency)]
                await asyncio.wait(workers)
                showing.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            reader.close()
            await asyncio.to_thread(self._writer.shutdown, cancel_futures=True)

    async def _work(self, reader: "_Reader") -> None:
        while (found := await reader.next()) is not None:
            await self._answer(*found)
            self._bar.update()

    async def _answer(self, number: int, line: bytes | LineError) -> None:
        try:
            if isinstance(line, LineError):
                raise line
            request = parse_line(line, number)
        except LineError as error:
            await self._report(error)
            return
        if not self._is_new(request.custom_id, number):
            return
        await self._write(await self._send(request))

    async def _report(self, error: LineError) -> None:
        if error.custom_id is not None:
            if not self._is_new(error.custom_id, error.number):
                return
        elif self._output.has_line(error.number):
            self.num_skipped += 1
            return
        logger.warning("line %d: %s", error.number, error.message)
        await self._write(error.as_line())
        self.num_failed += 1

    def _is_new(self, custom_id: str, number: int) -> bool:
        """Note a request's name; count it if it has an answer, or is not the first of that name."""
        if self._output.has(custom_id):
            self.num_skipped += 1
            return False
        if custom_id in self._started:
            logger.warning(
                "line %d: custom_id %r stands in an earlier line; skipped", number, custom_id[:200]
            )
            self.num_failed += 1
            return False
        self._started.add(custom_id)
        return True

    async def _write(self, line: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._output.write, line)

    async def _send(self, request: BatchRequest) -> bytes:
        headers = {"Content-Type": "application/json"}
        while True:
            url, data = self._url + request.url, bytes(request.body)
            async with self._session.post(url, data=data, headers=headers) as response:
                body = await response.read()
            if response.status == web.HTTPServiceUnavailable.status_code or not self._engine.is_accepting:
                # Whatever is answered now is no answer to this request.
                reason = self._engine.failure or body[:MAX_SHOWN_BYTES].decode(errors="replace")
                raise EngineError(f"the engine failed: {reason}")
            if response.status != web.HTTPTooManyRequests.status_code:
                break
            await asyncio.sleep(float(response.headers.get("Retry-After", RETRY_S)))
        if response.status == web.HTTPOk.status_code:
            self.num_good += 1
        else:
            self.num_failed += 1
        return answer_line(
            request,
            status=response.status,
            request_id=response.headers.get(REQUEST_ID_HEADER, ""),
            body=body,
        )

    async def _show(self) -> None:
        """Keep the rate of tokens on the bar."""
        loop = asyncio.get_running_loop()
        last_s, last_tokens = loop.time(), self._counter.num_tokens
        while True:
            await asyncio.sleep(SHOW_INTERVAL_S)
            now_s, num_tokens = loop.time(), self._counter.num_tokens
            self._bar.set_postfix_str(f"{(num_tokens - last_tokens) / (now_s - last_s):.0f} tokens/s")
            last_s, last_tokens = now_s, num_tokens


class _Reader:
    """Reads lines as they are asked for, in a thread of its own.

    The thread is a daemon: a read of standard input cannot be interrupted, and must not keep the process
    alive.
    """

    def __init__(self, lines: Iterator[InputLine]) -> None:
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[asyncio.Future[InputLine | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="batch-input", daemon=True).start()

    async def next(self) -> InputLine | None:
        """Return the next line; None after the last.

        Raises:
            OSError: The input cannot be read.
        """
        asked: asyncio.Future[InputLine | None] = self._loop.create_future()
        self._asked.put(asked)
        return await asked

    def close(self) -> None:
        """End the thread, when it is done with what it reads."""
        self._asked.put(None)

    def _read(self) -> None:
        while (asked := self._asked.get()) is not None:
            found: InputLine | None = None
            error: Exception | None = None
            try:
                found = next(self._lines, None)
            except Exception as raised:
                error = raised
            try:
                self._loop.call_soon_threadsafe(_resolve, asked, found, error)
            except RuntimeError:
                return  # the loop has ended


def _resolve(
    asked: "asyncio.Future[InputLine | None]", found: InputLine | None, error: Exception | None
) -> None:
    if asked.done():
        return  # whoever asked was cancelled
    if error is not None:
        asked.set_exception(error)
    else:
        asked.set_result(found)


def _checked_input(path: str) -> int | None:
    """Return how many lines the input has, if that can be known.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return None if path == STANDARD else count_lines(path)
    except OSError as error:
        raise ConfigError(f"cannot read the input file {path}: {error.strerror}") from error
