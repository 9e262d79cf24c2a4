"""A session of a client with the memory service: it connects, makes one call at a time, and takes notices."""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import msgspec

from segue.errors import MemoryServiceError, WeightsMismatchError
from segue.gms import messages as wire
from segue.gms.transport import GmsFrameError, close, connect, receive, send, unpacked
from segue.memory import shared

REPLY_S = 60.0  # `GmsTarget.reply_s`
TAKEOVER_REPLY_S = 2.0  # the same for a call of an engine that takes over: it can do without the service
ReplyKind = TypeVar("ReplyKind", bound=wire.Message)
PartKind = TypeVar("PartKind", wire.SlabsGiven, wire.KVGranted)


@dataclass(frozen=True, slots=True, kw_only=True)
class GmsTarget:
    """Which service a client talks to, and as whom."""

    directory: str
    tag: wire.Tag = "weights"
    cohort: str = "default"
    engine: str = "-"
    rank: int = 0
    size: int = 1
    device: str = "cpu"
    token: str | None = None
    epoch: int = 0  # with which the engine serves
    connect_s: float = 60.0  # how long a service is waited for
    reply_s: float = REPLY_S  # the longest time that a call takes which does not wait for something
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))


class ServiceConnection:
    """The connection of a :class:`segue.gms.client.GmsClient`, and what all its calls are made of."""

    def __init__(self, target: GmsTarget, pins: Sequence[int] = (), *, lineage: str = "") -> None:
        """Connect; `pins` are the generations that this process read in an earlier session.

        `lineage` is that of the service which has numbered them; "": they are numbers of this one.
        """
        self.target = target
        self._lineage = lineage
        self.notices: deque[wire.Notice] = deque()  # until somebody listens
        self._on_notice: Callable[[wire.Notice], None] = self.notices.append
        self._calls = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._socket: socket.socket
        self.opened = self._open(pins)

    def reopen(self, pins: Sequence[int], epoch: int = 0) -> None:
        """Connect again after the connection has ended; `pins` are the generations that are still read.

        `epoch` is that with which the engine serves; 0: it does not.
        Other threads may use the client meanwhile: their calls fail with the code "lost".
        """
        target = replace(self.target, connect_s=0.0, epoch=epoch)
        opened = ServiceConnection(target, pins, lineage=self.opened.lineage)
        with self._lock:
            if self._is_closed:
                opened.close()
                raise self._lost("the client is closed")
            self._socket.close()
            self._socket = opened._socket
            self.opened = opened.opened

    def epoch(self) -> int:
        """Return the highest epoch that the service knows of the cohort now.

        That of ``opened`` may be too low: engines that offer what they read tell the service theirs.
        """
        with ServiceConnection(replace(self.target, tag="watch", connect_s=0.0)) as now:
            return now.opened.epoch

    def _open(self, pins: Sequence[int]) -> wire.SessionOpened:
        """Connect and shake hands; a service that is not there yet is waited for."""
        target, deadline = self.target, time.monotonic() + self.target.connect_s
        while True:
            try:
                self._socket = connect(target.directory, target.reply_s)
                break
            except MemoryServiceError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        hello = wire.OpenSession(
            call=self._next(),
            protocol=wire.PROTOCOL,
            tag=target.tag,
            cohort=target.cohort,
            engine=target.engine,
            rank=target.rank,
            size=target.size,
            device=target.device,
            epoch=target.epoch,
            nonce=target.nonce,
            token=target.token,
            pins=list(pins),
            lineage=self._lineage,
        )
        try:
            return self._one(hello, wire.SessionOpened)
        except BaseException:
            self._socket.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether the service has ended the connection."""
        return self._socket.fileno() < 0 or shared.is_closed(self._socket)

    def listen(self, on_notice: Callable[[wire.Notice], None]) -> None:
        """Have a function take all notices, those too that have come already; any thread may call it."""
        with self._lock:
            self._on_notice = on_notice
            while self.notices:
                on_notice(self.notices.popleft())

    def take_notices(self) -> bool:
        """Wait for notices, and take those that have come; returns False once the connection has ended.

        For a thread of its own. While another thread makes a call, that one takes the notices.
        """
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # it is closed
            return False
        poll.poll()
        with self._lock:
            try:
                self._socket.settimeout(0)
                while True:
                    frame, descriptors = receive(self._socket)
                    close(descriptors)
                    reply = wire.decode_reply(frame) if frame else None
                    if not isinstance(reply, wire.Notice):
                        return False
                    self._on_notice(reply)
            except BlockingIOError:
                return True
            except (OSError, GmsFrameError, msgspec.MsgspecError):
                return False

    def close(self) -> None:
        """End the session: leases to write are dropped, and pins end."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends a wait for notices
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Frames.

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def _file(self, message: wire.Message, kind: type[wire.Message]) -> bytes:
        descriptors: list[int] = []
        self._one(message, kind, given=descriptors)
        try:
            return unpacked(descriptors[0])
        except (GmsFrameError, IndexError) as error:
            raise MemoryServiceError(f"the memory service has sent no readable file ({error})") from error
        finally:
            close(descriptors)

    def _parts(
        self,
        message: wire.Message,
        kind: type[PartKind],
        given: list[int],
        timeout_s: float,
        give_up: Callable[[], MemoryServiceError] | None = None,
    ) -> list[PartKind]:
        """Make a call whose reply may come in several parts; their descriptors are appended to `given`.

        `give_up` ends the call if it takes longer than `timeout_s`, and returns its error; None: the
        connection is of no use any more.
        """
        parts: list[PartKind] = []
        try:
            with self._lock:
                self._send(message, ())
                while not parts or parts[-1].more:
                    parts.append(self._reply(message.call, kind, given, timeout_s, give_up=give_up))
        except BaseException:
            close(given)
            raise
        return parts

    def _one(
        self,
        message: wire.Message,
        kind: type[ReplyKind],
        descriptors: Sequence[int] = (),
        *,
        wait_s: float = 0.0,
        reply_s: float | None = None,
        on_wait: Callable[[int], None] = lambda position: None,
        given: list[int] | None = None,
    ) -> ReplyKind:
        """Make a call with one reply; its descriptors are appended to `given`."""
        received: list[int] = []
        try:
            with self._lock:
                self._send(message, descriptors)
                timeout_s = wait_s + (self.target.reply_s if reply_s is None else reply_s)
                return self._reply(message.call, kind, received, timeout_s, on_wait)
        finally:
            if given is None:
                close(received)
            else:
                given += received

    def _send(self, message: wire.Message, descriptors: Sequence[int]) -> None:
        try:
            send(self._socket, wire.encode(message), descriptors)
        except OSError as error:
            raise self._last_words() or self._lost(error) from error

    def _last_words(self) -> MemoryServiceError | None:
        """Return why the service has ended the session, if it has said so."""
        try:
            while True:
                frame, descriptors = receive(self._socket)
                close(descriptors)
                reply = wire.decode_reply(frame)
                if isinstance(reply, wire.CallRefused):
                    return _error(reply)
        except (OSError, GmsFrameError, msgspec.MsgspecError):
            pass
        return None

    def _lost(self, error: object) -> MemoryServiceError:
        """Return the error of a connection that is of no use any more, and close it."""
        with suppress(OSError):  # else the service, and a thread that waits for notices, see no end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        text = f"the connection to the memory service in {self.target.directory} has ended ({error})"
        lost = MemoryServiceError(f"{text}; see its log, and start it again if it does not run")
        lost.code = "lost"
        return lost

    def _reply(
        self,
        call: int,
        kind: type[ReplyKind],
        descriptors: list[int],
        timeout_s: float,
        on_wait: Callable[[int], None] = lambda position: None,
        give_up: Callable[[], MemoryServiceError] | None = None,
    ) -> ReplyKind:
        """Receive until a call's reply comes; notices are kept, and replies to earlier calls are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                frame, received = receive(self._socket)
                descriptors += received
                if not frame:
                    raise ConnectionResetError("closed by the service")
                reply = wire.decode_reply(frame)
            except ConnectionError as error:
                raise self._last_words() or self._lost(error) from error
            except TimeoutError as error:
                raise (self._lost(error) if give_up is None else give_up()) from error
            except (OSError, GmsFrameError, msgspec.MsgspecError) as error:
                raise self._lost(error) from error
            if isinstance(reply, kind) and reply.call == call:
                return reply
            if 0 < reply.call < call:
                continue
            match reply:
                case wire.GenerationChanged() | wire.EpochChanged() | wire.LeaseLost():
                    self._on_notice(reply)
                case wire.StillWaiting():
                    on_wait(reply.position)
                case wire.CallRefused():
                    raise _error(reply)
                case _:
                    raise self._lost(f"unexpected message {type(reply).__name__}")


def _error(refusal: wire.CallRefused) -> MemoryServiceError:
    """Return the error of a refusal, with its code."""
    kind = WeightsMismatchError if refusal.code == "mismatch" else MemoryServiceError
    error = kind(f"memory service: {refusal.text}", param=refusal.field)
    error.code = refusal.code
    return error
