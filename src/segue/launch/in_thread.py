"""Work that blocks, in a thread for which nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work``, done in a thread of its own.

    As ``asyncio.to_thread``, except that nothing waits for the thread if the caller is cancelled: so a start
    that is interrupted while it reads a model ends at once.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # then a cancelled caller does not cancel it

    def run() -> None:
        """Do the work, and hand its result or its error to the caller."""
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="segue-blocking", daemon=True).start()
    return await asyncio.wrap_future(future)
