"""The same question has the same answer however the engine serves it: greedy, float32, tiny model."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

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
    model: Path, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: object
) -> list[tuple[int, ...]]:
    if "num_gpu_blocks_override" not in options:
        options = {"kv_cache_memory_bytes": 1 << 22, **options}
    with LLM(str(model), **TINY, **options) as llm:
        return [c.outputs[0].token_ids for c in llm.generate(prompts, params, progress=False)]


@pytest.fixture(scope="module", params=["greedy", "sampled", "restricted"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return {"greedy": PARAMS, "sampled": SAMPLED, "restricted": RESTRICTED}[request.param]


@pytest.fixture(scope="module")
def alone(model: Path, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
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
    params: SamplingParams,
    alone: list[tuple[int, ...]],
    options: dict[str, object],
) -> None:
    assert answers(model, prompts, params, **options) == alone


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
