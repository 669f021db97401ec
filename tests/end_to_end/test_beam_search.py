"""Beam searches through the engine are transformers', however they are served. Float32, tiny model."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncserve import LLM, SamplingParams
from asyncserve.errors import InvalidRequest
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TINY: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 4}
MAX_TOKENS = 20
STOPS = (17, 101)
Found = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 320) for _ in range(n)] for n in (1, 7, 16, 25)]


@pytest.fixture(scope="module", params=[2, 4, 8])
def width(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture(scope="module")
def found(model: Path, prompts: list[list[int]], width: int) -> Found:
    """What transformers finds."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    results = []
    for prompt in prompts:
        sequences = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=transformers.GenerationConfig(
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=list(STOPS),
                pad_token_id=0,
                do_sample=False,
            ),
        )
        results.append([tuple(each) for each in sequences[:, len(prompt) :].tolist()])
    return results


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"async_scheduling": False, "enable_prefix_caching": False}, id="plain"),
        pytest.param({}, id="one step ahead"),
        pytest.param({"max_num_batched_tokens": 9, "max_num_seqs": 9}, id="chunked prefill"),
        pytest.param({"num_gpu_blocks_override": 98, "max_num_seqs": 64}, id="preempted"),
    ],
)
def test_searches_find_what_transformers_finds(
    model: Path, prompts: list[list[int]], width: int, found: Found, options: dict[str, Any]
) -> None:
    if "num_gpu_blocks_override" not in options:
        options = {"kv_cache_memory_bytes": 1 << 22, **options}
    elif width == 8:
        prompts, found = prompts * 2, found * 2
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        stop_token_ids=STOPS,
        ignore_eos=True,
    )
    with LLM(str(model), **TINY, **options) as llm:
        completions = llm.generate(prompts, params, progress=False)
        statistics = llm.statistics()
    longest = [len(each[0]) for each in found]
    own = [
        [output.token_ids + (0,) * (length - len(output.token_ids)) for output in completion.outputs]
        for completion, length in zip(completions, longest, strict=True)
    ]
    assert own == found
    assert statistics.num_blocks_used == 0
    if "num_gpu_blocks_override" in options and width == 8:
        assert statistics.num_preemptions > 0


def test_searches_give_the_n_best_of_their_width_and_stand_beside_others(
    model: Path, prompts: list[list[int]]
) -> None:
    search = SamplingParams(
        n=4, use_beam_search=True, temperature=0.0, max_tokens=12, stop_token_ids=STOPS, ignore_eos=True
    )
    best = SamplingParams(
        n=1,
        best_of=4,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=12,
        stop_token_ids=STOPS,
        ignore_eos=True,
    )
    plain = SamplingParams(n=3, max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    with LLM(str(model), **TINY, kv_cache_memory_bytes=1 << 22, max_num_seqs=12) as llm:
        alone = [
            [[o.token_ids for o in llm.generate([prompt], params, progress=False)[0].outputs]]
            for prompt, params in zip(prompts, (search, best, plain, search), strict=True)
        ]
        together = llm.generate(prompts, [search, best, plain, search], progress=False)
        assert [[[o.token_ids for o in c.outputs]] for c in together] == alone
        assert len(together[1].outputs) == 1
        with pytest.raises(InvalidRequest, match="at most 12"):
            llm.generate(
                prompts[:1], SamplingParams(n=13, use_beam_search=True, temperature=0.0), progress=False
            )
