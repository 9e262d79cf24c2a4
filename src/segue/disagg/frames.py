"""Frames: every message is a length of 4 bytes, little-endian, and so many bytes of msgpack."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec

from segue.errors import KVProtocolError
from segue.messages.kv import (
    MAX_LARGE_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REASON,
    Grant,
    KVMessage,
    Pools,
    Sent,
)

LENGTH = struct.Struct("<I")

_encode: Callable[[KVMessage], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], KVMessage] = msgspec.msgpack.Decoder(KVMessage).decode


def frame(body: bytes) -> bytes:
    """Returns a message's frame, from its encoded form."""
    return LENGTH.pack(len(body)) + body


def encode(message: KVMessage) -> bytes:
    """Returns a message's frame.

    Raises:
        KVProtocolError: the message is over its limit.
    """
    body = _encode(message)
    _check_size(message, len(body))
    return frame(body)


def decode(body: bytes) -> KVMessage:
    """Returns the message of a frame.

    Raises:
        KVProtocolError: it is no message that may come after the handshake, or one over its limit.
    """
    try:
        message = _decode(body)
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's errors, and invalid UTF-8
        reason = printable(str(error))
        raise KVProtocolError(
            f"a frame of {len(body)} bytes is no message ({reason}); run the same version of Segue on both"
        ) from None
    _check_size(message, len(body))
    return message


def printable(text: str) -> str:
    """Returns text that the other side wrote, for a log: one line, not too long, no control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_REASON])


def _check_size(message: KVMessage, size: int) -> None:
    limit = MAX_LARGE_MESSAGE_BYTES if isinstance(message, Grant | Pools | Sent) else MAX_MESSAGE_BYTES
    if size > limit:
        raise KVProtocolError(
            f"{type(message).__name__} has {size} bytes; its limit is {limit}. Send less in one message"
        )


class FrameReader:
    """Cuts a stream of bytes into frames, and keeps the part of a frame that has come so far.

    A message's type is known only once it is decoded, so every frame may have ``MAX_LARGE_MESSAGE_BYTES``.
    The lower limit of most types is checked by :func:`decode`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Take the next bytes of the stream, and yield what the frames that they complete contain.

        Raises:
            KVProtocolError: a frame is over the limit; the frames before it have been yielded.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTH.size:
                (size,) = LENGTH.unpack_from(self._buffer, start)
                if size > MAX_LARGE_MESSAGE_BYTES:
                    raise KVProtocolError(
                        f"a frame of {size} bytes is announced; the limit is {MAX_LARGE_MESSAGE_BYTES}. "
                        "Connect only prefill and decode workers to this address"
                    )
                body = start + LENGTH.size
                if len(self._buffer) - body < size:
                    break
                start = body + size
                yield bytes(self._buffer[body:start])
        finally:
            del self._buffer[:start]

    @property
    def num_pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)
