"""OpenTelemetry's SDK: where spans go, and which traces are kept. Only who makes spans imports it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from segue.tracing.batches import SpanBatches
from segue.tracing.context import TraceContext
from segue.tracing.spans import EndedSpan
from segue.tracing.tracer import Tracer
from segue.version import __version__

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SCOPE = InstrumentationScope("segue", __version__)


class _Reason(logging.Handler):
    """Keeps what the exporter says of a batch, which would otherwise be lines of the log for each batch."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()  # the first line has the cause, the last that it gave up


def open_tracer(url: str, service: str, instance: str) -> Tracer:
    """Return a tracer that sends spans to ``url``; OpenTelemetry's variables say how.

    Args:
        url: of a collector, whole.
        service: the name of the service, unless ``OTEL_SERVICE_NAME`` gives another one.
        instance: tells this process from others of the service.
    """
    own = {"service.version": __version__, "service.instance.id": instance}
    variables = os.environ.get("OTEL_SERVICE_NAME", "") + os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not os.environ.get("OTEL_SERVICE_NAME") and f"{SERVICE_NAME}=" not in variables:
        own[SERVICE_NAME] = service
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    exporter, reason = OTLPSpanExporter(url), _Reason()
    for name in ("opentelemetry.exporter", "opentelemetry.sdk.trace.export"):
        logging.getLogger(name).addHandler(reason)
        logging.getLogger(name).propagate = False
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # it warns of clients' headers

    def send(spans: Sequence[EndedSpan]) -> str | None:
        reason.text = ""
        offset = time.time_ns() - time.monotonic_ns()
        try:
            result = exporter.export([_made(span, provider.resource, offset) for span in spans])
        except Exception as error:  # whatever goes wrong in there costs spans alone
            return repr(error)
        return None if result is SpanExportResult.SUCCESS else reason.text or "it did not take them"

    def sampler(parent: TraceContext | None, trace_id: int, name: str) -> tuple[bool, str]:
        context = None if parent is None else set_span_in_context(NonRecordingSpan(_context(parent, True)))
        result = provider.sampler.should_sample(context, trace_id, name, SpanKind.SERVER)
        return result.decision is not Decision.DROP, "" if parent is None else parent.state

    return Tracer(SpanBatches(url, send, exporter.shutdown), sampler)


def _made(span: EndedSpan, resource: Resource, offset: int) -> ReadableSpan:
    """Return a span as the exporter takes it; ``offset``: nanoseconds from the host's clock to Unix time."""
    context = _context(span.context)
    parent = None
    if span.parent:
        place = TraceContext(span.context.trace_id, span.parent, span.context.flags, span.context.state)
        parent = _context(place, span.parent_is_remote)
    return ReadableSpan(
        span.name,
        context,
        parent,
        resource,
        dict(span.attributes),
        kind=_KINDS[span.kind],
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=int(span.start * 1e9) + offset,
        end_time=int(span.end * 1e9) + offset,
        instrumentation_scope=_SCOPE,
    )


def _context(place: TraceContext, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([place.state]) if place.state else None
    return SpanContext(place.trace_id, place.span_id, is_remote, TraceFlags(place.flags), state)
