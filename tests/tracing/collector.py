"""Collectors of OpenTelemetry traces, over HTTP and over gRPC, as small as they can be."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from threading import Thread
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(slots=True)
class ReceivedSpan:
    """One span, as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    status: int
    description: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    service: str


@dataclass(slots=True)
class Collector:
    """What a test sees of it: each request's spans are one item of `batches`."""

    url: str
    status: int = 200
    paths: list[str] = field(default_factory=list)
    batches: "SimpleQueue[list[ReceivedSpan]]" = field(default_factory=SimpleQueue)

    def next_spans(self) -> list[ReceivedSpan]:
        """Wait for a request and return its spans."""
        return self.batches.get(timeout=30.0)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def parse(body: bytes) -> list[ReceivedSpan]:
    """Read the body of an export request."""
    spans = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        facts = {each.key: _value(each.value) for each in resource.resource.attributes}
        spans += [
            ReceivedSpan(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=span.kind,
                status=span.status.code,
                description=span.status.message,
                began_ns=span.start_time_unix_nano,
                ended_ns=span.end_time_unix_nano,
                attributes={each.key: _value(each.value) for each in span.attributes},
                service=facts["service.name"],
            )
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    return spans


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run one for the duration of the block; its answers have the status it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.append(self.path)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            collector.batches.put(parse(body))

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def running_grpc_collector() -> Iterator[Collector]:
    """Run one that speaks gRPC for the duration of the block."""

    def export(body: bytes, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        collector.batches.put(parse(body))
        return ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export, response_serializer=ExportTraceServiceResponse.SerializeToString
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Export": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector(f"grpc://127.0.0.1:{port}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
