"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from segue.frontend.request import Output
from segue.frontend.tokenizer_manager import Stream


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Output], None]:
    """(index of the stream, its news), until all have ended; the first error ends it."""
    if len(streams) == 1:
        while True:
            output = await streams[0].next()
            yield 0, output
            if output.end is not None:
                return
    tasks = [asyncio.create_task(stream.next()) for stream in streams]
    waiting = {task: index for index, task in enumerate(tasks)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting[task]
                output = task.result()
                del waiting[task]
                if output.end is None:
                    waiting[asyncio.create_task(streams[index].next())] = index
                yield index, output
    finally:
        await _end(waiting)


async def accepted(streams: Sequence[Stream], patience_s: float) -> None:
    """Wait until every stream has news, at most ``patience_s``: the scheduler may refuse a request.

    Raises:
        SegueError: one was refused, or has failed.
    """
    waits = [asyncio.create_task(stream.changed()) for stream in streams]
    try:
        done, _ = await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await _end(waits)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and look at every outcome."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
