"""Holds copies of the memory service's descriptors, so that its end frees nothing (``segue gms hold``).

It is so small that nothing in it fails: it knows names and descriptors, and nothing of weights. A frame is
one letter and a name: K keeps the descriptor that is with it, F forgets one, A asks for all, and P whether it
runs. The answer to A is a K for each, with its descriptor, and an E at the end; that to P is the E.
"""

from __future__ import annotations

import os
import selectors
import socket
import time

from segue.errors import MemoryServiceError
from segue.gms.server import lock_directory
from segue.gms.transport import HOLDER_SOCKET, GmsFrameError, close, listening, receive, send, unlink
from segue.logs import logger
from segue.memory import shared

ACCEPT_PAUSE_S = 0.1  # before the next try, if there are too many descriptors
SEND_S = 5.0  # a service that takes no descriptor for so long is given up


class Holder:
    """Named descriptors, and the socket over which the service hands them in and takes them."""

    def __init__(self, directory: str) -> None:
        """Take the directory, which must have no other holder; raises MemoryServiceError."""
        self._lock = lock_directory(directory, "holder")
        self.held: dict[bytes, int] = {}
        self._probes: set[socket.socket] = set()  # connections of those that have asked for an answer alone
        self.path = os.path.join(directory, HOLDER_SOCKET)
        try:
            self._listener, self._made = listening(self.path)
        except OSError as error:
            text = f"the socket {self.path} cannot be made ({error.strerror or error})"
            raise MemoryServiceError(f"{text}; choose a shorter path or another directory") from error
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self.serve_once()

    def serve_once(self) -> None:
        """Wait until somebody connects or sends something, and serve those who do."""
        for key, _ in self._selector.select():
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._serve(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # too many descriptors, or the client has gone
            logger.warning("a client cannot be accepted: %s", error)
            time.sleep(ACCEPT_PAUSE_S)
            return
        connection.settimeout(SEND_S)
        if shared.peer_ids(connection)[1] != os.geteuid():
            connection.close()
        else:
            self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        """Carry one message out."""
        try:
            frame, descriptors = receive(connection)
            if not frame:
                raise GmsFrameError("the service has ended")
            self._carry_out(connection, frame[:1], frame[1:], descriptors)
        except (OSError, GmsFrameError) as error:
            if self.held and connection not in self._probes:
                logger.info("a connection has ended; %d descriptors are kept: %s", len(self.held), error)
            self._probes.discard(connection)
            self._selector.unregister(connection)
            connection.close()

    def _carry_out(self, connection: socket.socket, kind: bytes, name: bytes, descriptors: list[int]) -> None:
        if kind == b"K" and len(descriptors) == 1:
            close([self.held[name]] if name in self.held else [])
            self.held[name] = descriptors[0]
            return
        close(descriptors)
        if kind == b"F":
            close([self.held.pop(name)] if name in self.held else [])
        elif kind == b"A":
            for each, descriptor in self.held.items():
                send(connection, b"K" + each, [descriptor])
            send(connection, b"E")
        elif kind == b"P":
            self._probes.add(connection)
            send(connection, b"E")
        else:
            raise GmsFrameError(f"a message of kind {kind!r} with {len(descriptors)} descriptors")

    def close(self) -> None:
        """Give everything up."""
        close(list(self.held.values()))
        self.held.clear()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        unlink(self.path, self._made)
        os.close(self._lock)
