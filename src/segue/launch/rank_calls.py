"""Calls that every rank answers by itself, and for how long each rank has been silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from segue.errors import EngineStartError, SegueError
from segue.heartbeat import AwakeClock
from segue.messages.life import EndWake, LifeMessage, PingRanks, RankAnswer, WakeRanks

PING_S = 1.0  # between two pings


class RankCalls:
    """Sends pings and the wake to the ranks. It lives on one event loop.

    Silence counts only time in which this process ran: a process that was stopped has read no answers.
    """

    def __init__(self, num_ranks: int, send: Callable[[LifeMessage], None]) -> None:
        self._send = send
        self._num_calls = 0
        self._clock = AwakeClock(time.monotonic(), 2 * PING_S)
        self._last_answers = [0.0] * num_ranks  # by the clock; by rank
        self._waking: tuple[int, set[int], asyncio.Future[None]] | None = None  # call, ranks without answer

    async def ping_forever(self, is_deep: Callable[[], bool]) -> None:
        """Ping every rank, again and again; ``is_deep`` says of which kind the next ping is to be."""
        while True:
            self._num_calls += 1
            self._send(PingRanks(self._num_calls, is_deep()))
            await asyncio.sleep(PING_S)
            self._clock.read(time.monotonic())

    async def wake(self, timeout_s: float, epoch: int = 0) -> None:
        """Wake every rank; returns once all of them have their memory. See :class:`WakeRanks`.

        `epoch` is that under which the engine serves; 0: it is in no cohort.

        Raises:
            SegueError: a rank cannot wake, or :meth:`fail` was called.
        """
        self._num_calls += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waking = self._num_calls, set(range(len(self._last_answers))), done
        self._send(WakeRanks(self._num_calls, timeout_s, epoch))
        await done

    def end_wake(self) -> None:
        """Tell the ranks that the wake has ended."""
        self._send(EndWake())

    def take(self, answer: RankAnswer) -> None:
        """Take an answer of a rank."""
        self._last_answers[answer.rank] = self._clock.read(time.monotonic())
        if self._waking is None or answer.call != self._waking[0]:
            return
        _, missing, done = self._waking
        missing.discard(answer.rank)
        if done.done():
            return
        if answer.error:
            done.set_exception(EngineStartError(f"rank {answer.rank} cannot wake: {answer.error}"))
        elif not missing:
            done.set_result(None)

    def fail(self, error: SegueError) -> None:
        """End a wake that waits with an error: the engine is dead."""
        if self._waking is not None and not self._waking[2].done():
            self._waking[2].set_exception(error)

    @property
    def silent_s(self) -> float:
        """The seconds since the last answer of the rank that has been silent for longest."""
        return self._clock.read(time.monotonic()) - min(self._last_answers)
