from array import array

from asyncserve.observer import RequestTimeline
from asyncserve.request import FinishReason, Request, SamplingParams, TokensPrompt
from asyncserve.tracing.requests import FinishedRequest, RequestTracer


def request(request_id: str, *, n: int = 1) -> Request:
    return Request(
        request_id=request_id,
        prompt=TokensPrompt(token_ids=array("i", [1])),
        sampling=SamplingParams(n=n, temperature=0.5),
        arrival_s=10.0,
        trace_headers={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
    )


def timeline(of: Request, *, finished_s: float = 14.0, num_output_tokens: int = 3) -> RequestTimeline:
    return RequestTimeline(
        arrived_s=10.0,
        tokenized_s=10.5,
        first_scheduled_s=11.0,
        first_token_s=12.0,
        last_token_s=13.5,
        finished_s=finished_s,
        num_prompt_tokens=7,
        num_cached_tokens=4,
        num_output_tokens=num_output_tokens,
        max_output_len=20,
        num_preemptions=1,
        request=of,
    )


def test_a_request_is_handed_on_when_its_last_sequence_has_ended() -> None:
    taken: list[FinishedRequest] = []
    tracer = RequestTracer(taken.append)
    both, other = request("both", n=2), request("other")
    tracer.request_finished(timeline(both), FinishReason.STOP)
    assert taken == []
    tracer.request_finished(timeline(other), FinishReason.LENGTH)
    assert [each.request_id for each in taken] == ["other"]
    tracer.request_finished(timeline(both, finished_s=15.0), FinishReason.ABORT)
    assert [each.request_id for each in taken] == ["other", "both"]
    assert [sequence.reason for sequence in taken[1].sequences] == ["stop", "abort"]
    assert [sequence.finished_s for sequence in taken[1].sequences] == [14.0, 15.0]


def test_what_is_handed_on_is_what_the_timeline_says() -> None:
    taken: list[FinishedRequest] = []
    asked = request("one")
    RequestTracer(taken.append).request_finished(timeline(asked), FinishReason.STOP)
    (finished,) = taken
    (sequence,) = finished.sequences
    assert finished.trace_headers == asked.trace_headers
    assert (finished.arrived_s, finished.temperature, finished.top_p) == (10.0, 0.5, 1.0)
    assert sequence[1:] == (10.5, 11.0, 12.0, 13.5, 14.0, 7, 4, 3, 20, 1, False)


def test_a_missed_deadline_is_handed_on() -> None:
    taken: list[FinishedRequest] = []
    of = timeline(request("late"))
    of.missed_deadline = True
    RequestTracer(taken.append).request_finished(of, FinishReason.ABORT)
    assert taken[0].sequences[0].missed_deadline


def test_a_request_id_may_come_again() -> None:
    taken: list[FinishedRequest] = []
    tracer = RequestTracer(taken.append)
    for _ in range(2):
        tracer.request_finished(timeline(request("same")), FinishReason.STOP)
    assert [len(each.sequences) for each in taken] == [1, 1]


def test_a_timeline_without_a_request_makes_no_trace() -> None:
    taken: list[FinishedRequest] = []
    RequestTracer(taken.append).request_finished(RequestTimeline(arrived_s=1.0), FinishReason.STOP)
    assert taken == []
