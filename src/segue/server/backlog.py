"""New connections that wait behind the one which the event loop has just accepted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

ACCEPTED_AT_ONCE = 128  # connections per turn of the event loop
# uvloop accepts one: where a turn takes 0.2 s, since many requests are answered in it, a health check behind
# a thousand new connections would wait minutes.


class Backlog:
    """Takes what waits at a listening socket, to be called whenever the event loop has accepted from it."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def first(self) -> asyncio.Protocol:
        """The protocol of the connection that was accepted; those behind it get theirs."""
        for _ in range(ACCEPTED_AT_ONCE - 1):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none waits, or it has gone; the event loop deals with want of descriptors
                break
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._protocol()

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has gone already
            connection.close()
