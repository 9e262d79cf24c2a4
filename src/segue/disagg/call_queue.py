"""What other threads ask a thread to do that waits in a selector."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

Call = Callable[[], None]


class CallQueue:
    """Calls for one thread, in order. Its selector watches :attr:`fd`, and :meth:`run` makes the calls."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable while there are calls
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._is_closed = False

    def put(self, call: Call) -> None:
        """Have the thread make a call; does nothing after :meth:`close`."""
        with self._lock:
            if self._is_closed:
                return
            self._calls.append(call)
            if len(self._calls) == 1:
                os.eventfd_write(self.fd, 1)

    def run(self) -> None:
        """Make the calls that are there; for the thread."""
        with self._lock:
            os.eventfd_read(self.fd)
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def close(self) -> None:
        """Drop what is left, and every later call."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
