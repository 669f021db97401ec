"""What the sampling tests share: filling slots, and how far counts may stray from probabilities."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncserve.gpu.sampling.gumbel import row_keys, seed_keys
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.request import SamplingParams
from asyncserve.step import SlotAssignment

CPU = torch.device("cpu")


def new_sampler(vocab_size: int, num_slots: int = 16, max_model_len: int = 64) -> Sampler:
    return Sampler(num_slots, vocab_size, max_model_len, CPU)


def assignment(
    slot: int,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> SlotAssignment:
    return SlotAssignment(
        slot=slot,
        token_ids=array("i", [*prompt, *outputs]),
        prompt_len=len(prompt),
        sampling=sampling,
        seed=seed,
        stop_token_ids=frozenset(stop_token_ids),
        bad_words=tuple(tuple(word) for word in bad_words),
    )


def keys_of(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> torch.Tensor:
    both = np.broadcast_arrays(np.atleast_1d(np.asarray(seeds, np.uint64)), np.asarray(positions, np.uint64))
    return torch.from_numpy(row_keys(seed_keys(both[0].copy()), both[1].copy())).unsqueeze(1)


def assert_drawn_from(
    probabilities: npt.NDArray[np.float64], drawn: npt.NDArray[np.int64], *, z: float = 3.72
) -> None:
    """Chi-square test of drawn bins; z = 3.72 would call a perfect sampler wrong once in 10,000 seeds.

    The seeds of the tests are fixed, so they either always pass or never.
    """
    expected = probabilities * len(drawn)
    counts = np.bincount(drawn, minlength=len(expected)).astype(np.float64)
    assert counts[probabilities == 0].sum() == 0
    common = expected >= 5  # rarer bins are pooled: the statistic needs a few in each
    rare = ~common & (expected > 0)
    expected = np.append(expected[common], expected[rare].sum())
    counts = np.append(counts[common], counts[rare].sum())
    counts, expected = counts[expected >= 5], expected[expected >= 5]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Wilson and Hilferty's approximation of the chi-square quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + z * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f}, limit {limit:.1f}, {freedom} degrees of freedom"
