"""An engine whose device, tokenizer and observer are fakes, with what tests need to drive it step by step."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from asyncserve.loop.engine import Engine
from asyncserve.request import OutputSink, Prompt, Request, SamplingParams, TextPrompt
from asyncserve.step import ExecutorInfo
from tests.fakes.executor import FakeExecutor, NextToken, fake_info
from tests.fakes.observer import RecordingObserver
from tests.fakes.sink import RecordingSink
from tests.fakes.tokenizer import FakeTokenizer

VOCAB_SIZE = 512


@dataclass
class Bench:
    """An engine with all its fakes."""

    engine: Engine
    executor: FakeExecutor
    tokenizer: FakeTokenizer
    observer: RecordingObserver

    def send(
        self,
        prompt: Prompt | str,
        request_id: str = "r",
        *,
        sink: OutputSink | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> RecordingSink:
        """Submit a request and return its sink."""
        asked = request(prompt, request_id, priority=priority, **sampling)
        recording = sink or RecordingSink(asked.sampling.n)
        self.engine.submit(asked, recording)
        return recording  # type: ignore[return-value]

    async def turn(self, num_turns: int = 12) -> None:
        """Let every stage do what it can."""
        for _ in range(num_turns):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until something is the case."""
        while not condition():
            assert self.engine.failure is None, f"the engine died of {self.engine.failure!r}"
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Let everything in flight come to its end, and find nothing left."""
        self.executor.resume()
        await self.until(lambda: self.engine.statistics().num_unapplied_steps == 0)
        # An aborted prompt that a thread is encoding is waited for, too: only then is it counted no more.
        await self.until(lambda: self.engine.statistics().num_waiting == 0)
        await self.turn()
        self.engine.check()
        statistics = self.engine.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.num_blocks_used) == (0, 0, 0)
        assert [channel.depth for channel in statistics.channels] == [0] * len(statistics.channels)


@asynccontextmanager
async def bench(
    info: ExecutorInfo | None = None,
    *,
    next_token: NextToken | None = None,
    executor: Any = None,
    tokenizer: FakeTokenizer | None = None,
    settles: bool = True,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A started engine; at the end it must have nothing left, unless `settles` is false.

    `executor`, if given, replaces the fake one that is made otherwise.
    """
    executor = executor or FakeExecutor(info or fake_info(vocab_size=VOCAB_SIZE), next_token=next_token)
    tokenizer = tokenizer or FakeTokenizer(vocab_size=VOCAB_SIZE)
    observer = RecordingObserver()
    engine = Engine(executor=executor, tokenizer=tokenizer, observer=observer, **options)
    await engine.start()
    subject = Bench(engine, executor, tokenizer, observer)
    try:
        yield subject
        if settles:
            await subject.settle()
    finally:
        await engine.stop()
    if isinstance(executor, FakeExecutor):
        assert executor.is_stopped
    lanes = ("tokenize", "compile-grammar")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(lanes)]


def request(
    prompt: Prompt | str,
    request_id: str = "r",
    *,
    priority: int = 0,
    max_tokens: int | None = 6,
    ignore_eos: bool = True,
    **sampling: Any,
) -> Request:
    """A request with few tokens that no EOS ends."""
    return Request(
        request_id=request_id,
        prompt=TextPrompt(text=prompt) if isinstance(prompt, str) else prompt,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),
        arrival_s=0.0,
        priority=priority,
    )
