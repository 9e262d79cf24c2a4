"""All connections of a server: bounds on their number and their bytes, and regular deadline checks."""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Self

from uvicorn.protocols.http.flow_control import FlowControl

from segue.config import MIB
from segue.errors import OverloadedError
from segue.logs import logger

if TYPE_CHECKING:
    from segue.server.connection import Connection

MAX_CONNECTIONS = 8192  # where descriptors allow it: twice the default of `--max-queued-requests`
SPARE_CONNECTIONS = 32
BODY_BYTES = 64 * MIB
RESERVED_DESCRIPTORS = 96  # listener, event loop, pipes and sockets to the workers, files: about 60 are open

MAX_TICK_S = 0.5  # largest step of the clock, so that no client is late while the server stands still
LOG_EVERY_S = 60.0
READ_BYTES = 1 << 18  # the most that the event loop reads from a connection at a time
CROWDED = "too many request bodies are being received, and this one is slow or came last; retry later"

# Why a connection is not read.
# For this uvicorn pauses, and while a pipelined request waits for an earlier one.
BUFFER_FULL = "the application has not yet read the buffered body"
OTHERS_FIRST = "the bodies of other connections are read first"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a client may cost before its request is checked: seconds, bytes, and bytes per second."""

    max_connections: int
    spare_connections: int = SPARE_CONNECTIONS  # beyond `max_connections`, for health routes only

    head_bytes: int = 1 << 16  # of a request's line and headers
    head_fields: int = 128  # headers per request; each takes about 200 bytes of memory, however short it is
    pipelined_requests: int = 16  # received while another request is being answered
    head_s: float = 10.0  # from the first byte of a head, or the begin of the connection, to the head's end
    idle_s: float = 65.0  # between two requests on a connection

    body_silence_s: float = 30.0  # without a byte of the body
    body_rate: float = 1024.0  # average of a body, counted from the end of the grace time
    body_grace_s: float = 5.0
    drain_s: float = 3.0  # for the rest of an unread body, so that the client reads the answer
    body_bytes: int = BODY_BYTES  # of all requests that are incomplete, or not yet read by the application
    crowded_rate: float = float(MIB)  # average of a body while `body_bytes` is reached
    crowded_grace_s: float = 2.0

    reply_silence_s: float = 60.0  # over which a client must read a finished reply at `reply_rate`
    stream_silence_s: float = 300.0  # the same for a stream that is not finished
    reply_rate: float = 1024.0  # average of a reply over each of the two times above

    evict_after_s: float = 0.25  # after which a connection without a complete head gives way to a new one
    stalled_after_s: float = 1.0  # silence after which a connection gives way to a new one
    sweep_s: float = 1.0  # between two checks of all connections

    @classmethod
    def of_this_process(cls, max_body_mib: int, descriptors_each: int = 1) -> Self:
        """Returns the limits for this process: its limit of open files bounds the number of connections.

        Four bodies of the largest size, ``max_body_mib`` in MiB, may be received at once. A connection needs
        ``descriptors_each``, together with those that its request makes this process open.
        """
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = MAX_CONNECTIONS * 2
        room = max(descriptors - RESERVED_DESCRIPTORS - SPARE_CONNECTIONS, descriptors // 4)
        return cls(  # where descriptors are few, a quarter of them, instead of none
            max_connections=min(MAX_CONNECTIONS, max(1, room // descriptors_each)),
            body_bytes=max(BODY_BYTES, 4 * max_body_mib * MIB),
        )


def raise_descriptor_limit(descriptors_each: int = 1) -> None:
    """Raise the soft limit of open files to the need of :data:`MAX_CONNECTIONS`, up to the hard limit.

    A connection needs ``descriptors_each``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors_each * MAX_CONNECTIONS + SPARE_CONNECTIONS + RESERVED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Room(Enum):
    """Whether there is room for a new connection, and thus how it is treated."""

    ORDINARY = "served"
    SPARE = "beyond the limit of connections: only health routes are answered, so that probes get through"
    NONE = "refused"


class Connections:
    """The connections of one server.

    ``now`` is the clock of all deadlines, in seconds; :meth:`tick` advances it. Where too many connections
    are open, those that keep the server waiting give way to new ones: first one without a complete head
    (``waiting``), else a stalled one, which has been silent for ``stalled_after_s``. Where bodies take more
    than ``body_bytes``, slow ones are refused, and others are held: they are not read until there is room.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.now = 0.0
        self.num_bytes = 0  # of requests that are incomplete, or not yet read by the application
        self.waiting: dict[Connection, None] = {}  # those without a complete head, the longest waiting first
        self.bodies: dict[Connection, None] = {}  # those whose body is not complete, the oldest first
        self._all: dict[Connection, None] = {}
        self._held: dict[Connection, None] = {}  # not read, because bodies exceed `body_bytes`
        self._stalled: deque[Connection] = deque()  # those to close for new ones, the longest silent first
        self._ticked_at: float | None = None
        self._next_sweep = limits.sweep_s
        self._logged_at = -LOG_EVERY_S

    @property
    def num_open(self) -> int:
        """The number of open connections."""
        return len(self._all)

    # --- opening and closing ---

    def opened(self, connection: Connection) -> Room:
        """Add a new connection; where there is no room, the one that waits longest is closed.

        The connections beyond ``max_connections`` are spare: they reach only the health routes. Once those
        are taken too, one that waits is closed however short its time.
        """
        room, surplus = Room.ORDINARY, len(self._all) - self.limits.max_connections
        if surplus >= 0:
            self._log_full()
            is_last = surplus >= self.limits.spare_connections
            if not self._make_room(0.0 if is_last else self.limits.evict_after_s):
                room = Room.NONE if is_last else Room.SPARE
        self._all[connection] = None
        return room

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        self._all.pop(connection, None)
        self.waiting.pop(connection, None)
        self._held.pop(connection, None)
        self.body_ended(connection)

    def abort_closing(self) -> None:
        """Close those at once that wait for nothing but their clients' agreement to the end of TLS."""
        for connection in list(self._all):
            connection.abort_closing()

    def _make_room(self, patience_s: float) -> bool:
        """Close the connection that has kept the server waiting longest; returns whether there was one.

        One without a complete head counts only if it has waited for ``patience_s`` seconds.
        """
        victim = next(iter(self.waiting), None)
        if victim is None or victim.waited(self.now) < patience_s:
            victim = self._next_stalled()
        if victim is None:
            return False
        victim.evict()
        self.closed(victim)
        return True

    def _next_stalled(self) -> Connection | None:
        """Take the next connection that was stalled at the last sweep and still is; None: there is none."""
        while self._stalled:
            connection = self._stalled.popleft()
            if connection in self._all and connection.silence(self.now) >= self.limits.stalled_after_s:
                return connection
        return None

    def _log_full(self) -> None:
        """Warn that the maximum is reached, at most once per ``LOG_EVERY_S``."""
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
        """Check the deadlines of all connections, and list the stalled ones anew while the server is full."""
        now, limits = self.now, self.limits
        for connection in list(self._all):
            connection.check(now)
        if self._held:
            self._refuse_slow()
            self._resume_held()
        self._stalled.clear()
        if len(self._all) >= limits.max_connections:
            late = [each for each in self._all if each.silence(now) >= limits.stalled_after_s]
            self._stalled.extend(sorted(late, key=lambda each: -each.silence(now)))

    # --- the bytes of bodies ---

    def received(self, connection: Connection, count: int) -> None:
        """Count received bytes of an unfinished request.

        Above ``body_bytes``, slow bodies are refused. If that is not enough, this connection is held or,
        above twice the limit, refused. The oldest body is neither, so that at least one completes.
        """
        self.num_bytes += count
        most = self.limits.body_bytes
        if self.num_bytes <= most:
            return
        self._refuse_slow()
        if self.num_bytes > most and connection in self.bodies and connection is not self._oldest_body():
            if self.num_bytes > 2 * most:
                connection.refuse(OverloadedError(CROWDED))
            else:
                self._held[connection] = None
                connection.flow.pause_reading(OTHERS_FIRST)
        self._resume_held()

    def released(self, count: int) -> None:
        """Subtract bytes that are no longer in memory."""
        self.num_bytes -= count
        self._resume_held()

    def body_ended(self, connection: Connection) -> None:
        """Note that a body is complete, or that its connection is lost."""
        self.bodies.pop(connection, None)
        self._resume_held()

    def _refuse_slow(self) -> None:
        """Refuse bodies below ``crowded_rate``, the slowest first, until 3/4 of ``body_bytes`` are in use.

        Bytes that applications have read meanwhile are subtracted first: they may be enough.
        """
        for connection in self._all:
            connection.release_read_body()
        now, limits = self.now, self.limits
        enough = limits.body_bytes * 3 // 4
        if self.num_bytes <= enough:
            return
        late = [each for each in self._all if each.waited(now) >= limits.crowded_grace_s]
        slow = [each for each in late if each.rate(now) < limits.crowded_rate]
        for connection in sorted(slow, key=lambda each: each.rate(now)):
            if self.num_bytes <= enough:
                return
            connection.refuse(OverloadedError(CROWDED))

    def _oldest_body(self) -> Connection | None:
        """Returns the connection of the oldest body: always read, so that bodies complete one by one."""
        return next((connection for connection in self.bodies if connection.is_served), None)

    def _resume_held(self) -> None:
        """Read the oldest body again if it was held; else as many held ones as the free bytes allow."""
        if not self._held:
            return
        oldest = self._oldest_body()
        room = (self.limits.body_bytes - self.num_bytes) // READ_BYTES
        for connection in [oldest] if oldest in self._held else list(islice(self._held, max(0, room))):
            del self._held[connection]
            connection.flow.resume_reading(OTHERS_FIRST)


class Backpressure(FlowControl):
    """Pauses reading and measures the pauses, so that paused time does not count against the client.

    Reading goes on when none of the reasons, which are ``BUFFER_FULL`` and ``OTHERS_FIRST``, holds any more.
    """

    def __init__(self, transport: asyncio.Transport, connections: Connections) -> None:
        """Control the reading of one connection's ``transport``; the clock is that of ``connections``."""
        super().__init__(transport)
        self._connections = connections
        self._reasons: set[str] = set()
        self._paused_at = 0.0
        self._paused_s = 0.0  # total of all pauses that have ended
        self.resumed_at = 0.0

    def pause_reading(self, reason: str = BUFFER_FULL) -> None:
        """Stop reading."""
        self._reasons.add(reason)
        if not self.read_paused:
            self._paused_at = self._connections.now
            super().pause_reading()

    def resume_reading(self, reason: str = BUFFER_FULL) -> None:
        """Resume reading, unless there is another reason not to."""
        self._reasons.discard(reason)
        if self.read_paused and not (self._reasons or self._transport.is_closing()):
            self.resumed_at = self._connections.now
            self._paused_s += self.resumed_at - self._paused_at
            super().resume_reading()

    def unpaused(self, now: float) -> float:
        """Returns the time ``now`` of a clock that stands still while reading is paused."""
        return (self._paused_at if self.read_paused else now) - self._paused_s
