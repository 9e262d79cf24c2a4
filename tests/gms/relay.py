"""Stands between engines and the memory service, and holds a message back: an engine stops at that stage.

Each connection has a process of its own, because the service watches the process at the other end, and may
kill it in place of the engine.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from segue.gms import messages as wire
from segue.gms.transport import SOCKET, close, connect, new_socket, receive, send
from tests.gms.running import DEADLINE_S, until
from tests.support.child import start_child

HOLD, HELD, RELEASED = "hold.json", "held.json", "released"  # files by which the processes talk


class Relay:
    """Passes messages on in both directions, for engines that connect to a directory of its own."""

    def __init__(self, service: Path, own: Path) -> None:
        own.mkdir(mode=0o700)
        self._own = own
        words = [sys.executable, "-m", "tests.gms.relay", str(service), str(own)]
        self._process = start_child(words)
        until((own / SOCKET).exists, "the relay listens")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def hold(self, kind: type[wire.Message], *, reply: bool = False) -> None:
        """Hold the next call of a kind back, or the reply to it."""
        for name in (HELD, RELEASED):
            (self._own / name).unlink(missing_ok=True)
        unnamed = self._own / "new"
        unnamed.write_text(json.dumps([kind.__name__, reply]))
        unnamed.rename(self._own / HOLD)

    def wait_held(self) -> None:
        until((self._own / HELD).exists, "such a message")

    def release(self) -> None:
        (self._own / RELEASED).touch()


def wanted(own: Path) -> list[object]:
    """Return the kind of call that is to be held, and whether its reply is meant."""
    with suppress(FileNotFoundError):
        found: list[object] = json.loads((own / HOLD).read_text())
        return found
    return ["", False]


def take_hold(own: Path) -> bool:
    """Hold what is to be held, unless another connection does."""
    with suppress(FileNotFoundError):
        (own / HOLD).rename(own / HELD)
        return True
    return False


def relay(engine: socket.socket, service: socket.socket, own: Path) -> None:
    """Pass messages on until one side has gone."""
    held_call = -1

    def wait() -> None:
        poll = select.poll()
        poll.register(engine, select.POLLRDHUP)
        while not (own / RELEASED).exists():
            if poll.poll(10):
                os._exit(0)

    while True:
        for source in select.select([engine, service], [], [])[0]:
            frame, descriptors = receive(source)
            if not frame:
                return
            message = msgspec.msgpack.decode(frame)
            if source is engine:
                kind, is_reply = wanted(own)
                if message["type"] == kind and is_reply:
                    held_call = message["call"]
                elif message["type"] == kind and take_hold(own):
                    wait()
            elif message["call"] == held_call:
                held_call = -1
                if take_hold(own):
                    wait()
            send(service if source is engine else engine, frame, descriptors)
            close(descriptors)


def main() -> None:
    service, own = Path(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    listener = new_socket()
    listener.bind(str(own / SOCKET))
    listener.listen()
    while True:
        engine, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            with suppress(OSError):
                relay(engine, connect(str(service), DEADLINE_S), own)
            os._exit(0)
        engine.close()


@contextmanager
def relaying(service: Path, own: Path) -> Iterator[Relay]:
    found = Relay(service, own)
    try:
        yield found
    finally:
        found.close()


if __name__ == "__main__":
    main()
