"""The requests of one call while they run, for every dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

from segue.errors import SegueError
from segue.frontend.request import GenerateRequest, Output, RequestState
from segue.frontend.thread_pool import INLINE_ENTRIES, TURN, turn
from segue.frontend.tokenizer_manager import TokenizerManager

T = TypeVar("T")
ACCEPT_S = 0.5  # how long a streamed call waits for a refusal of the scheduler before its reply begins


class Generation:
    """The requests of one call. Leaving the ``with`` block aborts those that have not ended."""

    def __init__(self, manager: TokenizerManager, states: Sequence[RequestState]) -> None:
        self.manager = manager
        self.states = states

    @classmethod
    async def start(
        cls,
        manager: TokenizerManager,
        requests: Sequence[GenerateRequest],
        batch_id: str | None,
        *,
        is_streamed: bool = False,
    ) -> Generation:
        """Submit the requests of a call; a streamed one waits up to ``ACCEPT_S`` for a refusal.

        Raises what :meth:`TokenizerManager.submit_batch` does, and the refusal.
        """
        generation = cls(manager, await manager.submit_batch(requests, batch_id))
        if is_streamed:
            try:
                await generation._accepted()
            except BaseException:
                generation.close()
                raise
        return generation

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort the requests that have not ended."""
        for state in self.states:
            self.manager.discard(state)

    async def outputs(self) -> list[Output]:
        """Wait for the end of every request, and return the whole output of each.

        Raises the first error at once.
        """
        if len(self.states) == 1:
            return [await self.states[0].result()]
        tasks: list[asyncio.Task[Output]] = []
        try:
            for index, state in enumerate(self.states):
                tasks.append(asyncio.create_task(state.result()))
                await turn(index)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            return [task.result() for task in tasks]
        finally:
            await _cancel(tasks)

    async def updates(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield (index of the request, its new output) until all have ended. The first error is raised."""
        states = self.states
        if len(states) == 1:
            while True:
                output = await states[0].next()
                yield 0, output
                if output.end is not None:
                    return
        ready: asyncio.Queue[int] = asyncio.Queue()

        async def watch(index: int) -> None:
            with suppress(SegueError):  # `next` raises it again below
                await states[index].wait_changed()
            ready.put_nowait(index)

        watchers: dict[int, asyncio.Task[None]] = {}
        try:
            for index in range(len(states)):
                watchers[index] = asyncio.create_task(watch(index))
                await turn(index)
            for number in count():
                if not watchers:
                    break
                await turn(number)
                index = await ready.get()
                try:
                    output = await states[index].next()
                except SegueError:
                    for other, state in enumerate(states):  # what came before the error is not lost
                        if state.has_unread:
                            yield other, await state.next()
                    raise
                if output.end is None:
                    watchers[index] = asyncio.create_task(watch(index))
                else:
                    del watchers[index]
                yield index, output
        finally:
            await _cancel(watchers.values())

    async def build(self, make: Callable[[], T], num_entries: int) -> T:
        """Return what ``make`` makes: at once if it has few entries, else in a thread."""
        return make() if num_entries <= INLINE_ENTRIES else await self.manager.thread_pool.run(make)

    async def _accepted(self) -> None:
        """Wait until a request has output, at most ``ACCEPT_S``: the scheduler may refuse a request.

        It refuses requests before it runs any of the same batch. Of many requests only the first and the last
        are watched: the first ones run first, and the last ones are refused first.

        Raises:
            SegueError: a request was refused, or has failed.
        """
        states = self.states
        watched = states if len(states) <= 2 * TURN else [*states[:TURN], *states[-TURN:]]
        waits = [asyncio.create_task(state.wait_changed()) for state in watched]
        try:
            done, _ = await asyncio.wait(waits, timeout=ACCEPT_S, return_when=asyncio.FIRST_COMPLETED)
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
