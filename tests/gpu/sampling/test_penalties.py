from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
import torch

from asyncserve.gpu.sampling.penalties import Penalties
from asyncserve.request import SamplingParams
from tests.gpu.sampling.rows import CPU, assignment, new_sampler

VOCAB = 40


def penalised_reference(
    logits: npt.NDArray[np.float32], sampling: SamplingParams, prompt: list[int], outputs: list[int]
) -> npt.NDArray[np.float32]:
    counts = Counter(outputs)
    expected = logits.copy()
    for token_id in range(len(logits)):
        if token_id in counts or token_id in prompt:
            value = expected[token_id]
            factor = sampling.repetition_penalty
            expected[token_id] = value / factor if value > 0 else value * factor
        if token_id in counts:
            expected[token_id] -= sampling.frequency_penalty * counts[token_id] + sampling.presence_penalty
    return expected


PENALTIES = [
    pytest.param({"repetition_penalty": 1.3}, id="repetition"),
    pytest.param({"repetition_penalty": 0.5}, id="repetition below one"),
    pytest.param({"frequency_penalty": 0.7}, id="frequency"),
    pytest.param({"presence_penalty": -1.5}, id="presence"),
    pytest.param({"repetition_penalty": 1.2, "frequency_penalty": -0.4, "presence_penalty": 1.1}, id="all"),
]


@pytest.mark.parametrize("values", PENALTIES)
@pytest.mark.parametrize("num_known", [0, 1, 7, 30], ids=lambda num: f"{num} outputs before a preemption")
def test_penalised_logits_are_those_of_the_definition_over_preemption(
    values: dict[str, float], num_known: int
) -> None:
    """Outputs known at admission and outputs recorded later must count alike."""
    sampling = SamplingParams(**values)  # type: ignore[arg-type]
    generator = np.random.default_rng(num_known)
    prompt = generator.integers(0, VOCAB, 12).tolist()
    outputs = generator.integers(0, 12, 30).tolist()
    penalties = Penalties(4, VOCAB, 64, CPU)
    penalties.admit(assignment(2, sampling, prompt=prompt, outputs=outputs[:num_known]))
    for token_id in outputs[num_known:]:
        penalties.record([1], [2], torch.tensor([39, token_id]))
    logits = generator.normal(size=(3, VOCAB)).astype(np.float32)
    changed = torch.from_numpy(logits.copy())
    penalties.apply(changed, [1], [2])
    expected = logits.copy()
    expected[1] = penalised_reference(logits[1], sampling, prompt, outputs)
    np.testing.assert_allclose(changed.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_slots_that_come_and_go_keep_their_own_counts(seed: int) -> None:
    """Random admissions, releases and steps over all slots, against a plain model of each sequence."""
    generator = np.random.default_rng(seed)
    penalties = Penalties(6, VOCAB, 400, CPU)
    running: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for _ in range(150):
        slot = int(generator.integers(6))
        if slot not in running:
            sampling = SamplingParams(
                repetition_penalty=float(generator.choice([1.0, 1.5])), frequency_penalty=0.5
            )
            prompt = generator.integers(0, VOCAB, int(generator.integers(1, 300))).tolist()
            running[slot] = (sampling, prompt, [])
            penalties.admit(assignment(slot, sampling, prompt=prompt))
        elif generator.random() < 0.2:
            penalties.release(slot)
            del running[slot]
            continue
        slots = [int(one) for one in generator.permutation(list(running))]
        rows = list(range(len(slots)))
        logits = generator.normal(size=(len(slots), VOCAB)).astype(np.float32)
        changed = torch.from_numpy(logits.copy())
        penalties.apply(changed, rows, slots)
        for row, one in enumerate(slots):
            expected = penalised_reference(logits[row], *running[one])
            np.testing.assert_allclose(changed[row].numpy(), expected, rtol=1e-5, atol=1e-6)
        sampled = generator.integers(0, VOCAB, len(slots))
        penalties.record(rows, slots, torch.from_numpy(sampled))
        for one, token_id in zip(slots, sampled.tolist(), strict=True):
            running[one][2].append(token_id)


def test_sampler_penalises_what_it_recorded() -> None:
    sampler = new_sampler(5)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler.admit(assignment(3, sampling))
    sampler.admit(assignment(1, SamplingParams(temperature=0.0)))
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.5], [0.0, 5.0, 4.9, 3.1, 0.0]])
    outputs = []
    for position in range(1, 6):
        token_ids = sampler.sample(logits.clone(), [1, 3], [position, position]).token_ids
        sampler.record([1, 3], token_ids)
        outputs.append(token_ids.tolist())
    assert outputs == [[0, 1], [0, 2], [0, 3], [0, 1], [0, 2]]


def test_recording_a_row_with_bad_logits_leaves_other_rows_right() -> None:
    penalties = Penalties(2, 4, 16, CPU)
    sampling = SamplingParams(presence_penalty=1.0)
    penalties.admit(assignment(0, sampling))
    penalties.admit(assignment(1, sampling))
    penalties.record([0, 1], [0, 1], torch.tensor([-1, 2]))
    logits = torch.zeros(1, 4)
    penalties.apply(logits, [0], [1])
    assert logits.tolist() == [[0.0, 0.0, -1.0, 0.0]]


def test_a_long_sequence_beside_a_short_one_changes_nothing_for_it() -> None:
    """Token 0 must not be penalised for filling up the short sequence's list."""
    penalties = Penalties(2, 1000, 4000, CPU)
    sampling = SamplingParams(repetition_penalty=2.0)
    penalties.admit(assignment(0, sampling, prompt=[5, 6]))
    penalties.admit(assignment(1, sampling, prompt=list(range(600))))
    logits = torch.ones(2, 1000)
    penalties.apply(logits, [0, 1], [0, 1])
    assert (logits == 0.5).nonzero().tolist() == [[0, 5], [0, 6], *([1, one] for one in range(600))]


def test_slots_of_ended_sequences_are_used_again_and_again() -> None:
    sampler = new_sampler(5, num_slots=2)
    for turn in range(20):
        sampler.admit(assignment(turn % 2, SamplingParams(temperature=0.0, presence_penalty=1.0), prompt=[1]))
        token_ids = sampler.sample(torch.tensor([[0.0, 1.0, 0.9, 0.0, 0.0]]), [turn % 2], [1]).token_ids
        assert token_ids.tolist() == [1]
        sampler.record([turn % 2], token_ids)
        if turn % 3:
            sampler.release(turn % 2)
