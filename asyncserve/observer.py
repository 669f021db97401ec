"""What the engine reports about itself, and to whom: `loop` calls an `Observer`, `metrics` is one.

Calls come once per request or once per step, never once per token. All run on the loop thread and must
return at once. Times are monotonic seconds.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncserve.request import FinishReason, Request
from asyncserve.step import StepOutput, StepPlan

logger = logging.getLogger(__name__)


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
    request: Request | None = None
    """Whose sequence it is."""
    missed_deadline: bool = False
    """It was aborted since the time for the answer was over."""


@dataclass(slots=True)
class ChannelStatistics:
    """State of one bounded channel."""

    name: str
    depth: int
    capacity: int
    peak: int


@dataclass(slots=True, kw_only=True)
class KVGroupStatistics:
    """What one KV group has of the pool that all share.

    Args:
        group_id: Its index in `ExecutorInfo.kv_groups`.
        num_blocks_used: Blocks held by a sequence.
        num_blocks_cached: Free blocks whose content can still be reused.
        num_slots: Tokens that the used blocks have room for; 0 for a group that keeps states.
        num_slots_unused: Of those, the ones behind the last token of a sequence: allocated, and empty.
    """

    group_id: int
    num_blocks_used: int
    num_blocks_cached: int
    num_slots: int
    num_slots_unused: int


@dataclass(slots=True, kw_only=True)
class EngineStatistics:
    """State of the engine at one moment, read when metrics are scraped.

    Args:
        num_running: Sequences that hold a slot.
        num_waiting: Sequences waiting for one (preempted ones included).
        num_waiting_tokens: Their tokens, estimated where a prompt is not encoded yet.
        num_paused: Sequences that rest because their client does not read.
        num_pauses: Times a sequence was paused, so far.
        num_deadlines_missed: Requests that were ended because their time was over, so far.
        num_blocks: Usable blocks of the pool.
        num_blocks_used: Blocks held by a sequence.
        num_blocks_cached: Free blocks whose content can still be reused.
        num_host_blocks: Blocks of the host's memory that KV blocks can be stored in.
        num_host_blocks_used: Of those, blocks of preempted sequences that will come back.
        num_host_blocks_cached: Of those, other blocks whose content can be loaded.
        num_swapped: Sequences that wait with their blocks on the host.
        num_swaps: Times a preempted sequence's blocks were kept on the host, so far.
        host_stored_bytes: Stored there so far.
        host_loaded_bytes: Loaded from there so far.
        host_cache_queries: Tokens looked up there since they were not cached on the device, so far.
        host_cache_hits: Of those, tokens found.
        num_blocks_saved: Blocks that would be held beyond those that are, if sequences shared none.
        num_copied_blocks: Blocks that branches have got copies of, so far.
        num_window_blocks_freed: Blocks that running sequences let go of, because a window had passed them.
        kv_groups: What each KV group has of them.
        num_unapplied_steps: Steps submitted and not applied.
        prefix_cache_queries: Prompt tokens looked up so far.
        prefix_cache_hits: Of those, tokens found.
        num_preemptions: So far.
        graphs_pending: CUDA graphs that are to be captured still.
        last_progress_s: When a step was last applied, or when the engine last had nothing to do.
        num_failed_steps: Steps that raised, so far.
        num_retried_steps: Steps that computed again what failed ones should have, so far.
        num_replayed_sequences: Times a sequence was set back to its known tokens, by a failed step or a lost
            device, so far.
        num_failed_sequences: Sequences ended because a step of theirs alone, or of another of their request,
            failed or lost the device, so far.
        num_device_restarts: Times the device was opened anew, so far.
        num_explained_losses: Times it was lost by the fault of one request, perhaps one that left.
        device_is_lost: It is being opened anew now.
        channels: Every channel of the pipeline.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_paused: int = 0
    num_pauses: int = 0
    num_deadlines_missed: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    num_host_blocks_cached: int = 0
    num_swapped: int = 0
    num_swaps: int = 0
    host_stored_bytes: int = 0
    host_loaded_bytes: int = 0
    host_cache_queries: int = 0
    host_cache_hits: int = 0
    num_blocks_saved: int = 0
    num_copied_blocks: int = 0
    num_window_blocks_freed: int = 0
    kv_groups: Sequence[KVGroupStatistics] = field(default_factory=tuple)
    num_unapplied_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    graphs_pending: int = 0
    last_progress_s: float = 0.0
    num_failed_steps: int = 0
    num_retried_steps: int = 0
    num_replayed_sequences: int = 0
    num_failed_sequences: int = 0
    num_device_restarts: int = 0
    num_explained_losses: int = 0
    device_is_lost: bool = False
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

    def first_token(self, timeline: RequestTimeline, num_tokens: int) -> None:
        """Note that a sequence got its first token.

        Args:
            timeline: Of the sequence.
            num_tokens: How many came at once, this one included: all of a text that a beam search has found.
        """

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Note the end of a sequence, aborted and failed ones included; exactly once for each."""

    def request_rejected(self, error: Exception) -> None:
        """Note that a request was refused before it became a sequence."""

    def loop_lag(self, lag_s: float) -> None:
        """Note how late the event loop ran a timer."""

    def stage_ran(self, stage: str, step_id: int, began_s: float, ended_s: float) -> None:
        """Note that a stage had the event loop for a step's sake, once or a few times per step.

        Args:
            stage: apply, plan, submit or detokenize.
            step_id: Of its plan.
            began_s: When it began.
            ended_s: When it gave the loop back.
        """


class NullObserver:
    """An observer that takes note of nothing."""

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Ignore it."""

    def first_token(self, timeline: RequestTimeline, num_tokens: int) -> None:
        """Ignore it."""

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Ignore it."""

    def request_rejected(self, error: Exception) -> None:
        """Ignore it."""

    def loop_lag(self, lag_s: float) -> None:
        """Ignore it."""

    def stage_ran(self, stage: str, step_id: int, began_s: float, ended_s: float) -> None:
        """Ignore it."""


class ObserverGroup:
    """Hands every call to each of several observers, in order.

    One that raises, which it must not, is logged the first time. The engine and the other observers do not
    feel it, and it is called again the next time.

    Args:
        observers: Who is told; more may be added.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)
        self._reported: set[int] = set()

    def add(self, observer: Observer) -> None:
        """Tell one more observer from now on."""
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Tell an observer nothing more; nothing happens if it is not told now."""
        self._observers = tuple(each for each in self._observers if each is not observer)

    def step_applied(
        self, plan: StepPlan, output: StepOutput, inter_token_s: Sequence[float], now_s: float
    ) -> None:
        """Hand it on."""
        for observer in self._observers:
            try:
                observer.step_applied(plan, output, inter_token_s, now_s)
            except Exception:
                self._note_raised(observer)

    def first_token(self, timeline: RequestTimeline, num_tokens: int) -> None:
        """Hand it on."""
        for observer in self._observers:
            try:
                observer.first_token(timeline, num_tokens)
            except Exception:
                self._note_raised(observer)

    def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        """Hand it on."""
        for observer in self._observers:
            try:
                observer.request_finished(timeline, reason)
            except Exception:
                self._note_raised(observer)

    def request_rejected(self, error: Exception) -> None:
        """Hand it on."""
        for observer in self._observers:
            try:
                observer.request_rejected(error)
            except Exception:
                self._note_raised(observer)

    def loop_lag(self, lag_s: float) -> None:
        """Hand it on."""
        for observer in self._observers:
            try:
                observer.loop_lag(lag_s)
            except Exception:
                self._note_raised(observer)

    def stage_ran(self, stage: str, step_id: int, began_s: float, ended_s: float) -> None:
        """Hand it on."""
        for observer in self._observers:
            try:
                observer.stage_ran(stage, step_id, began_s, ended_s)
            except Exception:
                self._note_raised(observer)

    def _note_raised(self, observer: Observer) -> None:
        """Log what an observer raised, once: called from its except clause."""
        if id(observer) in self._reported:
            return
        self._reported.add(id(observer))
        logger.exception("an observer raised; it is told further, and not heard again: %r", observer)
