import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncserve.gpu.sampling.allowed_tokens import AllowedTokens
from asyncserve.request import SamplingParams
from tests.gpu.sampling.rows import CPU, assignment, new_sampler


@given(st.data())
def test_a_row_with_a_list_keeps_its_logits_and_no_others_and_one_without_keeps_all(
    data: st.DataObject,
) -> None:
    vocab = data.draw(st.integers(1, 40), "vocab")
    num_rows = data.draw(st.integers(1, 5), "rows")
    ids = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=60)
    lists = data.draw(st.dictionaries(st.integers(0, num_rows - 1), ids), "lists")
    stage = AllowedTokens(vocab, CPU)
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    rows = []
    for row, allowed in sorted(lists.items()):
        if stage.set(10 + row, allowed):
            rows.append(row)
        else:
            assert set(allowed) == set(range(vocab))
        for token_id in set(range(vocab)) - set(allowed):
            expected[row, token_id] = -math.inf
    if rows:
        stage.apply(logits, rows, [10 + row for row in rows])
    assert torch.equal(logits, expected)


def test_ids_outside_the_vocabulary_are_left_out_and_a_list_of_nothing_else_forbids_nothing() -> None:
    stage = AllowedTokens(5, CPU)
    assert not stage.set(0, [5, 1000, 2**40])
    assert stage.set(1, [2, 7, -1])
    logits = torch.zeros(1, 5)
    stage.apply(logits, [0], [1])
    assert logits.isfinite().nonzero().tolist() == [[0, 2]]


def test_a_list_takes_a_bit_per_token_however_long_it_is() -> None:
    stage = AllowedTokens(1001, CPU)
    stage.set(0, list(range(1000)) * 3)
    (mask,) = stage._masks.values()
    assert mask.numel() * mask.element_size() == 128


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen_greedy_and_drawn(temperature: float) -> None:
    vocab = 300
    sampler = new_sampler(vocab)
    allowed = [7, 150, 299]
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    logits[0, 13] = 50.0
    sampler.admit(assignment(0, SamplingParams(temperature=temperature, allowed_token_ids=allowed)))  # type: ignore[arg-type]
    chosen = {int(sampler.sample(logits.clone(), [0], [position]).token_ids) for position in range(1, 60)}
    assert chosen <= set(allowed)
    assert len(chosen) == (1 if temperature == 0.0 else 3)


def test_a_bias_does_not_bring_a_forbidden_token_back_and_log_probabilities_are_the_models_own() -> None:
    sampler = new_sampler(10)
    sampling = SamplingParams(
        temperature=0.0, allowed_token_ids=(3, 4), logit_bias={9: 100.0}, num_logprobs=1
    )
    sampler.admit(assignment(0, sampling))
    logits = torch.arange(10.0).unsqueeze(0)
    sampled = sampler.sample(logits.clone(), [0], [1])
    assert sampled.token_ids.tolist() == [4]
    assert sampled.logprobs is not None
    assert sampled.logprobs[0].logprob == pytest.approx(float(logits.log_softmax(1)[0, 4]))
    assert sampled.logprobs[0].top[0][0] == 9
    assert sampled.logprobs[0].rank == 6


def test_a_released_slot_keeps_no_list_for_the_next_sequence() -> None:
    sampler = new_sampler(6)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0, allowed_token_ids=(3,))))
    sampler.release(0)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0)))
    assert sampler.sample(torch.tensor([[0.0, 9.0, 0, 0, 0, 0]]), [0], [1]).token_ids.item() == 1
