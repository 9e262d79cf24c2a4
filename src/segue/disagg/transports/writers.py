"""Hands a rank's shared memory to the processes that may write to it, and watches them until they cannot.

A writer connects to the rank's unix socket, shows the token, and gets the descriptor. The connection stays
open. A writer that has given up its mapping says so. If the connection ends without that message, the process
may still have the mapping, so it counts as a writer until its pidfd shows that it has ended. A process that
is stopped has not ended.
"""

from __future__ import annotations

import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import msgspec

from segue.disagg.transports.base import CONNECT_S, Writer
from segue.errors import SharedMemoryError, TransportError
from segue.memory import shared

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1024
LATE_S = 60.0  # after the opening of its session a writer is not let in any more
WELCOME = b"welcome"  # comes with the descriptor; any other message to a writer says why it gets none
RELEASED = b"released"  # a writer's last message: it has no mapping any more
_BACKLOG = 128  # connections that wait; every further one fails at once
_RETRY_S = 0.1


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """A writer's first message."""

    token: bytes
    session: str  # the connection between the two workers for which it will write
    opened_at: float  # when the writer's worker noted that this connection was open, by the monotonic clock


class _Stage(Enum):
    """What a process that has connected may do."""

    GREETING = auto()  # it has not got the descriptor
    WRITING = auto()  # it has, and its connection stands
    SILENT = auto()  # its connection has ended, but it may have the mapping
    GONE = auto()  # it has no mapping, and never will


class _Change(Enum):
    """What can happen to a process that has connected."""

    WELCOMED = auto()  # it showed the token
    REFUSED = auto()
    RELEASED = auto()  # it said that it has given up its mapping
    CLOSED = auto()  # its connection has ended
    ENDED = auto()  # all its threads have ended


# A pair that is not in the table changes nothing: another change of the same moment came first.
_NEXT = {
    (_Stage.GREETING, _Change.WELCOMED): _Stage.WRITING,
    (_Stage.GREETING, _Change.REFUSED): _Stage.GONE,
    (_Stage.GREETING, _Change.RELEASED): _Stage.GONE,
    (_Stage.GREETING, _Change.CLOSED): _Stage.GONE,
    (_Stage.WRITING, _Change.RELEASED): _Stage.GONE,
    (_Stage.WRITING, _Change.CLOSED): _Stage.SILENT,
    (_Stage.WRITING, _Change.ENDED): _Stage.GONE,
    (_Stage.SILENT, _Change.ENDED): _Stage.GONE,
}


@dataclass(slots=True, eq=False)
class _Visitor:
    """A process that has connected."""

    process: shared.PeerProcess
    connection: socket.socket
    deadline: float  # for its greeting, by the monotonic clock
    stage: _Stage = _Stage.GREETING
    writer: Writer | None = None  # from WRITING on


class WriterWatch:
    """The unix socket of a rank, and the thread that serves it."""

    def __init__(
        self, path: str, token: bytes, descriptor: int, on_writer_gone: Callable[[Writer], None]
    ) -> None:
        """Listen on `path`, which must not exist, and give `descriptor` to whoever shows `token`.

        Only processes of this process's effective user are let in. `on_writer_gone` is called from the
        thread, once per writer, when it can write no more; it must neither block nor raise.

        Raises:
            TransportError: the socket cannot be made.
        """
        self._path = path
        self._token = token
        self._descriptor = descriptor
        self._on_writer_gone = on_writer_gone
        self._visitors: list[_Visitor] = []
        self._writers: list[Writer] = []  # replaced as a whole, so that any thread may read it
        # Sessions -> when they were banned, the oldest first. After LATE_S a ban can be forgotten: a worker
        # pushes for a session only if it knew of its opening before the ban, and so its ranks come too late.
        self._banned: dict[str, float] = {}
        self._lock = threading.Lock()  # of the decision whether a writer is let in
        self._count = 0  # writers so far
        self._socket = _listen(path)
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_stopped = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="segue-kv-writers", daemon=True)
        self._thread.start()

    def writers(self) -> list[Writer]:
        """Return the processes that may still write, in the order in which they connected."""
        return list(self._writers)

    def ban(self, session: str) -> None:
        """Let nobody in any more for a session; who is among its `writers` now may still write."""
        now = time.monotonic()
        with self._lock:
            self._banned[session] = now
            while now > next(iter(self._banned.values())) + LATE_S:
                del self._banned[next(iter(self._banned))]

    def close(self) -> None:
        """Close all connections and end the thread; `writers` keeps those that may still write."""
        if self._has_stopped:
            return
        self._has_stopped = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._selector.close()
        for visitor in self._visitors:
            visitor.connection.close()
            os.close(visitor.process.pidfd)
        self._socket.close()
        os.close(self._wakeup)
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _run(self) -> None:
        """Serve the socket, the connections and the pidfds until `close`."""
        while not self._has_stopped:
            deadlines = [each.deadline for each in self._visitors if each.stage is _Stage.GREETING]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in self._selector.select(timeout):
                key.data()
            now = time.monotonic()
            for visitor in list(self._visitors):
                if visitor.stage is _Stage.GREETING and visitor.deadline <= now:
                    self._refuse(visitor, f"it sent no token within {CONNECT_S:g} s")

    def _accept(self) -> None:
        """Take a connection; its greeting comes later."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:  # too many open files, for example; the thread must not spin meanwhile
            logger.warning("a writer cannot connect to %s: %s", self._path, error)
            time.sleep(_RETRY_S)
            return
        connection.setblocking(False)
        try:
            process = shared.peer_process(connection)
        except SharedMemoryError as error:
            logger.warning("a writer cannot connect to %s: %s", self._path, error)
            connection.close()
            return
        visitor = _Visitor(process, connection, time.monotonic() + CONNECT_S)
        self._visitors.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._receive, visitor))

    def _receive(self, visitor: _Visitor) -> None:
        """Take a message, or note that the connection has ended."""
        if visitor.stage not in (_Stage.GREETING, _Stage.WRITING):
            return
        message = _receive(visitor.connection)
        if message == RELEASED:
            self._note(visitor, _Change.RELEASED)
        elif message and visitor.stage is _Stage.GREETING:
            self._greet(visitor, message)
        else:
            self._note(visitor, _Change.CLOSED)

    def _greet(self, visitor: _Visitor, message: bytes) -> None:
        """Give the descriptor to a visitor who shows the token."""
        try:
            greeting = msgspec.msgpack.decode(message, type=Greeting)
        except msgspec.DecodeError as error:
            self._refuse(visitor, f"its greeting cannot be read ({error})")
            return
        if visitor.process.uid != os.geteuid():
            users = f"user {visitor.process.uid}, and this worker as user {os.geteuid()}"
            self._refuse(visitor, f"it runs as {users}; run both as one user")
            return
        if not hmac.compare_digest(greeting.token, self._token):
            self._refuse(visitor, "its token is wrong; the right one is in what this worker offers now")
            return
        if not 0 <= time.monotonic() - greeting.opened_at <= LATE_S:
            self._refuse(
                visitor,
                f"its connection to this worker was not opened within the last {LATE_S:.0f} s of this host's "
                "clock; it has to open another one first, on this host",
            )
            return
        with self._lock:
            if is_welcome := greeting.session not in self._banned:
                self._count += 1
                pid = visitor.process.pid
                visitor.writer = Writer(number=self._count, session=greeting.session, pid=pid)
                self._note(visitor, _Change.WELCOMED)
        if not is_welcome:
            self._refuse(visitor, "its connection to this worker is lost; it has to open another one first")
            return
        try:
            shared.send_descriptor(visitor.connection, WELCOME, self._descriptor)
        except OSError:  # it has ended, or closed the connection: nobody got the descriptor
            self._note(visitor, _Change.RELEASED)

    def _refuse(self, visitor: _Visitor, why: str) -> None:
        """Tell a visitor why it gets no descriptor."""
        logger.warning("the writer of process %d is refused: %s", visitor.process.pid, why)
        with suppress(OSError):
            visitor.connection.send(why.encode())
        self._note(visitor, _Change.REFUSED)

    def _note(self, visitor: _Visitor, change: _Change) -> None:
        """Move the visitor to the stage that the table says."""
        stage = _NEXT.get((visitor.stage, change))
        if stage is None:
            return
        visitor.stage = stage
        writer, pidfd = visitor.writer, visitor.process.pidfd
        if stage is _Stage.WRITING:  # before it gets the descriptor
            assert writer is not None
            self._writers = [*self._writers, writer]
            self._selector.register(pidfd, selectors.EVENT_READ, partial(self._note, visitor, _Change.ENDED))
            return
        if visitor.connection.fileno() >= 0:
            self._selector.unregister(visitor.connection)
            visitor.connection.close()
        if stage is _Stage.GONE:
            self._visitors.remove(visitor)
            if writer is not None:
                self._selector.unregister(pidfd)
                self._writers = [each for each in self._writers if each != writer]
            os.close(pidfd)
            if writer is not None:
                self._on_writer_gone(writer)


def _receive(connection: socket.socket) -> bytes:
    """Return the next message; it is empty if the connection has ended."""
    with suppress(ConnectionResetError):
        return connection.recv(MAX_MESSAGE_BYTES)
    # The other end left a message unread, and the error hides what it sent last. It comes only once.
    with suppress(OSError):
        return connection.recv(MAX_MESSAGE_BYTES)
    return b""


def _listen(path: str) -> socket.socket:
    """Return a socket that listens on `path`, and that only this user and root can reach."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before `listen`
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise TransportError(
            f"the unix socket {path!r} cannot be made ({error}); its path must be new, in a directory that "
            "this user can write to, and at most 107 bytes long"
        ) from error
    listener.setblocking(False)
    return listener
