"""The rows of one beam search: sequences that the scheduler moves as one.

`BeamRows` holds a request's sequences while they search together, with what the search has found
(`beam_search`). They wait, enter slots, sample, are preempted, paused, tried and ended together; the first
stands for all where one is asked for, in the order of service as among suspects. Knows no plan and no blocks.

At first all rows have the same tokens: the first computes the prompt; the step that computes its last token,
in which the others are branches, gives every row its first token. Rows that come back
after a preemption each compute their own known tokens, but for the last, and then sample together.
"""

from array import array
from collections.abc import Sequence

from asyncserve.loop.beam_search import BeamSearch, Hypothesis
from asyncserve.loop.sequence import SequenceState, SequenceStatus
from asyncserve.request import FinishReason, TokenDelta
from asyncserve.step import BeamAssignment, BeamCandidate


class BeamRows:
    """One search and its rows.

    Args:
        first: Its first row; the others are added as they come.

    Attributes:
        rows: By `beam_idx`.
        search: What is known of the search: it holds the rows' outputs and scores.
        search_id: What the device knows it by; another one each time it enters slots.
        has_sampled: Whether a step that samples has been planned since it entered slots.
        has_bad_logits: Whether the step being applied had logits that are not finite.
    """

    __slots__ = ("has_bad_logits", "has_sampled", "rows", "search", "search_id", "width")

    def __init__(self, first: SequenceState) -> None:
        sampling = first.tokenized.request.sampling
        self.width = sampling.num_sequences
        self.rows = [first]
        self.search = BeamSearch(
            width=self.width,
            max_output_len=first.tokenized.max_output_len,
            stop_token_ids=first.stop_token_ids,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
        )
        self.search_id = -1
        self.has_sampled = False
        self.has_bad_logits = False

    @property
    def first(self) -> SequenceState:
        """The row that stands for all."""
        return self.rows[0]

    @property
    def can_start(self) -> bool:
        """Whether all rows are there and wait, holding nothing."""
        return len(self.rows) == self.width and all(
            row.status is SequenceStatus.WAITING and row.slot < 0 for row in self.rows
        )

    @property
    def begins(self) -> bool:
        """Whether no step that samples was planned yet: the first row computes the prompt for all."""
        return self.search.output_len == 0 and not self.has_sampled

    @property
    def computing_rows(self) -> list[SequenceState]:
        """The rows that compute what they know for themselves."""
        return self.rows[:1] if self.begins else self.rows

    @property
    def is_ready(self) -> bool:
        """Whether what is left to compute before all rows can sample is one token each."""
        return all(
            row.num_computed_tokens == len(row.token_ids) + row.num_unseen_tokens - 1
            for row in self.computing_rows
        )

    def enter(self, search_id: int) -> None:
        """Note that the rows are about to enter slots."""
        self.search_id = search_id
        self.has_sampled = False

    def assignment(self, row: SequenceState) -> BeamAssignment:
        """Return what the device is told of a row."""
        beam_idx = self.rows.index(row)
        return BeamAssignment(self.search_id, beam_idx, self.width, self.search.scores[beam_idx])

    def advance(self, candidates: Sequence[BeamCandidate]) -> list[int]:
        """Account for a step and give the rows their tokens; return which row each goes on from."""
        survivors = self.search.advance(candidates)
        for row, outputs in zip(self.rows, self.search.rows, strict=True):
            row.token_ids = row.tokenized.prompt_token_ids + outputs
        return [survivor.parent for survivor in survivors]

    def results(self) -> list[TokenDelta]:
        """Return the result that each row becomes, best first; where there are too few it is missing."""
        found: list[Hypothesis | None] = [*self.search.results(self.width)]
        found += [None] * (self.width - len(found))
        return [_delta(row, hypothesis) for row, hypothesis in zip(self.rows, found, strict=True)]


def _delta(row: SequenceState, hypothesis: Hypothesis | None) -> TokenDelta:
    outputs: array[int] = array("i") if hypothesis is None else hypothesis.token_ids
    row.token_ids = row.tokenized.prompt_token_ids + outputs
    if hypothesis is None:
        return TokenDelta(
            row.sequence_id,
            (),
            finish_reason=FinishReason.MISSING,
            num_cached_tokens=row.num_cached_tokens,
        )
    is_stopped = hypothesis.stop_token_id is not None
    return TokenDelta(
        row.sequence_id,
        tuple(outputs),
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        stop_token_id=hypothesis.stop_token_id,
        num_cached_tokens=row.num_cached_tokens,
    )
