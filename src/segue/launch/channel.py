"""The two sockets between the frontend and the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from segue.messages.control import FrontendMessage, SchedulerMessage

RETRY_S = 0.01
TURN_S = 0.005  # time for which messages are received before the event loop runs other tasks


class Addresses(NamedTuple):
    """The addresses of the messages to the scheduler and to the frontend. The frontend binds both."""

    to_scheduler: str
    to_frontend: str

    @classmethod
    def of(cls, run_dir: Path) -> Addresses:
        """Return those in the run directory of an engine."""
        return cls(f"ipc://{run_dir}/to_scheduler", f"ipc://{run_dir}/to_frontend")


class Channel:
    """Sends each ``FrontendMessage``, and calls ``receive`` for each ``SchedulerMessage``, on one event loop.

    It watches the socket's file descriptor, at a tenth of the cost of zmq's asyncio sockets.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Addresses,
        receive: Callable[[SchedulerMessage], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerMessage)
        self._unsent: deque[bytes] = deque()
        self._push = _bind(context, zmq.PUSH, addresses.to_scheduler)
        self._pull = _bind(context, zmq.PULL, addresses.to_frontend)
        self._descriptor = int(self._pull.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)  # the descriptor signals only changes

    def send(self, message: FrontendMessage) -> None:
        """Send a message, or queue it here while no peer is connected. Never blocks."""
        self._unsent.append(self._encoder.encode(message))
        self._flush()

    def close(self) -> None:
        """Close both sockets, and drop messages that are not yet received."""
        if self._push.closed:
            return
        self._loop.remove_reader(self._descriptor)
        self._unsent.clear()
        self._push.close(linger=100)
        self._pull.close(linger=0)

    def _flush(self) -> None:
        while self._unsent and not self._push.closed:
            try:
                self._push.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                self._loop.call_later(RETRY_S, self._flush)
                return
            self._unsent.popleft()

    def _drain(self) -> None:
        until = time.monotonic() + TURN_S
        while not self._pull.closed:
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(self._decoder.decode(frame))
            if time.monotonic() > until:
                self._loop.call_soon(self._drain)
                return


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.bind(address)
    return socket
