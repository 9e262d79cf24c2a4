"""Cuts the bytes of a leg's reply into frames, as they come."""

from __future__ import annotations

import struct

import msgspec

from segue.messages.leg import MOST_FRAME_BYTES, Frame

HEAD_BYTES = 4  # the length before each frame

_LENGTH = struct.Struct(">I")
_decode = msgspec.msgpack.Decoder(Frame).decode


class FrameError(ValueError):
    """The bytes are no frames of this version."""


class LegReader:
    """The frames of one leg. It keeps the part of a frame that has come so far; nobody sees a cut frame."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the frame that is not complete
        self._size = 0  # of them together, in bytes
        self._needed = HEAD_BYTES  # bytes of that frame that must be there before it is looked at again

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes; returns the frames that they complete.

        A large frame that comes in many parts is joined once. A payload is copied once, by the decoder.

        Raises:
            FrameError: a frame is over ``MOST_FRAME_BYTES``, or cannot be decoded.
        """
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return []
            data = b"".join(self._parts)
            self._parts = []
        elif len(data) > HEAD_BYTES and _LENGTH.unpack_from(data)[0] == len(data) - HEAD_BYTES:
            return [_decoded(data[HEAD_BYTES:])]  # one event of a stream: 0.6 µs instead of 2 µs
        frames: list[Frame] = []
        view, at, end = memoryview(data), 0, len(data)
        self._needed = HEAD_BYTES
        while end - at >= HEAD_BYTES:
            (size,) = _LENGTH.unpack_from(data, at)
            if size > MOST_FRAME_BYTES:
                raise FrameError(
                    f"a frame of {size} bytes is announced; at most {MOST_FRAME_BYTES} are allowed"
                )
            stop = at + HEAD_BYTES + size
            if stop > end:
                self._needed = stop - at
                break
            frames.append(_decoded(view[at + HEAD_BYTES : stop]))
            at = stop
        if at < end:
            self._parts, self._size = [data[at:]], end - at
        return frames


def _decoded(body: bytes | memoryview) -> Frame:
    try:
        frame: Frame = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(
            f"a frame of {len(body)} bytes cannot be read ({error}); use the same version of Segue for the "
            "router and its engines"
        ) from None
    return frame
