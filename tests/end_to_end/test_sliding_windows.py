"""A model most of whose layers have a window, prompts several windows long: transformers' tokens, always."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncserve import LLM, SamplingParams
from asyncserve.observer import EngineStatistics
from tests.fakes.tiny_model import tiny_llama_config
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_TOKENS = 24
WINDOW_LEN = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
SIZES = tiny_llama_config(
    num_hidden_layers=3,
    use_sliding_window=True,
    sliding_window=WINDOW_LEN,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)

Answers = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES, dtype=torch.float32)).save_pretrained(folder)
    write_tiny_tokenizer(folder, vocab_size=SIZES["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def prompts() -> Answers:
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(60)]
    return [
        shared[: rng.choice((0, 40, 60))] + [rng.randrange(3, 320) for _ in range(n)] for n in range(1, 9)
    ]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: Answers) -> Answers:
    reference = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    answers = []
    for prompt in prompts:
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def answer(model: Path, prompts: Answers, **options: Any) -> tuple[Answers, EngineStatistics]:
    if "num_gpu_blocks_override" not in options:
        options = {"kv_cache_memory_bytes": 1 << 22, **options}
    with LLM(
        str(model), device="cpu", dtype="float32", num_threads=1, block_size=4, max_model_len=96, **options
    ) as llm:
        # The first goes ahead, so that the others find what it leaves.
        completions = llm.generate(prompts[:1], PARAMS, progress=False)
        completions += llm.generate(prompts[1:], PARAMS, progress=False)
        return [list(each.outputs[0].token_ids) for each in completions], llm.statistics()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False, "async_scheduling": False}, id="plain"),
        pytest.param({}, id="cached"),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 5}, id="chunked and cached"),
        pytest.param(
            {"max_num_batched_tokens": 9, "max_num_seqs": 5, "enable_prefix_caching": False}, id="chunked"
        ),
        pytest.param(
            {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 16, "max_num_seqs": 8}, id="preempted"
        ),
        pytest.param({"attention_backend": "reference"}, id="reference"),
    ],
)
def test_answers_are_those_of_transformers_and_windows_give_back_what_they_pass(
    model: Path, prompts: Answers, expected: Answers, options: dict[str, Any]
) -> None:
    tokens, statistics = answer(model, prompts, **options)
    assert tokens == expected
    # Of each block that a window of the one group has passed.
    passed = sum((len(prompt) + NUM_TOKENS - 2 - WINDOW_LEN) // 4 for prompt in prompts)
    assert statistics.num_window_blocks_freed > passed // 2
    assert statistics.num_blocks_used == 0
    if options.get("enable_prefix_caching", True):
        assert statistics.prefix_cache_hits > 0
    if "num_gpu_blocks_override" in options:
        assert statistics.num_preemptions > 0
