"""Accepts several waiting connections per turn of the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# Connections accepted per turn of the event loop. uvloop accepts one per turn: where many requests are
# answered in a turn of 0.2 s, a health check behind 1,000 new connections would wait for minutes.
ACCEPTED_AT_ONCE = 128


class Backlog:
    """A protocol factory that also accepts the connections behind the one that the event loop accepted."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def first(self) -> asyncio.Protocol:
        """Returns the protocol of the accepted connection, after accepting those behind it."""
        for _ in range(ACCEPTED_AT_ONCE - 1):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none waits, or its client is gone; the event loop handles a lack of descriptors
                break
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._protocol()

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client is gone already
            connection.close()
