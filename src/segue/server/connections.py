"""All connections of a server: bounds on their number and their bytes, and regular deadline checks."""

from __future__ import annotations

from collections import deque
from enum import Enum
from itertools import islice
from typing import Protocol

from segue.errors import OverloadedError, SegueError
from segue.logs import logger
from segue.server.connection_limits import ConnectionLimits

MAX_TICK_S = 0.5  # largest step of the clock, so that no client is late while the server stands still
LOG_EVERY_S = 60.0
READ_BYTES = 1 << 18  # the most that the event loop reads from a connection at a time
CROWDED = "too many request bodies are being received, and this one is slow or came last; retry later"


class Room(Enum):
    """How a new connection is treated."""

    ORDINARY = "served"
    SPARE = "only health routes are answered"
    NONE = "refused"


class Peer(Protocol):
    """One connection, as :class:`Connections` sees it."""

    def check(self, now: float) -> None:
        """Answer 408, close or abort the connection if its client has missed a deadline."""
        ...

    def evict(self) -> None:
        """Close the connection at once, because another one needs its descriptor."""
        ...

    def refuse(self, error: SegueError) -> None:
        """Answer with the error and close the connection."""
        ...

    def settle(self) -> None:
        """Stop counting the bytes of a complete body that the application has read."""
        ...

    def waited(self, now: float) -> float:
        """Returns the seconds spent waiting for the next part of a request, without pauses of reading."""
        ...

    def silence(self, now: float) -> float:
        """Returns the seconds without a byte of a body, or with a finished reply unread; else 0."""
        ...

    def rate(self, now: float) -> float:
        """Returns the bytes per second of the request being received; infinite if none is, or if new."""
        ...

    def hold(self) -> None:
        """Stop reading the body until :meth:`let_go`."""
        ...

    def let_go(self) -> None:
        """End :meth:`hold`."""
        ...

    @property
    def is_served(self) -> bool:
        """Whether the body being received belongs to the request that is being answered."""
        ...


class Connections:
    """The connections of one server.

    ``now`` is the clock of all deadlines, in seconds. :meth:`tick` advances it.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.now = 0.0
        self.num_bytes = 0  # of requests that are incomplete, or not yet read by the application
        self.waiting: dict[Peer, None] = {}  # connections without a complete head, the longest waiting first
        self.bodies: dict[Peer, None] = {}  # connections whose body is not complete, the oldest first
        self._all: dict[Peer, None] = {}
        self._held: dict[Peer, None] = {}  # connections not read, because bodies exceed `body_bytes`
        self._stalled: deque[Peer] = deque()  # those that give way to new ones, the longest silent first
        self._ticked_at: float | None = None
        self._next_sweep = limits.sweep_s
        self._logged_at = -LOG_EVERY_S

    def __len__(self) -> int:
        return len(self._all)

    # --- opening and closing ---

    def admit(self, peer: Peer) -> Room:
        """Add a new connection; where there is no room, the one that waits longest is closed."""
        room, surplus = Room.ORDINARY, len(self._all) - self.limits.max_connections
        if surplus >= 0:
            self._log_full()
            is_last = surplus >= self.limits.spare_connections
            if not self._make_room(0.0 if is_last else self.limits.evict_after_s):
                room = Room.NONE if is_last else Room.SPARE
        self._all[peer] = None
        return room

    def leave(self, peer: Peer) -> None:
        """Remove a connection."""
        self._all.pop(peer, None)
        self.waiting.pop(peer, None)
        self._held.pop(peer, None)
        self.body_ended(peer)

    def _make_room(self, patience_s: float) -> bool:
        """Close the connection that has kept the server waiting longest; returns whether there was one."""
        victim = next(iter(self.waiting), None)
        if victim is None or victim.waited(self.now) < patience_s:
            victim = self._next_stalled()
        if victim is None:
            return False
        victim.evict()
        self.leave(victim)
        return True

    def _next_stalled(self) -> Peer | None:
        while self._stalled:
            peer = self._stalled.popleft()
            if peer in self._all and peer.silence(self.now) >= self.limits.stalled_after_s:
                return peer
        return None

    def _log_full(self) -> None:
        if self.now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self.now
            logger.warning(
                "%d connections are open, the maximum; those that keep the server waiting are closed, "
                "further ones are answered 503; a higher limit of open files may allow more",
                len(self._all),
            )

    # --- the clock ---

    def tick(self, time: float) -> None:
        """Advance the clock, and check every connection once per ``sweep_s``; ``time`` is in seconds."""
        if self._ticked_at is not None:
            self.now += min(time - self._ticked_at, MAX_TICK_S)
        self._ticked_at = time
        if self.now >= self._next_sweep:
            self._next_sweep = self.now + self.limits.sweep_s
            self._sweep()

    def _sweep(self) -> None:
        now = self.now
        for peer in list(self._all):
            peer.check(now)
        if self._held:
            self._refuse_slow()
            self._resume_held()
        self._stalled.clear()
        if len(self._all) >= self.limits.max_connections:
            silent = [(peer.silence(now), peer) for peer in self._all]
            late = [each for each in silent if each[0] >= self.limits.stalled_after_s]
            self._stalled.extend(peer for _, peer in sorted(late, key=lambda each: -each[0]))

    # --- the bytes of bodies ---

    def took(self, peer: Peer, count: int) -> None:
        """Count received bytes of an unfinished request; above ``body_bytes``, hold or refuse bodies."""
        self.num_bytes += count
        if self.num_bytes > self.limits.body_bytes:
            self._refuse_slow()
            if self.num_bytes > self.limits.body_bytes and peer in self.bodies and peer is not self._leader():
                self._hold_or_refuse(peer)
            self._resume_held()

    def gave(self, count: int) -> None:
        """Subtract bytes that are no longer in memory."""
        self.num_bytes -= count
        if self._held:
            self._resume_held()

    def body_ended(self, peer: Peer) -> None:
        """Note that a body is complete, or that its connection is lost."""
        self.bodies.pop(peer, None)
        if self._held:
            self._resume_held()

    def _refuse_slow(self) -> None:
        """Refuse bodies below ``crowded_rate``, the slowest first, until 3/4 of ``body_bytes`` are in use."""
        for peer in self._all:
            peer.settle()
        now, limits = self.now, self.limits
        enough = limits.body_bytes * 3 // 4
        if self.num_bytes <= enough:
            return
        rates = [(peer.rate(now), peer) for peer in self._all if peer.waited(now) >= limits.crowded_grace_s]
        slow = sorted((each for each in rates if each[0] < limits.crowded_rate), key=lambda each: each[0])
        for _, peer in slow:
            if self.num_bytes <= enough:
                return
            peer.refuse(OverloadedError(CROWDED))

    def _hold_or_refuse(self, peer: Peer) -> None:
        """Hold a body while others are read; beyond twice ``body_bytes``, refuse it."""
        if self.num_bytes > 2 * self.limits.body_bytes:
            peer.refuse(OverloadedError(CROWDED))
        else:
            self._held[peer] = None
            peer.hold()

    def _leader(self) -> Peer | None:
        """Returns the connection of the oldest body: always read, so that bodies complete one by one."""
        return next((peer for peer in self.bodies if peer.is_served), None)

    def _resume_held(self) -> None:
        leader = self._leader()
        resumed = [leader] if leader in self._held and leader is not None else []
        room = (self.limits.body_bytes - self.num_bytes) // READ_BYTES
        for peer in resumed or list(islice(self._held, max(0, room))):
            del self._held[peer]
            peer.let_go()
