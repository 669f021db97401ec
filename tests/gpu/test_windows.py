"""Scheduler and runner together on a model of which one layer has a window: what it has passed is poison."""

import random
from array import array

import pytest
import torch

from asyncserve.gpu.kv_cache import KVCache
from asyncserve.loop.kv_pool import KVBlockPool
from asyncserve.loop.scheduler import Scheduler
from asyncserve.observer import EngineStatistics, RequestTimeline
from asyncserve.request import Request, SamplingParams, TokenizedRequest, TokensPrompt
from tests.gpu.tiny_runners import MIXED_GRAPH, VOCAB, WINDOW_LEN, Subject, expected, marks_of, start_subject

NUM_TOKENS = 12
SUBJECTS = (
    Subject(kind="cpu", architecture="qwen3_windows"),
    Subject(kind="interpreted", architecture="qwen3_windows"),
    Subject(kind="cuda", architecture="qwen3_windows"),
    Subject(kind="cuda", architecture="qwen3_windows", graphs=(MIXED_GRAPH,)),
)
WAYS = {
    "chunked and cached": (100, 5, True),
    "whole": (100, 64, False),
    "preempted": (25, 9, False),
    "preempted and cached": (25, 64, True),
}
CASES = [
    pytest.param(subject, *way, id=f"{subject}, {name}", marks=marks_of(subject))
    for subject in SUBJECTS
    for name, way in list(WAYS.items())[: 1 if subject.is_slow else None]
]


def poison(cache: KVCache, pool: KVBlockPool) -> None:
    """Write NaN into every block that nobody holds and that is not cached."""
    free = [
        each for each in range(1, pool.num_usable + 1) if pool.is_free(each) and pool._digests[each] is None
    ]
    cache._storages[:, :, torch.tensor(free, dtype=torch.int64, device=cache._storages.device)] = torch.nan


def serve(
    subject: Subject,
    prompts: list[list[int]],
    *,
    num_tokens: int,
    num_blocks: int,
    budget: int,
    enable_prefix_caching: bool,
) -> tuple[list[list[int]], EngineStatistics]:
    """Serve prompts, all there from the beginning; return their greedy tokens and what was counted."""
    runner, info, _ = start_subject(subject, num_blocks=num_blocks)
    scheduler = Scheduler(
        info=info,
        policy="fcfs",
        enable_prefix_caching=enable_prefix_caching,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=budget,
    )
    for sequence_id, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        request = Request(
            request_id=str(sequence_id),
            prompt=TokensPrompt(token_ids=prompt),
            sampling=sampling,
            arrival_s=0.0,
        )
        tokenized = TokenizedRequest(
            request=request,
            sequence_id=sequence_id,
            index=0,
            prompt_token_ids=array("i", prompt),
            max_output_len=num_tokens,
            stop_token_ids=frozenset(),
            seed=0,
        )
        scheduler.add(tokenized, RequestTimeline(arrived_s=0.0))
    states = dict(scheduler._live.sequences)
    while not scheduler.is_idle:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.register_some()
        output = runner.run(plan).wait()
        # The step has read what was let go of when it was planned; the next one must not.
        poison(runner._kv_cache, scheduler._live.allocator.pool)
        scheduler.apply(output, 0.0)
        scheduler.check()
    statistics = EngineStatistics()
    scheduler.fill_statistics(statistics)
    return [
        list(states[number].token_ids[len(prompt) :]) for number, prompt in enumerate(prompts)
    ], statistics


@pytest.mark.parametrize(("subject", "num_blocks", "budget", "enable_prefix_caching"), CASES)
def test_tokens_depend_on_nothing_that_the_window_has_passed(
    subject: Subject, num_blocks: int, budget: int, enable_prefix_caching: bool
) -> None:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    prompts = [
        shared[:num] + [rng.randrange(VOCAB) for _ in range(num % 5 + 1)] for num in (0, 20, 9, 20, 15)
    ]
    num_tokens = NUM_TOKENS
    if subject.is_slow:
        prompts, num_tokens = [prompts[3], prompts[1]], 5
    tokens, statistics = serve(
        subject,
        prompts,
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        budget=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    assert tokens == [expected(subject, prompt, num_tokens) for prompt in prompts]
    assert max(map(len, prompts)) > 2 * WINDOW_LEN
    assert statistics.num_window_blocks_freed > len(prompts)
    if enable_prefix_caching:
        assert statistics.prefix_cache_hits > 0
    if num_blocks < 100:
        assert statistics.num_preemptions > 0
