"""Which trace a request belongs to, as its headers say: W3C Trace Context. Nothing here needs a package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED = 1  # a bit of the flags: the spans of the trace are kept
MOST_STATE = 512  # characters of tracestate that are passed on; a longer one is dropped
# A later version of the standard may add fields behind the four.
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[ -~]*")  # printable ASCII: it becomes a header again

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place: its trace, and its id, which is its children's parent."""

    trace_id: int  # 128 bits
    span_id: int  # 64 bits
    flags: int  # 8 bits
    state: str = ""  # of other tracing systems, to be passed on

    @property
    def is_sampled(self) -> bool:
        """Whether the trace's spans are kept."""
        return bool(self.flags & SAMPLED)

    @property
    def headers(self) -> list[Header]:
        """The headers by which another server's spans become children of this one."""
        parent = f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}".encode()
        state = [(TRACESTATE, self.state.encode())] if self.state else []
        return [(TRACEPARENT, parent), *state]


def context_of(headers: Iterable[Header]) -> TraceContext | None:
    """Return what a request's headers, with names in lower case, say about its trace.

    None: they say nothing, or nothing that is valid; a request must not fail by it.
    """
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    if len(parents) != 1 or (found := _PARENT.fullmatch(parents[0].strip())) is None:
        return None
    version, trace_id, span_id, flags = (int(found[index], 16) for index in range(1, 5))
    if version == 0xFF or (version == 0 and found[5] is not None) or not trace_id or not span_id:
        return None
    state = b",".join(states).decode("latin-1").strip()
    if len(state) > MOST_STATE or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, span_id, flags & 0x03, state)


def passed_on(headers: Iterable[Header]) -> list[Header]:
    """Return the headers about the trace as they came: who makes no spans passes them on."""
    return [header for header in headers if header[0] in (TRACEPARENT, TRACESTATE)]
