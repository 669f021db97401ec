import math

import torch

from asyncserve.gpu.sampling.logit_bias import LogitBias
from asyncserve.request import SamplingParams
from tests.gpu.sampling.rows import assignment, new_sampler


def test_bias_is_added_to_listed_tokens_of_its_own_row() -> None:
    bias = LogitBias(8)
    assert bias.set_bias(5, {1: 2.5, 7: -1.0})
    assert bias.set_bias(2, {0: 1.0})
    logits = torch.zeros(4, 8)
    bias.apply(logits, [3, 1], [5, 2])
    expected = torch.zeros(4, 8)
    expected[3, 1], expected[3, 7], expected[1, 0] = 2.5, -1.0, 1.0
    assert torch.equal(logits, expected)


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    bias = LogitBias(8)
    assert not bias.set_bias(0, {8: 1.0, 1000: 1.0})
    assert not bias.set_ban(1, {9})


def test_a_ban_on_every_token_bans_none() -> None:
    assert not LogitBias(3).set_ban(0, {0, 1, 2})


def test_bias_of_a_hundred_decides_the_token_greedy_and_drawn() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    likeliest = int(logits[1].argmax())
    sampler = new_sampler(300)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0, logit_bias={17: 100.0})))
    sampler.admit(assignment(1, SamplingParams(temperature=0.0, logit_bias={likeliest: -100.0})))
    sampler.admit(assignment(2, SamplingParams(temperature=1.0, logit_bias={18: 100.0})))
    sampler.admit(assignment(3, SamplingParams(temperature=0.0)))
    token_ids = sampler.sample(logits.clone(), [0, 1, 2, 3], [1, 1, 1, 1]).token_ids.tolist()
    without = logits[1].clone()
    without[likeliest] = -math.inf
    assert token_ids == [17, int(without.argmax()), 18, int(logits[3].argmax())]


def test_stop_tokens_are_banned_until_min_tokens_are_out_and_allowed_from_then_on() -> None:
    sampler = new_sampler(6)
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0, 4.0, 3.0]])
    sampling = SamplingParams(temperature=0.0, min_tokens=2)
    sampler.admit(assignment(0, sampling, prompt=[0, 0, 0], stop_token_ids=[2, 4, 99]))
    drawn = [sampler.sample(logits.clone(), [0], [position]).token_ids.item() for position in (3, 4, 5, 6)]
    assert drawn == [5, 5, 2, 2]


def test_min_tokens_count_outputs_made_before_a_preemption() -> None:
    sampler = new_sampler(6)
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0, 4.0, 3.0]])
    sampling = SamplingParams(temperature=0.0, min_tokens=2)
    for outputs, expected in (([5], 5), ([5, 5], 2)):
        sampler.admit(assignment(0, sampling, prompt=[0, 0, 0], outputs=outputs, stop_token_ids=[2, 4]))
        token_id = sampler.sample(logits.clone(), [0], [3 + len(outputs)]).token_ids.item()
        assert token_id == expected


def test_a_released_slot_keeps_no_bias_for_the_next_sequence() -> None:
    sampler = new_sampler(6)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0, logit_bias={3: 100.0})))
    sampler.release(0)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0)))
    assert sampler.sample(torch.tensor([[0.0, 9.0, 0, 0, 0, 0]]), [0], [1]).token_ids.item() == 1
