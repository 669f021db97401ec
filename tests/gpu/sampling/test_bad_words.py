import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncserve.gpu.device import CpuDevice
from asyncserve.gpu.sampling.bad_words import BadWords
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.gpu.slots import SlotTable
from asyncserve.gpu.staging import Staging
from asyncserve.request import SamplingParams
from tests.gpu.sampling.rows import CPU, assignment, new_sampler

NUM_SLOTS = 8
MAX_LEN = 40


def history_of(sequences: dict[int, Sequence[int]]) -> SlotTable:
    """The tokens of slots, as the device keeps them."""
    device = CpuDevice(num_threads=1)
    slots = SlotTable(num_slots=NUM_SLOTS, max_model_len=MAX_LEN, device=device)
    slots.admit(
        [assignment(slot, SamplingParams(), prompt=token_ids) for slot, token_ids in sequences.items()],
        Staging(device),
    )
    return slots


def completed(words: Sequence[Sequence[int]], outputs: Sequence[int]) -> set[int]:
    """What may not come after `outputs`, said plainly."""
    return {
        word[-1]
        for word in words
        if list(word[:-1]) == list(outputs[len(outputs) - len(word) + 1 :]) and len(word) - 1 <= len(outputs)
    }


WORDS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=8)
TOKENS = st.lists(st.integers(0, 4), max_size=12)


@given(st.lists(st.tuples(WORDS, st.lists(st.integers(0, 4), min_size=1, max_size=6), TOKENS), max_size=4))
def test_exactly_the_tokens_that_complete_a_word_among_the_outputs_are_forbidden(
    cases: list[tuple[list[list[int]], list[int], list[int]]],
) -> None:
    stage = BadWords(5, CPU)
    history = history_of({slot: [*prompt, *outputs] for slot, (_, prompt, outputs) in enumerate(cases)})
    logits = torch.randn(len(cases) + 1, 5, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    rows, slots, positions = [], [], []
    for slot, (words, prompt, outputs) in reversed(list(enumerate(cases))):
        assert stage.set(slot, words, prompt_len=len(prompt))
        rows.append(slot + 1)
        slots.append(slot)
        positions.append(len(prompt) + len(outputs))
        for token_id in completed(words, outputs):
            expected[slot + 1, token_id] = -math.inf
    if cases:
        for _ in range(2):  # the second time with the words put together before
            stage.apply(logits, rows, slots, positions, history)
    assert torch.equal(logits, expected)


def test_words_are_those_of_the_slots_that_ask_now() -> None:
    stage = BadWords(5, CPU)
    history = history_of({0: [0], 1: [0]})
    stage.set(0, [[1]], prompt_len=1)
    stage.set(1, [[2]], prompt_len=1)

    def forbidden(slots: list[int]) -> list[list[int]]:
        logits = torch.zeros(len(slots), 5)
        stage.apply(logits, list(range(len(slots))), slots, [1] * len(slots), history)
        return [row.isinf().nonzero().squeeze(1).tolist() for row in logits]

    assert forbidden([0, 1]) == [[1], [2]]
    assert forbidden([1, 0]) == [[2], [1]]
    stage.release(0)
    stage.set(0, [[3]], prompt_len=1)
    assert forbidden([1, 0]) == [[2], [3]]
    assert forbidden([0]) == [[3]]


def test_a_word_with_an_id_outside_the_vocabulary_is_left_out() -> None:
    stage = BadWords(5, CPU)
    assert not stage.set(0, [[5], [1, 7], [-1, 2], []], prompt_len=1)
    assert stage.set(0, [[5, 1], [1, 2]], prompt_len=1)


def generate(
    sampler: Sampler,
    history: SlotTable,
    staging: Staging,
    logits: torch.Tensor,
    *,
    sampling: SamplingParams,
    words: Sequence[Sequence[int]],
    slot: int,
    preempt_after: int = -1,
    others: Sequence[int] = (),
) -> list[int]:
    """Generate as the runner does: the sampled tokens go into the history without a look at them."""
    prompt = [1, 2, 1]
    given = assignment(slot, sampling, prompt=prompt, seed=5, bad_words=words)
    history.admit([given], staging)
    sampler.admit(given)
    for step in range(len(logits)):
        if step == preempt_after:
            outputs = history.tokens(slot, 3, 3 + step).tolist()
            history.release(slot)
            sampler.release(slot)
            slot = (slot + 3) % NUM_SLOTS
            given = assignment(slot, sampling, prompt=prompt, outputs=outputs, seed=5, bad_words=words)
            history.admit([given], staging)
            sampler.admit(given)
        slots = [*others, slot]
        rows = logits[step].expand(len(slots), -1).contiguous()
        token_ids = sampler.sample(rows, slots, [3 + step] * len(slots), history).token_ids
        places = history.flat_indices(np.array(slots), np.full(len(slots), 3 + step))
        history.write(torch.from_numpy(places).to(token_ids.device), token_ids)
        sampler.record(slots, token_ids)
    tokens: list[int] = history.tokens(slot, 3, 3 + len(logits)).tolist()
    return tokens


def runs(tokens: Sequence[int], words: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The words that stand in a text."""
    return [
        word
        for word in words
        if any(list(word) == list(tokens[at : at + len(word)]) for at in range(len(tokens)))
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_words_never_come_and_neither_batch_nor_preemption_changes_the_tokens(temperature: float) -> None:
    vocab = 4
    words = [[0, 1], [2, 2, 3], [3, 3], [1, 0, 2, 0]]
    logits = torch.randn(30, vocab, generator=torch.Generator().manual_seed(2))
    sampling = SamplingParams(temperature=temperature, max_tokens=30)

    def tokens(preempt_after: int = -1, *, with_others: bool = False, bans: bool = True) -> list[int]:
        device = CpuDevice(num_threads=1)
        staging = Staging(device)
        history = SlotTable(num_slots=NUM_SLOTS, max_model_len=MAX_LEN, device=device)
        sampler = new_sampler(vocab, NUM_SLOTS)
        others = []
        if with_others:
            for other, its_words in ((6, [[1], [3, 1]]), (7, ())):
                given = assignment(
                    other, SamplingParams(temperature=1.0), prompt=[1, 2, 1], bad_words=its_words
                )
                history.admit([given], staging)
                sampler.admit(given)
                others.append(other)
        return generate(
            sampler,
            history,
            staging,
            logits,
            sampling=sampling,
            words=words if bans else (),
            slot=1,
            preempt_after=preempt_after,
            others=others,
        )

    free = tokens(bans=False)
    assert runs(free, words), "the model would not say a bad word: nothing is tested"
    alone = tokens()
    assert not runs(alone, words)
    assert alone == tokens(with_others=True) == tokens(2) == tokens(17) == tokens(9, with_others=True)


def test_words_that_only_the_prompt_begins_may_be_completed() -> None:
    sampler = new_sampler(5, NUM_SLOTS)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0), prompt=[1, 2], bad_words=[[2, 4]]))
    history = history_of({0: [1, 2]})
    logits = torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0]])
    assert sampler.sample(logits.clone(), [0], [2], history).token_ids.tolist() == [4]


def test_a_released_slot_keeps_no_words_for_the_next_sequence() -> None:
    sampler = new_sampler(5, NUM_SLOTS)
    history = history_of({0: [1]})
    logits = torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0]])
    sampler.admit(assignment(0, SamplingParams(temperature=0.0), prompt=[1], bad_words=[[4]]))
    assert sampler.sample(logits.clone(), [0], [1], history).token_ids.tolist() == [3]
    sampler.release(0)
    sampler.admit(assignment(0, SamplingParams(temperature=0.0), prompt=[1]))
    assert sampler.sample(logits.clone(), [0], [1]).token_ids.tolist() == [4]
