"""The sampler's last stages as kernels: in Triton's interpreter without a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from asyncserve.gpu.batch import SampleRows
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.request import SamplingParams
from asyncserve.step import BAD_LOGITS, NO_TOKEN
from tests.gpu.kernels.machine import DEVICE, MARKS, ON_GPU
from tests.gpu.sampling import test_sampler
from tests.gpu.sampling.rows import CPU, assignment, new_sampler
from tests.gpu.sampling.test_sampler import some_logits as some_logits_of

pytest.importorskip("triton")

pytestmark = MARKS

VOCAB, TOP_K = (test_sampler.VOCAB, 1000) if ON_GPU else (250, 130)
"""The interpreter sorts in Python, slowly. There are still two blocks of 128 tokens to draw from, and a top-k
of more than 128, for which a CPU draws from the whole vocabulary, too."""

KINDS = [replace(kind, top_k=TOP_K) if kind.top_k > 100 else kind for kind in test_sampler.KINDS]

SLOTS = list(range(len(KINDS)))
PLAIN = [0, 1, 2, 3, 4, 5]
"""Rows of `KINDS` that nothing changes and that want no log-probabilities."""
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.bfloat16]
BROKEN = (
    [{row: bad} for bad in (math.nan, math.inf) for row in (0, 2, 6, 8)]
    if ON_GPU
    else [{0: math.nan, 6: math.inf}, {2: math.inf, 8: math.nan}]
)
"""What spoils which rows of a batch."""


def some_logits(num_rows: int) -> torch.Tensor:
    return some_logits_of(num_rows, VOCAB)


def sampler_of_kinds(device: torch.device = DEVICE, *, has_kernels: bool = True) -> Sampler:
    sampler = Sampler(16, VOCAB, 64, device, has_kernels=has_kernels)
    for slot, sampling in enumerate(KINDS):
        sampler.admit(assignment(slot, sampling, prompt=[4, 5, 6], seed=slot * 7, stop_token_ids=[2]))
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, slots: list[int], position: int = 3) -> list[int]:
    positions = [position] * len(slots)
    token_ids: list[int] = sampler.sample(logits.to(DEVICE), slots, positions).token_ids.tolist()
    return token_ids


def choose(
    sampler: Sampler, logits: torch.Tensor, slots: list[int], position: int = 3, *, truncates: bool = True
) -> list[int]:
    """Choose, and hold what is written against what is returned."""
    num_rows = len(slots)
    history = torch.full((100,), 99, dtype=torch.int32, device=DEVICE)
    results = torch.full((2, 16), 99, device=DEVICE)
    rows = SampleRows(
        slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        positions=torch.full((num_rows,), position, device=DEVICE),
        write_back=torch.arange(50, 50 + num_rows, device=DEVICE),
        result_row=torch.ones(1, dtype=torch.int32, device=DEVICE),
    )
    sampler.upload()
    token_ids: list[int] = sampler.choose(
        logits.to(DEVICE), rows, history, results, truncates=truncates
    ).tolist()
    assert results[1, :num_rows].tolist() == token_ids
    assert history[50 : 50 + num_rows].tolist() == [max(0, token_id) for token_id in token_ids]
    return token_ids


@pytest.mark.slow
def test_tokens_are_those_of_a_cpu_where_it_draws_from_the_whole_vocabulary() -> None:
    logits = some_logits(len(KINDS))
    on_cpu, by_kernels = sampler_of_kinds(CPU, has_kernels=False), sampler_of_kinds()
    whole = [0, 1, 4, 5, 7, 8]
    for position in (3, 4):
        expected = on_cpu.sample(logits[whole], whole, [position] * len(whole))
        assert sample(by_kernels, logits[whole], whole, position) == expected.token_ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    logits = some_logits(len(KINDS)).to(dtype)
    sampler = sampler_of_kinds()
    together = sample(sampler, logits, SLOTS)
    order = [4, 8, 0, 2, 6, 1, 3, 7, 5]
    assert sample(sampler, logits[order], order) == [together[slot] for slot in order]
    for slot in SLOTS:
        assert sample(sampler, logits[slot : slot + 1], [slot]) == [together[slot]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_row_gets_the_same_token_whatever_its_neighbours_need(dtype: torch.dtype) -> None:
    logits = some_logits(len(KINDS)).to(dtype)
    sampler = sampler_of_kinds()
    chosen = choose(sampler, logits[PLAIN], PLAIN)
    assert sample(sampler, logits, SLOTS)[: len(PLAIN)] == chosen
    assert choose(sampler, logits[:2], [0, 1], truncates=False) == chosen[:2]


def test_steps_of_changed_logits_or_logprobs_are_not_plain() -> None:
    sampler = sampler_of_kinds()
    assert [sampler.is_plain([slot]) for slot in SLOTS] == [slot in PLAIN for slot in SLOTS]
    assert sampler.is_plain(PLAIN)
    assert not sampler.is_plain([*PLAIN, 6])
    assert [sampler.truncates([slot]) for slot in SLOTS] == [slot in (2, 3, 4, 5, 6) for slot in SLOTS]


def test_a_step_is_plain_again_when_the_ban_on_stop_tokens_has_ended() -> None:
    sampler = Sampler(1, VOCAB, 64, DEVICE, has_kernels=True)
    sampling = SamplingParams(temperature=1.0, min_tokens=2)
    sampler.admit(assignment(0, sampling, prompt=[4], stop_token_ids=[2]))
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 2] = 30.0
    assert sample(sampler, logits, [0], 1) != [2]
    assert not sampler.is_plain([0])
    assert sample(sampler, logits, [0], 3) == [2]
    assert sampler.is_plain([0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
def test_a_row_that_is_not_finite_is_reported_and_harms_no_other() -> None:
    logits = some_logits(len(KINDS))
    sampler = sampler_of_kinds()
    healthy = sample(sampler, logits, SLOTS)
    for broken in BROKEN:
        spoiled = logits.clone()
        for row, bad in broken.items():
            spoiled[row, VOCAB // 3] = bad
        expected = [BAD_LOGITS if row in broken else token_id for row, token_id in enumerate(healthy)]
        assert sample(sampler, spoiled, SLOTS) == expected
        assert choose(sampler, spoiled[PLAIN], PLAIN) == expected[: len(PLAIN)]


@pytest.mark.parametrize("sampling", KINDS)
def test_a_row_of_minus_infinity_is_reported(sampling: SamplingParams) -> None:
    sampler = Sampler(1, VOCAB, 64, DEVICE, has_kernels=True)
    sampler.admit(assignment(0, sampling, stop_token_ids=[2]))
    assert sample(sampler, torch.full((1, VOCAB), -math.inf), [0]) == [BAD_LOGITS]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
def test_a_nan_hidden_by_a_stage_is_reported_and_so_are_rows_left_nothing() -> None:
    sampler = Sampler(3, 6, 64, DEVICE, has_kernels=True)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0, allowed_token_ids=(1, 3))))
    sampler.admit(assignment(1, SamplingParams(temperature=1.0, allowed_token_ids=(1, 3))))
    sampler.admit(assignment(2, SamplingParams(temperature=0.0)))
    logits = torch.tensor([[0.0, 1.0, math.nan, 2.0, 4.0, 3.0]] * 3)
    assert sample(sampler, logits, [0, 1, 2]) == [BAD_LOGITS] * 3
    logits[:, 1:4] = -math.inf
    assert sample(sampler, logits, [0, 1, 2]) == [NO_TOKEN, NO_TOKEN, 4]


def test_an_overflow_by_a_penalty_is_reported() -> None:
    sampler = Sampler(1, 3, 64, DEVICE, has_kernels=True)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0, repetition_penalty=0.01), prompt=[1]))
    assert sample(sampler, torch.tensor([[1.0, 3e37, 3.0]]), [0]) == [BAD_LOGITS]


@pytest.mark.slow
def test_logits_are_left_as_they_are_and_logprobs_are_of_them() -> None:
    logits = some_logits(len(KINDS)).to(DEVICE)
    before = logits.clone()
    sampled = sampler_of_kinds().sample(logits, SLOTS, [3] * len(SLOTS))
    assert torch.equal(logits, before)
    assert sampled.logprobs is not None
    assert set(sampled.logprobs) == {7, 8}
    own = logits.log_softmax(1)
    for slot in (7, 8):
        entry = sampled.logprobs[slot]
        assert entry.token_id == sampled.token_ids[slot]
        assert entry.logprob == pytest.approx(float(own[slot, entry.token_id]), abs=1e-5)


def test_bfloat16_logits_are_taken_on_a_cpu_and_mean_what_they_mean_in_float32() -> None:
    logits = some_logits(len(KINDS)).to(torch.bfloat16)
    as_bfloat16 = sampler_of_kinds(CPU, has_kernels=False).sample(logits, SLOTS, [3] * len(SLOTS))
    as_float32 = sampler_of_kinds(CPU, has_kernels=False).sample(logits.float(), SLOTS, [3] * len(SLOTS))
    assert torch.equal(as_bfloat16.token_ids, as_float32.token_ids)
    assert as_bfloat16.logprobs is not None
    assert as_bfloat16.logprobs == as_float32.logprobs
    scored = new_sampler(VOCAB).prompt_logprobs(logits[:3], torch.tensor([5, 6, 7]), 2)
    assert scored == new_sampler(VOCAB).prompt_logprobs(logits[:3].float(), torch.tensor([5, 6, 7]), 2)
