import math

import numpy as np
import pytest
import torch

from asyncserve.gpu.sampling.selection import BLOCK_LEN
from asyncserve.request import SamplingParams
from asyncserve.step import BAD_LOGITS
from tests.gpu.sampling.rows import assert_drawn_from, assignment, new_sampler

VOCAB = 40 * BLOCK_LEN + 11

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
    SamplingParams(temperature=3.0, top_p=0.97),
    SamplingParams(temperature=1.0, top_k=1000),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.2, top_p=0.5, repetition_penalty=1.4, presence_penalty=0.3),
    SamplingParams(temperature=0.7, logit_bias={3: 4.0, 9: -100.0}, num_logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, min_tokens=4, num_logprobs=3),
]
"""One of every way through the sampler."""


def some_logits(num_rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5


def test_greedy_rows_take_the_likeliest_token() -> None:
    sampler = new_sampler(VOCAB)
    logits = some_logits(16)
    for slot in range(16):
        sampler.admit(assignment(slot, SamplingParams(temperature=0.0)))
    sampled = sampler.sample(logits.clone(), list(range(16)), [1] * 16)
    assert sampled.token_ids.dtype == torch.int64
    assert torch.equal(sampled.token_ids, logits.argmax(1))
    assert sampled.logprobs is None


def test_a_token_depends_neither_on_the_batch_nor_on_the_row_nor_on_the_slot() -> None:
    logits = some_logits(len(KINDS))
    together = new_sampler(VOCAB)
    for slot, sampling in enumerate(KINDS):
        together.admit(assignment(slot, sampling, prompt=[4, 5, 6], seed=slot * 7, stop_token_ids=[2]))
    order = [4, 8, 0, 2, 6, 1, 3, 7, 5]
    rows = together.sample(logits[order], order, [3] * len(order)).token_ids.tolist()
    in_batch = dict(zip(order, rows, strict=True))
    for slot, sampling in enumerate(KINDS):
        alone = new_sampler(VOCAB)
        alone.admit(assignment(15 - slot, sampling, prompt=[4, 5, 6], seed=slot * 7, stop_token_ids=[2]))
        token_id = alone.sample(logits[slot : slot + 1].clone(), [15 - slot], [3]).token_ids.item()
        assert token_id == in_batch[slot], sampling


@pytest.mark.parametrize("sampling", KINDS)
def test_a_preempted_sequence_goes_on_with_the_same_tokens(sampling: SamplingParams) -> None:
    vocab = 50  # small, so that penalties meet repeated tokens
    sampling = SamplingParams(
        **{name: getattr(sampling, name) for name in sampling.__slots__} | {"max_tokens": 30}
    )
    logits = some_logits(30, vocab)
    prompt = [1, 2, 3]

    def generate(preempt_after: int) -> list[int]:
        sampler = new_sampler(vocab)
        sampler.admit(assignment(0, sampling, prompt=prompt, seed=5, stop_token_ids=[2]))
        outputs: list[int] = []
        slot = 0
        for step in range(30):
            if step == preempt_after:
                sampler.release(slot)
                slot = 7
                sampler.admit(
                    assignment(slot, sampling, prompt=prompt, outputs=outputs, seed=5, stop_token_ids=[2])
                )
            token_ids = sampler.sample(logits[step : step + 1].clone(), [slot], [3 + step]).token_ids
            sampler.record([slot], token_ids)
            outputs.append(int(token_ids.item()))
        return outputs

    assert generate(-1) == generate(2) == generate(17)


def test_seeds_of_64_bits_signed_or_not_are_taken_and_differ() -> None:
    logits = some_logits(5)
    sampler = new_sampler(VOCAB)
    seeds = [0, 1, -1, 2**63, 2**64 - 1]
    for slot, seed in enumerate(seeds):
        sampler.admit(assignment(slot, SamplingParams(), seed=seed))
    same_row = logits[:1].expand(5, -1).contiguous()
    draws = [
        sampler.sample(same_row.clone(), list(range(5)), [position] * 5).token_ids.tolist()
        for position in range(1, 20)
    ]
    by_seed = list(zip(*draws, strict=True))
    assert by_seed[2] == by_seed[4]  # -1 and 2**64 - 1 are the same 64 bits
    assert len(set(by_seed)) == 4


def test_positions_of_one_sequence_draw_from_the_softmax() -> None:
    sampler = new_sampler(20, num_slots=64)
    for slot in range(64):
        sampler.admit(assignment(slot, SamplingParams(temperature=0.7), seed=slot))
    row = some_logits(1, 20)
    rows = row.expand(64, -1).contiguous()
    drawn = [
        sampler.sample(rows.clone(), list(range(64)), [position] * 64).token_ids for position in range(100)
    ]
    assert_drawn_from((row.to(torch.float64) / 0.7).softmax(1).squeeze(0).numpy(), torch.cat(drawn).numpy())


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("place", [0, 777, VOCAB - 1])
def test_a_row_that_is_not_finite_is_reported_and_harms_no_other(bad: float, place: int) -> None:
    logits = some_logits(len(KINDS))
    samplers = [new_sampler(VOCAB), new_sampler(VOCAB)]
    slots = list(range(len(KINDS)))
    for sampler in samplers:
        for slot, sampling in enumerate(KINDS):
            sampler.admit(assignment(slot, sampling, seed=slot, stop_token_ids=[2]))
    healthy = samplers[0].sample(logits.clone(), slots, [1] * len(slots)).token_ids.tolist()
    for broken in slots:
        spoiled = logits.clone()
        spoiled[broken, place] = bad
        token_ids = samplers[1].sample(spoiled, slots, [1] * len(slots)).token_ids.tolist()
        assert token_ids == [*healthy[:broken], BAD_LOGITS, *healthy[broken + 1 :]]


@pytest.mark.parametrize("sampling", KINDS)
def test_a_row_of_minus_infinity_is_reported(sampling: SamplingParams) -> None:
    sampler = new_sampler(VOCAB)
    sampler.admit(assignment(0, sampling, stop_token_ids=[2]))
    assert sampler.sample(torch.full((1, VOCAB), -math.inf), [0], [1]).token_ids.tolist() == [BAD_LOGITS]


def test_a_nan_hidden_by_the_ban_on_stop_tokens_is_reported() -> None:
    sampler = new_sampler(6)
    sampler.admit(
        assignment(0, SamplingParams(temperature=0.0, min_tokens=2), prompt=[0], stop_token_ids=[2])
    )
    logits = torch.tensor([[0.0, 1.0, math.nan, 2.0, 4.0, 3.0]])
    assert sampler.sample(logits, [0], [1]).token_ids.tolist() == [BAD_LOGITS]


def test_an_overflow_by_a_penalty_is_reported() -> None:
    sampler = new_sampler(3)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0, repetition_penalty=0.01), prompt=[1]))
    assert sampler.sample(torch.tensor([[1.0, 3e37, 3.0]]), [0], [1]).token_ids.tolist() == [BAD_LOGITS]


@pytest.mark.parametrize("sampling", KINDS)
def test_minus_infinity_in_some_tokens_is_no_error_and_never_drawn(sampling: SamplingParams) -> None:
    sampler = new_sampler(VOCAB)
    sampler.admit(assignment(0, sampling, seed=3, stop_token_ids=[2]))
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [70, 900, VOCAB - 1]] = torch.tensor([1.0, 1.2, 0.8])
    for position in range(1, 20):
        token_id = sampler.sample(logits.clone(), [0], [position]).token_ids.item()
        assert token_id in (70, 900, VOCAB - 1)


def test_a_slot_admitted_anew_keeps_nothing_of_its_last_sequence() -> None:
    logits = some_logits(1)
    greedy = SamplingParams(temperature=0.0)
    for sampling in KINDS:
        sampler = new_sampler(VOCAB)
        sampler.admit(assignment(0, sampling, stop_token_ids=[2]))
        sampler.release(0)
        sampler.release(0)
        sampler.admit(assignment(0, greedy))
        sampled = sampler.sample(logits.clone(), [0], [1])
        assert sampled.token_ids.item() == logits.argmax()
        assert sampled.logprobs is None


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-30, 9e-6, 1e-5, 1e-4])
def test_low_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = some_logits(8)
    sampler = new_sampler(VOCAB)
    for slot in range(8):
        sampling = SamplingParams(temperature=temperature, top_p=0.99 if slot % 2 else 1.0)
        sampler.admit(assignment(slot, sampling, seed=slot))
    assert torch.equal(sampler.sample(logits.clone(), list(range(8)), [1] * 8).token_ids, logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-5, 100.0])
@pytest.mark.parametrize("repetition_penalty", [0.01, 1.0, 100.0])
def test_the_ends_of_every_range_give_tokens_that_are_not_banned(
    temperature: float, repetition_penalty: float
) -> None:
    sampler = new_sampler(VOCAB)
    for slot, top_p in enumerate((1.0, 0.9)):
        sampling = SamplingParams(
            temperature=temperature, top_p=top_p, repetition_penalty=repetition_penalty, min_tokens=9
        )
        sampler.admit(assignment(slot, sampling, prompt=[5, 6], stop_token_ids=[2, 3]))
    for seed in range(5):
        token_ids = sampler.sample(some_logits(2, seed=seed) * 20, [0, 1], [2 + seed] * 2).token_ids.tolist()
        assert all(0 <= token_id < VOCAB and token_id not in (2, 3) for token_id in token_ids)


def test_steps_of_one_seed_give_different_tokens_at_different_positions() -> None:
    sampler = new_sampler(VOCAB)
    sampler.admit(assignment(0, SamplingParams(), seed=1))
    rows = torch.zeros(1, VOCAB)
    drawn = {int(sampler.sample(rows.clone(), [0], [position]).token_ids.item()) for position in range(50)}
    assert len(drawn) > 45
    assert np.std(list(drawn)) > VOCAB / 6
