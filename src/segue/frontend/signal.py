"""Wakes the one reader of a call: asyncio's event, without what several readers need.

It is waited for once per token, so its cost counts.
"""

from __future__ import annotations

import asyncio


class Signal:
    """A flag that one task at a time can wait for. It belongs to one event loop."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        """Begin without the flag."""
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake who waits for it."""
        self._is_set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # it is done if its task was cancelled
            waiter.set_result(None)

    def clear(self) -> None:
        """Take the flag back."""
        self._is_set = False

    def wait(self) -> asyncio.Future[None]:
        """Return what is done once the flag is set; only the last one returned is woken."""
        waiter = asyncio.get_running_loop().create_future()
        if self._is_set:
            waiter.set_result(None)
        else:
            self._waiter = waiter
        return waiter
