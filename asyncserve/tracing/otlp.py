"""Finished requests → spans → an OpenTelemetry collector.

Takes `FinishedRequest`s on the loop's thread; making spans of them, encoding and sending is done by a thread
of its own, and what does not get through is dropped and counted. Names are those that vLLM's traces have,
with the current names of the GenAI conventions beside them. `OTEL_*` variables are honoured as by any
program with the SDK: service name, sampler, headers, certificates, time limits, protocol.
The only file that knows OpenTelemetry, which is an optional dependency: imported when it is asked for.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncserve.errors import ConfigError
from asyncserve.tracing.background import BackgroundWriter
from asyncserve.tracing.requests import FinishedRequest, FinishedSequence

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, SpanKind, TraceState

CAPACITY = 2048
"""Requests that wait to be sent, as many spans as the SDK's own processor keeps."""
BATCH_LEN = 128
LINGER_S = 1.0
CLOSE_TIMEOUT_S = 3.0
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC_PORT = 4317
DEFAULT_PATH = "/v1/traces"
STAGES = ("tokenize", "queue", "prefill", "decode")


class TraceExporter:
    """Sends the traces of requests to a collector.

    Args:
        endpoint: Its URL.
        model_name: As reported to clients.
        linger_s: Seconds that a request waits for others to be sent with.

    Raises:
        ConfigError: OpenTelemetry is not installed, or knows no such protocol.
    """

    def __init__(self, endpoint: str, *, model_name: str, linger_s: float = LINGER_S) -> None:
        self._endpoint = endpoint
        self._exporter = make_exporter(endpoint)
        self._spans = SpanMaker(model_name)
        self._writer = BackgroundWriter[FinishedRequest](
            self._send, name="asyncserve-otlp", capacity=CAPACITY, batch_len=BATCH_LEN, linger_s=linger_s
        )

    @property
    def num_exported(self) -> int:
        """Requests that the collector has taken, or that its sampling left out."""
        return self._writer.num_written

    @property
    def num_dropped(self) -> int:
        """Requests that never got there."""
        return self._writer.num_dropped

    def take(self, request: FinishedRequest) -> None:
        """Hand over a finished request; returns at once."""
        self._writer.put(request)

    def close(self) -> None:
        """Send what waits, for a few seconds at most. Blocks."""
        self._writer.close(CLOSE_TIMEOUT_S)
        self._exporter.shutdown()

    def _send(self, requests: Sequence[FinishedRequest]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for request in requests for span in self._spans.spans_of(request)]
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"{self._endpoint} takes no traces; they are dropped until it does")


def make_exporter(endpoint: str) -> "SpanExporter":
    """Return what sends spans to this URL.

    gRPC if a variable of `PROTOCOL_VARIABLES` or the URL's scheme says so, or its port is gRPC's usual one.

    Raises:
        ConfigError: OpenTelemetry is not installed, or knows no such protocol.
    """
    url = urlsplit(endpoint)
    protocol = next((os.environ[name] for name in PROTOCOL_VARIABLES if os.environ.get(name)), "")
    if not protocol:
        protocol = "grpc" if url.scheme.startswith("grpc") or url.port == GRPC_PORT else "http/protobuf"
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint=url.netloc, insecure=url.scheme in ("http", "grpc"))
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            path = DEFAULT_PATH if url.path in ("", "/") else url.path
            return HttpExporter(endpoint=url._replace(path=path).geturl())
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry: pip install 'asyncserve[otel]' ({error})"
        ) from error
    raise ConfigError(f"the OTLP protocol is {protocol!r}; it must be grpc or http/protobuf")


class SpanMaker:
    """Makes the spans of requests.

    Args:
        model_name: As reported to clients.
    """

    def __init__(self, model_name: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = OTELResourceDetector().detect().attributes
        provider = TracerProvider(
            resource=Resource.create({"service.name": "asyncserve", **given}), shutdown_on_exit=False
        )
        self._resource = provider.resource
        self._sampler = provider.sampler
        self._ids = RandomIdGenerator()
        self._scope = InstrumentationScope("asyncserve")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def spans_of(self, request: FinishedRequest) -> "list[ReadableSpan]":
        """Return a request's spans, the whole one first; none if its trace is not sampled."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace.sampling import Decision

        parent_context = self._propagator.extract(request.trace_headers)
        parent = trace.get_current_span(parent_context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        sampled = self._sampler.should_sample(
            parent_context, trace_id, "llm_request", trace.SpanKind.SERVER, {}, ()
        )
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return []
        trace_state = parent.trace_state if parent.is_valid else None
        new_context = partial(self._context, trace_id, trace_state)
        root = new_context()
        finished_s = max(sequence.finished_s for sequence in request.sequences)
        spans = [
            self._span(
                "llm_request",
                root,
                parent if parent.is_valid else None,
                request,
                (request.arrived_s, finished_s),
                self._attributes(request, finished_s),
                kind=trace.SpanKind.SERVER,
                failure=next(filter(None, map(failure_of, request.sequences)), None),
            )
        ]
        for index, sequence in enumerate(request.sequences):
            owner = root
            if len(request.sequences) > 1:
                owner = new_context()
                times_s = (request.arrived_s, sequence.finished_s)
                spans.append(
                    self._span(
                        "sequence",
                        owner,
                        root,
                        request,
                        times_s,
                        _sequence_attributes(sequence, index),
                        failure=failure_of(sequence),
                    )
                )
            spans += [
                self._span(stage, new_context(), owner, request, times_s, {})
                for stage, times_s in stages_of(request.arrived_s, sequence).items()
            ]
        return spans

    def _context(self, trace_id: int, trace_state: "TraceState | None") -> "SpanContext":
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(
            trace_id,
            self._ids.generate_span_id(),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
            trace_state=trace_state,
        )

    def _span(
        self,
        name: str,
        context: "SpanContext",
        parent: "SpanContext | None",
        request: FinishedRequest,
        times_s: tuple[float, float],
        attributes: Mapping[str, Any],
        *,
        kind: "SpanKind | None" = None,
        failure: str | None = None,
    ) -> "ReadableSpan":
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        began_ns, ended_ns = (round((at_s + request.epoch_offset_s) * 1e9) for at_s in times_s)
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=dict(attributes),
            kind=SpanKind.INTERNAL if kind is None else kind,
            status=Status(StatusCode.UNSET if failure is None else StatusCode.ERROR, failure),
            start_time=began_ns,
            end_time=ended_ns,
            instrumentation_scope=self._scope,
        )

    def _attributes(self, request: FinishedRequest, finished_s: float) -> dict[str, Any]:
        """Return the attributes of a whole request."""
        sequences = request.sequences
        longest = max(sequences, key=lambda sequence: sequence.num_output_tokens)
        first = min(sequences, key=lambda sequence: sequence.first_token_s or sequence.finished_s)
        num_output_tokens = sum(sequence.num_output_tokens for sequence in sequences)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "asyncserve",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": len(sequences),
            "gen_ai.request.choice.count": len(sequences),
            "gen_ai.request.max_tokens": longest.max_output_len,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.response.finish_reasons": tuple(sequence.reason for sequence in sequences),
            "gen_ai.usage.num_sequences": len(sequences),
            "gen_ai.usage.prompt_tokens": longest.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": num_output_tokens,
            "gen_ai.usage.input_tokens": longest.num_prompt_tokens,
            "gen_ai.usage.output_tokens": num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": longest.num_cached_tokens,
            "gen_ai.latency.e2e": finished_s - request.arrived_s,
            "asyncserve.num_preemptions": sum(sequence.num_preemptions for sequence in sequences),
        }
        scheduled_s, first_s, last_s = first.first_scheduled_s, first.first_token_s, first.last_token_s
        if scheduled_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = scheduled_s - request.arrived_s
        if first_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first_s - request.arrived_s
        if scheduled_s is not None and first_s is not None and last_s is not None:
            attributes["gen_ai.latency.time_in_model_prefill"] = first_s - scheduled_s
            attributes["gen_ai.latency.time_in_model_decode"] = last_s - first_s
            attributes["gen_ai.latency.time_in_model_inference"] = last_s - scheduled_s
        return attributes


def _sequence_attributes(sequence: FinishedSequence, index: int) -> dict[str, Any]:
    return {
        "asyncserve.sequence.index": index,
        "gen_ai.response.finish_reasons": (sequence.reason,),
        "gen_ai.usage.output_tokens": sequence.num_output_tokens,
    }


def failure_of(sequence: FinishedSequence) -> str | None:
    """Return what an error's span says of a sequence that failed; None if it did not."""
    if sequence.missed_deadline:
        return "the time for the answer was over before it was complete"
    return "the sequence ended with an error" if sequence.reason == "error" else None


def stages_of(arrived_s: float, sequence: FinishedSequence) -> dict[str, tuple[float, float]]:
    """Return when each stage that a sequence came to began and ended; the one it ended in ends with it."""
    ends_s = (
        sequence.tokenized_s,
        sequence.first_scheduled_s,
        sequence.first_token_s,
        sequence.last_token_s,
    )
    stages = {}
    began_s = arrived_s
    for name, ended_s in zip(STAGES, ends_s, strict=True):
        if ended_s is None:
            stages[name] = (began_s, sequence.finished_s)
            break
        stages[name] = (began_s, ended_s)
        began_s = ended_s
    return stages
