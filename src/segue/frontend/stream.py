"""The stream from which a client reads one request's output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from segue.frontend.request import Output, RequestState
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
