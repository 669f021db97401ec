"""Models with local layers, asked beyond their window: transformers' tokens, however they are served."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig

from asyncserve import LLM, SamplingParams
from tests.fakes.tiny_model import tiny_folder, tiny_llama_config
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_TOKENS = 24
WINDOW_LEN = 18
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
SIZES = tiny_llama_config(num_hidden_layers=3, sliding_window=WINDOW_LEN)
CONFIGS = {
    "gemma3": Gemma3TextConfig(
        **SIZES,
        pad_token_id=0,
        sliding_window_pattern=3,
        query_pre_attn_scalar=16,
        final_logit_softcapping=30.0,
    ),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=1, num_experts_per_tok=1),
}

Answers = list[list[int]]


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])
    write_tiny_tokenizer(folder, vocab_size=SIZES["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(60)]
    return [
        shared[: rng.choice((0, 40, 60))] + [rng.randrange(3, 320) for _ in range(n)] for n in range(1, 9)
    ]


def answers(model: Path, prompts: Sequence[Sequence[int]], **options: object) -> Answers:
    if "num_gpu_blocks_override" not in options:
        options = {"kv_cache_memory_bytes": 1 << 22, **options}
    with LLM(str(model), device="cpu", dtype="float32", num_threads=1, **options) as llm:
        return [list(c.outputs[0].token_ids) for c in llm.generate(prompts, PARAMS, progress=False)]


@pytest.fixture(scope="module")
def alone(model: Path, prompts: list[list[int]]) -> Answers:
    """Every prompt by itself, whole, without cache and without planning ahead: the plainest way."""
    options = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 1}
    return answers(model, prompts, **options)


def test_greedy_output_is_that_of_transformers(model: Path, prompts: list[list[int]], alone: Answers) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    for prompt, tokens in zip(prompts, alone, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
        assert len(set(tokens)) > NUM_TOKENS // 3, "says too little to tell right from wrong"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False}, id="batched"),
        pytest.param({}, id="prefix cache"),
        pytest.param({"block_size": 4}, id="small blocks"),
        pytest.param(
            {"max_num_batched_tokens": 7, "max_num_seqs": 5, "enable_prefix_caching": False}, id="chunked"
        ),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 5, "block_size": 4}, id="all at once"),
        pytest.param({"num_gpu_blocks_override": 24, "max_model_len": 96}, id="preempted"),
        pytest.param({"attention_backend": "reference"}, id="reference"),
    ],
)
def test_answers_do_not_depend_on_how_they_are_served(
    model: Path, prompts: list[list[int]], alone: Answers, options: dict[str, object]
) -> None:
    assert answers(model, prompts, **options) == alone


def test_local_and_global_layers_are_groups_of_their_own(model: Path) -> None:
    with LLM(str(model), device="cpu", dtype="float32", num_threads=1, load_format="dummy") as llm:
        [completion] = llm.generate([[5, 6, 7]], PARAMS, progress=False)
    assert len(completion.outputs[0].token_ids) == NUM_TOKENS
