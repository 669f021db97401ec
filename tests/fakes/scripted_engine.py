"""An engine that says what the test wants: a `ServedEngine` without device, scheduler and grammar.

Each request gets the same answer in each choice, in the pieces it was cut into, one in each turn of the loop.
"""

import asyncio
from array import array
from collections.abc import Sequence

from asyncserve.observer import EngineStatistics
from asyncserve.request import FinishReason, OutputSink, Request, RequestOutput, Usage
from asyncserve.step import ExecutorInfo
from tests.fakes.executor import fake_info
from tests.fakes.tokenizer import FakeTokenizer

PROMPT = array("i", (1, 2, 3))


def scripted_outputs(
    pieces: Sequence[str], *, index: int = 0, reason: FinishReason = FinishReason.STOP
) -> list[RequestOutput]:
    """Return a choice's outputs: its text in pieces, a token for each, the last with its end."""
    outputs = [
        RequestOutput(index=index, text=piece, token_ids=(number % 256,))
        for number, piece in enumerate(pieces or ("",))
    ]
    outputs[-1].finish_reason = reason
    outputs[-1].usage = Usage(len(PROMPT), len(outputs), 0)
    return outputs


class ScriptedEngine:
    """Implements `ServedEngine`.

    Args:
        pieces: Of the text of each answer.
        reason: Why each answer ends.
        tokenizer: Of the model.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        reason: FinishReason = FinishReason.STOP,
        tokenizer: FakeTokenizer | None = None,
    ) -> None:
        self.info: ExecutorInfo = fake_info()
        self.tokenizer = tokenizer or FakeTokenizer()
        self.is_accepting = True
        self.failure: BaseException | None = None
        self.requests: list[Request] = []
        self._pieces = pieces
        self._reason = reason
        self._tasks: set[asyncio.Task[None]] = set()

    def pause(self, request_id: str) -> None:
        """Nothing is slow enough to be paused."""

    def resume(self, request_id: str) -> None:
        """Nothing is paused."""

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Answer a request."""
        self.requests.append(request)
        task = asyncio.get_running_loop().create_task(self._answer(request, sink))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit_all(self, requests: Sequence[Request], sinks: Sequence[OutputSink]) -> None:
        """Answer all requests of a call: there is always room."""
        for request, sink in zip(requests, sinks, strict=True):
            self.submit(request, sink)

    async def _answer(self, request: Request, sink: OutputSink) -> None:
        sink.begin(PROMPT)
        choices = [
            scripted_outputs(self._pieces, index=index, reason=self._reason)
            for index in range(request.sampling.n)
        ]
        for outputs in zip(*choices, strict=True):
            for output in outputs:
                sink.put(output)
            await asyncio.sleep(0)

    def abort(self, request_id: str) -> None:
        """Every request is done, or has nobody left who would mind."""

    def statistics(self) -> EngineStatistics:
        """Nothing to tell."""
        raise NotImplementedError
