"""What has happened to the offers and leases that ended last, and when: where the time of a handover goes."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, Protocol

NUM_RECENT = 32
MOST_EVENTS = 256  # of one offer or lease; what comes after them is left out

TimedEvent = tuple[str, float, int]  # name, seconds of the scheduler's clock, tokens or pages so far; 0: none


def note(events: list[TimedEvent], name: str, now: float, count: int = 0) -> None:
    """Append an event."""
    if len(events) < MOST_EVENTS:
        events.append((name, now, count))


class RecordedHandover(Protocol):
    """The part of an offer or a lease that is remembered."""

    handoff: int
    rid: str
    num_tokens: int
    events: list[TimedEvent]


class RecentHandovers:
    """The last offers of a prefill worker, or the last leases of a decode worker."""

    def __init__(self, part: Literal["prefill", "decode"]) -> None:
        self._part = part
        self._ended: deque[tuple[int, str, int, list[TimedEvent]]] = deque(maxlen=NUM_RECENT)

    def add(self, ended: RecordedHandover) -> None:
        """Remember an offer or a lease that has ended, and forget the oldest one if there are too many."""
        self._ended.append((ended.handoff, ended.rid, ended.num_tokens, ended.events))

    def report(self) -> list[dict[str, Any]]:
        """Return what ``/server_info`` shows, the one that ended last at the end."""
        return [
            {
                "part": self._part,
                "handoff": handoff,
                "rid": rid,
                "num_tokens": num_tokens,
                "events": [_report(*event) for event in events],
            }
            for handoff, rid, num_tokens, events in self._ended
        ]


def _report(name: str, at: float, count: int) -> dict[str, Any]:
    return {"event": name, "at": round(at, 6), **({"count": count} if count else {})}
