"""One connection to another worker: its phases, its deadlines, and what it reads and writes.

    CONNECTING -> HANDSHAKE -> OPEN -> CLOSING -> CLOSED

In CLOSING the last bytes are written, ``Bye`` as the very last, and what still arrives is dropped: closing a
socket with unread bytes would reset the connection, and the other side might never read why.
"""

from __future__ import annotations

import enum
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

import msgspec

from segue.disagg import frames
from segue.disagg.addresses import SocketAddress, is_local
from segue.disagg.handshake import Handshake, HandshakePhase, LinkSide
from segue.disagg.send_buffer import SendBuffer
from segue.errors import KVLinkError, KVLinkLostError
from segue.messages.kv import MAX_LARGE_MESSAGE_BYTES, MAX_REASON, Bye, Hello, KVMessage, Ping, Pong
from segue.messages.kv_link import LinkMessage, LinkOpened

MAX_UNANSWERED = 3  # pings
MAX_QUEUED_BYTES = 4 * MAX_LARGE_MESSAGE_BYTES  # that wait to be sent to one peer
LINGER_S = 1.0  # how long a connection is still served after its end was decided


class LinkPhase(enum.Enum):
    """How far a connection is."""

    CONNECTING = enum.auto()
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()


FOLLOWING: dict[LinkPhase, tuple[LinkPhase, ...]] = {
    LinkPhase.CONNECTING: (LinkPhase.HANDSHAKE, LinkPhase.CLOSED),
    LinkPhase.HANDSHAKE: (LinkPhase.OPEN, LinkPhase.CLOSING, LinkPhase.CLOSED),
    LinkPhase.OPEN: (LinkPhase.CLOSING, LinkPhase.CLOSED),
    LinkPhase.CLOSING: (LinkPhase.CLOSED,),
    LinkPhase.CLOSED: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What all connections of a worker have in common."""

    hello: Callable[[], Hello]
    key: bytes | None
    load: Callable[[], Pong]  # what pings and their answers say
    silence_s: float  # without a byte from the other side, until it is pinged
    handshake_s: float  # from the first packet to the end of the handshake

    @property
    def lost_s(self) -> float:
        """The seconds after which the other side is lost if it sends nothing, or reads nothing."""
        return self.silence_s * (1 + MAX_UNANSWERED)


class Link:
    """One connection. Its methods are for the thread that serves it, except :meth:`queue`."""

    def __init__(self, peer: int, side: LinkSide, settings: LinkSettings, now: float) -> None:
        self.peer = peer
        self.side = side
        self.phase = LinkPhase.CONNECTING
        self.sock: socket.socket | None = None
        self.addresses: list[SocketAddress] = []  # that are left to be tried
        self.buffer = SendBuffer(MAX_QUEUED_BYTES)
        self._settings = settings
        self._reader = frames.FrameReader()
        self._handshake: Handshake | None = None
        self._bye: str | None = None  # the reason in the last `Bye` that came
        self._expires_at = now + settings.handshake_s  # the end of the phase, unless it is OPEN
        self._heard_at = now
        self._ping_at = inf
        self._unanswered = 0
        self._stalled_at = inf  # when the other side is lost because it reads nothing

    @property
    def deadline(self) -> float:
        """The next time at which :meth:`tick` has something to do."""
        if self.phase is LinkPhase.OPEN:
            return min(self._ping_at, self._stalled_at)
        return self._expires_at

    @property
    def has_output(self) -> bool:
        """Whether the thread has to wait until the socket takes bytes, or is connected."""
        return self.phase is LinkPhase.CONNECTING or len(self.buffer) > 0

    def enter(self, phase: LinkPhase) -> None:
        """Change the phase."""
        assert phase in FOLLOWING[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase

    # --- the beginning ---

    def dial(self) -> None:
        """Begin to connect to the next address that can be reached.

        Raises:
            OSError: no address is left; this is the last one's error.
        """
        self.sock = None
        while self.sock is None:
            family, name = self.addresses.pop(0)
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            number = sock.connect_ex(name)
            # EAGAIN: the queue of a unix socket's new connections is full, and no event would follow. A
            # connection that exists at once is reported by the selector like any other.
            if number in (0, errno.EINPROGRESS):
                self.sock = sock
            else:
                sock.close()
                if not self.addresses:
                    raise OSError(number, os.strerror(number))

    def check_connected(self) -> None:
        """Begin the handshake if the socket is connected; else connect to the next address.

        Raises:
            OSError: the socket could not be connected, and no address is left.
        """
        assert self.sock is not None
        number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not number:
            self.start(self.sock)
        elif self.addresses:
            self.sock.close()
            self.dial()
        else:
            raise OSError(number, os.strerror(number))

    def start(self, sock: socket.socket) -> None:
        """Begin the handshake on a connected socket."""
        self.sock = sock
        self.enter(LinkPhase.HANDSHAKE)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = msgspec.structs.replace(self._settings.hello(), nonce=os.urandom(32))
        self._handshake = Handshake(self.side, hello, self._settings.key, is_local=is_local(sock))
        self.queue(frames.frame(self._handshake.opening))

    # --- reading and writing ---

    def queue(self, frame: bytes) -> bool:
        """Add a frame to those that wait to be written; any thread may call it.

        Returns whether the link's thread has to be asked to write.
        """
        return self.buffer.add(frame)

    def receive(self, data: bytes | memoryview, now: float) -> Iterator[LinkOpened | LinkMessage]:
        """Take bytes that came, none at the end of the stream, and yield what they complete.

        Raises:
            KVLinkError: the other side has closed the connection, or its bytes break the protocol.
        """
        if not data:
            raise self._end_of_stream()
        if self.phase is LinkPhase.CLOSING:
            return
        self._heard_at, self._unanswered = now, 0
        if self.phase is LinkPhase.OPEN:
            self._ping_at = now + self._settings.silence_s
        for body in self._reader.feed(data):
            if self.phase is LinkPhase.HANDSHAKE:
                yield from self._shake_hands(body, now)
            else:
                message = frames.decode(body)
                self._answer(message)
                yield LinkMessage(self.peer, message)

    def _shake_hands(self, body: bytes, now: float) -> Iterator[LinkOpened]:
        """Take a message of the handshake."""
        assert self._handshake is not None
        if (answer := self._handshake.take(body)) is not None:
            self.queue(frames.frame(answer))
        if self._handshake.phase is HandshakePhase.DONE:
            assert self._handshake.theirs is not None
            self.enter(LinkPhase.OPEN)
            self._ping_at = now + self._settings.silence_s
            yield LinkOpened(self.peer, self._handshake.session, self._handshake.theirs)

    def _answer(self, message: KVMessage) -> None:
        """Do what a message asks of the link itself."""
        if isinstance(message, Ping):
            self.queue(frames.encode(self._settings.load()))
        elif isinstance(message, Bye):
            self._bye = message.reason

    def _end_of_stream(self) -> KVLinkError:
        """Returns the error for the end of the other side's bytes."""
        if self._bye is not None:
            return KVLinkError(f"the other side closed the connection: {frames.printable(self._bye)}")
        when = {LinkPhase.HANDSHAKE: "during the handshake"}.get(self.phase, "without a reason")
        part = f", {count} bytes into a frame" if (count := self._reader.num_pending) else ""
        return KVLinkLostError(f"the other side closed the connection {when}{part}; see its log")

    def write(self, now: float) -> None:
        """Write what the socket takes now.

        Raises:
            KVLinkLostError: too much waits to be written.
            OSError: the connection is broken.
        """
        if self.sock is None or self.phase is LinkPhase.CONNECTING:
            return
        if self.buffer.is_over:
            raise KVLinkLostError(
                f"the other side reads too slowly: over {self.buffer.limit} bytes would wait to be sent, "
                "which is the limit; see what keeps its process"
            )
        written = self.buffer.write(self.sock)
        if not self.buffer:
            self._stalled_at = inf
            if self.phase is LinkPhase.CLOSING:
                self.sock.shutdown(socket.SHUT_WR)
        elif written or self._stalled_at == inf:
            self._stalled_at = now + self._settings.lost_s

    # --- deadlines, and the end ---

    def tick(self, now: float) -> None:
        """Do what is due: ping, or give up.

        Raises:
            KVLinkLostError: the other side is lost, or took too long.
        """
        settings = self._settings
        if now < self.deadline:
            return
        if self.phase is not LinkPhase.OPEN:
            what = "connected" if self.phase is LinkPhase.CONNECTING else "completed the handshake"
            raise KVLinkLostError(
                f"the other side has not {what} within {settings.handshake_s:g} s; see whether it runs, and "
                "whether a firewall is in between"
            )
        if now >= self._stalled_at:
            raise KVLinkLostError(
                f"the other side has read nothing for {settings.lost_s:g} s, and {len(self.buffer)} bytes "
                "wait to be sent; see what keeps its process"
            )
        if self._unanswered == MAX_UNANSWERED:
            raise KVLinkLostError(
                f"the other side has been silent for {now - self._heard_at:.1f} s and has not answered "
                f"{MAX_UNANSWERED} pings; see whether its process and its host run"
            )
        self._unanswered += 1
        self._ping_at = now + settings.silence_s
        load = settings.load()
        self.queue(frames.encode(Ping(step=load.step, busy=load.busy)))

    def begin_closing(self, reason: str, now: float) -> None:
        """Queue ``Bye`` after all that waits to be written, and take no more messages."""
        self.queue(frames.encode(Bye(reason[:MAX_REASON])))
        self.enter(LinkPhase.CLOSING)
        self._expires_at = now + LINGER_S

    def close(self) -> None:
        """Close the socket at once."""
        self.enter(LinkPhase.CLOSED)
        if self.sock is not None:
            self.sock.close()
