"""The spans of a client's request at a router: one per choice of workers, and one per leg.

A leg's span is the parent of what its worker does for the request: the headers of the leg say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from segue.frontend.call_trace import OPERATIONS
from segue.router.breaker import LegEnd
from segue.router.fleet import WorkerView
from segue.tracing.context import Header, TraceContext, context_of
from segue.tracing.spans import Attribute, EndedSpan
from segue.tracing.tracer import Tracer


@dataclass(slots=True, eq=False)
class LegTrace:
    """The span of one leg, or of a whole request at a worker that knows no legs."""

    request: RequestTrace
    context: TraceContext
    began: float
    attributes: dict[str, Attribute]

    @property
    def headers(self) -> list[Header]:
        """The headers that make the worker's spans children of this one."""
        return self.context.headers

    def end(self, end: LegEnd, status: int, code: str | None, *, is_well: bool) -> None:
        """Record the leg; the arguments are those of `Registry.end`, and whether it did what it was to do."""
        self.attributes["segue.leg.end"] = end
        if status:
            self.attributes["http.response.status_code"] = status
        error = None if is_well else code or end
        if error is not None:
            self.attributes["error.type"] = error
        name, parent = f"leg {self.attributes['segue.leg.kind']}", self.request.context.span_id
        span = EndedSpan(
            name, self.context, parent, self.began, time.monotonic(), "client", self.attributes, error
        )
        self.request.tracer.record([span])


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The spans of one request."""

    tracer: Tracer
    parent: TraceContext | None
    context: TraceContext
    name: str
    began: float  # when the head of the request had come, by the monotonic clock
    attributes: dict[str, Attribute]
    num_legs: int = 0

    @classmethod
    def begin(
        cls, tracer: Tracer, headers: Iterable[Header], path: str, request_id: str, began: float
    ) -> RequestTrace:
        """Begin a request; ``headers`` are the client's."""
        parent, name = context_of(headers), OPERATIONS.get(path, "text_completion")
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": name,
            "gen_ai.provider.name": "segue",
            "http.request.method": "POST",
            "url.path": path,
            "segue.request.id": request_id,
        }
        return cls(tracer, parent, tracer.begin(parent, name), name, began, attributes)

    def chosen(self, began: float, what: str) -> None:
        """Record that a choice of workers has ended, which began at ``began``, and what was chosen."""
        place, attributes = self.tracer.child(self.context), {"segue.router.choice": what}
        now = time.monotonic()
        self.tracer.record(
            [EndedSpan("queue", place, self.context.span_id, began, now, "internal", attributes)]
        )

    def leg(self, kind: str, worker: WorkerView, num_tokens: int) -> LegTrace:
        """Begin a leg; ``num_tokens`` of the output are known before it."""
        self.num_legs += 1
        address = urlsplit(f"//{worker.id}")
        attributes: dict[str, Attribute] = {
            "segue.leg.kind": kind,
            "segue.leg.number": self.num_legs,
            "segue.leg.tokens_before": num_tokens,
            "server.address": address.hostname or worker.id,
        }
        if address.port:
            attributes["server.port"] = address.port
        return LegTrace(self, self.tracer.child(self.context), time.monotonic(), attributes)

    def end(self, error: str | None) -> None:
        """Record the request; ``error``: why its client has no whole reply."""
        if error is not None:
            self.attributes["error.type"] = "incomplete"
        parent = 0 if self.parent is None else self.parent.span_id
        now = time.monotonic()
        span = EndedSpan(
            self.name, self.context, parent, self.began, now, "server", self.attributes, error, bool(parent)
        )
        self.tracer.record([span])
