from array import array
from typing import Any

import pytest

from asyncserve.errors import AsyncserveError, StepFailed
from asyncserve.loop.best_of import BestOfSink, with_scores
from asyncserve.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    TokensPrompt,
    Usage,
)


class Sink:
    wants_usage = False

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.outputs: list[RequestOutput] = []
        self.error: AsyncserveError | None = None

    def begin(self, prompt_token_ids: "array[int]") -> None:
        self.prompt = list(prompt_token_ids)

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)

    def fail(self, error: AsyncserveError) -> None:
        self.error = error


def output(
    index: int, text: str, logprobs: list[float] | None, *, ends: bool, num_cached: int = 0
) -> RequestOutput:
    return RequestOutput(
        index=index,
        text=text,
        token_ids=[7] * len(text),
        logprobs=None if logprobs is None else [TokenLogprobs(7, logprob, 1, ()) for logprob in logprobs],
        finish_reason=FinishReason.STOP if ends else None,
        usage=Usage(5, len(text), num_cached) if ends else None,
    )


def failed(index: int) -> RequestOutput:
    error = StepFailed("it broke", step_id=3)
    return RequestOutput(index, "", (), finish_reason=FinishReason.ERROR, usage=Usage(5, 1, 0), error=error)


def given(sampling: SamplingParams, outputs: list[RequestOutput]) -> list[RequestOutput]:
    sink = Sink()
    best = BestOfSink(sink, sampling)
    best.begin(array("i", [1, 2]))
    assert sink.prompt == [1, 2]
    for each in outputs[:-1]:
        best.put(each)
    assert not sink.outputs
    best.put(outputs[-1])
    return sink.outputs


THREE = [
    output(0, "a", [-0.6], ends=True),
    output(1, "b", [-0.1], ends=False),
    output(2, "cc", [-0.5, -0.6], ends=True),
    output(1, "bb", [-0.1, -9.0], ends=True),
]


def test_the_likeliest_per_token_are_given_whole_and_best_first() -> None:
    outputs = given(SamplingParams(n=2, best_of=3, num_logprobs=0), THREE)
    assert [(each.index, each.text) for each in outputs] == [(0, "cc"), (1, "a")]
    assert [len(each.logprobs or ()) for each in outputs] == [2, 1]


def test_logprobs_that_nobody_asked_for_are_not_given() -> None:
    assert [each.logprobs for each in given(SamplingParams(n=2, best_of=3), THREE)] == [None, None]


def test_the_usage_counts_the_tokens_of_all() -> None:
    outputs = given(SamplingParams(n=2, best_of=3), THREE)
    assert [each.usage.num_output_tokens for each in outputs if each.usage is not None] == [2 + 2, 1]


def test_what_the_first_found_cached_is_told_whoever_wins() -> None:
    """The others find the whole prompt: it was computed for all of them a moment ago."""
    outputs = [
        output(0, "a", [-0.6], ends=True, num_cached=2),
        output(1, "b", [-0.1], ends=True, num_cached=5),
    ]
    (best,) = given(SamplingParams(n=1, best_of=2), outputs)
    assert best.text == "b"
    assert best.usage == Usage(5, 2, 2)


def test_results_of_a_beam_search_keep_their_order() -> None:
    sampling = SamplingParams(n=2, best_of=3, use_beam_search=True)
    outputs = [output(index, text, None, ends=True) for index, text in ((2, "c"), (0, "a"), (1, "b"))]
    assert [each.text for each in given(sampling, outputs)] == ["a", "b"]


def test_one_that_failed_is_left_out() -> None:
    outputs = given(SamplingParams(n=2, best_of=3), [failed(0), *THREE[1:]])
    assert [(each.index, each.text, each.error) for each in outputs] == [(0, "cc", None), (1, "bbb", None)]


def test_where_too_few_are_left_the_failure_is_given() -> None:
    outputs = given(SamplingParams(n=2, best_of=3), [failed(0), failed(2), *THREE[1:2], THREE[3]])
    assert [(each.index, each.text) for each in outputs] == [(0, "bbb"), (1, "")]
    assert isinstance(outputs[1].error, StepFailed)


def test_what_a_beam_search_has_not_found_stands_behind_what_it_has() -> None:
    sampling = SamplingParams(n=2, best_of=3, use_beam_search=True)
    missing = [RequestOutput(index, "", (), finish_reason=FinishReason.MISSING) for index in (1, 2)]
    outputs = given(sampling, [*missing, output(0, "a", None, ends=True)])
    assert [(each.index, each.text, each.finish_reason) for each in outputs] == [
        (0, "a", FinishReason.STOP),
        (1, "", FinishReason.MISSING),
    ]


def test_a_failure_of_the_request_is_passed_on() -> None:
    sink = Sink()
    error = StepFailed("it broke", step_id=3)
    BestOfSink(sink, SamplingParams(best_of=2)).fail(error)
    assert sink.error is error


@pytest.mark.parametrize(
    ("sampling", "num_logprobs"),
    [
        ({"best_of": 3}, 0),
        ({"best_of": 3, "num_logprobs": 4}, 4),
        ({"best_of": 3, "use_beam_search": True}, None),
    ],
)
def test_the_engine_is_asked_for_what_ranking_needs(
    sampling: dict[str, Any], num_logprobs: int | None
) -> None:
    request = Request(
        request_id="r", prompt=TokensPrompt(token_ids=[1]), sampling=SamplingParams(**sampling), arrival_s=0.0
    )
    assert with_scores(request).sampling.num_logprobs == num_logprobs
