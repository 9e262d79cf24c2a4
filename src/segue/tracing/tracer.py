"""Begins traces, and takes spans that have ended. Without a collector there is no tracer, and no span."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from segue.tracing.batches import SpanBatches
from segue.tracing.context import SAMPLED, TraceContext
from segue.tracing.spans import EndedSpan

RANDOM = 2  # a bit of the flags: the trace's id is random


@dataclass(slots=True, eq=False)
class Tracer:
    """Makes the ids of spans, and passes those on that are kept."""

    batches: SpanBatches
    # Whether the spans of a trace are kept, by the parent, the trace's id and the first span's name; and the
    # state to be passed on.
    sampler: Callable[[TraceContext | None, int, str], tuple[bool, str]]
    _random: random.Random = field(default_factory=random.Random)  # with a seed of the system

    def begin(self, parent: TraceContext | None, name: str) -> TraceContext:
        """Return the place of this process's first span of a trace; without a parent, of a new trace."""
        trace_id = self._id(128) if parent is None else parent.trace_id
        is_kept, state = self.sampler(parent, trace_id, name)
        flags = RANDOM if parent is None else parent.flags & RANDOM
        return TraceContext(trace_id, self._id(64), flags | (SAMPLED if is_kept else 0), state)

    def child(self, parent: TraceContext) -> TraceContext:
        """Return the place of a further span."""
        return TraceContext(parent.trace_id, self._id(64), parent.flags, parent.state)

    def record(self, spans: Sequence[EndedSpan]) -> None:
        """Send spans of one trace, if it is kept. It takes microseconds, whatever the collector does."""
        if spans and spans[0].context.is_sampled:
            self.batches.put(spans)

    def close(self) -> None:
        """Send what is there; it takes at most ``FLUSH_S`` + ``STOP_S`` seconds. May be called again."""
        self.batches.close()

    def _id(self, num_bits: int) -> int:
        return self._random.getrandbits(num_bits) or 1  # 0 stands for none
