"""Beam searches on the real runner, plans made by hand, against transformers' own."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from asyncserve.errors import InvariantError
from asyncserve.step import BAD_LOGITS, NO_TOKEN, BeamAssignment
from tests.fakes.attention_model import AttentionModel, small_runner
from tests.fakes.plan_driver import PlanDriver
from tests.gpu.beam_driver import BeamDriver, DrivenSearch
from tests.gpu.models.test_equal_transformers import reference_model
from tests.gpu.synchronization import waits_are_errors
from tests.gpu.tiny_runners import CONFIGS, PROMPTS, Subject, drive, subjects

STOPS = (17, 201)
MAX_OUTPUT_LEN = 14
PAD = 1
CPU = Subject(kind="cpu", architecture="llama")


def transformers_beams(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    *,
    width: int,
    max_output_len: int,
    stops: tuple[int, ...],
    **options: Any,
) -> tuple[list[list[int]], list[float]]:
    """Return the outputs of transformers' search, best first, padded to one length, and their scores."""
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_output_len,
            eos_token_id=list(stops) or None,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
            do_sample=False,
            **options,
        ),
    )
    texts = [sequence[len(prompt) :].tolist() for sequence in expected.sequences]
    return texts, expected.sequences_scores.tolist()


def assert_equal(driven: DrivenSearch, expected: tuple[list[list[int]], list[float]]) -> None:
    texts, scores = expected
    results = driven.search.results(driven.search.width)
    own = [result.token_ids.tolist() for result in results]
    assert [tokens + [PAD] * (len(texts[0]) - len(tokens)) for tokens in own] == texts
    assert [result.score for result in results] == pytest.approx(scores, rel=1e-4)


def texts_of(driven: DrivenSearch) -> list[list[int]]:
    return [result.token_ids.tolist() for result in driven.search.results(driven.search.width)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_tokens_and_scores_are_those_of_transformers(width: int, early_stopping: bool | str) -> None:
    model = reference_model(CONFIGS["llama"]).eval()
    beams = BeamDriver(drive(CPU, num_slots=width, num_blocks=400))
    for number, length_penalty in enumerate((0.5, 1.0, 2.0)):
        options: dict[str, Any] = {
            "width": width,
            "max_output_len": MAX_OUTPUT_LEN,
            "stops": STOPS[: number % 3],
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
        }
        prompt = PROMPTS[2][: 13 - number]
        driven = beams.begin(prompt, **options)
        beams.run(driven, ahead=number % 2)
        assert_equal(driven, transformers_beams(model, prompt, **options))


def test_searches_and_plain_rows_of_one_batch_get_what_each_gets_alone() -> None:
    options: list[dict[str, Any]] = [
        {"width": 3, "max_output_len": 9, "stops": STOPS},
        {"width": 2, "max_output_len": 9},
        {"width": 3, "max_output_len": 9, "stops": STOPS},
    ]
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    alone = []
    for prompt, each in zip(prompts, options, strict=True):
        beams = BeamDriver(drive(CPU, num_slots=3, num_blocks=200))
        driven = beams.begin(prompt, **each)
        beams.run(driven)
        alone.append(texts_of(driven))
    plain: dict[str, Any] = {"temperature": 0.9, "seed": 4, "num_logprobs": 2}
    driver = drive(CPU, num_slots=10, num_blocks=400)
    slot = driver.admit(PROMPTS[3], **plain)
    expected = driver.generate([slot], 9)[0]
    driver.release(slot)

    first = driver.admit(PROMPTS[3], **plain)
    beams = BeamDriver(driver)
    together = [beams.begin(prompt, **each) for prompt, each in zip(prompts, options, strict=True)]
    last = driver.admit(PROMPTS[3], **plain)
    tokens: dict[int, list[int]] = {first: [], last: []}
    while len(tokens[first]) < 9:
        live = [driven for driven in together if not driven.search.is_done]
        rows = {first: driver.known_lens[first] - driver.starts[first]}
        for driven in live:
            rows |= beams.tokens(driven)
        rows[last] = driver.known_lens[last] - driver.starts[last]
        output = driver.step(rows)
        for driven in live:
            driven.search.advance(output.beams[driven.search_id])
        for slot in (first, last):
            tokens[slot].append(output.token_ids[list(rows).index(slot)])
            assert output.logprobs[slot].token_id == tokens[slot][-1]
    assert [texts_of(driven) for driven in together] == alone
    assert tokens[first] == tokens[last] == expected


@pytest.mark.parametrize("num_before", [1, 4, 6])
def test_a_search_that_was_interrupted_gives_what_it_would_have_given(num_before: int) -> None:
    options: dict[str, Any] = {"width": 4, "max_output_len": 12, "stops": STOPS}
    beams = BeamDriver(drive(CPU, num_slots=4, num_blocks=400))
    whole = beams.begin(PROMPTS[2], **options)
    beams.run(whole)
    driven = beams.begin(PROMPTS[2], **options)
    for _ in range(num_before):
        output = beams.driver.step(beams.tokens(driven))
        driven.search.advance(output.beams[driven.search_id])
    beams.leave(driven)
    beams.enter(driven)
    beams.run(driven)
    assert texts_of(driven) == texts_of(whole)


def test_what_forbids_tokens_acts_as_in_transformers() -> None:
    model = reference_model(CONFIGS["llama"]).eval()
    beams = BeamDriver(drive(CPU, num_slots=3, num_blocks=200))
    options: dict[str, Any] = {"width": 3, "max_output_len": 10, "stops": STOPS}
    free = beams.begin(PROMPTS[0], **options)
    beams.run(free)
    liked = texts_of(free)[0][:2]
    driven = beams.begin(PROMPTS[0], **options, min_tokens=6, logit_bias={9: 2.5, liked[0]: -1.0})
    beams.run(driven)
    bias = {(9,): 2.5, (liked[0],): -1.0}
    assert_equal(
        driven, transformers_beams(model, PROMPTS[0], **options, min_new_tokens=6, sequence_bias=bias)
    )
    assert texts_of(driven) != texts_of(free)


def test_bad_words_are_looked_for_in_the_tokens_a_row_has_inherited() -> None:
    model = reference_model(CONFIGS["llama"]).eval()
    beams = BeamDriver(drive(CPU, num_slots=4, num_blocks=200))
    options: dict[str, Any] = {"width": 4, "max_output_len": 10, "stops": ()}
    for prompt in PROMPTS:
        words: list[list[int]] = []
        for _ in range(3):
            # What is found is forbidden next time, so that the rows take ever more turns.
            driven = beams.begin(prompt, **options, bad_words=tuple(map(tuple, words)))
            beams.run(driven)
            found = texts_of(driven)
            if words:
                assert_equal(driven, transformers_beams(model, prompt, **options, bad_words_ids=words))
            words += [text[at : at + 3] for text in found[:2] for at in (1, 3, 5)]


def test_rows_that_compute_their_own_prompt_give_what_branches_give() -> None:
    options: dict[str, Any] = {"width": 3, "max_output_len": 6}
    beams = BeamDriver(drive(CPU, num_slots=3, num_blocks=200))
    branches = beams.begin(PROMPTS[0], **options)
    beams.run(branches)
    own = beams.begin(PROMPTS[0], **options)
    output = beams.driver.step(dict.fromkeys(own.slots, len(PROMPTS[0])))
    own.search.advance(output.beams[own.search_id])
    beams.run(own)
    assert texts_of(own) == texts_of(branches)


def test_a_search_whose_logits_are_not_finite_ends_and_no_other() -> None:
    driver = PlanDriver(*small_runner(num_slots=5, num_blocks=60))
    beams = BeamDriver(driver)
    spoilt = beams.begin([5, 6, 7], width=2, max_output_len=4)
    good = beams.begin([5, 6, 8], width=2, max_output_len=4)
    plain = driver.admit([5, 6, 8])
    model = driver.runner._model
    assert isinstance(model, AttentionModel)
    model.embedding[7] = torch.nan
    output = driver.step(beams.tokens(spoilt) | beams.tokens(good) | {plain: 3})
    assert list(output.token_ids[:2]) == [BAD_LOGITS] * 2
    assert output.token_ids[2] == output.token_ids[4] >= 0
    good.search.advance(output.beams[good.search_id])
    assert all(score > -20 for score in good.search.scores)
    assert all(candidate.score == -torch.inf for candidate in output.beams[spoilt.search_id])


def test_a_search_in_which_nothing_is_allowed_has_no_token() -> None:
    driver = PlanDriver(*small_runner(num_slots=2, num_blocks=60))
    beams = BeamDriver(driver)
    driven = beams.begin([5, 6, 7], width=2, max_output_len=4, allowed_token_ids=(3,), bad_words=((3,),))
    output = driver.step(beams.tokens(driven))
    assert list(output.token_ids) == [NO_TOKEN] * 2


def test_two_rows_in_one_place_of_a_search_are_refused() -> None:
    driver = PlanDriver(*small_runner(num_slots=2, num_blocks=60))
    for _ in range(2):
        driver.admit([5, 6], beam=BeamAssignment(1, 0, 2, 0.0))
    with pytest.raises(InvariantError, match="cannot be row"):
        driver.step({0: 2, 1: 2})


@pytest.mark.parametrize("subject", subjects("interpreted", "cuda"))
def test_tables_and_tokens_on_a_device_give_what_those_of_the_host_give(subject: Subject) -> None:
    options: dict[str, Any] = {"width": 2, "max_output_len": 5, "stops": STOPS}
    prompt = PROMPTS[0]
    on_host = BeamDriver(drive(Subject(kind="cpu", architecture=subject.architecture), num_slots=4))
    expected = on_host.begin(prompt, **options)
    on_host.run(expected)
    decode_only = tuple(size for size in subject.graphs if not size.num_long_rows)  # others take long to make
    on_device = BeamDriver(drive(dataclasses.replace(subject, graphs=decode_only)))
    driven = on_device.begin(prompt, **options)
    plain = on_device.driver.admit(PROMPTS[1])
    tokens = []
    while not driven.search.is_done:
        row = {plain: on_device.driver.known_lens[plain] - on_device.driver.starts[plain]}
        output = on_device.driver.step(on_device.tokens(driven) | row)
        driven.search.advance(output.beams[driven.search_id])
        tokens.append(output.token_ids[-1])
    assert texts_of(driven) == texts_of(expected)
    slot = on_host.driver.admit(PROMPTS[1])
    assert on_host.driver.generate([slot], len(tokens))[0] == tokens


@pytest.mark.parametrize("subject", subjects("cuda"))
def test_no_step_of_a_search_waits_for_the_device(subject: Subject) -> None:
    beams = BeamDriver(drive(subject))
    for is_warm in (False, True):
        driven = beams.begin(PROMPTS[2], width=4, max_output_len=6, stops=STOPS)
        with waits_are_errors() if is_warm else contextlib.nullcontext():
            pending = [beams.driver.launch(beams.tokens(driven)) for _ in range(4)]
        for each in pending:
            driven.search.advance(each.wait().beams[driven.search_id])
        beams.leave(driven)
