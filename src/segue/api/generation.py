"""The requests of one call while they run, for every dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from segue.frontend.request import GenerateRequest, Output
from segue.frontend.stream import RequestStream, accepted, merged, results
from segue.frontend.thread_pool import INLINE_ENTRIES
from segue.frontend.tokenizer_manager import TokenizerManager

T = TypeVar("T")
ACCEPT_S = 0.5  # how long a streamed call waits for a refusal of the scheduler before its reply begins


class Generation:
    """The streams of one call. Leaving the ``with`` block aborts those that have not ended."""

    def __init__(self, manager: TokenizerManager, streams: list[RequestStream]) -> None:
        self.manager = manager
        self.streams = streams
        self._stack = ExitStack()
        for stream in streams:
            self._stack.enter_context(stream)

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
                await accepted(generation.streams, ACCEPT_S)
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
        self._stack.close()

    async def outputs(self) -> list[Output]:
        """Wait for the end of every request, and return what each has generated."""
        return await results(self.streams)

    def updates(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Give (index of the request, its new output) until all have ended."""
        return merged(self.streams)

    async def build(self, make: Callable[[], T], num_entries: int) -> T:
        """Return what ``make`` makes: at once if it has few entries, else in a thread."""
        return make() if num_entries <= INLINE_ENTRIES else await self.manager.thread_pool.run(make)
