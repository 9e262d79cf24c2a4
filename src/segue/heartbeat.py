"""Heartbeats: each worker process sends one about once per second, whatever its loop does.

A thread of their own sends them, and needs only the GIL. A long step does not stop the heartbeats, because
torch releases the GIL; a process that was stopped sends none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    """One pass of a rank's main loop, such as one step.

    The loop notes when it begins one, and when it waits for messages. The thread that sends heartbeats
    measures how long the pass has taken: a very long one means that the rank hangs.
    """

    __slots__ = ("_began", "_seen", "hurry", "owner_lost", "since")

    def __init__(self) -> None:
        self.since: float | None = None  # when it began, by the monotonic clock; None: the loop waits
        self.owner_lost = False  # whether the memory service that has the rank's memory is away
        self.hurry = threading.Event()  # the next heartbeat is due at once
        self._seen: float | None = None  # the value of `since` when it was measured last
        self._began = 0.0  # when the turn in `_seen` began, by the clock of the thread that measures

    def begin(self) -> None:
        """Start a turn."""
        self.since = time.monotonic()

    def rest(self) -> None:
        """Note that the loop waits for messages."""
        self.since = None

    def note_owner(self, lost: bool) -> None:
        """Note that the memory service is away, or there again, and tell the frontend at once."""
        self.owner_lost = lost
        self.hurry.set()

    def seconds(self, awake: float) -> float:
        """Return the seconds of the current turn; 0 while the loop waits.

        One thread alone calls this, once per period. ``awake`` is a reading of its :class:`AwakeClock`, so
        that time in which this process did not run does not count. A turn counts from the first call that
        sees it.
        """
        since = self.since
        if since is None or since != self._seen:
            self._seen, self._began = since, awake
        return awake - self._began


@contextmanager
def send_heartbeats(context: zmq.Context[Any], address: str, rank: int, ping_s: float) -> Iterator[Turn]:
    """Send one rank's heartbeats from a thread, while the ``with`` block runs.

    The rank's loop writes its turns into the :class:`Turn` that the block gets.
    """
    turn, period, stopped = Turn(), heartbeat_period(ping_s), threading.Event()

    def run() -> None:
        """Send a heartbeat once per period, with the seconds of the loop's turn, until the block ends."""
        clock = AwakeClock(time.monotonic(), 2 * period)
        encode = msgspec.msgpack.Encoder().encode
        socket = context.socket(zmq.PUSH)
        try:
            socket.connect(address)
            while True:
                turn.hurry.wait(period)
                if stopped.is_set():  # also if `clear` below has just met the last `set`
                    return
                turn.hurry.clear()
                beat = Heartbeat(rank, turn.seconds(clock.read(time.monotonic())), turn.owner_lost)
                with suppress(zmq.Again):  # 1,000 heartbeats are unread: drop this one
                    socket.send(encode(beat), zmq.NOBLOCK)
        finally:
            socket.close(linger=0)

    thread = threading.Thread(target=run, name="segue-pulse", daemon=True)
    thread.start()
    try:
        yield turn
    finally:
        stopped.set()
        turn.hurry.set()
        thread.join()
