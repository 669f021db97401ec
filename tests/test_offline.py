"""The engine without a server, on a tiny random model."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncserve import LLM, SamplingParams
from asyncserve.errors import ConfigError, EngineStopped, InvalidRequest, PromptTooLong
from asyncserve.garbage import YOUNG_OBJECTS
from asyncserve.observer import NullObserver, RequestTimeline
from asyncserve.offline import Completion
from asyncserve.request import FinishReason
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder, vocab_size=320)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 22) as llm:
        yield llm


def test_an_observer_that_raises_keeps_no_prompt_from_its_answer(model: Path) -> None:
    class BrokenObserver(NullObserver):
        def request_finished(self, timeline: RequestTimeline, reason: FinishReason) -> None:
            raise ZeroDivisionError("a bug in the observer")

        def request_rejected(self, error: Exception) -> None:
            raise ZeroDivisionError("a bug in the observer")

    with LLM(str(model), device="cpu", kv_cache_memory_bytes=1 << 22, observer=BrokenObserver()) as llm:
        assert len(tokens(llm.generate(["a", "b"], GREEDY, progress=False))) == 2
        with pytest.raises(PromptTooLong):
            llm.generate([[5] * 100_000], GREEDY, progress=False)


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.outputs[0].token_ids for completion in completions]


def test_the_collector_is_settled_while_a_model_is_loaded_and_as_before_afterwards(model: Path) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with LLM(str(model), device="cpu", kv_cache_memory_bytes=1 << 22) as llm:
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        assert gc.get_freeze_count() > before[1]
        llm.generate("a", GREEDY, progress=False)
        assert not any(gc.get_count()[1:]), "what the call left is collected when it is over"
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_results_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a", "a much longer prompt than the first one", "b"]
    together = llm.generate(prompts, GREEDY, progress=False)
    assert [completion.prompt for completion in together] == prompts
    assert tokens(together) == [tokens(llm.generate(prompt, GREEDY, progress=False))[0] for prompt in prompts]


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    lengths = [2, 4]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
    assert [len(t) for t in tokens(llm.generate(["x", "y"], params, progress=False))] == lengths
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate(["x", "y"], params[:1], progress=False)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_token_ids_are_taken_in_any_kind_of_array(llm: LLM, kind: type) -> None:
    want = tokens(llm.generate([[5, 6, 7]], GREEDY, progress=False))
    assert tokens(llm.generate(kind([5, 6, 7]), GREEDY, progress=False)) == want
    assert tokens(llm.generate([kind([5, 6, 7])], GREEDY, progress=False)) == want


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(conversation, GREEDY, progress=False)
    assert answer.prompt_token_ids == llm.generate("user: hi\n", GREEDY, progress=False)[0].prompt_token_ids
    assert answer.prompt == conversation


def test_several_outputs_and_logprobs_come_back_by_index(llm: LLM) -> None:
    params = SamplingParams(
        n=3, max_tokens=4, temperature=1.0, seed=1, ignore_eos=True, num_logprobs=2, num_prompt_logprobs=1
    )
    (completion,) = llm.generate(["hello"], params, progress=False)
    assert [output.index for output in completion.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in completion.outputs}) > 1
    for output in completion.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    assert completion.prompt_logprobs is not None
    assert [e.token_id for e in completion.prompt_logprobs] == list(completion.prompt_token_ids[1:])


def test_a_beam_search_gives_what_it_has_found(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=1, use_beam_search=True, allowed_token_ids=(65, 66))
    (completion,) = llm.generate(["hello"], params, progress=False)
    assert sorted(output.token_ids for output in completion.outputs) == [(65,), (66,)]


@pytest.mark.parametrize(
    "prompt", [None, 1.5, b"bytes", {"a": 1}, {1, 2}, ["words"], [1, None], [1, True], [10**6]]
)
def test_a_bad_prompt_is_refused_and_harms_nothing(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(["good", prompt], GREEDY, progress=False)
    assert len(tokens(llm.generate(["good"], GREEDY, progress=False))[0]) == 5
    statistics = llm.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.num_blocks_used) == (0, 0, 0)


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"300 tokens.*256"):
        llm.generate([[5] * 300], GREEDY, progress=False)


def test_parameters_left_out_are_the_models_own(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(model / name)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "eos_token_id": 2}')
    with LLM(str(tmp_path), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 22) as llm:
        assert len(set(tokens(llm.generate(["same"] * 4, progress=False)))) == 1


def test_allowed_tokens_and_bad_words_hold(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=30, temperature=1.0, seed=1, allowed_token_ids=(67, 68, 69), bad_words=("ab", "c")
    )
    (completion,) = llm.generate(["x"], params, progress=False)
    text = completion.outputs[0].text
    assert (len(text), set(text)) == (30, {"a", "b"})
    assert "ab" not in text
    for impossible in (
        SamplingParams(allowed_token_ids=(67,), bad_words=("a",)),
        SamplingParams(allowed_token_ids=(320,)),
    ):
        with pytest.raises(InvalidRequest, match="allowed_token_ids"):
            llm.generate(["x"], impossible, progress=False)


def test_a_truncated_prompt_has_the_log_probabilities_of_what_is_left(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, num_prompt_logprobs=2)
    cut, kept, fitted = (
        llm.generate([prompt], params, truncate_prompt_tokens=num_kept, progress=False)[0]
        for prompt, num_kept in (("abcdefgh", 4), ("efgh", None), ("abcdefgh" * 100, -1))
    )
    assert cut.prompt_token_ids == kept.prompt_token_ids
    assert cut.prompt_logprobs == kept.prompt_logprobs
    assert cut.prompt_logprobs is not None
    assert len(cut.prompt_logprobs) == 3
    assert cut.outputs == kept.outputs
    assert len(fitted.prompt_token_ids) == 256 - 3
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], params, truncate_prompt_tokens=2, progress=False)
    assert len(chat.prompt_token_ids) == 2


def test_options_of_the_server_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="api_key, port"):
        LLM(str(model), port=1, api_key=("x",))


def test_a_closed_llm_says_so(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", device="cpu", kv_cache_memory_bytes=1 << 22)
    llm.close()
    llm.close()
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate("x", GREEDY, progress=False)


def test_it_works_from_several_threads_and_beside_a_running_loop(llm: LLM) -> None:
    want = tokens(llm.generate("x", GREEDY, progress=False))
    got: list[list[tuple[int, ...]]] = []

    def ask() -> None:
        got.append(tokens(llm.generate("x", GREEDY, progress=False)))

    async def from_a_loop() -> None:
        await asyncio.to_thread(ask)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(from_a_loop())
    for thread in threads:
        thread.join()
    assert got == [want] * 4


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_a_cpu(model: Path) -> None:
    prompts = [[3 + (7 * i + n) % 300 for i in range(n)] for n in range(1, 60)]
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(str(model), dtype="float32", device=device, kv_cache_memory_bytes=1 << 26) as llm:
            answers.append(tokens(llm.generate(prompts, params, progress=False)))
    assert answers[1] == answers[0]
