"""Calls of the scheduler that are answered once: each has a number, and its answer has the same number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from segue.errors import SegueError
from segue.frontend.life import Life
from segue.messages.control import Continued, Flushed, FrontendMessage, Paused, State
from segue.messages.weight_update import WeightAnswer, WithdrawCall

Answer = TypeVar("Answer", State, Paused, Continued, Flushed, WeightAnswer)


class ControlCalls:
    """The calls that wait for an answer."""

    def __init__(self, send: Callable[[FrontendMessage], None], life: Life) -> None:
        self._send = send
        self._life = life
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    async def ask(self, message: Callable[[int], FrontendMessage], kind: type[Answer]) -> Answer:
        """Send the message for a new call number, and wait for the answer with that number.

        Raises:
            EngineDeadError: the engine has ended.
            EngineHungError: the engine does not answer. It may still carry out the call when it recovers.
        """
        if (silence := self._life.silence) is not None:
            raise silence
        self._num_calls += 1
        call = self._num_calls
        self._waiting[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(call))
            answer = await self._waiting[call]
        except asyncio.CancelledError:
            if kind is WeightAnswer and self._life.error is None:
                self._send(WithdrawCall(call))
            raise
        finally:
            del self._waiting[call]
        assert isinstance(answer, kind)
        return answer

    def answer(self, message: State | Paused | Continued | Flushed | WeightAnswer) -> None:
        """Give an answer to the call that waits for it, if one still does."""
        future = self._waiting.get(message.call)
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, error: SegueError) -> None:
        """End all calls with an error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
