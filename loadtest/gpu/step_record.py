"""What the engine told of its steps, and what follows: time per token, device time, idle share.

A `StepRecorder` is an observer that keeps one short tuple a step. `decode_steps` picks those that did nothing
but decode a batch of one size; `summarize` puts steps into figures. Times are as the device side gives them,
intervals are between the moments at which two successive steps were applied.
"""

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncserve.observer import NullObserver
from asyncserve.step import StepOutput, StepPlan


class Step(NamedTuple):
    """One step.

    Args:
        num_tokens: Positions computed.
        num_sequences: Rows.
        device_s: Seconds the device worked on it.
        launch_s: Seconds the host took to prepare and launch it.
        idle_s: Seconds the device had nothing to do before it.
        applied_s: When its results were taken, monotonic seconds.
    """

    num_tokens: int
    num_sequences: int
    device_s: float
    launch_s: float
    idle_s: float
    applied_s: float

    @property
    def is_decode(self) -> bool:
        """Whether every row computed one token."""
        return self.num_tokens == self.num_sequences


class StepRecorder(NullObserver):
    """Keeps every step.

    Attributes:
        steps: In the order applied; appended to by the engine's loop, may be read at any time.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Keep it."""
        if plan.sequences:
            step = Step(
                plan.num_tokens,
                len(plan.sequences),
                output.device_s,
                output.launch_s,
                output.idle_s,
                now_s,
            )
            self.steps.append(step)


class StepFigures(NamedTuple):
    """Steps in figures.

    Args:
        num_steps: How many.
        interval_ms: Median from one to the next; None for a single step.
        interval_p99_ms: Of the same.
        device_ms: Median time of the device.
        launch_ms: Median time of the host.
        idle_share: Of the time of the device, idle and not, that it was idle.
    """

    num_steps: int
    interval_ms: float | None
    interval_p99_ms: float | None
    device_ms: float
    launch_ms: float
    idle_share: float


def decode_steps(steps: Sequence[Step], batch: int) -> list[Step]:
    """Return the longest run of successive steps that decode exactly `batch` rows, its first left out.

    What is left out still waited for the step before, which did something else.
    """
    longest: list[Step] = []
    run: list[Step] = []
    for step in steps:
        if step.is_decode and step.num_sequences == batch:
            run.append(step)
            if len(run) > len(longest):
                longest = run
        else:
            run = []
    return longest[1:]


def summarize(steps: Sequence[Step]) -> StepFigures | None:
    """Return the figures of successive steps; None if there are none."""
    if not steps:
        return None
    gaps_ms = [1e3 * (later.applied_s - earlier.applied_s) for earlier, later in itertools.pairwise(steps)]
    device_s = sum(step.device_s for step in steps)
    idle_s = sum(step.idle_s for step in steps)
    return StepFigures(
        num_steps=len(steps),
        interval_ms=statistics.median(gaps_ms) if gaps_ms else None,
        interval_p99_ms=float(np.percentile(gaps_ms, 99)) if gaps_ms else None,
        device_ms=1e3 * statistics.median(step.device_s for step in steps),
        launch_ms=1e3 * statistics.median(step.launch_s for step in steps),
        idle_share=idle_s / (idle_s + device_s) if idle_s + device_s else 0.0,
    )
