"""The memory service's socket: who may connect, what a client may send, and when it has gone."""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec

from segue.errors import MemoryServiceError, SharedMemoryError
from segue.gms import messages as wire
from segue.gms.service import STILL_WAITING_S, MemoryService
from segue.gms.session import GmsSession
from segue.gms.transport import SOCKET, GmsFrameError, close, listening, receive, send, unlink
from segue.logs import logger
from segue.memory import shared

HANDSHAKE_S = 2.0
MAX_UNSENT = 256  # messages that a client may leave unread
TICK_S = 0.25


class GmsConnection:
    """One client: reads its messages in order, and ends it at its first fault. See `session.GmsPort`."""

    def __init__(self, server: GmsServer, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._received: deque[tuple[bytes, list[int]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._pidfd: int | None = None
        self.pid = 0
        self.session: GmsSession | None = None
        self.since = time.monotonic()
        self.is_closed = False

    def start(self) -> None:
        """Begin to read; the first message must be the handshake."""
        self._loop.add_reader(self._socket, self._readable)

    def watch_process(self) -> None:
        """End the session also when the process ends: a child may still have the socket."""
        try:
            process = shared.peer_process(self._socket)
        except SharedMemoryError as error:
            self._server.cannot_watch(error.message)
            return
        self._pidfd = process.pidfd
        self._loop.add_reader(self._pidfd, self.end, "its process has ended")

    def _readable(self) -> None:
        try:
            frame, descriptors = receive(self._socket)
        except BlockingIOError:
            return
        except GmsFrameError as error:
            self.fault(str(error))
            return
        except OSError as error:
            self.end(error.strerror or "connection lost")
            return
        if not frame:
            close(descriptors)
            self.end("it has closed the connection")
            return
        self._received.append((frame, descriptors))
        if self._task is None:
            self._loop.remove_reader(self._socket)  # until this message is done
            self._task = self._loop.create_task(self._handle())

    async def _handle(self) -> None:
        """Carry out what was received."""
        try:
            while self._received and not self.is_closed:
                frame, descriptors = self._received.popleft()
                try:
                    await self._dispatch(wire.decode_request(frame), descriptors)
                finally:
                    close(descriptors)
        except (GmsFrameError, msgspec.MsgspecError) as error:
            self.fault(str(error))
        except Exception as error:  # a fault of the service ends this session alone
            logger.exception("the memory service failed at a message")
            self.fault(f"internal error: {error}")
        finally:
            self._task = None
            if not self.is_closed:
                self._loop.add_reader(self._socket, self._readable)

    async def _dispatch(self, message: wire.Request, descriptors: list[int]) -> None:
        if self.session is not None:
            await self._server.service.handle(self.session, message, descriptors)
            return
        if not isinstance(message, wire.OpenSession) or descriptors:
            raise GmsFrameError("the first message must be OpenSession")
        refusal = self._server.refusal(message)
        if refusal is not None:
            self.fault(refusal[1], code=refusal[0], call=message.call)
            return
        self.watch_process()
        if not self.is_closed:
            self.session = self._server.service.open(self, self.pid, message)
            self._server.service.fence.seen(self.session, self._pidfd)

    def send(self, reply: wire.Reply, descriptors: Sequence[int] = ()) -> None:
        """See `session.GmsPort`: what cannot be sent at once is sent when the client has read."""
        if self.is_closed:
            return
        frame = wire.encode(reply)
        if not self._unsent:
            try:
                send(self._socket, frame, descriptors)
                return
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._writable)
            except OSError as error:
                self._loop.call_soon(self.end, error.strerror or "connection lost")
                return
        self._unsent.append((frame, [os.dup(descriptor) for descriptor in descriptors]))
        if len(self._unsent) > MAX_UNSENT:
            self._loop.call_soon(self.end, "it does not read its messages")

    def _writable(self) -> None:
        try:
            while self._unsent:
                send(self._socket, *self._unsent[0])
                close(self._unsent.popleft()[1])
        except BlockingIOError:
            return
        except OSError as error:
            self.end(error.strerror or "connection lost")
            return
        self._loop.remove_writer(self._socket)

    def has_left(self) -> bool:
        """See `session.GmsPort`."""
        return self.is_closed or shared.is_closed(self._socket)

    def fault(self, text: str, code: str = "protocol", call: int = 0) -> None:
        """Tell the client why its session ends, and end it."""
        self.send(wire.CallRefused(call=call, code=code, text=text))
        self.end(text)

    def end(self, reason: str) -> None:
        """End the session; the client's memory is dealt with as the lock has it."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        for _, descriptors in (*self._unsent, *self._received):
            close(descriptors)
        self._unsent.clear()
        self._received.clear()
        self._server.connections.discard(self)
        if self.session is not None:
            self._server.service.gone(self.session, reason)


class GmsServer:
    """Listens in a directory, and admits clients."""

    def __init__(
        self,
        service: MemoryService,
        directory: str,
        *,
        allowed_uids: Collection[int] = (),
        token: str | None = None,
        credentials: Callable[[socket.socket], tuple[int, int]] = shared.peer_ids,
    ) -> None:
        """Take the directory, which no other service may have.

        Args:
            service: what carries messages out.
            directory: where the socket is made; others than the owner must not write there.
            allowed_uids: users besides this one that may connect.
            token: what clients must also send; None: nothing.
            credentials: returns the process and the user of a client.

        Raises:
            MemoryServiceError: the directory is not safe, or another service has it.
        """
        self.service = service
        self.connections: set[GmsConnection] = set()
        self._allowed = {os.geteuid(), *allowed_uids}
        self._token = token
        self._credentials = credentials
        self._has_warned = False
        self._lock = lock_directory(directory)
        self.path = os.path.join(directory, SOCKET)
        try:
            self._listener, self._made = listening(self.path)
            if allowed_uids:
                os.chmod(self.path, 0o666)  # the peer's user is checked
                os.chmod(directory, 0o711)
            self._listener.listen(wire.MAX_SESSIONS)
            self._listener.setblocking(False)
        except OSError as error:
            os.close(self._lock)
            text = f"the socket {self.path} cannot be made ({error.strerror or error})"
            raise MemoryServiceError(f"{text}; choose a shorter path or another directory") from error

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        last_report = time.monotonic()
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self.service.tick()
                if self.service.keeper is not None:
                    self.service.keeper.save(self.service)  # for a holder that was started again
                now = time.monotonic()
                for connection in list(self.connections):
                    if connection.session is None and now >= connection.since + HANDSHAKE_S:
                        connection.end(f"it did not shake hands within {HANDSHAKE_S:g} s")
                if now >= last_report + STILL_WAITING_S:
                    self.service.report_waiting()
                    last_report = now
        finally:
            loop.remove_reader(self._listener)
            self.close()

    def close(self) -> None:
        """End all sessions, and give the directory up."""
        for connection in list(self.connections):
            connection.end("the service ends")
        self._listener.close()
        unlink(self.path, self._made)
        os.close(self._lock)
        self.service.close()

    def _accept(self) -> None:
        for _ in range(64):  # then others have their turn
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many descriptors, or the client has gone
                logger.warning("a client of the memory service cannot be accepted: %s", error)
                return
            accepted.setblocking(False)
            connection = GmsConnection(self, accepted)
            try:
                connection.pid, uid = self._credentials(accepted)
            except OSError:
                accepted.close()
                continue
            self.connections.add(connection)
            if uid not in self._allowed:
                rule = "not this user, and not in --allow-uid"
                connection.fault(f"user {uid} is {rule}", code="access")
            elif len(self.connections) > wire.MAX_SESSIONS:
                connection.fault(f"there are {wire.MAX_SESSIONS} sessions already", code="limit")
            else:
                connection.start()

    def refusal(self, hello: wire.OpenSession) -> tuple[str, str] | None:
        """Return the code and text of why a client is not admitted, or None."""
        if hello.protocol != wire.PROTOCOL:
            text = f"the service speaks protocol {wire.PROTOCOL}, and the client {hello.protocol}"
            return "protocol", f"{text}; use the same version of Segue"
        if self._token is not None and not hmac.compare_digest(
            (hello.token or "").encode(), self._token.encode()
        ):
            return "access", "the token is missing or wrong; give the service's own with --gms-token"
        if hello.tag == "weights" and hello.device not in self.service.store.vmms:
            served = ", ".join(self.service.store.vmms)
            return "device", f"the service does not serve device {hello.device}; it serves {served}"
        if hello.rank >= hello.size:
            return "protocol", f"rank {hello.rank} of {hello.size}: ranks count from 0"
        return None

    def cannot_watch(self, reason: str) -> None:
        """Say once that the end of processes cannot be seen."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "processes of clients cannot be watched (%s): the kernel has no SO_PEERPIDFD, which came "
                "with Linux 6.5. KV memory is never handed on then; each engine gets fresh memory",
                reason,
            )


def lock_directory(directory: str, what: Literal["service", "holder"] = "service") -> int:
    """Make a directory that is this user's alone, and lock it for `what`; returns the lock's descriptor.

    Raises:
        MemoryServiceError: others may write there, or another service or holder has it.
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        found = os.stat(directory)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise MemoryServiceError(
                f"the directory {directory} (mode {stat.S_IMODE(found.st_mode):o}, user {found.st_uid}) is "
                "one that others may write to, so they could take the service's place; make it mode 700 and "
                "your own, or choose another with --gms-dir",
                param="gms_dir",
            )
        lock = os.open(os.path.join(directory, f"{what}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MemoryServiceError(
            f"the directory {directory} cannot be used ({error.strerror or error}); choose another with "
            "--gms-dir",
            param="gms_dir",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise MemoryServiceError(
            f"another memory {what} has the directory {directory}; stop it, or choose another directory "
            "with --gms-dir",
            param="gms_dir",
        ) from error
    return lock
