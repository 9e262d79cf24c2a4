"""The bytes that wait to be written to a socket: any thread adds some, one thread writes them."""

from __future__ import annotations

import socket
import threading

WRITE_BYTES = (
    256 << 10
)  # that one call hands to the kernel at most, so that other connections have their turn


class SendBuffer:
    """A queue of at most ``limit`` bytes; what is added beyond that is dropped, and noted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_over = False  # whether something was dropped: the connection is of no use any more
        self._lock = threading.Lock()
        self._added = bytearray()
        self._writing = memoryview(b"")  # the older part; only the writing thread changes it
        self._is_known = False  # whether the writing thread has been told of what was added

    def __len__(self) -> int:
        with self._lock:
            return len(self._writing) + len(self._added)

    def add(self, frame: bytes) -> bool:
        """Add a frame at the end; returns whether the writing thread has to be told."""
        with self._lock:
            if len(self._writing) + len(self._added) + len(frame) > self.limit:
                self.is_over = True
            else:
                self._added += frame
            was_known, self._is_known = self._is_known, True
            return not was_known

    def write(self, sock: socket.socket) -> int:
        """Write what the non-blocking socket takes at once; returns the number of bytes.

        Raises:
            OSError: the connection is broken.
        """
        with self._lock:
            self._is_known = False
            if not self._writing:
                self._writing, self._added = memoryview(self._added), bytearray()
        try:
            count = sock.send(self._writing[:WRITE_BYTES]) if self._writing else 0
        except BlockingIOError:
            count = 0
        with self._lock:
            self._writing = self._writing[count:]
        return count
