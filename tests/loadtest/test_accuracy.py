import json
from pathlib import Path

import pytest

from asyncserve.request import TokenLogprobs
from loadtest.accuracy import (
    LONGEST,
    SHORTEST,
    Answers,
    Way,
    compare,
    cut_prompts,
    errors,
    first_difference,
    main,
    table,
    ways,
)
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

EXACT, ROUNDED = Way(device="cpu", dtype="float32"), Way(device="cpu", dtype="bfloat16")


def entry(token_id: int, logprob: float = -1.0, gap: float = 0.5) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1, ((token_id, logprob), (0, logprob - gap)))


def answers(*tokens: list[int], logprob: float = -1.0, gap: float = 0.5) -> Answers:
    return Answers(
        tokens=list(tokens),
        logprobs=[[entry(token_id, logprob, gap) for token_id in each] for each in tokens],
    )


def test_prompts_are_passages_from_short_to_long_all_over_the_text() -> None:
    text = list(range(2000))
    prompts = cut_prompts(text, 5, head=[-1])
    lengths = [len(prompt) - 1 for prompt in prompts]
    assert (lengths[0], lengths[-1]) == (SHORTEST, LONGEST)
    assert lengths == sorted(set(lengths))
    assert all(prompt[:1] == [-1] for prompt in prompts)
    assert all(prompt[1:] == text[prompt[1] : prompt[1] + len(prompt) - 1] for prompt in prompts)
    assert [prompt[1] for prompt in prompts] == [0, 360, 720, 1080, 1440]
    assert len(cut_prompts(text, 1)[0]) == SHORTEST
    with pytest.raises(ValueError, match="203 tokens; 4 prompts take 204"):
        cut_prompts(text[:203], 4)


def test_a_device_is_tried_in_both_dtypes_with_graphs_and_without_and_the_yardstick_once() -> None:
    assert [way.name for way in ways("cuda", has_graphs=True)] == [
        "cuda float32",
        "cuda float32, no graphs",
        "cuda bfloat16",
        "cuda bfloat16, no graphs",
        "cpu bfloat16",
    ]
    assert ways("cpu", has_graphs=False) == [EXACT, ROUNDED]


def test_the_earliest_difference_of_all_prompts_is_told_with_its_gap() -> None:
    reference = answers([1, 2, 3], [4, 5, 6], [7, 8, 9], gap=0.25)
    assert first_difference(reference, reference) is None
    parted = first_difference(answers([1, 2, 0], [4, 0, 0], [7, 8, 9]), reference)
    assert parted is not None
    assert (parted.prompt, parted.position, parted.gap) == (1, 1, 0.25)


def test_errors_are_of_absolute_differences_and_the_bias_keeps_the_sign() -> None:
    found = errors([-1.0, -2.0, -3.5], [-1.0, -3.0, -3.0])
    assert (found.num_tokens, found.max) == (3, 1.0)
    assert found.mean == pytest.approx(0.5)
    assert found.bias == pytest.approx(1 / 6)
    assert errors([0.0] * 989 + [-1.0] * 12, [0.0] * 1001).p99 == 1.0
    assert errors([0.0] * 992 + [-1.0] * 9, [0.0] * 1001).p99 == 0.0


def test_decoded_tokens_are_held_against_their_own_scores_and_not_the_prompts() -> None:
    prompts = [[8, 9]]
    reference = answers([1, 2])
    found = answers([1, 2], logprob=-1.5)
    scored = [[entry(9, -7.0), entry(1, -1.0), entry(2, -1.0)]]
    result = compare(EXACT, prompts, found, reference, (scored, scored), scored)
    assert (result.prefill.max, result.decode.num_tokens, result.decode.mean) == (0.0, 2, 0.5)
    assert (result.num_equal, result.same_likeliest, result.is_sound) == (1, 1.0, True)


@pytest.mark.parametrize(("way", "is_sound"), [(EXACT, False), (ROUNDED, True)])
def test_other_tokens_are_wrong_in_the_dtype_of_the_reference_only(way: Way, is_sound: bool) -> None:
    prompts = [[8, 9]]
    found, reference = answers([1, 3]), answers([1, 2])
    scored = [[entry(9), entry(1), entry(2)]]
    other = [[entry(9), entry(1), entry(3)]]
    result = compare(way, prompts, found, reference, (other, scored), other)
    assert result.is_sound is is_sound
    assert result.same_likeliest == pytest.approx(2 / 3)
    assert "0 of 1" in table([result])
    assert "token 1 of prompt 0, gap 0.5" in table([result])


def test_other_tokens_with_log_probabilities_than_without_are_wrong_in_any_dtype() -> None:
    scored = [[entry(9), entry(1), entry(2)]]
    found = Answers(tokens=[[1, 3]], logprobs=[[entry(1), entry(2)]])
    result = compare(ROUNDED, [[8, 9]], found, answers([1, 2]), (scored, scored), scored)
    assert not result.is_sound


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_program_finds_float32_equal_and_bfloat16_near(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama_folder(tmp_path / "tiny", max_position_embeddings=512)
    write_tiny_tokenizer(model, vocab_size=320)
    arguments = ["--model", str(model), "--device", "cpu", "--prompts", "3", "--tokens", "6"]
    assert main([*arguments, "--json", str(tmp_path / "out.json"), "--label", "here"]) == 0
    content = json.loads((tmp_path / "out.json").read_text())
    exact, rounded = content["results"]
    assert (content["label"], content["model"], exact["way"]) == ("here", "tiny", "cpu float32")
    assert (exact["num_equal"], exact["first_difference"], exact["same_likeliest"]) == (3, None, 1.0)
    assert max(exact["prefill"]["max"], exact["decode"]["max"]) < 1e-3
    assert 1e-3 < rounded["prefill"]["mean"] < 0.5
    assert 1e-3 < rounded["decode"]["mean"] < 0.5
    assert "| cpu bfloat16 |" in capsys.readouterr().out
