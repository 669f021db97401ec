"""A sink that keeps what it gets, holds the caller to the rules of `OutputSink`, and can be awaited."""

import asyncio
from array import array
from collections.abc import Callable

from asyncserve.errors import AsyncserveError
from asyncserve.request import RequestOutput, merge_all


class RecordingSink:
    """Implements `OutputSink`.

    Args:
        num_choices: The request's `n`.
        wants_usage: As in the protocol.
        on_put: Called with each output after it was kept; may raise, to play a sink with a bug.
    """

    def __init__(
        self,
        num_choices: int = 1,
        *,
        wants_usage: bool = False,
        on_put: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        self.wants_usage = wants_usage
        self.prompt_token_ids: array[int] | None = None
        self.outputs: list[RequestOutput] = []
        self.error: AsyncserveError | None = None
        self._on_put = on_put
        self._open = set(range(num_choices))
        self._first_output = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended or the request failed."""
        return self._ended.is_set()

    async def wait(self) -> "RecordingSink":
        """Return when all choices have ended or the request failed."""
        await self._ended.wait()
        return self

    async def wait_first_output(self) -> None:
        """Return when something was put."""
        await self._first_output.wait()

    def choice(self, index: int = 0) -> RequestOutput:
        """All outputs of one choice as one."""
        outputs = [output for output in self.outputs if output.index == index]
        assert outputs, f"choice {index} has no output"
        return merge_all([RequestOutput(index, "", []), *outputs])

    def begin(self, prompt_token_ids: "array[int]") -> None:
        assert self.prompt_token_ids is None, "begin was called twice"
        assert not self.outputs, "begin came after an output"
        assert self.error is None, "begin came after fail"
        self.prompt_token_ids = prompt_token_ids

    def put(self, output: RequestOutput) -> None:
        assert self.prompt_token_ids is not None, "put came before begin"
        assert self.error is None, "put came after fail"
        assert output.index in self._open, f"choice {output.index} has ended or does not exist"
        self.outputs.append(output)
        self._first_output.set()
        if output.finish_reason is not None:
            self._open.discard(output.index)
        if self._on_put is not None:
            self._on_put(output)
        if not self._open:
            self._ended.set()

    def fail(self, error: AsyncserveError) -> None:
        assert self.error is None, "fail was called twice"
        assert self._open, "fail came after the last output"
        self.error = error
        self._ended.set()
