"""The last steps and the last minutes of the engine, kept for whoever looks at the live page.

Takes the engine's calls as an `Observer`; keeps one small tuple for each of the last steps and one for each
of the last seconds. A step costs about a microsecond, however many tokens it has: of its gaps between tokens
only a few are looked at, evenly chosen. Percentiles are made once a second, of a bounded sample. Knows no
viewers: `sampler.py` asks it a few times a second when there are some.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncserve.observer import RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import StepOutput, StepPlan

NUM_STEPS = 120
"""Steps that are kept."""
NUM_SECONDS = 180
"""Seconds that are kept."""
GAPS_PER_STEP = 8
"""Gaps between tokens that are looked at in each step, at most."""
SAMPLE_LEN = 512
"""Values of one second that percentiles are made of, at most."""


class StepRecord(NamedTuple):
    """One step, as the page gets it. A prompt's chunk of one token counts as decode."""

    number: int
    prefill_tokens: int
    decode_tokens: int
    device_us: int
    idle_us: int


class SecondRecord(NamedTuple):
    """One second that is over, as the page gets it. What was not measured in it is None."""

    number: int
    prefill_tokens: int
    output_tokens: int
    steps: int
    device_ms: float
    idle_ms: float
    lag_ms: float | None
    first_token_p50_ms: float | None
    first_token_p99_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None


class Totals(NamedTuple):
    """Counts since the server was built, as the page gets them; of sequences, by how they ended.

    Those whose time was over are not among the aborted: the engine's statistics count their requests.
    """

    steps: int
    prefill_tokens: int
    output_tokens: int
    stopped: int
    cut_by_length: int
    aborted: int
    failed: int
    refused: int


class Sample:
    """Values of one second, evenly thinned out when they become too many."""

    __slots__ = ("_num_offered", "_stride", "_values")

    def __init__(self) -> None:
        self._values: list[float] = []
        self._num_offered = 0
        self._stride = 1

    def offer(self, values: Sequence[float]) -> None:
        """Take values, of one step or request, or pass them over."""
        self._num_offered += 1
        if self._num_offered % self._stride == 0:
            self._values += values
            if len(self._values) > SAMPLE_LEN:
                del self._values[::2]
                self._stride *= 2

    def percentiles_ms(self) -> tuple[float | None, float | None]:
        """Return the median and the 99th percentile of seconds, in milliseconds."""
        values = sorted(self._values)
        if not values:
            return None, None
        last = len(values) - 1
        return round(values[last // 2] * 1e3, 3), round(values[round(last * 0.99)] * 1e3, 3)


class PipelineRecorder:
    """An `Observer` that remembers the last steps and minutes.

    Args:
        clock: Monotonic seconds, the engine's clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=NUM_STEPS)
        """Oldest first."""
        self.seconds: deque[SecondRecord] = deque(maxlen=NUM_SECONDS)
        """Those that are over, oldest first, without gaps."""
        self._clock = clock
        self._started_s = clock()
        self._finished = dict.fromkeys(FinishReason, 0)
        self._num_refused = 0
        self._num_steps = self._num_prefill_tokens = self._num_output_tokens = 0
        self._lag_s: float | None = None
        self._begin_second(0)

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Note one finished step; see `Observer`."""
        if now_s >= self._second_ends_s:
            self.advance(now_s)
        num_prefill = 0
        rows = plan.rows
        if rows:
            num_decode = len(rows)
            # Prompts stand last, so that a step of nothing but decode shows it at a glance.
            if plan.admitted or rows.lens[-1] > 1:
                chunks = [num_tokens for num_tokens in rows.lens if num_tokens > 1]
                num_prefill = sum(chunks)
                num_decode -= len(chunks)
            self._num_steps += 1
            self._num_prefill_tokens += num_prefill
            device_us, idle_us = int(output.device_s * 1e6), int(output.idle_s * 1e6)
            self._device_us += device_us
            self.steps.append(StepRecord(self._num_steps, num_prefill, num_decode, device_us, idle_us))
        self._idle_s += output.idle_s
        num_gaps = len(inter_token_s)
        if num_gaps:
            self._num_output_tokens += num_gaps
            self._gaps.offer(inter_token_s[:: -(-num_gaps // GAPS_PER_STEP)])

    def first_token(self, timeline: RequestTimeline, num_tokens: int) -> None:
        """Note that a sequence got its first token; see `Observer`."""
        self._num_output_tokens += num_tokens
        if timeline.first_token_s is not None:
            self._first_tokens.offer((timeline.first_token_s - timeline.arrived_s,))

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Note the end of a sequence."""
        if not timeline.missed_deadline:
            self._finished[reason] += 1

    def request_rejected(self, error: Exception) -> None:
        """Note that a request was refused."""
        self._num_refused += 1

    def loop_lag(self, lag_s: float) -> None:
        """Note how late the event loop ran a timer, and that time passes when nothing else happens."""
        self.advance(self._clock())
        self._lag_s = max(lag_s, self._lag_s or 0.0)

    def stage_ran(self, stage: str, step_id: int, began_s: float, ended_s: float) -> None:
        """Ignore it."""

    def advance(self, now_s: float) -> None:
        """End the seconds that are over."""
        number = int(now_s - self._started_s)
        if number <= self._second:
            return
        before = self._at_second_begin
        self.seconds.append(
            SecondRecord(
                self._second,
                self._num_prefill_tokens - before[0],
                self._num_output_tokens - before[1],
                self._num_steps - before[2],
                self._device_us / 1e3,
                round(self._idle_s * 1e3, 3),
                None if self._lag_s is None else round(self._lag_s * 1e3, 3),
                *self._first_tokens.percentiles_ms(),
                *self._gaps.percentiles_ms(),
            )
        )
        for silent in range(max(self._second + 1, number - NUM_SECONDS), number):
            self.seconds.append(SecondRecord(silent, 0, 0, 0, 0.0, 0.0, None, None, None, None, None))
        self._begin_second(number)

    def totals(self) -> Totals:
        """Return the counts of this moment."""
        return Totals(
            steps=self._num_steps,
            prefill_tokens=self._num_prefill_tokens,
            output_tokens=self._num_output_tokens,
            stopped=self._finished[FinishReason.STOP],
            cut_by_length=self._finished[FinishReason.LENGTH],
            aborted=self._finished[FinishReason.ABORT],
            failed=self._finished[FinishReason.ERROR],
            refused=self._num_refused,
        )

    def _begin_second(self, number: int) -> None:
        self._second = number
        self._second_ends_s = self._started_s + number + 1
        self._at_second_begin = (self._num_prefill_tokens, self._num_output_tokens, self._num_steps)
        self._device_us = 0
        self._idle_s = 0.0
        self._lag_s = None
        self._first_tokens = Sample()
        self._gaps = Sample()
