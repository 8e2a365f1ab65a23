"""Where servers send their traces."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """Receives traces as an OpenTelemetry collector does, over HTTP.

    Attributes:
        spans: attributes of the spans of requests, by trace id.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.spans: dict[str, dict[str, str]] = {}

    def receive(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {item.key: item.value.string_value for item in span.attributes}
                    if span.name == "llm_request":
                        self.spans[span.trace_id.hex()] = attributes


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.receive(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return None
