"""Decode alone, quickly: the engine driven directly, no prompt or output longer than needed.

A `StepDriver` submits a batch of prompts, waits until enough successive steps have decoded all of them, and
aborts them: what is looked at is the interval between steps, taken by a `StepRecorder`. Detokenizing and
delivery are in it, HTTP is not. Good for a look after each change; figures to be kept come from `offline`.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from asyncserve import SamplingParams
from asyncserve.config import ServerConfig
from asyncserve.errors import AsyncserveError
from asyncserve.loop.engine import Engine
from asyncserve.request import Request, RequestOutput, TokensPrompt
from asyncserve.serve import build_engine, open_model
from loadtest.figures import Row
from loadtest.gpu.extent import Extent
from loadtest.gpu.offline import bytes_per_kv_value, engine_options
from loadtest.gpu.step_record import Step, StepRecorder, decode_steps, summarize
from loadtest.model_shapes import Shape
from loadtest.workload import random_tokens

POLL_S = 0.01
LIMIT_S = 120.0


class StepDriver:
    """Lets an engine decode batches.

    Args:
        engine: Started, with `recorder` as its observer.
        recorder: Of its steps.
        shape: What it serves.
        output_len: Most tokens of an output: above what is waited for.
    """

    def __init__(self, engine: Engine, recorder: StepRecorder, shape: Shape, output_len: int) -> None:
        self._engine = engine
        self._recorder = recorder
        self._shape = shape
        self._output_len = output_len
        self._num_batches = 0

    async def wait_until_warm(self) -> None:
        """Return when no graph is left to be captured."""
        while self._engine.statistics().graphs_pending:  # noqa: ASYNC110, the engine tells nobody
            await asyncio.sleep(POLL_S)

    @asynccontextmanager
    async def decoding(
        self, batch: int, input_len: int, temperature: float = 0.0
    ) -> AsyncIterator["DecodingBatch"]:
        """Have `batch` sequences decode for the duration of the block; they are aborted then.

        Raises:
            AsyncserveError: A request was refused or failed.
            TimeoutError: They did not come to decode.
        """
        self._num_batches += 1
        samples = random_tokens(
            batch,
            input_len=input_len,
            output_len=1,
            vocab_size=self._shape.vocab_size,
            seed=f"steps {self._num_batches}",
        )
        sampling = SamplingParams(max_tokens=self._output_len, temperature=temperature, ignore_eos=True)
        running = DecodingBatch(self._recorder, batch)
        names = [f"steps-{self._num_batches}-{index}" for index in range(batch)]
        try:
            for name, sample in zip(names, samples, strict=True):
                assert not isinstance(sample.prompt, str)
                prompt = TokensPrompt(token_ids=list(sample.prompt))
                request = Request(
                    request_id=name, prompt=prompt, sampling=sampling, arrival_s=time.monotonic()
                )
                self._engine.submit(request, running)
            await running.wait(2)
            yield running
        finally:
            for name in names:
                self._engine.abort(name)
            while self._engine.statistics().num_unapplied_steps:  # noqa: ASYNC110, as above
                await asyncio.sleep(POLL_S)


class DecodingBatch:
    """The sink of a batch's outputs, which it drops, and the steps that decode all of it."""

    wants_usage = False

    def __init__(self, recorder: StepRecorder, batch: int) -> None:
        self._recorder = recorder
        self._begin = len(recorder.steps)
        self._batch = batch
        self._error: AsyncserveError | None = None

    def begin(self, prompt_token_ids: "array[int]") -> None:
        """Ignore it."""

    def put(self, output: RequestOutput) -> None:
        """Drop it."""
        self._error = self._error or output.error

    def fail(self, error: AsyncserveError) -> None:
        """Keep it for whoever waits."""
        self._error = error

    @property
    def steps(self) -> list[Step]:
        """The steps so far that decoded the whole batch, one after the other."""
        return decode_steps(self._recorder.steps[self._begin :], self._batch)

    async def wait(self, count: int) -> list[Step]:
        """Return the steps when there are that many.

        Raises:
            AsyncserveError: A sequence failed.
            TimeoutError: They do not come.
        """
        deadline_s = time.monotonic() + LIMIT_S
        while len(steps := self.steps) < count:
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"only {len(steps)} steps of {self._batch} rows in {LIMIT_S:g} s")
            await asyncio.sleep(POLL_S)
        return steps


@asynccontextmanager
async def running_driver(
    shape: Shape, tokenizer: str, extent: Extent, further: Mapping[str, Any]
) -> AsyncIterator[StepDriver]:
    """Run an engine of random weights for the duration of the block; its graphs are captured first."""
    options = engine_options(extent, {"tokenizer": tokenizer, **further})
    config = ServerConfig(model=str(shape.folder), **options)
    config.validate()
    recorder = StepRecorder()
    engine = build_engine(config, open_model(config), recorder)
    await engine.start()
    try:
        output_len = engine.info.max_model_len - extent.decode_input_len
        driver = StepDriver(engine, recorder, shape, output_len)
        await driver.wait_until_warm()
        yield driver
    finally:
        await engine.stop()


def measure(
    shape: Shape,
    tokenizer: str,
    extent: Extent,
    *,
    further: Mapping[str, Any],
    batches: Sequence[int],
    num_steps: int,
    temperature: float = 0.0,
) -> Iterator[Row]:
    """Give one row per batch size: the figures of `num_steps` successive decode steps."""

    async def rows() -> AsyncIterator[Row]:
        async with running_driver(shape, tokenizer, extent, further) as driver:
            for batch in batches:
                async with driver.decoding(batch, extent.decode_input_len, temperature) as running:
                    steps = await running.wait(num_steps)
                figures = summarize(steps[-num_steps:])
                assert figures is not None
                context_len = extent.decode_input_len + len(steps) - num_steps / 2
                yield {
                    "kind": "steps",
                    "batch": batch,
                    "context_len": context_len,
                    "temperature": temperature,
                    "floor_bytes": shape.step_bytes(
                        batch, context_len, bytes_per_kv_value=bytes_per_kv_value(further)
                    ),
                    "steps": figures._asdict(),
                }

    yield from one_by_one(rows())


def one_by_one(rows: AsyncIterator[Row]) -> Iterator[Row]:
    """Run an event loop until it gives a row, hand that on, and so on: no row waits for the next."""

    async def following() -> Row | None:
        return await anext(rows, None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while (row := runner.run(following())) is not None:
            yield row
