"""The two sockets between the frontend and the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from segue.messages.control import FrontendMessage, SchedulerMessage, WorkerMessage

RECONNECT_MS = 10  # until the scheduler has bound its socket
TURN_S = 0.005  # time for which messages are received before the event loop runs other tasks


class Channel:
    """Sends each ``FrontendMessage``, and hands on each ``SchedulerMessage``, on one event loop.

    ``to_scheduler`` and ``to_frontend`` are the addresses of the messages that go there.
    ``on_worker`` is called for what the workers say of themselves, and ``on_output``, which is set when the
    scheduler runs, for all else. If one of them raises an error, ``on_error`` is called.

    It watches the socket's file descriptor, at a tenth of the cost of zmq's asyncio sockets.
    """

    on_output: Callable[[SchedulerMessage], None]

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        to_scheduler: str,
        to_frontend: str,
        on_worker: Callable[[WorkerMessage], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Open both sockets and begin to receive; must be called on the event loop that is to be used."""
        self._loop = asyncio.get_running_loop()
        self._on_worker = on_worker
        self._on_error = on_error
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(SchedulerMessage).decode
        self._push, self._pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._push.set_hwm(0)  # 0: no limit, so no message is ever dropped
        self._pull.set_hwm(0)
        self._push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._push.connect(to_scheduler)  # the scheduler binds it later; from now on, messages are queued
        self._pull.bind(to_frontend)
        self._descriptor = int(self._pull.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)  # the descriptor signals only changes

    def send(self, message: FrontendMessage) -> None:
        """Send a message, or queue it while the scheduler is not connected. Never blocks."""
        if not self._push.closed:
            with suppress(zmq.Again):  # an embedded scheduler has ended
                self._push.send(self._encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Close both sockets, and drop messages that are not yet received."""
        if not self._push.closed:
            self._loop.remove_reader(self._descriptor)
            self._push.close(linger=0)
            self._pull.close(linger=0)

    def _drain(self) -> None:
        """Receive until no message is left, but for at most ``TURN_S``; then go on in a later turn.

        Called when the receiving socket's descriptor signals. It signals only changes, so a message that is
        left would not be announced again.
        """
        until = time.monotonic() + TURN_S
        while not self._pull.closed:
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(frame)
                is_of_worker = isinstance(message, WorkerMessage)
                (self._on_worker if is_of_worker else self.on_output)(message)
            except Exception as error:
                self._on_error(error)
            if time.monotonic() > until:
                self._loop.call_soon(self._drain)
                return
