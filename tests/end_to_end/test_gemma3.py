"""Gemma 3 270M in float32: transformers' tokens far beyond the window, and what the model knows."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.initialization import no_init_weights

from asyncserve import LLM, SamplingParams
from asyncserve.checkpoint import open_checkpoint
from asyncserve.errors import InvalidRequest
from asyncserve.gpu.weights import read_weights
from tests.fakes.gemma_model import gemma_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WINDOW_LEN = 512
NUM_TOKENS = 128
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, temperature=0)
KNOWN = {
    "Once upon a time, there was a little girl who": " loved to play with her dolls.",
    "The planets of the solar system are Mercury, Venus, Earth,": " and Mars.\n\nThe planets are made up of",
}
"""What transformers' own reading of the file goes on with."""

# On a busy machine each step of two threads waits for both.
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "num_threads": 1}
LONG_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:3000]


@pytest.fixture(scope="module")
def answers() -> dict[bool, list[tuple[list[int], list[int]]]]:
    """With the prefix cache and without: prompt and output of the long text and of those in `KNOWN`."""
    path = str(gemma_model_path())
    given: dict[bool, list[tuple[list[int], list[int]]]] = {}
    for is_cached in (True, False):
        with LLM(path, **OPTIONS, enable_prefix_caching=is_cached) as llm:
            if is_cached:
                [first] = llm.generate([LONG_TEXT], SamplingParams(max_tokens=1), progress=False)
                assert first.outputs[0].token_ids
                with pytest.raises(InvalidRequest, match=r"no chat template.*--chat-template"):
                    llm.chat([{"role": "user", "content": "Hello"}], progress=False)
            completions = llm.generate(
                [LONG_TEXT, *KNOWN], [GREEDY, *itertools.repeat(SHORT, len(KNOWN))], progress=False
            )
            assert (completions[0].num_cached_tokens > WINDOW_LEN) == is_cached
            assert [c.outputs[0].text[: len(KNOWN[str(c.prompt)])] for c in completions[1:]] == list(
                KNOWN.values()
            )
            given[is_cached] = [(list(c.prompt_token_ids), list(c.outputs[0].token_ids)) for c in completions]
    return given


def test_with_and_without_the_prefix_cache_it_says_the_same(
    answers: dict[bool, list[tuple[list[int], list[int]]]],
) -> None:
    assert answers[True] == answers[False]


def test_greedy_output_far_beyond_the_window_is_that_of_transformers(
    answers: dict[bool, list[tuple[list[int], list[int]]]],
) -> None:
    prompt, tokens = answers[False][0]
    assert len(prompt) > WINDOW_LEN
    assert len(tokens) == NUM_TOKENS
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=WINDOW_LEN,
        max_position_embeddings=32768,
    )
    with no_init_weights():
        model = Gemma3ForCausalLM(config)
    weights = dict(read_weights(open_checkpoint(str(gemma_model_path())), progress=False))
    assert model.load_state_dict(weights, strict=False, assign=True).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    model.eval()
    with torch.inference_mode():
        logits = model(
            torch.tensor([prompt + tokens]), use_cache=False, logits_to_keep=NUM_TOKENS + 1
        ).logits[0, :-1]
    assert logits.argmax(-1).tolist() == tokens
