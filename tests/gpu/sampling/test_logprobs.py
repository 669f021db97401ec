import math

import pytest
import torch

from asyncserve.gpu.sampling.logprobs import prompt_logprobs
from asyncserve.request import SamplingParams, TokenLogprobs
from asyncserve.step import BAD_LOGITS
from tests.gpu.sampling.rows import assignment, new_sampler

VOCAB = 300


def some_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


def assert_scored(entry: TokenLogprobs, logits: torch.Tensor, token_id: int, num_top: int) -> None:
    expected = logits.to(torch.float64).log_softmax(0)
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
    assert entry.rank == (expected >= expected[token_id]).sum()
    order = sorted(range(VOCAB), key=lambda one: (-expected[one].item(), one))
    assert [one for one, _ in entry.top] == order[:num_top]
    assert [logprob for _, logprob in entry.top] == pytest.approx(
        expected[order[:num_top]].tolist(), abs=1e-5
    )


def test_logprobs_are_log_softmax_of_raw_logits_whatever_sampling_does_to_them() -> None:
    logits = some_logits(4)
    sampler = new_sampler(VOCAB)
    samplings = [
        SamplingParams(temperature=0.0, num_logprobs=5),
        SamplingParams(temperature=0.4, top_k=3, num_logprobs=0, logit_bias={5: 50.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0, repetition_penalty=1.5, num_logprobs=20),
    ]
    for slot, sampling in enumerate(samplings):
        sampler.admit(assignment(slot, sampling))
    sampled = sampler.sample(logits.clone(), [3, 2, 1, 0], [1, 1, 1, 1])
    token_ids = sampled.token_ids.tolist()
    assert sampled.logprobs is not None
    assert set(sampled.logprobs) == {0, 1, 3}
    for row, slot, num_top in ((0, 3, 20), (2, 1, 0), (3, 0, 5)):
        assert_scored(sampled.logprobs[slot], logits[row], token_ids[row], num_top)


def test_raw_logprobs_survive_a_bias_when_every_row_asks() -> None:
    logits = some_logits(1)
    sampler = new_sampler(VOCAB)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0, num_logprobs=1, logit_bias={9: 100.0})))
    sampled = sampler.sample(logits.clone(), [0], [1])
    assert sampled.logprobs is not None
    assert_scored(sampled.logprobs[0], logits[0], 9, 1)


def test_no_logprobs_are_made_when_nobody_asks() -> None:
    sampler = new_sampler(VOCAB)
    sampler.admit(assignment(0, SamplingParams()))
    assert sampler.sample(some_logits(1), [0], [1]).logprobs is None


def test_a_row_with_bad_logits_has_no_logprobs() -> None:
    logits = some_logits(2)
    logits[0, 3] = math.nan
    sampler = new_sampler(VOCAB)
    for slot in (0, 1):
        sampler.admit(assignment(slot, SamplingParams(num_logprobs=2)))
    sampled = sampler.sample(logits, [0, 1], [1, 1])
    assert sampled.token_ids[0] == BAD_LOGITS
    assert sampled.logprobs is not None
    assert list(sampled.logprobs) == [1]


def test_prompt_logprobs_are_log_softmax_of_each_row() -> None:
    logits = some_logits(130)  # more than are scored at once
    targets = torch.arange(130) * 2
    entries = prompt_logprobs(logits, targets, 3)
    assert len(entries) == 130
    for row, entry in enumerate(entries):
        assert_scored(entry, logits[row], 2 * row, 3)


def test_sampler_scores_prompts_of_int32_ids_without_rivals() -> None:
    logits = some_logits(3)
    entries = new_sampler(VOCAB).prompt_logprobs(logits, torch.tensor([5, 6, 7], dtype=torch.int32), 0)
    for row, entry in enumerate(entries):
        assert_scored(entry, logits[row], 5 + row, 0)


def test_minus_infinity_is_a_logprob_and_does_not_spoil_the_others() -> None:
    logits = some_logits(1)
    logits[0, 10:] = -math.inf
    inside, outside = prompt_logprobs(logits.expand(2, -1), torch.tensor([3, 50]), 12)
    expected = logits[0, :10].log_softmax(0)
    assert inside.logprob == pytest.approx(expected[3].item(), abs=1e-5)
    assert (outside.logprob, outside.rank) == (-math.inf, VOCAB)
    assert [math.isfinite(logprob) for _, logprob in inside.top] == [True] * 10 + [False] * 2


def test_equally_likely_tokens_share_a_rank_and_stand_by_id() -> None:
    logits = torch.zeros(1, VOCAB) - 9
    logits[0, [40, 7, 12]] = 1.0
    (entry,) = prompt_logprobs(logits, torch.tensor([12]), 3)
    assert entry.rank == 3
    assert [token_id for token_id, _ in entry.top] == [7, 12, 40]


def test_more_logprobs_than_tokens_give_all_tokens() -> None:
    (entry,) = prompt_logprobs(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0]), 20)
    assert [token_id for token_id, _ in entry.top] == [2, 1, 0]
