"""Masks of grammars on a GPU: pinned memory, a copy that is waited for, and steps launched ahead of it."""

from typing import Any

import pytest
import torch

from asyncserve.gpu.device import open_device
from asyncserve.gpu.sampling.sampler import Sampler
from asyncserve.request import SamplingParams
from tests.fakes.attention_model import small_runner
from tests.fakes.grammar import ByteTokens, FakeGrammar
from tests.fakes.plan_driver import PlanDriver
from tests.fakes.small_tokenizers import byte_level_bpe
from tests.gpu.sampling.rows import CPU
from tests.gpu.sampling.test_token_masks import PROMPT_LEN, VOCAB, assignment, grammar, some_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TEXTS = ["012345", "05050505", "1234567"]


def driver(kind: str) -> PlanDriver:
    device = open_device(kind, num_threads=1)
    device.activate()
    return PlanDriver(*small_runner(device=device))


def test_the_tokens_are_those_of_a_cpu() -> None:
    samplings = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, min_tokens=3), None]
    tokens = []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(16, VOCAB, 64, device)
        for slot, sampling in enumerate(samplings):
            follows = None if sampling is None else grammar("ab", "abc", "xyz")
            sampler.admit(assignment(slot, follows, sampling or SamplingParams(temperature=0.0)))
        opened = open_device(device.type, num_threads=1)
        opened.activate()
        steps = []
        for step in range(5):
            logits = some_logits(3, seed=step).to(device)
            sampled = sampler.sample(logits, [0, 1, 2], [PROMPT_LEN + step] * 3)
            (copy,), copied = opened.copy_out([sampled.token_ids])
            sampler.expect([0, 1, 2], copy, copied)
            copied.wait()
            steps.append(copy.tolist())
        tokens.append(steps)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_steps_launched_ahead_give_what_steps_awaited_give(sampling: dict[str, Any]) -> None:
    def admitted(fresh: PlanDriver) -> PlanDriver:
        for slot in range(4):
            follows = FakeGrammar(TEXTS, ByteTokens(), fresh.info.vocab_size) if slot != 2 else None
            fresh.admit([5, 6, 7 + slot], grammar=follows, seed=slot, **sampling)
        return fresh

    awaited = admitted(driver("cuda"))
    expected = [list(awaited.step(dict.fromkeys(range(4), 3)).token_ids)]
    expected += [list(awaited.step(dict.fromkeys(range(4), 1)).token_ids) for _ in range(8)]
    ahead = admitted(driver("cuda"))
    pending = [ahead.launch(dict.fromkeys(range(4), 3))]
    outputs = []
    for _ in range(8):
        pending.append(ahead.launch(dict.fromkeys(range(4), 1)))
        outputs.append(list(pending.pop(0).wait().token_ids))
    outputs.append(list(pending.pop().wait().token_ids))
    assert outputs == expected
    for slot in (0, 1, 3):
        column = [row[slot] for row in outputs]
        assert bytes(column[: column.index(ByteTokens.EOS_ID)]).decode() in TEXTS


def test_a_mask_of_xgrammar_forbids_the_same_as_on_a_cpu() -> None:
    pytest.importorskip("xgrammar")
    from tests.loop.grammars import compiled, schema

    tokenizer = byte_level_bpe()
    vocab_size = tokenizer.vocab_size + 11
    follows = compiled(
        schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        tokenizer,
        vocab_size=vocab_size,
    )
    tokens = []
    for device in (CPU, torch.device("cuda")):
        opened = open_device(device.type, num_threads=1)
        opened.activate()
        sampler = Sampler(16, vocab_size, 64, device)
        sampler.admit(assignment(0, follows))
        sampler.admit(assignment(1, None))
        steps = []
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            logits = torch.randn(2, vocab_size, generator=generator).to(device)
            sampled = sampler.sample(logits, [0, 1], [PROMPT_LEN + step] * 2)
            (copy,), copied = opened.copy_out([sampled.token_ids])
            sampler.expect([0, 1], copy, copied)
            copied.wait()
            steps.append(copy.tolist())
        tokens.append(steps)
    assert tokens[0] == tokens[1]
    assert tokens[0][0][0] == tokenizer.encode("{", add_special_tokens=False)[0]
