"""One beam search as the host follows it: which rows go on, what is finished, when it is over, who wins.

Takes each step's best candidates (`step.BeamCandidate`, best first) and gives the rows that go on, which are
those the device has chosen itself. Pure; knows no blocks, slots or text.

What is chosen is what transformers' beam search chooses (5.x), whose defaults are these:

* of a step's candidates the first `width` without a stop token go on;
* those of the first `width` with a stop token are finished: the `width` best finished ones are kept, by
  `log_probability / length ** length_penalty`, the stop token counted, the prompt not;
* `early_stopping` False: it is over when `width` are finished and the best row, as if it ended now, is no
  better than the worst of them. "never" compares instead what the best row could reach at full length, if
  longer is better. True: it is over as soon as `width` are finished;
* at full length the first `width` candidates are finished, whatever their tokens.

vLLM differs: its length counts the prompt and leaves out the EOS, and it goes on to full length always.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from asyncserve.errors import InvariantError
from asyncserve.request import EarlyStopping
from asyncserve.step import BeamCandidate


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text.

    Args:
        token_ids: Its outputs; a stop token that ended it is the last.
        log_probability: Sum over its outputs.
        score: What it is ranked by.
        stop_token_id: The stop token that ended it; None if its length did.
    """

    token_ids: "array[int]"
    log_probability: float
    score: float
    stop_token_id: int | None


class BeamSearch:
    """One search, from its first step to its results.

    Args:
        width: Rows, at least 1.
        max_output_len: Outputs at which every row ends, at least 1.
        stop_token_ids: Tokens that end a row.
        length_penalty: Above 0 longer texts are preferred, below 0 shorter ones.
        early_stopping: When it is over.

    Attributes:
        width: As given.
        rows: Per row the outputs it has, all of one length.
        scores: Per row the sum of their log-probabilities. Before the first step only row 0 counts.
        is_done: Whether the results are final.
    """

    __slots__ = (
        "_early_stopping",
        "_finished",
        "_length_penalty",
        "_max_output_len",
        "_stop_token_ids",
        "is_done",
        "rows",
        "scores",
        "width",
    )

    def __init__(
        self,
        *,
        width: int,
        max_output_len: int,
        stop_token_ids: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.width = width
        self.rows: list[array[int]] = [array("i") for _ in range(width)]
        self.scores = [0.0] + [-math.inf] * (width - 1)
        self.is_done = False
        self._max_output_len = max_output_len
        self._stop_token_ids = stop_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._finished: list[Hypothesis] = []  # the best first, at most `width`

    @property
    def output_len(self) -> int:
        """Outputs of every row."""
        return len(self.rows[0])

    @property
    def has_found_nothing(self) -> bool:
        """Whether nothing is finished yet."""
        return not self._finished

    def advance(self, candidates: Sequence[BeamCandidate]) -> list[BeamCandidate]:
        """Account for one step.

        Args:
            candidates: The step's, as in `StepOutput.beams`. What nothing allows has a score of `-inf`.

        Returns:
            What each row is from now on, `width` of them, also when the search is done with this step.

        Raises:
            InvariantError: It is done already, or there are too few candidates without a stop token.
        """
        if self.is_done:
            raise InvariantError("a beam search is given candidates after its end")
        stops = self._stop_token_ids
        survivors = [each for each in candidates if each.token_id not in stops][: self.width]
        if len(survivors) < self.width:
            raise InvariantError(f"{len(survivors)} candidates go on with a beam search of {self.width} rows")
        length = self.output_len + 1
        is_last = length >= self._max_output_len
        for candidate in candidates[: self.width]:
            if (is_last or candidate.token_id in stops) and candidate.score > -math.inf:
                self._finish(candidate, length)
        if len(self._finished) > self.width:
            self._finished.sort(key=_score, reverse=True)  # of equal ones those finished first
            del self._finished[self.width :]
        self.rows = [self.rows[survivor.parent] + array("i", (survivor.token_id,)) for survivor in survivors]
        self.scores = [survivor.score for survivor in survivors]
        self.is_done = is_last or not self._can_improve(length)
        return survivors

    def results(self, num: int) -> list[Hypothesis]:
        """Return the best of what is finished, best first.

        Fewer than `num`, which is at most `width`, only if restrictions of the output allow no more. Then
        transformers fills up with texts of what is forbidden; vLLM, as this one, returns what there is.
        """
        return sorted(self._finished, key=_score, reverse=True)[:num]

    def _finish(self, candidate: BeamCandidate, length: int) -> None:
        token_id = candidate.token_id
        self._finished.append(
            Hypothesis(
                token_ids=self.rows[candidate.parent] + array("i", (token_id,)),
                log_probability=candidate.score,
                score=self._score_of(candidate.score, length),
                stop_token_id=token_id if token_id in self._stop_token_ids else None,
            )
        )

    def _can_improve(self, length: int) -> bool:
        """Return whether going on may still change the results."""
        best = self.scores[0]
        if best == -math.inf:
            return False
        if len(self._finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            length = self._max_output_len
        worst = min(map(_score, self._finished))
        return self._score_of(best, length) > worst

    def _score_of(self, log_probability: float, length: int) -> float:
        divisor: float = length**self._length_penalty
        return log_probability / divisor


def _score(hypothesis: Hypothesis) -> float:
    return hypothesis.score
