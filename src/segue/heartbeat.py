"""Heartbeats: each worker process sends one about once per second, whatever its loop does.

A thread of their own sends them, and needs only the GIL. A long step does not stop the heartbeats, because
torch releases the GIL; a process that was stopped sends none.
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
PERIODS_PER_PING = 5  # so that one late heartbeat does not yet count as silence


def heartbeat_period(ping_s: float) -> float:
    """Return the seconds between two heartbeats, if ``ping_s`` seconds without one count as hung."""
    return min(LONGEST_PERIOD_S, ping_s / PERIODS_PER_PING)


class AwakeClock:
    """Counts the seconds for which this process ran: each reading adds at most ``most`` seconds.

    A process that was stopped, or got no CPU time, has read no messages meanwhile. It must not blame other
    processes for that time.
    """

    def __init__(self, now: float, most: float) -> None:
        self._last = now
        self._most = most
        self._seconds = 0.0

    def read(self, now: float) -> float:
        """Return the seconds counted up to ``now``, a time of the monotonic clock."""
        self._seconds += min(max(0.0, now - self._last), self._most)
        self._last = now
        return self._seconds


class Turn:
    """The start time of a loop's current turn. The loop writes it, and another thread reads it."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: float | None = None  # a time of the monotonic clock; None: the loop waits for messages

    def begin(self) -> None:
        """Start a turn."""
        self.since = time.monotonic()

    def rest(self) -> None:
        """Note that the loop waits for messages."""
        self.since = None


class TurnWatch:
    """Measures how long a loop's current turn takes, not counting time in which this process did not run."""

    def __init__(self, turn: Turn, now: float, most: float) -> None:
        self._turn = turn
        self._clock = AwakeClock(now, most)
        self._seen: float | None = None
        self._began = 0.0  # when the turn in `_seen` began, by the clock

    def seconds(self, now: float) -> float:
        """Return the seconds of the current turn; 0 while the loop waits. Must be called once per period."""
        since, before = self._turn.since, self._clock.read(now)
        if since is None or since != self._seen:
            self._seen, self._began = since, before
        return before - self._began


class HeartbeatSender:
    """Sends one rank's heartbeats from a thread, while the ``with`` block runs."""

    def __init__(self, context: zmq.Context[Any], address: str, rank: int, ping_s: float) -> None:
        self.turn = Turn()  # the current turn of the rank's loop
        self._context = context
        self._address = address
        self._rank = rank
        self._period = heartbeat_period(ping_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segue-pulse", daemon=True)

    def __enter__(self) -> HeartbeatSender:
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
                with suppress(zmq.Again):  # 1,000 heartbeats are unread: drop this one
                    socket.send(encode(beat), zmq.NOBLOCK)
        finally:
            socket.close(linger=0)
