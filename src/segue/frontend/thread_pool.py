"""Work that would hold up the event loop: done in threads, or in turns with everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from segue.errors import SegueError

T = TypeVar("T")
TURN = 128  # items
INLINE_ENTRIES = 1024  # of a reply that is built and encoded on the event loop
NUM_THREADS = 2  # they share one interpreter with the event loop, and more would have it wait longer


async def turn(number: int) -> None:
    """Behind item ``number`` of many: after each ``TURN`` of them, let everything else have its turn."""
    if number % TURN == TURN - 1:
        await asyncio.sleep(0)


class Workers:
    """A queue of short pieces of work for a few threads, first come, first served: bodies, texts, templates.

    Long work comes as one piece after the other, each queued when the one before is done. Nobody has to wait
    for the whole of another's work then, and what is cancelled ends with its present piece. asyncio's own
    threads stay free for others.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "segue-worker")
        self._end: SegueError | None = None

    async def run(self, piece: Callable[[], T]) -> T:
        """Do a piece of work; cancelled before its turn, it is never begun.

        Raises:
            SegueError: the one given to :meth:`close`.
        """
        if self._end is not None:
            raise self._end
        future = asyncio.get_running_loop().run_in_executor(self._executor, piece)
        try:
            return await future
        except asyncio.CancelledError:
            if self._end is not None and future.cancelled():
                raise self._end from None
            raise

    def close(self, error: SegueError) -> None:
        """Begin nothing more: what is queued or comes ends with ``error``. Nobody waits for what runs."""
        self._end = error
        self._executor.shutdown(wait=False, cancel_futures=True)
