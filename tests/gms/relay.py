"""Stands between engines and the memory service, and holds a message back: an engine stops at that stage."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from segue.gms import messages as wire
from segue.gms.transport import SOCKET, close, connect, new_socket, receive, send
from tests.gms.running import DEADLINE_S


class Relay:
    """Passes messages on in both directions, for engines that connect to a directory of its own."""

    def __init__(self, service: Path, own: Path) -> None:
        self._service = service
        self._listener = new_socket()
        own.mkdir(mode=0o700)
        self._listener.bind(str(own / SOCKET))
        self._listener.listen()
        self._kind: type[wire.Message] | None = None
        self._is_reply = False
        self._held = threading.Event()
        self._released = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._released.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def hold(self, kind: type[wire.Message], *, reply: bool = False) -> None:
        """Hold the next call of a kind back, or the reply to it."""
        self._held.clear()
        self._released.clear()
        self._is_reply, self._kind = reply, kind

    def wait_held(self) -> None:
        assert self._held.wait(DEADLINE_S), "no such message came"

    def release(self) -> None:
        self._released.set()

    def _accept(self) -> None:
        while True:
            try:
                engine, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(engine,), daemon=True).start()

    def _relay(self, engine: socket.socket) -> None:
        with engine, connect(str(self._service), DEADLINE_S) as service, suppress(OSError):
            held_call = -1
            while True:
                for source in select.select([engine, service], [], [])[0]:
                    frame, descriptors = receive(source)
                    if not frame:
                        return
                    if source is engine:
                        call = msgspec.msgpack.decode(frame)
                        if self._kind is not None and call["type"] == self._kind.__name__:
                            self._kind = None
                            held_call = call["call"] if self._is_reply else -1
                            if not self._is_reply:
                                self._hold(engine)
                    elif msgspec.msgpack.decode(frame)["call"] == held_call:
                        held_call = -1
                        self._hold(engine)
                    send(service if source is engine else engine, frame, descriptors)
                    close(descriptors)

    def _hold(self, engine: socket.socket) -> None:
        """Wait until the message may go on; ends the connection if the engine has gone."""
        self._held.set()
        poll = select.poll()
        poll.register(engine, select.POLLRDHUP)
        while not self._released.is_set():
            if poll.poll(10):
                raise ConnectionResetError("the engine has gone")


@contextmanager
def relaying(service: Path, own: Path) -> Iterator[Relay]:
    relay = Relay(service, own)
    try:
        yield relay
    finally:
        relay.close()
