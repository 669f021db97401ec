"""The way through the sampler that only a GPU takes: no host decision in between, hence whole sorted rows."""

import math

import numpy as np
import pytest
import torch

from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.step import BAD_LOGITS
from tests.gpu.sampling.rows import CPU, assert_drawn_from, assignment
from tests.gpu.sampling.test_sampler import KINDS, VOCAB, some_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def filled_sampler(device: torch.device) -> Sampler:
    sampler = Sampler(16, VOCAB, 64, device)
    for slot, sampling in enumerate(KINDS):
        sampler.admit(assignment(slot, sampling, prompt=[4, 5, 6], seed=slot * 7, stop_token_ids=[2]))
    return sampler


def test_greedy_tokens_and_logprobs_are_those_of_a_cpu() -> None:
    logits = some_logits(len(KINDS))
    slots = list(range(len(KINDS)))
    on_cpu, on_gpu = filled_sampler(CPU), filled_sampler(torch.device("cuda"))
    for position in range(3, 9):
        expected = on_cpu.sample(logits.clone(), slots, [position] * len(slots))
        sampled = on_gpu.sample(logits.cuda(), slots, [position] * len(slots))
        assert expected.logprobs is not None
        assert sampled.logprobs is not None
        for slot in (0, 8):
            assert sampled.token_ids[slot] == expected.token_ids[slot]
        assert set(sampled.logprobs) == {7, 8}
        assert sampled.logprobs[8].logprob == pytest.approx(expected.logprobs[8].logprob, abs=1e-4)
        assert [one for one, _ in sampled.logprobs[8].top] == [one for one, _ in expected.logprobs[8].top]
        on_cpu.record(slots, expected.token_ids)
        on_gpu.record(slots, expected.token_ids.cuda())


def test_a_token_does_not_depend_on_the_batch_and_bad_rows_are_reported() -> None:
    logits = some_logits(len(KINDS)).cuda()
    sampler = filled_sampler(logits.device)
    slots = list(range(len(KINDS)))
    together = sampler.sample(logits.clone(), slots, [3] * len(slots)).token_ids.tolist()
    alone = [sampler.sample(logits[slot : slot + 1].clone(), [slot], [3]).token_ids.item() for slot in slots]
    assert together == alone
    logits[4, 100] = math.nan
    with_bad = sampler.sample(logits.clone(), slots, [3] * len(slots)).token_ids.tolist()
    assert with_bad == [*together[:4], BAD_LOGITS, *together[5:]]


def test_draws_follow_top_p() -> None:
    sampler = Sampler(64, 400, 64, torch.device("cuda"))
    sampling = KINDS[3]
    for slot in range(64):
        sampler.admit(assignment(slot, sampling, seed=slot))
    row = some_logits(1, 400)
    rows = row.expand(64, -1).contiguous().cuda()
    drawn = [
        sampler.sample(rows.clone(), list(range(64)), [position] * 64).token_ids.cpu()
        for position in range(200)
    ]
    weights = (row.squeeze(0).to(torch.float64) / sampling.temperature).softmax(0).numpy()
    order = np.argsort(-weights)
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= sampling.top_p]] = 0.0
    assert_drawn_from(weights / weights.sum(), torch.cat(drawn).numpy())
