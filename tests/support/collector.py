"""A collector of spans on a real socket: it takes OTLP over HTTP, and keeps what comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """A span as it came."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str  # "": it has none
    kind: int
    start: int  # nanoseconds since 1970
    end: int
    error: str  # "": it went well
    attributes: dict[str, Any] = field(default_factory=dict)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found


class Collector:
    """The collector; it stops when the ``with`` block is left."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector._take(ExportTraceServiceRequest.FromString(data))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def named(self, name: str, service: str | None = None) -> list[SeenSpan]:
        """The spans of a name, perhaps of one service, in the order of their beginnings."""
        found = [s for s in self.spans if s.name == name and service in (None, s.service)]
        return sorted(found, key=lambda span: span.start)

    def wait(self, is_there: Callable[[], bool], seconds: float = 10) -> None:
        """Waits until a condition holds."""
        deadline = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.01)

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            about = {each.key: _value(each.value) for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    seen = SeenSpan(
                        about["service.name"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.message if span.status.code == 2 else "",
                        {each.key: _value(each.value) for each in span.attributes},
                    )
                    self.spans.append(seen)


def only(spans: list[SeenSpan]) -> SeenSpan:
    """Returns the one span of a list."""
    assert len(spans) == 1, [(span.service, span.name) for span in spans]
    return spans[0]
