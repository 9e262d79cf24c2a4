"""Ends a process whose wake takes too long, also if its event loop or the whole interpreter hangs."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable

from segue.logs import logger

# From a deadline to the end of a process whose threads do not run: the interpreter's own watchdog, which is
# written in C and needs no GIL, then shows what each thread does and ends the process.
TRACEBACK_S = 0.5


class Watchdog:
    """Ends this process unless the ``with`` block is left in time.

    At the deadline a thread calls ``kill``, which must end the workers and wait for nothing, and ends the
    process. If that thread does not get the GIL, the process ends ``TRACEBACK_S`` later, and the kernel then
    kills the workers.
    """

    def __init__(self, timeout_s: float, kill: Callable[[], None], what: str) -> None:
        """``what`` is to be done within ``timeout_s`` seconds; it begins a sentence of the log."""
        self._timeout_s = timeout_s
        self._kill = kill
        self._what = what
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Watchdog:
        faulthandler.dump_traceback_later(self._timeout_s + TRACEBACK_S, exit=True)
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        self._kill()
        logger.critical("%s has taken more than %g s; this process ends", self._what, self._timeout_s)
        os._exit(1)
