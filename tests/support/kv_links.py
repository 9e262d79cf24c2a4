"""A worker's connections and the events that they report, and a bare peer that says what it likes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from segue.disagg import frames
from segue.disagg.addresses import resolve
from segue.disagg.handshake import LinkSide, sign
from segue.disagg.links import Links
from segue.messages.kv import Hello, KVMessage, Ping, Pong, Proof
from segue.messages.kv_link import LinkClosed, LinkEvent, LinkMessage, LinkOpened
from tests.support.kv_hello import hello

Event = TypeVar("Event", LinkOpened, LinkMessage, LinkClosed)
KEY = b"the key of these tests"


class Worker:
    """The connections of one worker, with a list of everything that they reported."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        listen: str | None = None,
        *,
        key: bytes | None = KEY,
        silence_s: float = 1.0,
        handshake_s: float = 5.0,
        **changes: Any,
    ) -> None:
        self.events: list[LinkEvent] = []
        self.on_event: Callable[[LinkEvent], None] = self.events.append
        self.hello = hello(role, **changes)
        self.make_hello: Callable[[], Hello] = lambda: self.hello
        self.links = Links(
            listen,
            lambda: self.make_hello(),
            key,
            lambda event: self.on_event(event),
            silence_s=silence_s,
            handshake_s=handshake_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.links.close()

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self.links.address is not None
        return self.links.address

    def wait(
        self, kind: type[Event], condition: Callable[[Event], bool] = lambda _: True, timeout: float = 60.0
    ) -> Event:
        """The first event of this kind that meets the condition; waits until there is one."""
        deadline, seen = time.monotonic() + timeout, 0
        while time.monotonic() < deadline:
            count = len(self.events)
            for event in self.events[seen:count]:
                if isinstance(event, kind) and condition(event):
                    return event
            seen = count
            time.sleep(0.001)
        raise AssertionError(f"no such {kind.__name__} within {timeout} s among {self.events[-20:]}")

    def closed(self, peer: int, timeout: float = 60.0) -> LinkClosed:
        """Waits for the end of a connection."""
        return self.wait(LinkClosed, lambda event: event.peer == peer, timeout)

    def messages(self, peer: int) -> list[KVMessage]:
        """The messages that came from a peer so far, without pings and their answers."""
        return [
            event.message
            for event in list(self.events)
            if isinstance(event, LinkMessage)
            and event.peer == peer
            and not isinstance(event.message, Ping | Pong)
        ]


def connect(first: Worker, second: Worker) -> tuple[int, int]:
    """Opens a connection from the first worker to the second one; returns their numbers of it."""
    seen = {event.peer for event in list(second.events) if isinstance(event, LinkOpened)}
    ours = first.links.connect(second.address)
    first.wait(LinkOpened, lambda event: event.peer == ours)
    return ours, second.wait(LinkOpened, lambda event: event.peer not in seen).peer


class BarePeer:
    """A connection to a worker that is not served by the code under test; it can do what a peer must not."""

    def __init__(self, address: str) -> None:
        family, name = resolve(address)[0]
        self.sock = socket.socket(family)
        self.sock.settimeout(60)
        self.sock.connect(name)
        self._reader = frames.FrameReader()
        self._bodies: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, *messages: Any) -> None:
        """Sends messages in frames."""
        for message in messages:
            self.sock.sendall(frames.frame(msgspec.msgpack.encode(message)))

    def body(self) -> bytes:
        """The next frame's contents; raises EOFError at the end of the stream."""
        while not self._bodies:
            if not (data := self.sock.recv(65536)):
                raise EOFError
            self._bodies += self._reader.feed(data)
        return self._bodies.pop(0)

    def messages(self) -> list[KVMessage]:
        """All messages up to the end of the stream."""
        found = []
        while True:
            try:
                found.append(frames.decode(self.body()))
            except EOFError:
                return found

    def shake_hands(self, ours: Hello | None = None, key: bytes = KEY) -> None:
        """Opens the connection, as the decode worker."""
        first, second = msgspec.msgpack.encode(ours or hello("decode")), self.body()
        self.sock.sendall(frames.frame(first))
        self.send(Proof(sign(key, LinkSide.CONNECTING, first, second)))
        assert msgspec.msgpack.decode(self.body(), type=Proof).mac == sign(
            key, LinkSide.ACCEPTING, first, second
        )
