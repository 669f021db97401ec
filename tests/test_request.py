import math
from typing import Any

import pytest

from asyncserve.errors import InvalidRequest
from asyncserve.request import (
    FinishReason,
    RequestOutput,
    SamplingParams,
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
