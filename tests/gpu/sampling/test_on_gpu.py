"""The way through the sampler that only a GPU takes, for real: kernels and graphs, and no wait in between."""

import math

import numpy as np
import pytest
import torch

from asyncserve.gpu.batch import SampleRows
from asyncserve.gpu.device import CpuDevice, Device, open_device
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Staging
from asyncserve.request import SamplingParams
from asyncserve.step import BAD_LOGITS
from tests.gpu.sampling.rows import CPU, assert_drawn_from, assignment
from tests.gpu.sampling.test_sampler import KINDS, VOCAB, some_logits
from tests.gpu.synchronization import waits_are_errors

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


RESTRICTED = [
    (SamplingParams(temperature=0.0), [[0, 1], [2, 2, 3], [3, 3], [1, 0, 2, 0]]),
    (SamplingParams(temperature=0.0, allowed_token_ids=(0, 3, 6)), []),
    (SamplingParams(temperature=0.0, allowed_token_ids=(0, 1, 2, 3), num_logprobs=2), [[0, 1], [3]]),
    (SamplingParams(temperature=0.0), []),
]
"""Sampling and bad words of slots."""


def restricted_tokens(device: Device, logits: torch.Tensor) -> list[list[int]]:
    """Generate with all of them together; the host looks at no token before the end."""
    history = SlotTable(num_slots=8, max_model_len=64, device=device)
    sampler = Sampler(8, logits.shape[2], 64, device.torch_device)
    staging = Staging(device)
    for slot, (sampling, words) in enumerate(RESTRICTED):
        given = assignment(slot, sampling, prompt=[1, 2, 1], bad_words=words)
        history.admit([given], staging)
        sampler.admit(given)
    slots = list(range(len(RESTRICTED)))
    for step, rows in enumerate(logits):
        token_ids = sampler.sample(rows.to(device.torch_device), slots, [3 + step] * 4, history).token_ids
        places = history.flat_indices(np.array(slots), np.full(len(slots), 3 + step))
        history.write(torch.from_numpy(places).to(token_ids.device), token_ids)
        sampler.record(slots, token_ids)
    return [history.tokens(slot, 3, 3 + len(logits)).tolist() for slot in slots]


def test_allowed_tokens_and_bad_words_are_those_of_a_cpu() -> None:
    logits = torch.randn(30, 4, 7, generator=torch.Generator().manual_seed(2))
    on_gpu = restricted_tokens(open_device("cuda"), logits)
    assert on_gpu == restricted_tokens(CpuDevice(num_threads=1), logits)
    assert on_gpu[0] != on_gpu[3]


def test_the_host_waits_for_nothing_while_it_launches_a_step() -> None:
    device = open_device("cuda")
    history = SlotTable(num_slots=16, max_model_len=64, device=device)
    sampler = Sampler(16, VOCAB, 64, device.torch_device)
    for slot, sampling in enumerate([*KINDS, *(sampling for sampling, _ in RESTRICTED)]):
        words = [[7, 8], [9]] if slot % 2 else []
        given = assignment(slot, sampling, prompt=[4, 5, 6], seed=slot, stop_token_ids=[2], bad_words=words)
        history.admit([given], Staging(device))
        sampler.admit(given)
    slots = list(range(len(KINDS) + len(RESTRICTED)))
    logits = some_logits(len(slots)).cuda()
    steps = []
    with waits_are_errors():
        for position in range(3, 6):
            steps.append(sampler.sample(logits.clone(), slots, [position] * len(slots), history).token_ids)
            sampler.record(slots, steps[-1])
    assert all((token_ids >= 0).all() for token_ids in steps)


def test_a_graph_chooses_what_was_admitted_after_it_was_captured() -> None:
    """Rows of other slots, with other parameters, at other positions; the last one is padding."""
    device = open_device("cuda")
    sampler = filled_sampler(device.torch_device)
    plain = [0, 1, 2, 3, 4, 5]
    num_rows = len(plain) + 1
    logits = some_logits(num_rows).to(device.torch_device, torch.bfloat16)
    history = torch.zeros(200, dtype=torch.int32, device=device.torch_device)
    results = torch.zeros(4, 16, dtype=torch.int64, pin_memory=True)
    rows = SampleRows(
        slots=torch.tensor([*plain, -1], dtype=torch.int32, device=device.torch_device),
        positions=torch.full((num_rows,), 3, device=device.torch_device),
        write_back=torch.arange(num_rows, device=device.torch_device),
        result_row=torch.zeros(1, dtype=torch.int32, device=device.torch_device),
    )
    sampler.upload()
    sampler.choose(logits, rows, history, results)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.choose(logits, rows, history, results)
    for slot in plain:
        given = assignment(9 + slot, KINDS[5 - slot], prompt=[4, 5, 6], seed=99 + slot)
        sampler.admit(given)
    later = [9 + slot for slot in plain]
    expected = sampler.sample(logits[: len(plain)].clone(), later, [7] * len(plain)).token_ids.tolist()
    rows.slots[: len(plain)] = torch.tensor(later, dtype=torch.int32)
    rows.positions.fill_(7)
    rows.write_back += 100
    assert rows.result_row is not None
    rows.result_row.fill_(2)
    results.fill_(99)
    graph.replay()
    torch.cuda.synchronize()
    assert results[2].tolist() == [*expected, *[99] * (16 - len(plain))]
    assert (results[[0, 1, 3]] == 99).all()
    assert history[100 : 100 + num_rows].tolist() == [*expected, 0]
