"""Ways to keep long work from blocking the event loop: threads, and yielding between items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from segue.errors import SegueError

T = TypeVar("T")
TURN = 128  # items between two yields to the event loop
INLINE_ENTRIES = 1024  # most entries of a reply that is built and encoded on the event loop
NUM_THREADS = 2  # they share the GIL with the event loop: more threads would make it wait longer


async def turn(number: int) -> None:
    """Yield to the event loop after every ``TURN`` items; called after item ``number`` of a long loop."""
    if number % TURN == TURN - 1:
        await asyncio.sleep(0)


class ThreadPool:
    """A few threads with a first-come, first-served queue of short pieces of work: bodies, texts, templates.

    Long work is split into pieces, and each piece is queued when the one before it is done. So no call waits
    for the whole work of another, and cancelled work ends with its current piece. asyncio's own threads stay
    free.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "segue-worker")
        self._end: SegueError | None = None

    async def run(self, piece: Callable[[], T]) -> T:
        """Run a piece of work in a thread. If it is cancelled while it is queued, it never begins.

        Raises:
            SegueError: the error that was given to :meth:`close`.
        """
        if self._end is not None:
            raise self._end
        future = asyncio.get_running_loop().run_in_executor(self._executor, piece)
        try:
            return await future
        except asyncio.CancelledError:
            if self._end is not None and future.cancelled():  # by `close`, and not with the caller
                raise self._end from None
            raise

    async def build(self, make: Callable[[], T], num_entries: int) -> T:
        """Return what ``make`` makes of a reply: at once if it has few entries, else in a thread."""
        return make() if num_entries <= INLINE_ENTRIES else await self.run(make)

    def close(self, error: SegueError) -> None:
        """Begin no more pieces: queued and later ones end with ``error``. Running ones are not waited for."""
        self._end = error
        self._executor.shutdown(wait=False, cancel_futures=True)
