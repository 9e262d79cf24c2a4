"""The waiting queue, the choice of the request to retract, and the measure that admission goes by."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from segue.scheduler.request import Request


def queue_key(request: Request) -> tuple[int, float, int]:
    """The sort key of the waiting queue: the highest priority, then the earliest deadline, then arrival."""
    return (-request.priority, request.deadline, request.arrival)


class WaitingQueue:
    """The waiting requests, in the order in which they will be admitted.

    It is a sorted list and not a heap: requests leave from any position, and policies and reports read it in
    order. With 4,096 requests a ``push`` and a ``remove`` take some microseconds.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Insert by :func:`queue_key`; a retracted request therefore comes before younger ones."""
        insort(self._requests, request, key=queue_key)

    def remove(self, request: Request) -> None:
        """Remove a request from any position; it must be in the queue."""
        at = bisect_left(self._requests, queue_key(request), key=queue_key)
        assert self._requests[at] is request
        del self._requests[at]


def choose_victim(running: Iterable[Request]) -> Request:
    """Returns the request to retract when pages run out: the one that would be last in the queue."""
    return max(running, key=queue_key)


@dataclass(slots=True, kw_only=True)
class NewTokenRatio:
    """The share of their remaining output tokens that running requests are expected to need.

    Admission keeps room for that many tokens free. The ratio decays a little with every step, because most
    requests end before their limit, and rises with every preemption, which shows that it was too low.
    """

    initial: float = 0.7
    minimum: float = 0.1
    decay: float = (0.7 - 0.1) / 600  # from initial to minimum in 600 steps
    rise: float = 0.2
    value: float = 0.7

    def on_step(self) -> None:
        """Decay the ratio; call it once per launched step."""
        self.value = max(self.minimum, self.value - self.decay)

    def on_preemption(self) -> None:
        """Raise the ratio; call it for every request that is retracted because pages ran out."""
        self.value = min(1.0, self.value + self.rise)
