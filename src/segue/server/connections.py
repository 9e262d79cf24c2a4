"""All connections of a server: their number, the bytes of their bodies, a regular look at their clocks."""

from __future__ import annotations

from collections import deque
from enum import Enum
from itertools import islice
from typing import Protocol

from segue.errors import OverloadedError, SegueError
from segue.logs import logger
from segue.server.connection_limits import ConnectionLimits

MAX_TICK_S = 0.5  # by which the clock advances: while the server itself stands still, no client is late
LOG_EVERY_S = 60.0
READ_BYTES = 1 << 18  # by which the event loop reads at most from a connection at a time
CROWDED = "too many request bodies are on their way, and this one comes slowly or came last; retry later"


class Room(Enum):
    """What becomes of a new connection."""

    ORDINARY = "served"
    SPARE = "only health routes are answered"
    NONE = "refused"


class Peer(Protocol):
    """One connection as the others' keeper sees it."""

    def check(self, now: float) -> None:
        """Refuse or close it if its client is late."""
        ...

    def evict(self) -> None:
        """Close it at once: another needs its descriptor."""
        ...

    def refuse(self, error: SegueError) -> None:
        """Answer with the error and close."""
        ...

    def settle(self) -> None:
        """Forget the bytes of a body that the application has taken whole."""
        ...

    def waited(self, now: float) -> float:
        """Seconds since the client has to send what it has to send next."""
        ...

    def silence(self, now: float) -> float:
        """Seconds for which the client has sent, or taken, nothing of what it owes; 0 if it owes nothing."""
        ...

    def rate(self, now: float) -> float:
        """Bytes per second of what the client is sending; infinite if it sends nothing, or began just now."""
        ...

    def hold(self) -> None:
        """Read no more of its body."""
        ...

    def let_go(self) -> None:
        """Read on."""
        ...

    @property
    def is_served(self) -> bool:
        """Whether the body that comes is that of the request which is being answered."""
        ...


class Connections:
    """The connections of one server.

    ``now`` is the clock of all deadlines, in seconds. It advances with :meth:`tick`.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.now = 0.0
        self.num_bytes = 0  # of requests that are not complete, or not yet taken by the application
        self.waiting: dict[Peer, None] = {}  # those without a complete head, the longest waiting first
        self.bodies: dict[Peer, None] = {}  # those whose body is not complete, the oldest first
        self._all: dict[Peer, None] = {}
        self._held: dict[Peer, None] = {}  # those that are not read, since bodies take too much
        self._stalled: deque[Peer] = deque()  # those that give way to new ones, the longest silent first
        self._ticked_at: float | None = None
        self._next_sweep = limits.sweep_s
        self._logged_at = -LOG_EVERY_S

    def __len__(self) -> int:
        return len(self._all)

    # --- come and go ---

    def admit(self, peer: Peer) -> Room:
        """Take a new connection; where there is no room, the one that waits longest gives way."""
        room, surplus = Room.ORDINARY, len(self._all) - self.limits.max_connections
        if surplus >= 0:
            self._log_full()
            is_last = surplus >= self.limits.spare_connections
            if not self._make_room(0.0 if is_last else self.limits.evict_after_s):
                room = Room.NONE if is_last else Room.SPARE
        self._all[peer] = None
        return room

    def leave(self, peer: Peer) -> None:
        """Forget a connection."""
        self._all.pop(peer, None)
        self.waiting.pop(peer, None)
        self._held.pop(peer, None)
        self.body_ended(peer)

    def _make_room(self, patience_s: float) -> bool:
        """Close the connection whose client has kept the server waiting longest; False if there is none."""
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
                "%d connections are open, the most that the limit of open files allows; those that wait for "
                "their clients are closed, further ones are answered 503",
                len(self._all),
            )

    # --- the clock ---

    def tick(self, time: float) -> None:
        """Advance the clock, and look at every connection once per ``sweep_s``."""
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
            self._relieve()
            self._read_on()
        self._stalled.clear()
        if len(self._all) >= self.limits.max_connections:
            silent = [(peer.silence(now), peer) for peer in self._all]
            late = [each for each in silent if each[0] >= self.limits.stalled_after_s]
            self._stalled.extend(peer for _, peer in sorted(late, key=lambda each: -each[0]))

    # --- the bytes of bodies ---

    def took(self, peer: Peer, count: int) -> None:
        """So many bytes of an unfinished request came."""
        self.num_bytes += count
        if self.num_bytes > self.limits.body_bytes:
            self._relieve()
            if self.num_bytes > self.limits.body_bytes and peer in self.bodies and peer is not self._leader():
                self._hold_back(peer)
            self._read_on()

    def gave(self, count: int) -> None:
        """So many bytes are no longer kept."""
        self.num_bytes -= count
        if self._held:
            self._read_on()

    def body_ended(self, peer: Peer) -> None:
        """Its body is complete, or never will be."""
        self.bodies.pop(peer, None)
        if self._held:
            self._read_on()

    def _relieve(self) -> None:
        """Refuse bodies that come too slowly to keep others waiting, the slowest first, to make room."""
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

    def _hold_back(self, peer: Peer) -> None:
        """Have a body wait for others; beyond twice the bound, refuse it."""
        if self.num_bytes > 2 * self.limits.body_bytes:
            peer.refuse(OverloadedError(CROWDED))
        else:
            self._held[peer] = None
            peer.hold()

    def _leader(self) -> Peer | None:
        """The oldest body; it is always read, so that one after the other gets through."""
        return next((peer for peer in self.bodies if peer.is_served), None)

    def _read_on(self) -> None:
        leader = self._leader()
        going = [leader] if leader in self._held and leader is not None else []
        room = (self.limits.body_bytes - self.num_bytes) // READ_BYTES
        for peer in going or list(islice(self._held, max(0, room))):
            del self._held[peer]
            peer.let_go()
