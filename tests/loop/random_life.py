"""Random life of a scheduler on tiny pools: whatever happens, tokens are right and nothing leaks.

Every operation is followed by every check there is: the scheduler's invariants, the rules of plans, the
content of each KV position that a step reads, what the log of the cache says. By hand, over many seeds:

    python -m tests.loop.random_life --num-operations 100000
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Any

from asyncserve.errors import InvalidRequest, StepFailed, StepOutOfMemory
from asyncserve.kv_spec import FullAttention, KVSpec, RecurrentState, SlidingWindow
from asyncserve.loop.waiting import POLICIES
from asyncserve.request import FinishReason
from tests.fakes.executor import fake_continuation, fake_info, fake_logprobs
from tests.loop.beams import searched
from tests.loop.scheduling import Bench

VOCAB = 40


def random_specs(rng: random.Random, block_len: int) -> list[KVSpec]:
    """Return what one to four groups keep: everything, a window, or a state."""
    size: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
    full = FullAttention(block_len=block_len, **size)
    if rng.random() < 0.4:
        return [full] * rng.choice([1, 1, 2])

    def window() -> KVSpec:
        length = block_len * rng.choice([1, 1, 2, 3])
        return SlidingWindow(block_len=length, window_len=rng.choice([1, 2, 3, 5, 9, 16]), **size)

    specs: list[KVSpec] = [window() for _ in range(rng.choice([1, 2]))]
    if rng.random() < 0.7:
        specs.append(FullAttention(block_len=block_len * rng.choice([1, 1, 2]), **size))
    if rng.random() < 0.25:
        specs.append(RecurrentState(state_bytes=12, page_bytes=rng.choice([6, 12])))
    rng.shuffle(specs)
    return specs


def check_search(bench: Bench, sequence_id: int, *, may_fail: bool) -> None:
    """Hold a row's result against what its search finds alone."""
    family = bench.family_of(sequence_id)
    tokenized, received = bench.tokenized[sequence_id], bench.received[sequence_id]
    if received.finish_reason is FinishReason.ERROR:
        assert may_fail or any(each in bench.culprits for each in family)
        return
    if sequence_id in bench.aborted:
        return
    found = searched(
        list(tokenized.prompt_token_ids),
        len(family),
        tokenized.max_output_len,
        tokenized.stop_token_ids,
        VOCAB,
    )[family.index(sequence_id)]
    assert received.token_ids == list(found.token_ids)
    is_stopped = found.stop_token_id is not None
    assert received.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


def simulate(seed: int, size: int = 1, *, are_steps_tiny: bool = False) -> dict[str, int]:
    """Live through one random scenario; return how often the interesting things happened.

    Args:
        seed: Decides everything.
        size: So many times as many requests, slots and blocks as in the smallest lives.
        are_steps_tiny: Whether a step never holds all that run, so that they take turns; nothing fails then,
            for who is tried comes before all others.
    """
    rng = random.Random(seed)
    block_len = rng.choice([1, 2, 4])
    capacity = size * rng.choice([24, 32, 40, 80, 200])
    max_model_len = size * rng.choice([16, 24, 40])
    chunked = rng.random() < 0.7
    host = random.Random(f"host {seed}")
    num_swap_blocks = host.choice([0, 0, 4, 16, 64])
    num_host_blocks = num_swap_blocks + host.choice([0, 0, 3, 16, 64])
    # A bus that carries all, or few blocks a step, beside steps whose tokens take about as long as a block.
    host_block_s, step_s = host.choice([(0.0, 0.0), (0.002, 0.004), (0.01, 0.004)])
    max_num_batched_tokens = rng.choice([1, 2, 3, 8, 16, 64]) if chunked else rng.choice([16, 40])
    if are_steps_tiny:
        chunked, max_num_batched_tokens = True, rng.randint(1, 5)
        capacity, max_model_len = 4 * capacity, 4 * max_model_len  # a search of many steps beside others
    specs = random_specs(rng, block_len)
    info = fake_info(
        num_slots=rng.randint(1, 6 * size),
        num_blocks=1 + sum(spec.most_held(capacity, max_num_batched_tokens) for spec in specs),
        block_len=block_len,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        max_num_batched_tokens=max_num_batched_tokens,
        max_unapplied=rng.choice([1, 2, 2, 3]),
        num_host_blocks=num_host_blocks + 1 if num_host_blocks else 0,
        num_swap_blocks=num_swap_blocks,
        host_block_s=host_block_s,
        specs=specs,
    )
    bench = Bench(
        info,
        policy=rng.choice(POLICIES),
        enable_prefix_caching=rng.random() < 0.8,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 2, 5]),
        async_scheduling=rng.random() < 0.8,
    )
    bench.step_s = step_s
    limit = min(max_model_len, capacity, 1000 if chunked else info.max_num_batched_tokens + 10)
    shared = [[rng.randrange(VOCAB) for _ in range(64 * size)] for _ in range(2)]
    failure_rate = rng.choice([0.0, 0.0, 0.05, 0.2])
    loss_rate = rng.choice([0.0, 0.0, 0.0, 0.02])
    culprit_rate = rng.choice([0.0, 0.0, 0.2])
    if are_steps_tiny:
        failure_rate = loss_rate = culprit_rate = 0.0
    abort_rate = rng.choice([0.0, 0.0, 0.02, 0.1])
    pause_rate = rng.choice([0.0, 0.0, 0.05, 0.2])
    paused: set[int] = set()
    num_left = size * rng.randint(5, 25)

    def add_some() -> None:
        nonlocal num_left
        num_left -= 1
        prompt_limit = limit - 1 if chunked else min(limit - 1, info.max_num_batched_tokens)
        prompt_len = rng.randint(1, prompt_limit)
        prefix = rng.choice(shared)
        if bench.received and rng.random() < 0.3:
            # The next turn of a conversation, perhaps one that still runs.
            earlier = rng.randrange(len(bench.received))
            prefix = [*bench.tokenized[earlier].prompt_token_ids, *bench.tokens_of(earlier)]
        prefix = prefix[: rng.randint(0, prompt_len)]
        prompt = prefix + [rng.randrange(VOCAB) for _ in range(prompt_len - len(prefix))]
        max_tokens = rng.randint(1, limit - prompt_len)
        stop = frozenset(rng.sample(range(VOCAB), rng.choice([0, 1, 3])))
        num_sequences = rng.choice([1, 1, 3, 5])
        # Choices of one request, or requests that happen to be alike.
        are_family = rng.random() < 0.6
        are_beams = are_family and rng.random() < (0.8 if are_steps_tiny else 0.4)
        if are_beams:
            try:
                bench.scheduler.limits.check_search(num_sequences, prompt_len, max_tokens)
            except InvalidRequest:
                are_beams = False
        for index in range(num_sequences):
            if index == 0 or not are_family:
                asked = {
                    "min_tokens": rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
                    "priority": rng.randint(0, 2),
                    "cache_salt": rng.choice([None, None, "salt"]),
                    "num_prompt_logprobs": rng.choice([None, None, None, 2]),
                    "num_logprobs": rng.choice([None, None, 1]),
                }
                if are_beams:
                    asked |= {"n": num_sequences, "use_beam_search": True, "temperature": 0.0}
                    asked |= {"min_tokens": 0, "num_prompt_logprobs": None, "num_logprobs": None}
            sequence_id = bench.add(
                prompt,
                max_tokens=max_tokens,
                stop_token_ids=stop,
                leader_id=len(bench.received) - index if are_family else None,
                **asked,
            )
            if rng.random() < culprit_rate:
                bench.culprits[sequence_id] = rng.randrange(prompt_len + max_tokens)

    num_losses = num_branches = 0
    while num_left or bench.has_work or paused:
        action = rng.random()
        if paused and (rng.random() < 0.3 or not bench.has_work):
            bench.resume(paused.pop())
        elif bench.received and rng.random() < pause_rate:
            paused.add(rng.randrange(len(bench.received)))
            for sequence_id in paused:
                bench.pause(sequence_id)
        elif bench.received and rng.random() < abort_rate:
            sequence_id = rng.randrange(len(bench.received))
            bench.abort(sequence_id)
            if bench.tokenized[sequence_id].request.sampling.use_beam_search:
                bench.aborted.update(bench.family_of(sequence_id))
        elif num_left and action < 0.2:
            add_some()
        elif action < 0.6:
            planned = bench.plan()
            assert planned is not None or bench.in_flight or not bench.has_work
            if planned is not None:
                num_branches += sum(not sequence.num_tokens for sequence in planned.sequences)
        elif bench.in_flight:
            if rng.random() < loss_rate:
                bench.lose_device()
                num_losses += 1
            elif rng.random() < failure_rate:
                bench.fail(rng.choice([StepFailed, StepOutOfMemory]))
            else:
                bench.advance()
    bench.check_nothing_leaked()

    num_cached = num_searches = 0
    for sequence_id, received in bench.received.items():
        tokenized = bench.tokenized[sequence_id]
        sampling = tokenized.request.sampling
        prompt = tokenized.prompt_token_ids
        if sampling.use_beam_search:
            num_searches += 1
            check_search(bench, sequence_id, may_fail=bool(failure_rate or loss_rate))
            continue
        expected = fake_continuation(prompt, tokenized.max_output_len, VOCAB)
        reason = FinishReason.LENGTH
        for position, token_id in enumerate(expected):
            if token_id in tokenized.stop_token_ids and position + 1 >= sampling.min_tokens:
                expected = expected[: position + 1]
                reason = FinishReason.STOP
                break
        num_cached += bench.timelines[sequence_id].num_cached_tokens
        assert received.token_ids == expected[: len(received.token_ids)]
        if sampling.num_logprobs is not None:
            assert received.logprobs == [
                fake_logprobs(token_id, sampling.num_logprobs, VOCAB) for token_id in received.token_ids
            ]
        if sampling.num_prompt_logprobs is not None and received.token_ids:
            scored = [fake_logprobs(token_id, sampling.num_prompt_logprobs, VOCAB) for token_id in prompt[1:]]
            assert received.prompt_logprobs == [scored]
        else:
            assert received.prompt_logprobs == []
        if received.finish_reason is FinishReason.ERROR:
            # `Bench` has seen that a step of it alone failed, or lost the device.
            assert failure_rate or loss_rate or sequence_id in bench.culprits
        elif sequence_id not in bench.aborted:
            assert received.token_ids == expected
            assert received.finish_reason is reason
    return {
        "operations": bench.num_operations,
        "preemptions": bench.statistics().num_preemptions,
        "cached": num_cached,
        "failed_steps": bench.num_failed_steps,
        "losses": num_losses,
        "aborts": len(bench.aborted),
        "pauses": bench.statistics().num_pauses,
        "swaps": bench.statistics().num_swaps,
        "host_hits": bench.statistics().host_cache_hits,
        "branches": num_branches,
        "beams": num_searches,
        "copies": bench.statistics().num_copied_blocks,
        "window blocks freed": bench.statistics().num_window_blocks_freed,
        "cached beside windows": num_cached if any(isinstance(spec, SlidingWindow) for spec in specs) else 0,
    }


def live_many(
    seeds: Iterable[int], *, size: int = 1, num_operations: int | None = None, are_steps_tiny: bool = False
) -> Counter[str]:
    """Live through the scenarios of many seeds, until there were enough operations; return the counts.

    An error says the seed and the size.
    """
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total.update(simulate(seed, size, are_steps_tiny=are_steps_tiny))
        except BaseException as error:
            error.add_note(f"seed {seed}, size {size}")
            raise
        total["lives"] += 1
        if num_operations is not None and total["operations"] >= num_operations:
            break
    return total


def main() -> None:
    """Live as long as asked, in parts of every size, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-operations", type=int, default=100_000, help="of all sizes together")
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow it")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tiny-steps", action="store_true", help="steps that never hold all that run")
    options = parser.parse_args()
    share = -(-options.num_operations // len(options.sizes))
    for size in options.sizes:
        total = live_many(
            count(options.seed), size=size, num_operations=share, are_steps_tiny=options.tiny_steps
        )
        print(f"size {size}: {dict(total)}", flush=True)


if __name__ == "__main__":
    main()
