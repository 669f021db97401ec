import asyncio

import pytest

from loadtest.structured import SCHEMAS, main, measure_compiling, measure_masks, measure_sampling
from tests.fakes.demo_model import demo_model_path
from tests.fakes.grammar import FakeGrammar
from tests.fakes.small_tokenizers import byte_level_bpe
from tests.fakes.tokenizer import FakeTokenizer

VOCAB = 300


def test_masks_and_sampling_are_measured_in_a_line_for_each_grammar_and_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grammar = FakeGrammar(["abc", "abd"], FakeTokenizer(), VOCAB)
    measure_masks({"one": grammar, "two": grammar}, VOCAB, 20)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[3:]] == ["one", "two"]
    measure_sampling(grammar, VOCAB, "cpu", 3)
    assert len(capsys.readouterr().out.splitlines()) == 3 + 4


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_schema_is_compiled_and_then_kept(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_level_bpe()
    grammars = asyncio.run(measure_compiling(tokenizer, tokenizer.vocab_size))
    assert list(grammars) == list(SCHEMAS)
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in SCHEMAS)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_program_runs_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--model",
            str(demo_model_path()),
            "--streams",
            "2",
            "--tokens",
            "4",
            "--steps",
            "5",
            "--rounds",
            "1",
        ]
    )
    assert "| 1 of 2 |" in capsys.readouterr().out
