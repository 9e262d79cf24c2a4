"""The requests that wait for admission, by class and in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import get_args

from segue.laps.classes import PromptClass
from segue.scheduler.request import Request


class WaitingQueue:
    """One sorted list per class of prompts, each in the order of ``Request.queue_key``.

    They are lists and not heaps: requests leave from any position, and policies and reports read them in
    order. With 4,096 requests each change takes some microseconds.
    """

    def __init__(self) -> None:
        self._lists: dict[PromptClass, list[Request]] = {name: [] for name in get_args(PromptClass)}

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain(*self._lists.values())

    def of(self, prompt_class: PromptClass) -> list[Request]:
        """Returns the requests of a class, in order; it changes with the queue."""
        return self._lists[prompt_class]

    def add(self, request: Request) -> None:
        """Add a request to the list of its class."""
        insort(self._lists[request.prompt_class], request, key=Request.queue_key)

    def remove(self, request: Request) -> None:
        """Remove a request; a binary search finds it."""
        requests = self._lists[request.prompt_class]
        at = bisect_left(requests, request.queue_key(), key=Request.queue_key)
        assert requests[at] is request
        del requests[at]
