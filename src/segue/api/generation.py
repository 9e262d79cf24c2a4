"""The requests of one call while they run, for every dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from segue.errors import SegueError
from segue.frontend.request import GenerateRequest, Output, RequestState
from segue.frontend.thread_pool import INLINE_ENTRIES, turn
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
        changed, waiting = self._listen(streaming=False), self.states
        while waiting:
            await changed.wait()
            changed.clear()
            for state in waiting:
                if state.error is not None:
                    raise state.error
            waiting = [state for state in waiting if state.end is None]
        outputs = []
        for index, state in enumerate(self.states):
            outputs.append(state.whole())
            await turn(index)
        return outputs

    async def updates(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield (index of the request, its new output) until all have ended.

        The first error is raised, once what came before it has been yielded.
        """
        changed, running = self._listen(streaming=True), dict(enumerate(self.states))
        while running:
            await changed.wait()
            changed.clear()
            error: SegueError | None = None
            for number, (index, state) in enumerate(list(running.items())):
                error = error or state.error
                if state.has_unread or state.end is not None:
                    output = state.take()
                    if output.end is not None:
                        del running[index]
                    yield index, output
                if number:  # most calls have one request
                    await turn(number)
            if error is not None:
                raise error

    async def build(self, make: Callable[[], T], num_entries: int) -> T:
        """Return what ``make`` makes: at once if it has few entries, else in a thread."""
        return make() if num_entries <= INLINE_ENTRIES else await self.manager.thread_pool.run(make)

    def _listen(self, *, streaming: bool) -> asyncio.Event:
        """Return an event that is set when a request ends, and with ``streaming`` for every token."""
        changed = asyncio.Event()
        for state in self.states:
            state.changed, state.streaming = changed, streaming
        changed.set()  # to look at what has come before
        return changed

    async def _accepted(self) -> None:
        """Wait until a request has output, at most ``ACCEPT_S``: the scheduler may refuse a request.

        It refuses requests before it runs any of the same batch.

        Raises:
            SegueError: a request was refused, or has failed.
        """
        changed = self._listen(streaming=True)
        if not any(state.has_unread or state.is_over for state in self.states):
            changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ACCEPT_S):
                    await changed.wait()
        for state in self.states:
            if state.error is not None and not state.has_unread:
                raise state.error
