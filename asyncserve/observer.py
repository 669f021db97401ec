"""What the engine reports about itself, and to whom: `loop` calls an `Observer`, `metrics` is one.

Calls come once per request or once per step, never once per token. All run on the loop thread and must
return at once. Times are monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncserve.request import FinishReason
from asyncserve.step import StepOutput, StepPlan


@dataclass(slots=True)
class RequestTimeline:
    """When things happened to one sequence; None until they did. Mutable: each stage fills in its own."""

    arrived_s: float
    tokenized_s: float | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_output_len: int = 0
    prompt_is_counted: bool = False
    """The observer's own mark: a prompt is counted once, with the first token or at the end."""


@dataclass(slots=True)
class ChannelStatistics:
    """State of one bounded channel."""

    name: str
    depth: int
    capacity: int
    peak: int


@dataclass(slots=True, kw_only=True)
class EngineStatistics:
    """State of the engine at one moment, read when metrics are scraped.

    Args:
        num_running: Sequences that hold a slot.
        num_waiting: Sequences waiting for one (preempted ones included).
        num_blocks: Usable blocks of the pool.
        num_blocks_used: Blocks held by a sequence.
        num_blocks_cached: Free blocks whose content can still be reused.
        num_unapplied_steps: Steps submitted and not applied.
        prefix_cache_queries: Prompt tokens looked up so far.
        prefix_cache_hits: Of those, tokens found.
        num_preemptions: So far.
        graphs_pending: CUDA graphs that are to be captured still.
        last_progress_s: When a step was last applied, or when the engine last had nothing to do.
        channels: Every channel of the pipeline.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_unapplied_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    graphs_pending: int = 0
    last_progress_s: float = 0.0
    channels: Sequence[ChannelStatistics] = field(default_factory=tuple)


class Observer(Protocol):
    """Takes note of what happens. Implementations must not raise."""

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Note one finished step.

        Args:
            plan: What it was asked.
            output: What it gave.
            inter_token_s: For each sequence that got another token, seconds since its previous one.
            now_s: When it was applied.
        """

    def first_token(self, timeline: RequestTimeline) -> None:
        """Note that a sequence got its first token."""

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Note the end of a sequence, aborted and failed ones included; exactly once for each."""

    def request_rejected(self, error: Exception) -> None:
        """Note that a request was refused before it became a sequence."""

    def loop_lag(self, lag_s: float) -> None:
        """Note how late the event loop ran a timer."""


class NullObserver:
    """An observer that takes note of nothing."""

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Ignore it."""

    def first_token(self, timeline: RequestTimeline) -> None:
        """Ignore it."""

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Ignore it."""

    def request_rejected(self, error: Exception) -> None:
        """Ignore it."""

    def loop_lag(self, lag_s: float) -> None:
        """Ignore it."""
