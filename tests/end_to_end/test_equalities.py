"""The same question has the same answer however the engine serves it: float32, tiny model."""

import dataclasses
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncserve import LLM, SamplingParams
from asyncserve.loop.admission import seed_of_choice
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# A tiny model gains nothing from a second thread, and on a busy machine each of its steps waits for it.
TINY = {"device": "cpu", "dtype": "float32", "num_threads": 1}
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=24, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True, frequency_penalty=0.4
)

RESTRICTED = SamplingParams(
    max_tokens=24,
    temperature=0.8,
    seed=3,
    ignore_eos=True,
    allowed_token_ids=tuple(range(67, 73)),  # the letters a to f
    bad_words=("ab", "ba", "cc", "d", "aca", "efe", "fff"),
)
"""So few tokens that the words would come at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    return [shared[: rng.randrange(0, 40)] + [rng.randrange(3, 320) for _ in range(n)] for n in range(1, 13)]


def answers(
    model: Path,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **options: object,
) -> list[tuple[int, ...]]:
    if "num_gpu_blocks_override" not in options:
        options = {"kv_cache_memory_bytes": 1 << 22, **options}
    with LLM(str(model), **TINY, **options) as llm:
        return [c.outputs[0].token_ids for c in llm.generate(prompts, params, progress=False)]


@pytest.fixture(scope="module")
def params(prompts: list[list[int]]) -> list[SamplingParams]:
    """Of each prompt: batches have every kind."""
    return [(PARAMS, SAMPLED, RESTRICTED)[number % 3] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(model: Path, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Every prompt by itself, whole, without cache and without planning ahead: the plainest way."""
    options = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 1}
    return answers(model, prompts, params, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False, "async_scheduling": False}, id="batched"),
        pytest.param({"enable_prefix_caching": False}, id="one step ahead"),
        pytest.param({}, id="prefix cache"),
        pytest.param(
            {"max_num_batched_tokens": 7, "max_num_seqs": 5, "enable_prefix_caching": False},
            id="chunked prefill",
        ),
        pytest.param({"long_prefill_token_threshold": 5}, id="long prompts held back"),
        pytest.param({"block_size": 4}, id="small blocks"),
        pytest.param({"num_gpu_blocks_override": 12, "max_model_len": 96}, id="preempted"),
        pytest.param(
            {
                "num_gpu_blocks_override": 12,
                "max_model_len": 96,
                "swap_space_gib": 1e-3,
                "kv_offloading_size": 1e-3,
            },
            id="swapped, evicted to the host",
        ),
        pytest.param({"scheduling_policy": "priority"}, id="priority"),
    ],
)
def test_answers_do_not_depend_on_how_they_are_served(
    model: Path,
    prompts: list[list[int]],
    params: list[SamplingParams],
    alone: list[tuple[int, ...]],
    options: dict[str, object],
) -> None:
    assert answers(model, prompts, params, **options) == alone


@pytest.fixture(scope="module", params=["fp8_e4m3", "fp8_e5m2"])
def alone_in_8_bits(
    request: pytest.FixtureRequest, model: Path, prompts: list[list[int]]
) -> tuple[str, list[tuple[int, ...]]]:
    """As `alone`, with a cache dtype, which comes first."""
    options = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 1}
    return request.param, answers(model, prompts, PARAMS, kv_cache_dtype=request.param, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched, prefix cache"),
        pytest.param(
            {"max_num_batched_tokens": 7, "max_num_seqs": 5, "enable_prefix_caching": False},
            id="chunked prefill",
        ),
        pytest.param({"num_gpu_blocks_override": 12, "max_model_len": 96}, id="preempted"),
        pytest.param({"attention_backend": "reference"}, id="reference"),
    ],
)
def test_answers_from_a_cache_of_8_bits_do_not_depend_on_it_either(
    model: Path,
    prompts: list[list[int]],
    alone_in_8_bits: tuple[str, list[tuple[int, ...]]],
    options: dict[str, object],
) -> None:
    kv_cache_dtype, expected = alone_in_8_bits
    assert answers(model, prompts, PARAMS, kv_cache_dtype=kv_cache_dtype, **options) == expected


def scored(model: Path, prompts: Sequence[Sequence[int]], kv_cache_dtype: str) -> list[float]:
    """Return the log-probability of each of the prompts' tokens; in chunks, so that the cache is read."""
    params = dataclasses.replace(PARAMS, max_tokens=1, num_prompt_logprobs=0)
    options = {"kv_cache_memory_bytes": 1 << 22, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(str(model), **TINY, **options, kv_cache_dtype=kv_cache_dtype) as llm:
        completions = llm.generate(prompts, params, progress=False)
    return [entry.logprob for each in completions for entry in each.prompt_logprobs or ()]


def test_a_cache_of_8_bits_is_near_the_exact_one_and_nearer_with_more_bits_for_the_digits(
    model: Path, prompts: list[list[int]]
) -> None:
    exact, four, three = (scored(model, prompts, dtype) for dtype in ("auto", "fp8_e4m3", "fp8_e5m2"))
    errors = [
        sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact) for found in (four, three)
    ]
    assert 0.001 < errors[0] < errors[1] < 0.5


def test_scales_of_the_checkpoint_are_used_for_8_bits_and_for_nothing_else(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    def with_scales(name: str, k_scale: float, v_scale: list[float]) -> Path:
        folder = shutil.copytree(model, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        for layer_id in range(2):
            tensors[f"model.layers.{layer_id}.self_attn.k_scale"] = torch.tensor(k_scale)
            tensors[f"model.layers.{layer_id}.self_attn.v_scale"] = torch.tensor(v_scale)
        save_file(tensors, folder / "model.safetensors")
        return folder

    plain = scored(model, prompts, "fp8_e5m2")
    # Powers of two move the point and no digit; a tiny one for each head would be seen at once.
    moved = with_scales("moved", 0.25, [0.5, 4.0])
    assert scored(moved, prompts, "fp8_e5m2") == pytest.approx(plain, abs=1e-4)
    assert scored(moved, prompts, "auto") == pytest.approx(scored(model, prompts, "auto"), abs=1e-6)
    saturated = with_scales("saturated", 1e-5, [1e-5, 1e-6])
    assert scored(saturated, prompts, "fp8_e5m2") != pytest.approx(plain, abs=0.1)


def test_a_small_pool_really_preempts(model: Path, prompts: list[list[int]]) -> None:
    with LLM(str(model), **TINY, num_gpu_blocks_override=12, max_model_len=96) as llm:
        llm.generate(prompts, PARAMS, progress=False)
        assert llm.statistics().num_preemptions > 0


def test_restricted_answers_have_allowed_tokens_and_no_bad_words(
    model: Path, prompts: list[list[int]]
) -> None:
    free = dataclasses.replace(RESTRICTED, bad_words=())
    with LLM(str(model), **TINY, kv_cache_memory_bytes=1 << 22) as llm:
        for params, expected in ((free, True), (RESTRICTED, False)):
            texts = [c.outputs[0].text for c in llm.generate(prompts, params, progress=False)]
            assert {letter for text in texts for letter in text} <= set("abcdef")
            found = [word for text in texts for word in RESTRICTED.bad_words if word in text]
            assert bool(found) is expected, found


CHOICES = SamplingParams(
    n=4, max_tokens=20, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True, frequency_penalty=0.4
)


@pytest.fixture(scope="module")
def requests_of_their_own(model: Path, prompts: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """Every choice asked for by itself, with the seed it has as a choice, one sequence at a time."""
    asked = [dataclasses.replace(CHOICES, n=1, seed=seed_of_choice(11, index)) for index in range(CHOICES.n)]
    with LLM(str(model), **TINY, kv_cache_memory_bytes=1 << 22, max_num_seqs=1) as llm:
        by_choice = [llm.generate(prompts[::2], params, progress=False) for params in asked]
    return [[c.outputs[0].token_ids for c in choices] for choices in zip(*by_choice, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="prefix cache"),
        pytest.param({"enable_prefix_caching": False, "async_scheduling": False}, id="no cache"),
        pytest.param(
            {"max_num_batched_tokens": 7, "max_num_seqs": 6, "enable_prefix_caching": False},
            id="chunked prefill",
        ),
        pytest.param({"num_gpu_blocks_override": 12, "max_model_len": 96}, id="preempted"),
        pytest.param(
            {
                "num_gpu_blocks_override": 12,
                "max_model_len": 96,
                "swap_space_gib": 1e-3,
                "kv_offloading_size": 1e-3,
            },
            id="swapped, evicted to the host",
        ),
    ],
)
def test_choices_of_a_request_are_what_requests_of_their_own_would_give(
    model: Path,
    prompts: list[list[int]],
    requests_of_their_own: list[list[tuple[int, ...]]],
    options: dict[str, object],
) -> None:
    if "num_gpu_blocks_override" not in options:
        options = {"kv_cache_memory_bytes": 1 << 22, **options}
    with LLM(str(model), **TINY, **options) as llm:
        completions = llm.generate(prompts[::2], CHOICES, progress=False)
        statistics = llm.statistics()
    assert [[o.token_ids for o in c.outputs] for c in completions] == requests_of_their_own
    assert statistics.num_copied_blocks > 0
    assert statistics.num_blocks_saved == 0
    assert (statistics.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
