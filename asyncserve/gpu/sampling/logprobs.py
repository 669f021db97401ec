"""Log-probabilities under the model's own distribution: before bias, penalties, temperature and truncation.

Takes raw logits of the rows that asked and nothing else. Tensors stay on the device until someone reads
the result, which is when the host values are built: after the step's event, so nobody waits.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from asyncserve.gpu.sampling.selection import largest
from asyncserve.request import TokenLogprobs

_ROWS_AT_ONCE = 64


class ScoredTokens:
    """Log-probability, rank and likeliest rivals of one token per row, still on the device.

    Args:
        logits: `[num_rows, vocab] float32`, as the model gave them; may hold minus infinity.
        token_ids: `[num_rows] int64`, the token of each row; a negative one is scored as 0.
        num_top: How many likeliest tokens to find, 0 for none.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> None:
        self._token_ids = token_ids
        log_total = logits.logsumexp(dim=1)
        logit = logits.gather(1, token_ids.clamp(min=0).unsqueeze(1))
        self._ranks = (logits >= logit).sum(dim=1)
        self._logprobs = logit.squeeze(1) - log_total
        self._top_ids: Tensor | None = None
        if num_top:
            values, self._top_ids = largest(logits, min(num_top, logits.shape[1]))
            self._top_logprobs = values - log_total.unsqueeze(1)

    def build(self, nums: Sequence[int]) -> list[TokenLogprobs]:
        """Copy to the host: one entry per row, row `i` with `nums[i]` likeliest tokens (at most `num_top`).

        Equally likely ones stand in the order of their ids.
        """
        token_ids, logprobs, ranks = self._token_ids.tolist(), self._logprobs.tolist(), self._ranks.tolist()
        if self._top_ids is None:
            return [
                TokenLogprobs(token_id, logprob, rank, ())
                for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True)
            ]
        top_ids, top_logprobs = self._top_ids.tolist(), self._top_logprobs.tolist()
        tops = map(_ordered, top_ids, top_logprobs, nums)
        return list(map(TokenLogprobs, token_ids, logprobs, ranks, tops))


class StepLogprobs(Mapping[int, TokenLogprobs]):
    """Slot → log-probabilities of its sampled token, built when first looked at.

    A slot whose logits were not finite has none. Read it when the step is done: reading waits for the
    device.

    Args:
        slots: The slots that asked.
        nums: How many likeliest tokens each asked for.
        scored: Their sampled tokens, in the order of `slots`.
    """

    def __init__(self, slots: Sequence[int], nums: Sequence[int], scored: ScoredTokens) -> None:
        self._slots = slots
        self._nums = nums
        self._scored = scored
        self._built: dict[int, TokenLogprobs] | None = None

    def __getitem__(self, slot: int) -> TokenLogprobs:
        return self._by_slot()[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_slot())

    def __len__(self) -> int:
        return len(self._by_slot())

    def _by_slot(self) -> dict[int, TokenLogprobs]:
        if self._built is None:
            entries = self._scored.build(self._nums)
            self._built = {
                slot: entry for slot, entry in zip(self._slots, entries, strict=True) if entry.token_id >= 0
            }
        return self._built


def prompt_logprobs(logits: Tensor, target_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Score prompt tokens.

    Args:
        logits: `[num_rows, vocab]` of any float dtype, row `i` predicting `target_ids[i]`.
        target_ids: `[num_rows] int64`.
        num_top: How many likeliest tokens to give with each, 0 for none.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, logits.shape[0], _ROWS_AT_ONCE):  # bounds what scoring needs beside the logits
        rows = slice(start, start + _ROWS_AT_ONCE)
        scored = ScoredTokens(logits[rows].to(torch.float32), target_ids[rows], num_top)
        entries += scored.build([num_top] * target_ids[rows].shape[0])
    return entries


def _ordered(ids: list[int], logprobs: list[float], num: int) -> tuple[tuple[int, float], ...]:
    pairs = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:num])
