"""Signs of life: each worker process sends a heartbeat about once per second, whatever its loop does.

A thread sends them, which needs nothing but the interpreter: a long step, in which torch releases the
interpreter, does not silence it, while a process that was stopped falls silent.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from segue.messages.control import Heartbeat

LONGEST_PERIOD_S = 1.0
PERIODS_PER_PING = 5  # so that one heartbeat that comes late says nothing yet


def heartbeat_period(ping_s: float) -> float:
    """Seconds between two heartbeats, where a silence of ``ping_s`` seconds is too long."""
    return min(LONGEST_PERIOD_S, ping_s / PERIODS_PER_PING)


class AwakeClock:
    """Seconds that this process has been awake for: of the time between two readings, ``most`` at most.

    A process that was stopped, or kept from running, has seen nothing of what the others did meanwhile; it
    must not take its own absence for theirs.
    """

    def __init__(self, now: float, most: float) -> None:
        self._last = now
        self._most = most
        self._seconds = 0.0

    def read(self, now: float) -> float:
        """The seconds up to ``now``, a time of the monotonic clock."""
        self._seconds += min(max(0.0, now - self._last), self._most)
        self._last = now
        return self._seconds


class Turn:
    """Since when a loop has been at its present turn, for another thread to read."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: float | None = None  # a time of the monotonic clock; None: the loop waits for messages

    def begin(self) -> None:
        """A turn begins."""
        self.since = time.monotonic()

    def rest(self) -> None:
        """The loop begins to wait."""
        self.since = None


class TurnWatch:
    """How long a loop has been at one turn; time in which this process did not run does not count."""

    def __init__(self, turn: Turn, now: float, most: float) -> None:
        self._turn = turn
        self._clock = AwakeClock(now, most)
        self._seen: float | None = None
        self._began = 0.0  # of the turn that was seen last, by the clock

    def seconds(self, now: float) -> float:
        """Seconds of the present turn; 0 while the loop waits. To be called once per period."""
        since, before = self._turn.since, self._clock.read(now)
        if since is None or since != self._seen:
            self._seen, self._began = since, before
        return before - self._began


class Pulse:
    """The thread that sends one rank's heartbeats, while the ``with`` block runs."""

    def __init__(self, context: zmq.Context[Any], address: str, rank: int, ping_s: float) -> None:
        self.turn = Turn()  # of the rank's loop
        self._context = context
        self._address = address
        self._rank = rank
        self._period = heartbeat_period(ping_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segue-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        watch = TurnWatch(self.turn, time.monotonic(), 2 * self._period)
        encode = msgspec.msgpack.Encoder().encode
        socket = self._context.socket(zmq.PUSH)
        try:
            socket.connect(self._address)
            while not self._stopped.wait(self._period):
                beat = Heartbeat(self._rank, watch.seconds(time.monotonic()))
                with suppress(zmq.Again):  # the frontend has not read the last thousand: one less
                    socket.send(encode(beat), zmq.NOBLOCK)
        finally:
            socket.close(linger=0)
