"""The connection between the coordinator of a router and one serving process: messages, in order."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
_LENGTH = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode


def packed(message: msgspec.Struct) -> bytes:
    """Returns a message with its length in front, as :meth:`ProcessLink.send_packed` takes it."""
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


class ProcessLink(Generic[T]):
    """One end of the connection; messages of the union ``T`` arrive here."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = msgspec.msgpack.Decoder(kind).decode

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> ProcessLink[T]:
        """Take one end of a pair of sockets; ``kind`` is ``T``."""
        return cls(*await asyncio.open_connection(sock=end), kind)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or queue it; nothing happens if the other end is gone."""
        self.send_packed(packed(message))

    def send_packed(self, data: bytes) -> None:
        """Send what :func:`packed` has made; messages for several processes are encoded once."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> T | None:
        """Returns the next message; None: the other end is gone."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            message: T = self._decode(await self._reader.readexactly(size))
            return message
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def __aiter__(self) -> AsyncIterator[T]:
        while (message := await self.receive()) is not None:
            yield message

    async def close(self) -> None:
        """Close this end."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
