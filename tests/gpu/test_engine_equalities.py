"""The engine on a GPU: the same question has the same answer however it is served. Float32, tiny model.

All kinds of sampling are mixed in every batch, so that an engine is started once for each way to serve. On a
CPU `tests/end_to_end/test_equalities.py` says the same of more ways.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncserve import LLM, SamplingParams
from asyncserve.request import FinishReason
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer
from tests.gpu.tiny_runners import BLOCK_LEN, TINY_SIZES, VOCAB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
NUM_TOKENS = 20
BOTH = {"swap_space_gib": 1e-3, "kv_offloading_size": 1e-3}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 12},
    {"temperature": 0.9, "seed": 13, "frequency_penalty": 0.4, "num_logprobs": 1},
    {"temperature": 0.8, "seed": 14, "allowed_token_ids": tuple(range(67, 73)), "bad_words": ("ab", "d")},
    {"temperature": 1.0, "seed": 15, "n": 2},
]

Answers = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"), **TINY_SIZES)
    write_tiny_tokenizer(folder, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    return [
        shared[: rng.randrange(0, 40)] + [rng.randrange(3, VOCAB) for _ in range(n)] for n in range(1, 19)
    ]


def open_llm(model: Path, device: str, **options: Any) -> LLM:
    # Few slots: few sizes of steps, hence few graphs to wait for.
    options = {"max_num_seqs": 8, **options}
    if "num_gpu_blocks_override" not in options:
        options["kv_cache_memory_bytes"] = 1 << 22
    return LLM(str(model), device=device, dtype="float32", block_size=BLOCK_LEN, num_threads=1, **options)


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> Answers:
    """Return the tokens of every choice; prompts have the kinds of sampling in turn."""
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **KINDS[number % len(KINDS)])
        for number in range(len(prompts))
    ]
    completions = llm.generate(prompts, params, progress=False)
    return [[output.token_ids for output in completion.outputs] for completion in completions]


@pytest.fixture(scope="module")
def alone(model: Path, device: str, prompts: list[list[int]]) -> Answers:
    """Every prompt by itself, whole, launched one by one, without cache and without planning ahead."""
    plain: dict[str, Any] = {
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_num_seqs": 1,
        "enforce_eager": True,
    }
    with open_llm(model, device, **plain) as llm:
        return answers(llm, prompts)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False, "async_scheduling": False}, id="batched"),
        pytest.param({"enforce_eager": True}, id="cached, one step ahead, no graphs"),
        pytest.param({}, id="cached, one step ahead"),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 5}, id="chunked"),
        pytest.param({"num_gpu_blocks_override": 50}, id="preempted"),
        pytest.param({"num_gpu_blocks_override": 50, "swap_space_gib": 1e-3}, id="swapped"),
        pytest.param({"num_gpu_blocks_override": 50, **BOTH}, id="swapped, evicted and found on the host"),
    ],
)
def test_answers_do_not_depend_on_how_they_are_served(
    model: Path, device: str, prompts: list[list[int]], alone: Answers, options: dict[str, Any]
) -> None:
    with open_llm(model, device, **options) as llm:
        llm.wait_until_warm()
        assert answers(llm, prompts) == alone
        statistics = llm.statistics()
        if "num_gpu_blocks_override" in options:
            assert statistics.num_preemptions > 0
        if options.get("swap_space_gib"):
            assert statistics.num_swaps > 0
            assert statistics.host_loaded_bytes > 0
        if options.get("kv_offloading_size"):
            found = statistics.host_cache_hits
            assert answers(llm, prompts) == alone
            assert llm.statistics().host_cache_hits > found


def test_choices_stops_and_what_is_launched_too_late_leave_nothing_behind(
    model: Path, device: str, prompts: list[list[int]]
) -> None:
    free = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with open_llm(model, device, max_num_seqs=4) as llm:
        llm.wait_until_warm()
        whole = [
            completion.outputs[0].token_ids for completion in llm.generate(prompts, free, progress=False)
        ]
        # Each is to end at a token that it first says somewhere in the middle.
        stops = [next(token_id for token_id in tokens[5:] if token_id not in tokens[:5]) for tokens in whole]
        several = [
            SamplingParams(
                n=1 + number % 3,
                max_tokens=NUM_TOKENS,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=(stop,),
            )
            for number, stop in enumerate(stops)
        ]
        for tokens, stop, completion in zip(
            whole, stops, llm.generate(prompts, several, progress=False), strict=True
        ):
            end = tokens.index(stop) + 1
            for output in completion.outputs:
                assert output.token_ids == tokens[:end]
                assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
        again = [
            completion.outputs[0].token_ids for completion in llm.generate(prompts, free, progress=False)
        ]
        assert again == whole
        statistics = llm.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.num_blocks_used) == (0, 0, 0)


def test_the_best_of_several_are_the_likeliest_of_as_many_choices(
    model: Path, device: str, prompts: list[list[int]]
) -> None:
    drawn: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    with open_llm(model, device) as llm:
        several = llm.generate(prompts[:4], SamplingParams(n=5, num_logprobs=0, **drawn), progress=False)
        best = llm.generate(prompts[:4], SamplingParams(n=2, best_of=5, **drawn), progress=False)
    for all_of_them, two in zip(several, best, strict=True):
        means = [
            sum(each.logprob for each in output.logprobs or ()) / len(output.token_ids)
            for output in all_of_them.outputs
        ]
        ranked = sorted(range(5), key=means.__getitem__, reverse=True)
        assert [output.token_ids for output in two.outputs] == [
            all_of_them.outputs[index].token_ids for index in ranked[:2]
        ]
        assert all(output.logprobs is None for output in two.outputs)


@pytest.fixture(scope="module")
def searched(model: Path, device: str, prompts: list[list[int]]) -> Answers:
    """Every search by itself, without cache and without planning ahead."""
    plain: dict[str, Any] = {
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_num_seqs": 4,
        "enforce_eager": True,
    }
    with open_llm(model, device, **plain) as llm:
        return [search(llm, [prompt], number)[0] for number, prompt in enumerate(prompts[:8])]


def search(llm: LLM, prompts: Sequence[Sequence[int]], first: int = 0) -> Answers:
    """Return the tokens that searches find, wide by turns."""
    params = [
        SamplingParams(
            n=1 + number % 2,
            best_of=2 + number % 3,
            use_beam_search=True,
            max_tokens=NUM_TOKENS,
            stop_token_ids=(70, 71, 72),
            early_stopping=number % 4 == 0,
        )
        for number in range(first, first + len(prompts))
    ]
    completions = llm.generate(prompts, params, progress=False)
    return [[output.token_ids for output in completion.outputs] for completion in completions]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False, "async_scheduling": False}, id="batched"),
        pytest.param({}, id="cached, one step ahead"),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 5}, id="chunked"),
        pytest.param({"num_gpu_blocks_override": 60, "max_num_seqs": 24}, id="preempted"),
    ],
)
def test_what_searches_find_does_not_depend_on_how_they_are_served(
    model: Path, device: str, prompts: list[list[int]], searched: Answers, options: dict[str, Any]
) -> None:
    with open_llm(model, device, **options) as llm:
        llm.wait_until_warm()
        assert search(llm, prompts[:8]) == searched
        if "num_gpu_blocks_override" in options:
            assert llm.statistics().num_preemptions > 0
