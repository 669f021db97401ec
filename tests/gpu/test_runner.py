import random
from typing import Any

import pytest

from asyncserve.errors import InvariantError
from asyncserve.gpu.runner import ModelRunner
from asyncserve.request import TokenLogprobs
from asyncserve.step import BAD_LOGITS, BlockAppend, ScheduledSequence, StepPlan
from tests.fakes.attention_model import AttentionModel, small_runner
from tests.fakes.plan_driver import PlanDriver

PROMPTS = [[5, 6, 7], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8, 8, 8]]


def driver(model: AttentionModel | None = None, **sizes: Any) -> PlanDriver:
    return PlanDriver(*small_runner(model=model, **sizes))


def alone(prompt: list[int], num_tokens: int, **sampling: Any) -> list[int]:
    """Return the tokens of one prompt on a fresh runner, computed in one prefill step."""
    fresh = driver()
    return fresh.generate([fresh.admit(prompt, **sampling)], num_tokens)[0]


def direct(prompt: list[int], num_tokens: int) -> list[int]:
    """Return greedy tokens by the plainest way: the whole sequence recomputed for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        fresh = driver()
        slot = fresh.admit(tokens)
        tokens += fresh.step({slot: len(tokens)}).token_ids
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_decoding_from_the_cache_equals_recomputing_everything(prompt: list[int]) -> None:
    assert alone(prompt, 8) == direct(prompt, 8)


def test_sequences_in_one_batch_get_what_each_gets_alone() -> None:
    together = driver()
    slots = [together.admit(prompt) for prompt in PROMPTS]
    assert together.generate(slots, 10) == [alone(prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_prompt_in_chunks_gives_what_it_gives_at_once(chunk: int) -> None:
    chunked = driver()
    slots = [chunked.admit(prompt) for prompt in PROMPTS]
    assert chunked.generate(slots, 6, chunk=chunk) == [alone(prompt, 6) for prompt in PROMPTS]


def test_seeded_sampling_does_not_depend_on_batch_or_slot() -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    expected = alone(PROMPTS[2], 8, **sampling)
    together = driver()
    for prompt in PROMPTS[:2]:
        together.admit(prompt, temperature=0.8, seed=3)
    slot = together.admit(PROMPTS[2], **sampling)
    assert together.generate([0, 1, slot], 8)[2] == expected


def test_cached_prefix_gives_what_computing_it_gives() -> None:
    shared = driver()
    prefix = [3, 1, 4, 1, 5, 9, 2, 6]
    first = shared.admit([*prefix, 10, 11])
    shared.generate([first], 3)
    second = shared.admit([*prefix, 20], shares_blocks_of=first, num_shared=2)
    assert shared.generate([second], 5)[0] == alone([*prefix, 20], 5)


def test_prefix_filled_by_another_sequence_of_the_same_step_is_read() -> None:
    shared = driver()
    prefix = [3, 1, 4, 1, 5, 9, 2, 6]
    first = shared.admit([*prefix, 10])
    plan = shared.plan({first: 9})
    second_table = shared.tables[first][0][:2]
    second = shared.admit([*prefix, 20])
    shared.starts[second] = 8
    shared.tables[second][0] += second_table
    both = StepPlan(
        step_id=plan.step_id,
        sequences=(*plan.sequences, ScheduledSequence(second, 8, 1, samples=True)),
        admitted=(*plan.admitted, *shared._admitted),
        block_appends=(*plan.block_appends, BlockAppend(0, second, (*second_table, 60))),
    )
    output = shared.runner.run(both).wait()
    assert list(output.token_ids) == [alone([*prefix, 10], 1)[0], alone([*prefix, 20], 1)[0]]


def test_slot_and_blocks_of_a_released_sequence_serve_the_next_one() -> None:
    reused = driver(num_slots=1, num_blocks=6)
    slot = reused.admit([9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9], frequency_penalty=1.5, temperature=0.7)
    reused.generate([slot], 5)
    reused.release(slot)
    slot = reused.admit(PROMPTS[0])
    assert reused.generate([slot], 6)[0] == alone(PROMPTS[0], 6)


def test_preempted_sequence_goes_on_where_it_was() -> None:
    preempted = driver()
    slot = preempted.admit(PROMPTS[2], temperature=0.9, seed=5, repetition_penalty=1.3)
    tokens = preempted.generate([slot], 4)[0]
    preempted.release(slot)
    slot = preempted.admit(
        [*PROMPTS[2], *tokens],
        prompt_len=len(PROMPTS[2]),
        temperature=0.9,
        seed=5,
        repetition_penalty=1.3,
        slot=2,
    )
    tokens += preempted.generate([slot], 4)[0]
    assert tokens == alone(PROMPTS[2], 8, temperature=0.9, seed=5, repetition_penalty=1.3)


def test_step_launched_before_the_last_one_is_read_continues_from_its_token() -> None:
    ahead = driver()
    slots = [ahead.admit(prompt) for prompt in PROMPTS[:2]]
    pending = [ahead.launch({0: 3, 1: 1}), *(ahead.launch({0: 1, 1: 1}) for _ in range(4))]
    steps = [list(step.wait().token_ids) for step in pending]
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == [
        alone(PROMPTS[slot], 5) for slot in slots
    ]


def test_prefill_chunk_that_is_not_the_last_samples_nothing() -> None:
    chunked = driver()
    slot = chunked.admit(PROMPTS[2])
    output = chunked.step({slot: 5})
    assert list(output.token_ids) == []
    assert len(chunked.step({slot: 4}).token_ids) == 1


def test_tokens_stand_in_plan_order_with_rows_that_do_not_sample_left_out() -> None:
    mixed = driver()
    for prompt in PROMPTS[:3]:
        mixed.admit(prompt)
    output = mixed.step({2: 4, 1: 1, 0: 3})
    assert list(output.token_ids) == [alone(PROMPTS[1], 1)[0], alone(PROMPTS[0], 1)[0]]


def test_failed_step_leaves_later_steps_of_others_right() -> None:
    model = AttentionModel({})
    failing = driver(model)
    survivor = failing.admit(PROMPTS[0])
    tokens = failing.generate([survivor], 2)[0]
    model.fail_on = 90
    culprit = failing.admit([90, 1])
    with pytest.raises(RuntimeError, match="token 90"):
        failing.launch({culprit: 2})
    # The step queued behind was planned before anyone knew: it decodes the culprit from an unwritten token.
    tokens += failing.step({survivor: 1, culprit: 1}).token_ids[:1]
    failing.release(culprit)
    tokens += failing.step({survivor: 1}).token_ids
    assert tokens == alone(PROMPTS[0], 4)


def test_sequence_with_bad_logits_harms_neither_the_step_behind_nor_the_next_owner_of_its_blocks() -> None:
    model = AttentionModel({})
    model.embedding[90] = float("nan")
    poisoned = driver(model, num_blocks=8)
    culprit = poisoned.admit([90, 1, 2, 3, 4, 5, 6])
    output = poisoned.step({culprit: 7})
    assert list(output.token_ids) == [BAD_LOGITS]
    assert list(poisoned.step({culprit: 1}).token_ids) == [BAD_LOGITS]
    poisoned.release(culprit)
    # The freed blocks, NaN in every position, are handed out first; the prompt fills half of one.
    slot = poisoned.admit([7, 7])
    other = poisoned.admit([5, 6, 7])
    tokens = poisoned.generate([slot, other], 3)
    assert all(token_id >= 0 for row in tokens for token_id in row)


def test_logprobs_belong_to_the_slot_that_asked() -> None:
    mixed = driver()
    mixed.admit(PROMPTS[0])
    asking = mixed.admit(PROMPTS[3], num_logprobs=2)
    output = mixed.step({0: 3, asking: 4})
    assert set(output.logprobs) == {asking}
    entry = output.logprobs[asking]
    assert entry.token_id == output.token_ids[1]
    assert entry.rank == 1
    assert entry.top[0] == pytest.approx((entry.token_id, entry.logprob))


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_prompt_logprobs_are_those_of_the_whole_prompt_however_chunked(chunk: int | None) -> None:
    prompt = PROMPTS[2]
    scored = driver()
    scored.admit(PROMPTS[0])
    slot = scored.admit(prompt, num_prompt_logprobs=1)
    entries: list[TokenLogprobs] = []
    while scored.starts[slot] < len(prompt):
        num = min(chunk or len(prompt), len(prompt) - scored.starts[slot])
        entries += scored.step({slot: num}).prompt_logprobs.get(slot, ())
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        reference = driver()
        other = reference.admit(prompt[: position + 1], num_logprobs=160)
        expected = dict(reference.step({other: position + 1}).logprobs[other].top)
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-4)


def test_prompt_logprobs_stop_at_the_prompt_of_a_preempted_sequence() -> None:
    scored = driver()
    slot = scored.admit([5, 6, 7, 8, 9], prompt_len=3, num_prompt_logprobs=0)
    entries = scored.step({slot: 5}).prompt_logprobs[slot]
    assert [entry.token_id for entry in entries] == [6, 7]


def test_sequence_may_fill_the_whole_context() -> None:
    full = driver(max_model_len=16)
    slot = full.admit(list(range(1, 15)))
    assert len(full.generate([slot], 3)[0]) == 3


def test_plan_that_breaks_a_rule_is_refused() -> None:
    runner: ModelRunner = driver().runner
    with pytest.raises(InvariantError, match="released while free"):
        runner.run(StepPlan(step_id=0, sequences=(), released_slots=(1,)))
    uncovered = driver()
    uncovered.admit(PROMPTS[2])
    plan = uncovered.plan({0: 9})
    with pytest.raises(InvariantError, match="shorter than its sequence"):
        uncovered.runner.run(
            StepPlan(step_id=0, sequences=plan.sequences, admitted=plan.admitted, block_appends=())
        )


def test_times_of_a_step_are_told() -> None:
    timed = driver()
    slot = timed.admit(PROMPTS[0])
    first = timed.step({slot: 3})
    assert first.idle_s == 0.0  # nothing was running before
    second = timed.step({slot: 1})
    assert second.device_s > 0
    assert second.launch_s > 0
    assert second.idle_s > 0
    timed.release(slot)
    timed.admit(PROMPTS[1])
    assert timed.step({0: 1}).idle_s == 0.0  # the only sequence had ended


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_mixes_of_arrivals_chunks_and_releases_change_no_sequence(seed: int) -> None:
    rng = random.Random(seed)
    mixed = driver(num_slots=4, num_blocks=40)
    running: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(60):
        if len(running) < 4 and rng.random() < 0.5:
            prompt = [rng.randrange(160) for _ in range(rng.randint(1, 12))]
            running[mixed.admit(prompt)] = (prompt, [])
        decoding = [slot for slot in running if mixed.starts[slot] >= mixed.assigned_lens[slot]]
        rows = {slot: 1 for slot in decoding if rng.random() < 0.8}
        for slot in running:
            if slot not in decoding:
                rows[slot] = rng.randint(1, mixed.assigned_lens[slot] - mixed.starts[slot])
        if not rows:
            continue
        plan = mixed.plan(rows)
        sampled = iter(mixed.runner.run(plan).wait().token_ids)
        for sequence in plan.sequences:
            if sequence.samples:
                running[sequence.slot][1].append(next(sampled))
        for slot in [slot for slot, (_, tokens) in running.items() if len(tokens) >= 8]:
            prompt, tokens = running.pop(slot)
            assert tokens == alone(prompt, len(tokens))
            mixed.release(slot)
