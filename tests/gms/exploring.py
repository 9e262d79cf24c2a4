"""Visits every state of a state machine that its events can reach, breadth first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State")
Event = TypeVar("Event")


class Violation(AssertionError):
    """A step broke an invariant."""


def explore(
    start: State,
    events: Callable[[State], Iterable[Event]],
    step: Callable[[State, Event], State],
    key: Callable[[State], Hashable],
) -> int:
    """Apply every event in every reachable state; returns the number of states. `step` checks its result."""
    seen = {key(start)}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for event in events(state):
            found = step(state, event)
            if (name := key(found)) not in seen:
                seen.add(name)
                queue.append(found)
    return len(seen)
