import asyncio
import logging
import sys
from collections.abc import Iterator

import pytest

from asyncserve.errors import ConfigError
from asyncserve.tracing.otlp import TraceExporter, make_exporter, stages_of
from asyncserve.tracing.requests import FinishedRequest, FinishedSequence, RequestTracer
from tests.http.live import live_server
from tests.tracing.collector import Collector, ReceivedSpan, running_collector, running_grpc_collector

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flag}" for flag in ("01", "00"))
SERVER, INTERNAL = 2, 1


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


def sequence(
    *, first_scheduled_s: float | None = 101.0, finished_s: float = 104.0, reason: str = "stop"
) -> FinishedSequence:
    ran = first_scheduled_s is not None
    return FinishedSequence(
        reason=reason,
        tokenized_s=100.5,
        first_scheduled_s=first_scheduled_s,
        first_token_s=102.0 if ran else None,
        last_token_s=103.5 if ran else None,
        finished_s=finished_s,
        num_prompt_tokens=7,
        num_cached_tokens=4,
        num_output_tokens=3 if ran else 0,
        max_output_len=20,
        num_preemptions=1,
    )


def request(*sequences: FinishedSequence, traceparent: str | None = None) -> FinishedRequest:
    return FinishedRequest(
        request_id="cmpl-1",
        arrived_s=100.0,
        epoch_offset_s=1_000_000.0,
        temperature=0.5,
        top_p=0.75,
        trace_headers={} if traceparent is None else {"traceparent": traceparent, "tracestate": "a=b"},
        sequences=sequences or (sequence(),),
    )


def sent(collector: Collector, *requests: FinishedRequest) -> list[ReceivedSpan]:
    """Send requests and return the spans that arrive."""
    exporter = TraceExporter(collector.url, model_name="m", linger_s=60.0)
    for each in requests:
        exporter.take(each)
    exporter.close()
    assert (exporter.num_exported, exporter.num_dropped) == (len(requests), 0)
    return collector.next_spans()


def test_a_request_is_a_trace_with_a_span_per_stage(collector: Collector) -> None:
    root, *stages = sent(collector, request())
    assert collector.paths == ["/v1/traces"]
    assert (root.name, root.kind, root.parent_id, root.service) == ("llm_request", SERVER, "", "asyncserve")
    second_ns = 1_000_000_000
    assert [(each.name, each.began_ns / second_ns, each.ended_ns / second_ns) for each in stages] == [
        ("tokenize", 1_000_100.0, 1_000_100.5),
        ("queue", 1_000_100.5, 1_000_101.0),
        ("prefill", 1_000_101.0, 1_000_102.0),
        ("decode", 1_000_102.0, 1_000_103.5),
    ]
    assert (root.began_ns / second_ns, root.ended_ns / second_ns) == (1_000_100.0, 1_000_104.0)
    assert {each.trace_id for each in stages} == {root.trace_id}
    assert {each.parent_id for each in stages} == {root.span_id}
    assert {each.kind for each in stages} == {INTERNAL}
    assert len({each.span_id for each in (root, *stages)}) == 5


def test_the_whole_request_has_the_attributes_of_vllm_and_of_the_conventions(collector: Collector) -> None:
    root = sent(collector, request())[0]
    assert root.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "asyncserve",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.n": 1,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.e2e": 4.0,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 2.0,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "asyncserve.num_preemptions": 1,
    }


def test_a_collector_may_speak_grpc() -> None:
    with running_grpc_collector() as collector:
        spans = sent(collector, request(traceparent=SAMPLED))
    assert [each.name for each in spans] == ["llm_request", "tokenize", "queue", "prefill", "decode"]
    assert spans[0].trace_id == TRACE_ID


def test_a_client_that_has_a_trace_gets_the_spans_into_it(collector: Collector) -> None:
    root, *stages = sent(collector, request(traceparent=SAMPLED))
    assert (root.trace_id, root.parent_id) == (TRACE_ID, PARENT_ID)
    assert {each.trace_id for each in stages} == {TRACE_ID}


def test_a_trace_that_the_client_does_not_sample_is_not_sent(collector: Collector) -> None:
    unsampled = request(traceparent=NOT_SAMPLED)
    spans = sent(collector, unsampled, request(), unsampled)
    assert [each.name for each in spans].count("llm_request") == 1
    assert TRACE_ID not in {each.trace_id for each in spans}


def test_a_damaged_traceparent_begins_a_trace_of_its_own(collector: Collector) -> None:
    root = sent(collector, request(traceparent="00-zz-1-01"))[0]
    assert root.parent_id == ""


def test_every_sequence_of_a_request_has_its_own_stages(collector: Collector) -> None:
    spans = sent(collector, request(sequence(), sequence(finished_s=105.0, reason="error")))
    root = spans[0]
    parts = [each for each in spans if each.name == "sequence"]
    assert root.attributes["gen_ai.usage.completion_tokens"] == 6
    assert root.attributes["gen_ai.usage.prompt_tokens"] == 7
    assert (root.status, root.description) == (2, "the sequence ended with an error")
    assert [each.status for each in parts] == [0, 2]
    assert [each.parent_id for each in parts] == [root.span_id] * 2
    assert [each.attributes["gen_ai.response.finish_reasons"] for each in parts] == [["stop"], ["error"]]
    for part in parts:
        below = [each.name for each in spans if each.parent_id == part.span_id]
        assert below == ["tokenize", "queue", "prefill", "decode"]


def test_a_request_that_never_ran_has_the_stages_it_came_to(collector: Collector) -> None:
    root, *stages = sent(collector, request(sequence(first_scheduled_s=None, reason="abort")))
    assert [each.name for each in stages] == ["tokenize", "queue"]
    assert stages[-1].ended_ns == root.ended_ns
    assert "gen_ai.latency.time_to_first_token" not in root.attributes


def test_a_missed_deadline_is_an_error_and_a_client_that_left_is_none(collector: Collector) -> None:
    left = sequence(reason="abort")
    spans = sent(collector, request(left), request(left._replace(missed_deadline=True)))
    roots = [each for each in spans if each.name == "llm_request"]
    assert [(each.status, each.description) for each in roots] == [
        (0, ""),
        (2, "the time for the answer was over before it was complete"),
    ]


def test_a_stage_ends_where_the_next_one_begins() -> None:
    stages = stages_of(100.0, sequence()._replace(first_token_s=None, last_token_s=None))
    assert stages == {"tokenize": (100.0, 100.5), "queue": (100.5, 101.0), "prefill": (101.0, 104.0)}


def test_a_collector_that_refuses_costs_the_traces_and_nothing_else(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    exporter = TraceExporter(collector.url, model_name="m", linger_s=60.0)
    with caplog.at_level(logging.CRITICAL):
        exporter.take(request())
        exporter.take(request())
        exporter.close()
    assert (exporter.num_exported, exporter.num_dropped) == (0, 2)


@pytest.mark.parametrize(
    ("endpoint", "where"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
        ("grpc://collector:4317", "collector:4317"),
        ("http://collector:4317", "collector:4317"),
    ],
)
def test_the_url_tells_the_protocol(endpoint: str, where: str) -> None:
    exporter = make_exporter(endpoint)
    assert (".grpc." in type(exporter).__module__) == where.endswith("4317")
    assert getattr(exporter, "_endpoint") == where  # noqa: B009 - the library's own
    exporter.shutdown()


def test_a_variable_tells_the_protocol_before_the_url_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    exporter = make_exporter("http://collector:4317/v1/traces")
    assert ".http." in type(exporter).__module__
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="http/json"):
        make_exporter("http://collector:4318")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncserve\[otel\]'"):
        make_exporter("http://collector:4318")


async def test_requests_of_a_live_server_arrive_in_the_clients_trace(collector: Collector) -> None:
    exporter = await asyncio.to_thread(TraceExporter, collector.url, model_name="fake-model")
    async with live_server(engine_options={"observer": RequestTracer(exporter.take)}) as live:
        body = {"model": "fake-model", "prompt": "ab", "max_tokens": 3, "ignore_eos": True}
        await live.call("/v1/completions", body, headers={"traceparent": SAMPLED})
    await asyncio.to_thread(exporter.close)
    root, *stages = await asyncio.to_thread(collector.next_spans)
    assert (root.trace_id, root.parent_id) == (TRACE_ID, PARENT_ID)
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert [each.name for each in stages] == ["tokenize", "queue", "prefill", "decode"]
    assert root.began_ns <= stages[0].began_ns <= stages[-1].ended_ns <= root.ended_ns
