import math
from typing import Any

import numpy as np
import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.request import (
    DEFAULT_MAX_TOKENS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_STRUCTURE_CHARACTERS,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    StructureKind,
    TextPrompt,
    TokenLogprobs,
    Usage,
    merge_all,
    total_usage,
)


def one(name: str, value: float) -> dict[str, Any]:
    return {name: value}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0.0, 100.0),
        ("repetition_penalty", 0.01, 100.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("min_p", 0.0, 1.0),
    ],
)
def test_the_ends_of_a_range_are_taken_and_what_lies_beyond_is_refused_with_the_range(
    name: str, low: float, high: float
) -> None:
    for value in (low, high):
        assert getattr(SamplingParams(**one(name, value)), name) == value
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), math.inf, math.nan):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**one(name, value))
        assert caught.value.param == name
        assert f"[{low}, {high}]" in str(caught.value)


@pytest.mark.parametrize(
    "sampling", [{"repetition_penalty": 1e-39}, {"repetition_penalty": 1e39}, {"temperature": 1e46}]
)
def test_values_that_would_make_finite_logits_infinite_are_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(sampling))):
        SamplingParams(**sampling)


def len_of(number: int) -> str:
    """Name a number whose digits Python would not print."""
    return f"{number.bit_length()} bits"


INTEGER_FIELDS = {
    "n": "n",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "seed": "seed",
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
}
NUMBER_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@pytest.mark.parametrize("value", [1.5, 2.0, True, "1", [1], np.float64(2.0), np.bool_(True), np.array([1])])
@pytest.mark.parametrize(("name", "shown_as"), INTEGER_FIELDS.items())
def test_a_field_that_counts_takes_nothing_but_integers(name: str, shown_as: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be an integer") as caught:
        SamplingParams(**one(name, value))
    assert caught.value.param == shown_as


@pytest.mark.parametrize("value", ["hot", None, True, [1.0], 1j])
@pytest.mark.parametrize("name", NUMBER_FIELDS)
def test_a_field_that_measures_takes_nothing_but_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a number") as caught:
        SamplingParams(**one(name, value))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", [5.5]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "57"),
        ("logit_bias", {5.5: 1}),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", [(5, 1)]),
        ("allowed_token_ids", [5.5]),
        ("allowed_token_ids", [5, True]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", "57"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [5, -1]),
        ("allowed_token_ids", [5, 2**64]),
        ("allowed_token_ids", [5] * (MAX_ALLOWED_TOKENS + 1)),
        ("bad_words", "word"),
        ("bad_words", [5]),
        ("bad_words", ["a", ""]),
        ("bad_words", ["a"] * (MAX_BAD_WORDS + 1)),
        ("bad_words", ["a" * (MAX_BAD_WORD_CHARACTERS + 1)]),
        ("structured", "json"),
        ("structured", {"type": "json_object"}),
    ],
)
def test_a_field_that_holds_several_values_names_itself_when_one_is_of_a_wrong_type(
    name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**one(name, value))
    assert caught.value.param == name


@pytest.mark.parametrize("huge", [int("1" * 401), -int("1" * 401), 10**5000, 2**64], ids=len_of)
@pytest.mark.parametrize(
    ("name", "shown_as"), [*INTEGER_FIELDS.items(), ("temperature", "temperature"), ("top_p", "top_p")]
)
def test_a_huge_integer_is_refused_with_the_name_of_the_field(name: str, shown_as: str, huge: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**one(name, huge))
    assert caught.value.param == shown_as
    assert len(caught.value.message) < 100


@pytest.mark.parametrize("huge", [int("1" * 401), 10**5000], ids=len_of)
def test_a_huge_token_id_or_bias_is_refused_with_the_name_of_the_field(huge: int) -> None:
    for name, value in (("stop_token_ids", [huge]), ("logit_bias", {huge: 1}), ("logit_bias", {1: huge})):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert caught.value.param == name


def test_numbers_of_numpy_are_taken_and_become_pythons() -> None:
    sampling = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        top_k=np.int32(-1),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.int64(7),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int64(5): np.float32(1)},  # type: ignore[dict-item]
    )
    assert (sampling.n, sampling.top_k, sampling.temperature, sampling.seed) == (2, 0, 0.5, 7)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((3, 4), {5: 1.0})
    for value in (sampling.n, sampling.seed, *sampling.stop_token_ids, *sampling.logit_bias):
        assert type(value) is int


def test_max_tokens_left_out_can_be_told_from_the_same_number_asked_for() -> None:
    assert SamplingParams().max_tokens is DEFAULT_MAX_TOKENS
    assert SamplingParams(max_tokens=16).max_tokens is not DEFAULT_MAX_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-30, 9.9e-6])
def test_temperatures_next_to_zero_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_outputs_of_a_choice_merge_into_one_with_the_end_of_the_last() -> None:
    entries = [TokenLogprobs(token_id=number, logprob=-1.0, rank=1, top=()) for number in range(4)]
    usage = Usage(3, 2, 0)
    outputs = [
        RequestOutput(1, "a", (5,), entries[:1], entries[2:]),
        RequestOutput(1, "", ()),
        RequestOutput(1, "b", (6,), entries[1:2], None, FinishReason.STOP, "x", usage),
    ]
    merged = RequestOutput(1, "ab", [5, 6], entries[:2], entries[2:], FinishReason.STOP, "x", usage)
    assert merge_all(outputs) == merged
    assert merge_all(outputs[1:2]) is outputs[1]


def test_usage_of_choices_counts_the_prompt_once_and_its_cache_as_the_choice_that_found_fewest() -> None:
    assert total_usage([Usage(10, 3, 8), Usage(10, 4, 0)]) == Usage(10, 7, 0)


def test_lists_of_tokens_and_words_become_tuples_of_pythons_own_values() -> None:
    sampling = SamplingParams(allowed_token_ids=np.array([3, 5]), bad_words=["a", "b c"])  # type: ignore[arg-type]
    assert sampling.allowed_token_ids == (3, 5)
    assert {type(token_id) for token_id in sampling.allowed_token_ids} == {int}
    assert sampling.bad_words == ("a", "b c")
    assert SamplingParams().allowed_token_ids is None


def test_shapes_are_equal_by_what_they_say_and_not_by_the_field_they_came_from() -> None:
    first = StructuredOutput(kind=StructureKind.REGEX, source="a", param="guided_regex")
    assert first == StructuredOutput(kind=StructureKind.REGEX, source="a")
    assert len({first, StructuredOutput(kind=StructureKind.GRAMMAR, source="a")}) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "regex", "source": "a"},
        {"kind": StructureKind.JSON_SCHEMA, "source": {}},
        {"kind": StructureKind.REGEX},
        {"kind": StructureKind.REGEX, "source": "a" * (MAX_STRUCTURE_CHARACTERS + 1)},
    ],
)
def test_a_shape_without_a_description_or_with_an_endless_one_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutput(**fields, param="structured_outputs")
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("value", [0, -2, -(2**70), 2**70, 1.0, True, "5"])
def test_a_prompt_can_be_truncated_to_one_token_or_more_or_to_what_fits(value: Any) -> None:
    def request(num_kept: Any) -> Request:
        return Request(
            request_id="r",
            prompt=TextPrompt(text="a"),
            sampling=SamplingParams(),
            arrival_s=0.0,
            truncate_prompt_tokens=num_kept,
        )

    for good in (1, 10_000, -1, None):
        assert request(good).truncate_prompt_tokens == good
    with pytest.raises(InvalidRequest) as caught:
        request(value)
    assert caught.value.param == "truncate_prompt_tokens"
