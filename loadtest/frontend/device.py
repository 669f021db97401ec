"""A device side that costs nothing: every step's tokens are a slice of one long text's.

Each stream gets consecutive tokens of the text (as long as the rows stay the same), so that what is streamed
is real text: English, code, and characters of several tokens. Steps finish at the next iteration of the loop,
or `step_s` after the step before. While streams are still to come they are slow, so that all run at once.
"""

import asyncio
from collections import deque

from asyncserve.errors import EngineStopped
from asyncserve.loop.tokenizer import Tokenizer
from asyncserve.step import ExecutorInfo, StepOutput, StepPlan

TEXT = """The lighthouse keeper's daughter had never seen the mainland, but she counted its lights at night.
"There are more of them tonight," she said, and wrote the number into the book: 1,204. Her father nodded.

def mean(values: list[float]) -> float:
    \"\"\"Return the mean of at least one value.\"\"\"
    return sum(values) / len(values)

On some days the fog came early, and there was nothing to be counted. She would then read the older pages
aloud, one number after the other, as if they were a story; and in a way they were: of a town that grew.
Größe, naïve, 東京, नमस्ते, 👩‍🚀 and 🇳🇴 stood in the margins, copied from crates that the sea had brought.
The first entry was her grandmother's: 12 lights, wind from the north-west, the supply boat two days late.

for page in reversed(book):
    if page.count is None:  # fog
        continue
    print(f"{page.date:%d %B %Y}: {page.count:>6,d} lights", page.remark or "-", sep="\\t")

Nobody knew why her grandmother had begun to count, or what she had hoped to find. But when the keeper was
asked, many years later, what a lighthouse is for, he said: "So that somebody looks back." It was thought a
strange answer, and it went into the book as well, between 3,118 lights on a Friday and 3,120 on a Saturday.
"""


FILLING_STEP_S = 0.01
FILLING_STEP_PER_SLOT_S = 10e-6
"""How long a step takes while not every slot has a stream: longer than the writing of its tokens, or the
first streams would end before the last have begun."""


class ReplayDevice:
    """An `Executor` whose tokens are known beforehand.

    Args:
        info: What `start` returns.
        tokenizer: Of the text.
        step_s: Seconds between the ends of two steps; 0 for as fast as the loop turns.
    """

    def __init__(self, info: ExecutorInfo, tokenizer: Tokenizer, *, step_s: float = 0.0) -> None:
        token_ids = list(tokenizer.encode(TEXT, add_special_tokens=False))
        num_copies = 2 + info.num_slots // len(token_ids)
        self._len = len(token_ids)
        self._token_ids = num_copies * token_ids
        self._info = info
        self._step_s = step_s
        self._filling_step_s = max(step_s, FILLING_STEP_S + FILLING_STEP_PER_SLOT_S * info.num_slots)
        self._pending: deque[tuple[StepPlan, asyncio.Future[StepOutput]]] = deque()
        self._next_end_s = 0.0
        self._is_filling = True
        self._is_stopped = False

    async def start(self) -> ExecutorInfo:
        """Start at once."""
        return self._info

    def submit(self, plan: StepPlan) -> "asyncio.Future[StepOutput]":
        """Queue one step."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepOutput] = loop.create_future()
        if self._is_stopped:
            future.set_exception(EngineStopped("the executor has stopped"))
            return future
        self._pending.append((plan, future))
        if plan.admitted:
            self._is_filling = True
        if len(plan.sequences) == self._info.num_slots:
            self._is_filling = False
        step_s = self._filling_step_s if self._is_filling else self._step_s
        self._next_end_s = max(self._next_end_s, loop.time()) + step_s
        if self._next_end_s <= loop.time():
            loop.call_soon(self._finish)
        else:
            loop.call_at(self._next_end_s, self._finish)
        return future

    @property
    def graphs_pending(self) -> int:
        """None."""
        return 0

    async def restart(self) -> ExecutorInfo:
        """Nothing is lost here, and nothing to open anew."""
        return self._info

    async def stop(self) -> None:
        """Fail the steps that wait."""
        self._is_stopped = True
        while self._pending:
            _, future = self._pending.popleft()
            if not future.done():
                future.set_exception(EngineStopped("the executor has stopped"))

    def _finish(self) -> None:
        if not self._pending:
            return
        plan, future = self._pending.popleft()
        if future.done():
            return
        rows = plan.rows
        # Decode steps come first; they all sample.
        num_samples = len(rows)
        if rows and rows.lens[-1] > 1:
            num_samples = rows.num_samples
        first = plan.step_id % self._len
        future.set_result(
            StepOutput(step_id=plan.step_id, token_ids=self._token_ids[first : first + num_samples])
        )
