"""What a sequence gets is what it gets alone on a CPU, however its steps are made up and run."""

import random
from typing import Any

import pytest

from asyncserve.gpu.completion import PendingOutput
from asyncserve.step import StepPlan
from tests.gpu.tiny_runners import PROMPTS, VOCAB, Subject, drive, expected, generate_alone, subjects

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 6
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
TRUNCATED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "seed": 8}
PENALIZED: dict[str, Any] = {"temperature": 0.8, "seed": 9, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}}

each_subject = pytest.mark.parametrize("subject", subjects())
each_quick_subject = pytest.mark.parametrize("subject", subjects("cpu", "cuda"))


@each_subject
def test_sequences_in_one_batch_get_what_each_gets_alone(subject: Subject) -> None:
    together = drive(subject)
    slots = [together.admit(prompt) for prompt in PROMPTS]
    num_tokens = 3 if subject.is_slow else NUM_TOKENS
    tokens = together.generate(slots, num_tokens)
    assert tokens == [expected(subject, prompt, num_tokens) for prompt in PROMPTS]


@each_quick_subject
def test_a_sequence_alone_gets_what_it_gets_on_a_cpu(subject: Subject) -> None:
    alone = drive(subject)
    tokens = [generate_alone(alone, prompt, NUM_TOKENS) for prompt in PROMPTS[1:3]]
    assert tokens == [expected(subject, prompt, NUM_TOKENS) for prompt in PROMPTS[1:3]]


@each_quick_subject
@pytest.mark.parametrize("chunk", [1, 3])
def test_prompts_in_chunks_give_what_they_give_whole(subject: Subject, chunk: int) -> None:
    chunked = drive(subject)
    slots = [chunked.admit(prompt) for prompt in PROMPTS]
    tokens = chunked.generate(slots, 4, chunk=chunk)
    assert tokens == [expected(subject, prompt, 4) for prompt in PROMPTS]


@each_quick_subject
def test_a_cached_prefix_gives_what_computing_it_gives(subject: Subject) -> None:
    shared = drive(subject)
    prefix = PROMPTS[2][:8]
    first = shared.admit([*prefix, 10, 11])
    assert shared.generate([first], 3)[0] == expected(subject, [*prefix, 10, 11], 3)
    second = shared.admit([*prefix, 20], shares_blocks_of=first, num_shared=2)
    assert shared.generate([second], 5)[0] == expected(subject, [*prefix, 20], 5)


@each_subject
def test_a_preempted_sequence_goes_on_where_it_was(subject: Subject) -> None:
    preempted = drive(subject, num_blocks=12)
    slot = preempted.admit(PROMPTS[2])
    before, meanwhile, after = (2, 2, 2) if subject.is_slow else (3, 4, 4)
    tokens = preempted.generate([slot], before)[0]
    preempted.release(slot)
    # Another sequence takes its blocks and its slot meanwhile.
    other = generate_alone(preempted, PROMPTS[0], meanwhile)
    assert other == expected(subject, PROMPTS[0], meanwhile)
    slot = preempted.admit([*PROMPTS[2], *tokens], prompt_len=len(PROMPTS[2]), slot=2)
    tokens += preempted.generate([slot], after)[0]
    assert tokens == expected(subject, PROMPTS[2], before + after)


@each_quick_subject
def test_steps_launched_before_the_last_one_is_read_continue_from_its_tokens(subject: Subject) -> None:
    ahead = drive(subject)
    first, second = ahead.admit(PROMPTS[0]), ahead.admit(PROMPTS[1])
    pending = [ahead.launch({first: len(PROMPTS[0]), second: 1})]
    pending += [ahead.launch({first: 1, second: 1}) for _ in range(2)]
    third = ahead.admit(PROMPTS[3])
    pending.append(ahead.launch({first: 1, second: 1, third: len(PROMPTS[3])}))
    pending += [ahead.launch({second: 1, third: 1}) for _ in range(2)]
    steps = [list(step.wait().token_ids) for step in pending]
    assert [row[0] for row in steps[:4]] == expected(subject, PROMPTS[0], 4)
    assert [row[1] for row in steps[:4]] + [row[0] for row in steps[4:]] == expected(subject, PROMPTS[1], 6)
    assert [steps[3][2]] + [row[1] for row in steps[4:]] == expected(subject, PROMPTS[3], 3)


@each_quick_subject
def test_a_token_that_a_stop_makes_void_harms_neither_neighbours_nor_the_next_owner(subject: Subject) -> None:
    late = drive(subject, num_blocks=12)
    stopped, other = late.admit(PROMPTS[0]), late.admit(PROMPTS[3])
    late.step({stopped: len(PROMPTS[0]), other: len(PROMPTS[3])})
    late.step({stopped: 1, other: 1})
    # Planned before anyone knew that the last token ended the sequence; its row is released a step later.
    late.launch({stopped: 1, other: 1})
    late.release(stopped)
    tokens = list(late.step({other: 1}).token_ids)
    assert tokens == expected(subject, PROMPTS[3], 4)[3:]
    heir = late.admit(PROMPTS[2])
    assert heir == stopped
    assert late.generate([heir], 4)[0] == expected(subject, PROMPTS[2], 4)


@each_quick_subject
@pytest.mark.parametrize("sampling", [SAMPLED, TRUNCATED, PENALIZED], ids=["free", "truncated", "penalized"])
def test_a_draw_depends_on_seed_and_position_and_not_on_neighbours_or_the_slot(
    subject: Subject, sampling: dict[str, Any]
) -> None:
    mixed = drive(subject)
    alone = generate_alone(mixed, PROMPTS[2], 5, **sampling)
    for neighbour in ({}, {"temperature": 0.7, "top_p": 0.5, "seed": 1}, {"num_logprobs": 2}):
        mixed.admit(PROMPTS[0], **neighbour)
    slot = mixed.admit(PROMPTS[2], **sampling)
    assert slot != 0
    *neighbours, together = mixed.generate([0, 1, 2, slot], 5)
    assert together == alone
    assert neighbours[0] == neighbours[2] == expected(subject, PROMPTS[0], 5)


@each_quick_subject
def test_choices_of_one_prompt_are_its_greedy_tokens_or_draws_of_their_own(subject: Subject) -> None:
    several = drive(subject)
    first = several.admit(PROMPTS[2])
    several.step({first: len(PROMPTS[2])})
    # The others read the full blocks that the first has computed.
    shared: dict[str, Any] = {"shares_blocks_of": first, "num_shared": 3}
    drawing = [several.admit(PROMPTS[2], temperature=1.5, seed=seed, **shared) for seed in (1, 2)]
    greedy = several.admit(PROMPTS[2], **shared)
    *drawn, again = several.generate([*drawing, greedy], 6)
    assert again == expected(subject, PROMPTS[2], 6)
    assert drawn[0] != drawn[1]


@each_subject
def test_random_mixes_of_arrivals_chunks_pauses_and_releases_change_no_sequence(subject: Subject) -> None:
    rng = random.Random(3)
    mixed = drive(subject, num_blocks=40)
    running: dict[int, tuple[list[int], list[int]]] = {}
    waiting: list[tuple[StepPlan, PendingOutput]] = []
    num_ended = 0
    num_steps, num_tokens, least_ended = (12, 3, 2) if subject.is_slow else (60, 6, 11)
    for _ in range(num_steps):
        if len(running) < 4 and rng.random() < 0.6:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            running[mixed.admit(prompt)] = (prompt, [])
        decoding = [slot for slot in running if mixed.starts[slot] >= mixed.assigned_lens[slot]]
        rows = {slot: 1 for slot in decoding if rng.random() < 0.8}
        for slot in running:
            if slot not in decoding:
                rows[slot] = rng.randint(1, mixed.assigned_lens[slot] - mixed.starts[slot])
        if not rows:
            continue
        plan = mixed.plan(dict(sorted(rows.items(), key=lambda row: row[1])))
        waiting.append((plan, mixed.runner.run(plan)))
        if len(waiting) == 2:  # one runs, one is behind it
            _read(*waiting.pop(0), running)
        for slot in [slot for slot, (_, tokens) in running.items() if len(tokens) >= num_tokens]:
            while waiting:
                _read(*waiting.pop(0), running)
            prompt, tokens = running.pop(slot)
            assert tokens == expected(subject, prompt, len(tokens))
            mixed.release(slot)
            num_ended += 1
    assert num_ended >= least_ended


def _read(plan: StepPlan, output: PendingOutput, running: dict[int, tuple[list[int], list[int]]]) -> None:
    sampled = iter(output.wait().token_ids)
    for sequence in plan.sequences:
        if sequence.samples:
            running[sequence.slot][1].append(next(sampled))
