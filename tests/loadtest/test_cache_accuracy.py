import json
from pathlib import Path

import pytest

from asyncserve.request import TokenLogprobs
from loadtest.cache_accuracy import compare, cut_passages, main, perplexity, table
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer


def entry(logprob: float, likeliest: int = 1) -> TokenLogprobs:
    return TokenLogprobs(5, logprob, 1, ((likeliest, -0.5),))


def test_passages_lie_all_over_the_text_and_none_over_another() -> None:
    text = list(range(1000))
    passages = cut_passages(text, 3, 300, head=[-1])
    assert [passage[:2] for passage in passages] == [[-1, 0], [-1, 333], [-1, 666]]
    assert {len(passage) for passage in passages} == {301}
    assert len(set().union(*(passage[1:] for passage in passages))) == 900
    with pytest.raises(ValueError, match="the text has 1000 tokens; 4 passages take 1200"):
        cut_passages(text, 4, 300)


def test_perplexity_is_that_of_the_mean() -> None:
    assert perplexity([-1.0, -3.0]) == pytest.approx(7.38905609893)


def test_a_dtype_is_held_against_the_models_own_token_by_token() -> None:
    reference = [[entry(-1.0), entry(-2.0)], [entry(-3.0), entry(-1.0)]]
    found = [[entry(-1.0), entry(-2.5)], [entry(-2.0, likeliest=7), entry(-1.0)]]
    result = compare("fp8_e4m3", found, reference)
    assert (result.errors.num_tokens, result.errors.mean, result.errors.max) == (4, 0.375, 1.0)
    assert result.errors.bias == 0.125
    assert result.same_likeliest == 0.75
    assert "| fp8_e4m3 | 5.0784 | 0.38 / " in table([result])


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_program_finds_no_error_with_the_models_own_dtype_and_one_with_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama_folder(tmp_path / "tiny", max_position_embeddings=512)
    write_tiny_tokenizer(model, vocab_size=320)
    text, file = tmp_path / "text.md", tmp_path / "out.json"
    text.write_text("a text of letters " * 30)
    arguments = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--text", str(text)]
    assert main([*arguments, "--passages", "2", "--length", "80", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    own, *others = content["results"]
    assert (own["kv_cache_dtype"], own["errors"]["max"], own["same_likeliest"]) == ("auto", 0.0, 1.0)
    means = [each["errors"]["mean"] for each in others]
    assert [each["kv_cache_dtype"] for each in others] == ["bfloat16", "fp8_e4m3", "fp8_e5m2"]
    assert 0 < means[0] < means[1] < means[2]
    assert "2 passages of 80 tokens" in capsys.readouterr().out
