"""The device side on a GPU: what a CPU cannot show (streams, pinned copies, events, memory figures)."""

import asyncio
import dataclasses
import gc
from typing import Any

import pytest
import torch

from asyncserve.errors import StepFailed
from asyncserve.gpu.attention.reference import ReferenceAttention
from asyncserve.gpu.device import open_device
from asyncserve.gpu.executor import ThreadExecutor
from asyncserve.gpu.runner import ModelRunner
from asyncserve.gpu.startup import (
    ASKS_MOST,
    SEARCHES,
    group_layers,
    profile,
    run_dummy_rows,
    start_runner,
)
from asyncserve.kv_spec import KVGroup
from asyncserve.request import SamplingParams
from asyncserve.step import ExecutorInfo
from tests.contracts.attention_contract import AttentionContract
from tests.fakes.attention_model import AttentionModel, small_runner
from tests.fakes.plan_driver import PlanDriver
from tests.gpu.attention.test_reference import ReferenceInPieces
from tests.gpu.test_startup import dummy_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

PROMPTS = [[5, 6, 7], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8, 8, 8]]


class TestReferenceOnCuda(AttentionContract):
    backend_class = ReferenceAttention
    device = torch.device("cuda")


class TestReferenceInPiecesOnCuda(AttentionContract):
    backend_class = ReferenceInPieces
    device = torch.device("cuda")


def driver(kind: str, **sizes: Any) -> PlanDriver:
    device = open_device(kind, num_threads=1)
    device.activate()
    return PlanDriver(*small_runner(device=device, **sizes))


def tokens_on(kind: str, **sampling: Any) -> list[list[int]]:
    fresh = driver(kind)
    return fresh.generate([fresh.admit(prompt, **sampling) for prompt in PROMPTS], 10)


def test_greedy_tokens_are_those_of_the_cpu() -> None:
    assert tokens_on("cuda") == tokens_on("cpu")


def test_steps_launched_ahead_give_what_steps_awaited_give() -> None:
    ahead = driver("cuda")
    for prompt in PROMPTS:
        ahead.admit(prompt)
    pending = [ahead.launch({slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})]
    pending += [ahead.launch(dict.fromkeys(range(4), 1)) for _ in range(9)]
    outputs = [step.wait() for step in pending]
    assert [list(row) for row in zip(*(output.token_ids for output in outputs), strict=True)] == tokens_on(
        "cuda"
    )
    assert all(output.device_s > 0 for output in outputs)
    assert all(output.idle_s >= 0 for output in outputs)


def test_sampling_with_everything_on_runs_and_repeats() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {7: 2.0},
        "num_logprobs": 3,
        "seed": 5,
    }
    assert tokens_on("cuda", **sampling) == tokens_on("cuda", **sampling)


def test_prompt_logprobs_are_those_of_the_cpu() -> None:
    scored = []
    for kind in ("cuda", "cpu"):
        fresh = driver(kind)
        slot = fresh.admit(PROMPTS[2], num_prompt_logprobs=2)
        scored.append(fresh.step({slot: 9}).prompt_logprobs[slot])
    for on_gpu, on_cpu in zip(*scored, strict=True):
        assert on_gpu.logprob == pytest.approx(on_cpu.logprob, abs=1e-3)


def test_executor_one_step_ahead_and_past_a_failed_step() -> None:
    def start() -> tuple[ModelRunner, ExecutorInfo]:
        device = open_device("cuda")
        device.activate()
        return small_runner(device=device)

    async def run() -> list[list[int]]:
        executor = ThreadExecutor(start)
        info = await executor.start()
        writer = PlanDriver(None, info)  # type: ignore[arg-type]
        for prompt in PROMPTS:
            writer.admit(prompt)
        plans = [writer.plan({slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})]
        plans += [writer.plan(dict.fromkeys(range(4), 1)) for _ in range(9)]
        steps = [executor.submit(plan) for plan in plans]
        outputs = await asyncio.gather(*steps)
        bad = dataclasses.replace(plans[-1], step_id=99, released_slots=(7,))
        with pytest.raises(StepFailed):
            await executor.submit(bad)
        await executor.stop()
        return [list(row) for row in zip(*(output.token_ids for output in outputs), strict=True)]

    assert asyncio.run(run()) == tokens_on("cuda")


@pytest.mark.parametrize("max_model_len", [None, 48])
def test_startup_measures_memory_and_leaves_the_rest_alone(max_model_len: int | None) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # what tests before this one left
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    runner, info = start_runner(
        dummy_checkpoint(hidden_size=512, intermediate_size=1024, vocab_size=32000, num_hidden_layers=4),
        device="cuda",
        load_format="dummy",
        gpu_memory_utilization=0.3,
        max_num_seqs=64,
        max_model_len=max_model_len,
    )
    used_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    pool_bytes = info.kv_groups[0].num_blocks * info.kv_groups[0].bytes_per_block
    assert 0.2 * total_bytes < pool_bytes < used_bytes < 0.31 * total_bytes
    fresh = PlanDriver(runner, info)
    assert len(fresh.generate([fresh.admit([1, 2, 3])], 4)[0]) == 4
    del runner, fresh
    torch.cuda.empty_cache()


def test_no_mix_of_rows_takes_more_memory_than_the_profile_found() -> None:
    device = open_device("cuda")
    device.activate()
    num_slots, longest = 128, 32768

    def make_runner(groups: tuple[KVGroup, ...], model_len: int) -> ModelRunner:
        return small_runner(
            num_slots=num_slots, num_blocks=groups[0].num_blocks, max_model_len=model_len, device=device
        )[0]

    groups = group_layers(AttentionModel({}).kv_specs(block_len=4, dtype="float32"))
    found, _ = profile(
        make_runner, groups, device, num_slots=num_slots, token_budget=2048, model_len=longest + 1
    )
    before_bytes = device.allocated_bytes()
    sized = tuple(dataclasses.replace(group, num_blocks=2) for group in groups)
    runner = make_runner(sized, longest + 1)
    device.reset_peak()
    plain = SamplingParams(temperature=1.0, top_p=0.9)
    for rows, sampling, widths in (
        ([(longest - 1, 1)] + [(1023, 1)] * 127, plain, ()),
        ([(256 * slot, 1) for slot in range(1, 128)], plain, ()),
        ([(3000, 1)] * 60 + [(longest - 1500, 1500)] + [(20000, 300)], plain, ()),
        ([(0, 2048)], plain, ()),
        ([(3000, 1)] * 128, ASKS_MOST, ()),
        ([(3000, 1)] * 128, SEARCHES, (100, 4, 4, 20)),
        ([(3000, 1)] * 128, SEARCHES, (2,) * 64),
    ):
        run_dummy_rows(runner, rows, sampling=sampling, widths=widths)
    device.synchronize()
    taken = device.peak_bytes() - before_bytes - 2 * sum(group.bytes_per_block for group in groups)
    assert 0 < taken <= found


def test_many_admissions_in_one_plan_get_their_own_tokens() -> None:
    crowded = driver("cuda", num_slots=32, num_blocks=200)
    for slot in range(31):
        crowded.admit([slot + 1, 7])
    together = crowded.launch(dict.fromkeys(range(31), 2)).wait()
    alone = [driver("cuda") for _ in range(2)]
    for slot, fresh in zip((0, 30), alone, strict=True):
        fresh.admit([slot + 1, 7])
        assert fresh.step({0: 2}).token_ids[0] == together.token_ids[slot]
