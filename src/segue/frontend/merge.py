"""Reads several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from segue.errors import SegueError
from segue.frontend.request import Output
from segue.frontend.stream import RequestStream
from segue.frontend.thread_pool import TURN, turn


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, Output], None]:
    """Yield (index of the stream, its output) until all streams have ended. The first error is raised."""
    if len(streams) == 1:
        while True:
            output = await streams[0].next()
            yield 0, output
            if output.end is not None:
                return
    ready: asyncio.Queue[int] = asyncio.Queue()

    async def watch(index: int) -> None:
        with suppress(SegueError):  # `next` raises it again below
            await streams[index].changed()
        ready.put_nowait(index)

    watchers: dict[int, asyncio.Task[None]] = {}
    try:
        for index in range(len(streams)):
            watchers[index] = asyncio.create_task(watch(index))
            await turn(index)
        for number in count():
            if not watchers:
                break
            await turn(number)
            index = await ready.get()
            output = await streams[index].next()
            if output.end is None:
                watchers[index] = asyncio.create_task(watch(index))
            else:
                del watchers[index]
            yield index, output
    finally:
        await _cancel(watchers.values())


async def results(streams: Sequence[RequestStream]) -> list[Output]:
    """Return the whole output of each stream, once all have ended. The first error is raised at once."""
    if len(streams) == 1:
        return [await streams[0].result()]
    tasks: list[asyncio.Task[Output]] = []
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(stream.result()))
            await turn(index)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        await _cancel(tasks)


async def accepted(streams: Sequence[RequestStream], patience_s: float) -> None:
    """Wait until a stream has output, at most ``patience_s`` seconds: the scheduler may refuse a request.

    It refuses requests before it runs any of the same batch. Of many streams only the first and the last are
    watched: the first ones run first, and the last ones are refused first.

    Raises:
        SegueError: a request was refused, or has failed.
    """
    watched = streams if len(streams) <= 2 * TURN else [*streams[:TURN], *streams[-TURN:]]
    waits = [asyncio.create_task(stream.changed()) for stream in watched]
    try:
        done, _ = await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _cancel(waits)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that still run, and retrieve the exceptions of all."""
    tasks = list(tasks)
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.exception()
