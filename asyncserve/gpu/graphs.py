"""CUDA graphs of whole steps: which sizes there are, which have been captured, which one serves a step.

A step is replayed in two parts, up to the logits and from there to the tokens, because what stands between
for rows with penalties, masks or log-probabilities differs from step to step. Graphs are captured one by one,
when the runner is told to: largest first, so that the smaller ones find their memory in the shared pool.
Knows no plan; what is launched is the runner's.
"""

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncserve.errors import ConfigError
from asyncserve.gpu.batch import SampleRows
from asyncserve.gpu.step_inputs import StepSize

logger = logging.getLogger(__name__)

_MIXED_TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Launching a step anew takes the host some milliseconds, a step of more tokens takes the device longer."""

_MIXED_ROWS = 256
_LONG_ROWS = 16
"""Prompts, and branches that begin: one more is a program of the attention kernel more for each KV head of
each layer, in every replay. So a step in which more than 15 branches begin is launched anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """One captured size.

    Args:
        size: What it has room for.
        forward: Replays from the inputs to the logits.
        choose: Replays from the logits to the tokens, if no row has a top-k, top-p or min-p.
        choose_truncated: The same if one has.
        logits: `[size.num_rows, vocab]`, of the sampling rows; all graphs share the memory.
        rows: Of the sampling rows.
    """

    size: StepSize
    forward: Callable[[], None]
    choose: Callable[[], None]
    choose_truncated: Callable[[], None]
    logits: torch.Tensor
    rows: SampleRows


class GraphPool:
    """The graphs of a runner.

    Args:
        sizes: To be captured.
    """

    def __init__(self, sizes: Sequence[StepSize]) -> None:
        self._waiting = sorted(sizes, key=_cost)
        # Ascending, so that the first that fits is the smallest.
        self._ready: list[StepGraph] = []

    @property
    def num_pending(self) -> int:
        """Sizes not captured yet."""
        return len(self._waiting)

    @property
    def num_ready(self) -> int:
        """Sizes captured."""
        return len(self._ready)

    def capture_next(self, capture: Callable[[StepSize], StepGraph]) -> None:
        """Capture the largest size left; if that fails, but not for lack of memory, give up on all that are.

        Args:
            capture: Captures one. Not kept: who captures also owns the pool.
        """
        size = self._waiting.pop()
        try:
            graph = capture(size)
        except torch.OutOfMemoryError as error:
            # Smaller ones need less.
            logger.warning("no CUDA graph of %d rows, %d tokens: %s", size.num_rows, size.num_tokens, error)
            return
        except Exception as error:  # torch's errors and Triton's have no common base
            # Steps run without graphs, too. What could not be captured now will hardly be later.
            logger.warning(
                "no CUDA graph of %d rows and %d tokens, nor of %d smaller sizes: %s",
                size.num_rows,
                size.num_tokens,
                len(self._waiting),
                error,
            )
            self.give_up()
            return
        bisect.insort(self._ready, graph, key=lambda ready: _cost(ready.size))

    def give_up(self) -> None:
        """Capture none of those that are left."""
        self._waiting.clear()

    def find(self, size: StepSize, *, is_decode: bool) -> StepGraph | None:
        """Return the smallest captured graph that can run such a step, or None.

        Args:
            size: Of the step.
            is_decode: Whether each row is one token and samples.
        """
        for graph in self._ready:
            room = graph.size
            if (
                room.num_tokens >= size.num_tokens
                and room.num_rows >= size.num_rows
                and room.num_long_rows >= (size.num_long_rows if is_decode else max(1, size.num_long_rows))
            ):
                return graph
        return None


def _cost(size: StepSize) -> tuple[int, int, int]:
    return size.num_tokens, size.num_rows, size.num_long_rows


def decode_sizes(num_slots: int, asked: Sequence[int] | None = None) -> list[StepSize]:
    """Return the sizes of decode steps to capture: 1, 2, 4, every eighth up to 256, every sixteenth beyond.

    Args:
        num_slots: Most rows of a step; it is among the sizes itself.
        asked: Sizes instead of these; those above `num_slots` cannot occur and are left out.

    Raises:
        ConfigError: An asked size is below 1.
    """
    if asked is not None:
        if any(num < 1 for num in asked):
            raise ConfigError(f"cudagraph_capture_sizes are {list(asked)}; each must be at least 1")
        nums = {num for num in asked if num <= num_slots}
    else:
        nums = {1, 2, 4, *range(8, min(num_slots, 256) + 1, 8), *range(272, num_slots + 1, 16), num_slots}
        nums = {num for num in nums if num <= num_slots}
    return [StepSize(num_rows=num, num_tokens=num) for num in sorted(nums)]


def mixed_sizes(num_slots: int, token_budget: int) -> list[StepSize]:
    """Return the sizes of steps with prompts in them to capture; larger ones take the device long enough.

    Args:
        num_slots: Most rows of a step.
        token_budget: Most tokens of a step.
    """
    return [
        StepSize(num_rows=num_rows, num_tokens=num_tokens, num_long_rows=min(num_rows, _LONG_ROWS))
        for num_tokens in _MIXED_TOKENS
        for num_rows in sorted({min(num_slots, _LONG_ROWS), min(num_slots, _MIXED_ROWS)})
        if num_rows <= num_tokens <= token_budget
    ]
