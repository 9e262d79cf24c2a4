"""Who waits, who goes first, who gives way."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from segue.scheduler.request import Request


def queue_key(request: Request) -> tuple[int, int]:
    """Waiting order: higher priority first, then the earlier arrival."""
    return (-request.priority, request.arrival)


class WaitingQueue:
    """Waiting requests in the order they are admitted."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        """The request to admit next."""
        return self._requests[0]

    def push(self, request: Request) -> None:
        """Insert by priority, then arrival: a retracted request comes before younger ones."""
        insort(self._requests, request, key=queue_key)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        at = bisect_left(self._requests, queue_key(request), key=queue_key)
        assert self._requests[at] is request
        del self._requests[at]


def choose_victim(running: Iterable[Request]) -> Request:
    """Whom to retract when pages run out: the lowest priority, then the youngest."""
    return max(running, key=queue_key)


CLIP_MAX_NEW_TOKENS = 4096  # a client that leaves max_tokens open must not reserve the whole context


def expected_tokens(requests: Iterable[Request]) -> int:
    """Output tokens that requests may still ask for, each clipped."""
    return sum(min(r.max_new_tokens - r.outputs_launched, CLIP_MAX_NEW_TOKENS) for r in requests)


@dataclass(slots=True, kw_only=True)
class NewTokenRatio:
    """The share of their remaining tokens that running requests are expected to need.

    Admission keeps that many tokens free. The ratio decays a little with every step, since most requests
    end before their limit, and rises with every preemption, since then it was too low.
    """

    initial: float = 0.7
    minimum: float = 0.1
    decay: float = (0.7 - 0.1) / 600  # from initial to minimum in 600 steps
    rise: float = 0.2
    value: float = 0.7

    def on_step(self) -> None:
        """A step was launched."""
        self.value = max(self.minimum, self.value - self.decay)

    def on_preemption(self) -> None:
        """A request was retracted for want of pages."""
        self.value = min(1.0, self.value + self.rise)
