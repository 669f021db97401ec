"""The demo model in float32 says, token for token, what transformers says on the same file."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from asyncserve import LLM, SamplingParams
from tests.fakes.demo_model import demo_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 40
PROMPTS = [
    "The capital of France is",
    "San Francisco is a",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "The three laws of thermodynamics are",
    "1 2 3 4 5 6 7",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at a temperature of 100 degrees, and ice melts at",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    with LLM(str(demo_model_path()), device="cpu", dtype="float32", max_model_len=512) as model:
        yield model


@pytest.fixture(scope="module")
def prompt_token_ids(llm: LLM) -> list[list[int]]:
    one = SamplingParams(max_tokens=1, temperature=0)
    return [list(c.prompt_token_ids) for c in llm.generate(PROMPTS, one, progress=False)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    path = demo_model_path()
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, prompt_token_ids: list[list[int]]) -> list[list[int]]:
    outputs = []
    with torch.inference_mode():
        for ids in prompt_token_ids:
            out = model.generate(
                torch.tensor([ids]),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
            outputs.append(out[0, len(ids) :].tolist())
    return outputs


def test_greedy_output_in_a_batch_is_that_of_transformers(
    llm: LLM, prompt_token_ids: list[list[int]], expected: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    got = llm.generate(prompt_token_ids, params, progress=False)
    assert [list(c.outputs[0].token_ids) for c in got] == expected


def test_greedy_output_alone_is_that_of_transformers(
    llm: LLM, prompt_token_ids: list[list[int]], expected: list[list[int]]
) -> None:
    # Alone, a token costs eight times as much: every prompt for a while, one of them to the end.
    for index, (ids, want) in enumerate(zip(prompt_token_ids, expected, strict=True)):
        num_tokens = NUM_TOKENS if index == 0 else 8
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        [choice] = llm.generate(ids, params, progress=False)[0].outputs
        assert list(choice.token_ids) == want[:num_tokens]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_beam_searches_in_a_batch_find_what_those_of_transformers_find(
    llm: LLM, model: PreTrainedModel, prompt_token_ids: list[list[int]], width: int
) -> None:
    comma = 28
    prompts = [prompt_token_ids[0], prompt_token_ids[3], prompt_token_ids[6]]
    kinds: list[dict[str, Any]] = [
        {"early_stopping": False, "length_penalty": 1.0},
        {"early_stopping": True, "length_penalty": 0.5},
        {"early_stopping": "never", "length_penalty": 2.0},
    ]
    params = [
        SamplingParams(n=width, use_beam_search=True, max_tokens=12, stop_token_ids=(comma,), **kind)
        for kind in kinds
    ]
    for ids, kind, got in zip(prompts, kinds, llm.generate(prompts, params, progress=False), strict=True):
        config = GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            eos_token_id=[model.config.eos_token_id, comma],
            pad_token_id=comma,
            do_sample=False,
            **kind,
        )
        with torch.inference_mode():
            sequences = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), generation_config=config
            )
        texts = sequences[:, len(ids) :].tolist()
        padding = [comma] * 12
        own = [[*output.token_ids, *padding][: len(texts[0])] for output in got.outputs]
        assert own == texts
