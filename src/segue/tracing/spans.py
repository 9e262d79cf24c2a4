"""A span as Segue notes it, when it has ended; OpenTelemetry's own is made of it in another thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from segue.tracing.context import TraceContext

SpanKind = Literal["internal", "server", "client"]
Attribute = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class EndedSpan:
    """One span. Times are seconds of the host's monotonic clock."""

    name: str
    context: TraceContext
    parent: int  # id of the parent span, which is of the same trace; 0: there is none
    start: float
    end: float
    kind: SpanKind = "internal"
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str | None = None  # why what it spans has failed; None: it has not
    parent_is_remote: bool = False  # whether another process has the parent
