"""An observer that remembers every call, for tests to look at."""

import copy
from collections import Counter
from collections.abc import Sequence

from asyncserve.observer import RequestTimeline
from asyncserve.request import FinishReason
from asyncserve.step import StepOutput, StepPlan


class RecordingObserver:
    """Keeps what it was told, in order; timelines are kept as they were at the time of the call."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepPlan, StepOutput, list[float], float]] = []
        self.first_tokens: list[RequestTimeline] = []
        self.num_first_tokens = 0
        self.finished: list[tuple[RequestTimeline, FinishReason]] = []
        self.rejected: list[Exception] = []
        self.lags_s: list[float] = []
        self.stages: list[tuple[str, int, float, float]] = []

    @property
    def reasons(self) -> Counter[FinishReason]:
        """How many sequences ended for each reason."""
        return Counter(reason for _, reason in self.finished)

    @property
    def num_gaps(self) -> int:
        """How many inter-token gaps were reported over all steps."""
        return sum(len(gaps) for _, _, gaps, _ in self.steps)

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        self.steps.append((plan, output, list(inter_token_s), now_s))

    def first_token(self, timeline: RequestTimeline, num_tokens: int) -> None:
        self.first_tokens.append(copy.copy(timeline))
        self.num_first_tokens += num_tokens

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        self.finished.append((copy.copy(timeline), reason))

    def request_rejected(self, error: Exception) -> None:
        self.rejected.append(error)

    def loop_lag(self, lag_s: float) -> None:
        self.lags_s.append(lag_s)

    def stage_ran(self, stage: str, step_id: int, began_s: float, ended_s: float) -> None:
        self.stages.append((stage, step_id, began_s, ended_s))
