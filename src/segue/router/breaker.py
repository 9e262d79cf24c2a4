"""A worker's circuit breaker: it keeps requests away from a worker that fails again and again.

    CLOSED -> OPEN -> HALF_OPEN -> CLOSED | OPEN

While it is OPEN the worker gets no requests. After some seconds one request is let through as a probe: the
breaker is HALF_OPEN until that request has ended, and its end decides. A worker with a new epoch is another
process, and begins with a new breaker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal

FAILURES = 3  # failures in a row that open a closed breaker
OPEN_S = 5.0  # how long it stays open the first time
GROWTH = 1.5  # how many times longer it stays open each further time
MOST_OPEN_S = 60.0  # how long it stays open at most
NOT_A_PROBE = 0

# How a request to a worker ended. answered: with a status, and the whole body if the status was 200.
# connect: no connection came about. timeout: nothing arrived for too long. cut: the body ended too early.
# client_left: the client closed its connection before.
LegEnd = Literal["answered", "connect", "timeout", "cut", "client_left"]
# What an end says about the worker. neither: nothing.
Verdict = Literal["success", "failure", "neither"]
# Error codes of a healthy worker that says no, or that has lost its partner or the processes that follow
# grammars: a prefill worker that dies must not open the breakers of all decode workers.
REFUSALS = (
    "overloaded",
    "paused",
    "wrong_role",
    "draining",
    "kv_peer_lost",
    "guide_lost",
    "route_not_served",
)


class BreakerState(Enum):
    """Whether a worker gets requests."""

    CLOSED = auto()  # it does
    OPEN = auto()  # it does not, until it is time for a probe
    HALF_OPEN = auto()  # the probe is under way, and it gets no others


# What the end of a request does, where it counts. In OPEN no end counts: these requests left before the
# breaker opened. In HALF_OPEN only the probe's does; if the client left, the next request is the next probe.
_NEXT: Mapping[tuple[BreakerState, Verdict], BreakerState] = {
    (BreakerState.CLOSED, "success"): BreakerState.CLOSED,
    (BreakerState.CLOSED, "failure"): BreakerState.OPEN,  # once there are FAILURES in a row
    (BreakerState.HALF_OPEN, "success"): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, "failure"): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, "neither"): BreakerState.OPEN,
}


def judge(end: LegEnd, status: int = 0, code: str | None = None) -> Verdict:
    """Returns what the end of a request says about the worker.

    Args:
        end: how it ended.
        status: the HTTP status, if it was answered.
        code: the ``code`` in the body of an error, if it has one.
    """
    if end == "client_left" or 400 <= status < 500 or (status >= 500 and code in REFUSALS):
        return "neither"
    return "success" if end == "answered" and status < 500 else "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """The state of one worker's breaker. Times are of the caller's monotonic clock, in seconds."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0  # in a row, while it is closed
    times_open: int = 0  # how often it has opened since it was last closed
    probe_at: float = 0.0  # when the next probe may go, while it is open
    num_probes: int = 0  # so far; the last one's number

    def why_not(self, now: float) -> str | None:
        """Returns why the worker gets no request now; None: it may get one."""
        if self.state is BreakerState.CLOSED:
            return None
        if self.state is BreakerState.HALF_OPEN:
            return "its circuit breaker waits for the end of a probe"
        if now >= self.probe_at:
            return None
        return f"its circuit breaker is open for {self.probe_at - now:.1f} s more"

    def admitted(self, now: float) -> tuple[Breaker, int]:
        """Returns the breaker once a request has been sent, and the request's number as a probe.

        The number is ``NOT_A_PROBE`` for other requests. ``why_not`` must have been None.
        """
        assert self.why_not(now) is None
        if self.state is BreakerState.CLOSED:
            return self, NOT_A_PROBE
        probe = self.num_probes + 1
        return replace(self, state=BreakerState.HALF_OPEN, num_probes=probe), probe

    def ended(self, verdict: Verdict, probe: int, now: float) -> Breaker:
        """Returns the breaker once a request has ended; ``probe``: its number from :meth:`admitted`.

        A success may be told as soon as the status has arrived: a failure of the same request's body then
        counts as a failure of its own.
        """
        if self.state is BreakerState.HALF_OPEN and probe != self.num_probes:
            return self
        target = _NEXT.get((self.state, verdict))
        if target is None:
            return self
        if target is BreakerState.CLOSED:
            return Breaker(num_probes=self.num_probes)
        if verdict == "neither":
            return replace(self, state=target)
        if self.state is BreakerState.CLOSED and self.failures + 1 < FAILURES:
            return replace(self, failures=self.failures + 1)
        seconds = min(OPEN_S * GROWTH ** min(self.times_open, 32), MOST_OPEN_S)
        return replace(self, state=target, failures=0, times_open=self.times_open + 1, probe_at=now + seconds)
