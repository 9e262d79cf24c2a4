"""The stream from which a client reads one request's output, and several streams read as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from segue.errors import SegueError
from segue.frontend.request import Output, RequestState
from segue.frontend.thread_pool import TURN, turn
from segue.messages.requests import TokenLogprob


class RequestStream:
    """The output of one request. Leaving the ``with`` block before its end aborts the request."""

    __slots__ = ("_discard", "_state")

    def __init__(self, state: RequestState, discard: Callable[[RequestState], None]) -> None:
        self._state = state
        self._discard = discard

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard(self._state)

    @property
    def rid(self) -> str:
        return self._state.rid

    @property
    def has_unread(self) -> bool:
        """Whether tokens came that were not taken yet."""
        return self._state.has_unread

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return self._state.prompt_ids

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities of the prompt tokens, as far as they are known."""
        return self._state.prompt_logprobs

    @property
    def prompt_logprobs_start(self) -> int:
        """The first prompt position whose logprob was requested; -1: none was."""
        return self._state.prompt_logprobs_start

    def age(self) -> float:
        """Return the seconds since the request was submitted."""
        return time.monotonic() - self._state.created

    async def next(self) -> Output:
        """Wait for output, and return all since the last call. The last output has an ``end``."""
        await self.changed()
        return self._state.take()

    async def result(self) -> Output:
        """Wait for the end, and return all unread output. Raises the error that ended the request."""
        state = self._state
        state.streaming = False
        while state.end is None and state.error is None:
            state.changed.clear()
            await state.changed.wait()
        if state.error is not None:
            raise state.error
        return state.take()

    async def changed(self) -> None:
        """Wait for output without taking it.

        Raises the error that ended the request, once all tokens before the error have been taken.
        """
        self._state.streaming = True
        await self._state.changed.wait()
        if self._state.error is not None and not self._state.has_unread:
            raise self._state.error


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
            try:
                output = await streams[index].next()
            except SegueError:
                for other, stream in enumerate(streams):  # what came before the error is not lost
                    if stream.has_unread:
                        yield other, await stream.next()
                raise
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
