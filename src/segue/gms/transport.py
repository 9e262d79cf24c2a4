"""Messages and descriptors over a unix socket that keeps the borders of messages (SOCK_SEQPACKET)."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from segue.errors import MemoryServiceError
from segue.gms.messages import MAX_DESCRIPTORS, MAX_FRAME, MAX_MANIFEST

SOCKET = "gms.sock"  # in the service's directory
HOLDER_SOCKET = "hold.sock"
_INT = array.array("i").itemsize
_SPACE = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT)


class GmsFrameError(Exception):
    """The other side has sent what breaks the protocol."""


def new_socket() -> socket.socket:
    """Return a unix socket that keeps the borders of messages."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def send(connection: socket.socket, frame: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a frame with copies of descriptors.

    Raises:
        OSError: the connection is broken, or it is not blocking and its buffer is full.
    """
    assert len(frame) <= MAX_FRAME and len(descriptors) <= MAX_DESCRIPTORS
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([frame], rights, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a frame, and the descriptors that came with it; the caller closes them. Empty: the end.

    Raises:
        GmsFrameError: the frame, or the number of its descriptors, is over the limit; none is left open.
        OSError: the connection is broken, or nothing came within its timeout.
    """
    # `socket.recv_fds` drops its flags: a child would inherit the descriptors.
    frame, rights, flags, _ = connection.recvmsg(MAX_FRAME, _SPACE, socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        descriptor
        for level, kind, data in rights
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for descriptor in array.array("i", data[: len(data) // _INT * _INT])
    ]
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close(descriptors)
        raise GmsFrameError(
            f"a message is over the limit of {MAX_FRAME} bytes and {MAX_DESCRIPTORS} descriptors"
        )
    return frame, descriptors


def close(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def packed(data: bytes) -> int:
    """Return a descriptor from which :func:`unpacked` reads these bytes."""
    descriptor = os.memfd_create("segue-gms", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unpacked(descriptor: int, max_bytes: int = MAX_MANIFEST) -> bytes:
    """Return the bytes of a memfd.

    Raises:
        GmsFrameError: it is no memfd, or has more bytes than allowed.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # fails for all that could block, such as a pipe
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise GmsFrameError(f"a descriptor is not one of a memfd ({error})") from None
    if size > max_bytes:
        raise GmsFrameError(f"a memfd has {size} bytes; at most {max_bytes} are allowed")
    pieces, offset = [], 0
    while piece := os.pread(descriptor, min(size, max_bytes) - offset, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def listening(path: str) -> tuple[socket.socket, os.stat_result]:
    """Return a socket that is bound to a path, for this user alone, and what is at the path now.

    Raises:
        OSError: the path is too long, or cannot be made.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = new_socket()
    before = os.umask(0o177)
    try:
        listener.bind(path)
        return listener, os.stat(path)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)


def unlink(path: str, made: os.stat_result) -> None:
    """Remove a socket's path, unless another one is there by now: its directory may have been made anew."""
    with suppress(OSError):
        if os.path.samestat(os.stat(path), made):
            os.unlink(path)


def connect(directory: str, timeout_s: float) -> socket.socket:
    """Connect to the service of a directory.

    Raises:
        MemoryServiceError: none answers there.
    """
    path = os.path.join(directory, SOCKET)
    connection = new_socket()
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise MemoryServiceError(
            f"no memory service answers at {path} ({error.strerror or error}); start one with "
            f"`segue gms serve --gms-dir {directory}`",
            param="gms_dir",
        ) from error
    return connection
