"""Memory that several processes of one host map, and how its descriptor gets from one to another.

The memory is a memfd: a file without a name, which every process that has a descriptor can map. It is sealed,
so its size never changes, and no access to a mapping can fail because the memory has shrunk. Descriptors
travel over unix sockets. The socket also tells which process is at its other end, and gives a pidfd: a
descriptor of that process, which becomes readable when all its threads have ended, so that it writes no more.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from segue.errors import SharedMemoryError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # the last: nobody adds a seal
SO_PEERPIDFD = 77  # Linux 6.5 and later; Python has no name for it
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_INT = array.array("i").itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProcess:
    """The process that is at the other end of a unix socket."""

    pid: int
    uid: int
    pidfd: int  # readable once all threads of the process have ended; the owner of this object closes it

    @property
    def has_ended(self) -> bool:
        """Whether all threads of the process have ended. A stopped process has not."""
        return _has_event(self.pidfd, select.POLLIN)


def create(num_bytes: int) -> int:
    """Return the descriptor of `num_bytes` of zeroed memory (more than 0), which `map_shared` maps.

    A page of the memory costs nothing until one of the processes touches it. All are freed with the last
    descriptor and mapping.
    """
    descriptor = os.memfd_create("segue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_shared(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map the memory of `descriptor`, to read and to write; the caller may close the descriptor afterwards.

    The mapping is a buffer for `numpy.frombuffer` and `torch.frombuffer`; its `close` fails with BufferError
    as long as there are views. It is in huge pages where the kernel gives them to shared memory. A forked
    child does not have the mapping, so only processes that called this function have one.

    Raises:
        SharedMemoryError: the descriptor has another size, or its size could change.
    """
    try:
        size, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:  # not a memfd
        raise SharedMemoryError(
            f"the descriptor is not one of shared memory ({error}); pass one of `shared.create`"
        ) from error
    if size != num_bytes or seals & _SEALS != _SEALS:
        raise SharedMemoryError(
            f"the shared memory has {size} bytes and the seals {seals:#x}; it must have {num_bytes} bytes "
            f"and the seals {_SEALS:#x}, so that it cannot shrink. Pass one of `shared.create`"
        )
    memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # the kernel may have been built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def peer_ids(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the effective user of the other end when it connected, or began to listen."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


def peer_process(connection: socket.socket) -> PeerProcess:
    """Return the process at the other end of a connected unix socket.

    Raises:
        SharedMemoryError: the process has ended, or the socket's other end is closed.
    """
    pid, uid = peer_ids(connection)
    try:
        return PeerProcess(pid=pid, uid=uid, pidfd=_open_pidfd(connection, pid))
    except OSError as error:
        raise SharedMemoryError(
            f"the process {pid} at the other end of the unix socket cannot be watched ({error}); it must "
            "run, and see the same process ids as this process"
        ) from error


def _open_pidfd(connection: socket.socket, pid: int) -> int:
    """Return a pidfd of the process `pid`, which is the one at the other end of `connection`."""
    with suppress(OSError):  # the kernel is older than Linux 6.5
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    pidfd = os.pidfd_open(pid)
    # Another process can have got the same pid only if the first one has ended, and its socket with it.
    if is_closed(connection):
        os.close(pidfd)
        raise ProcessLookupError("it has ended, or closed the socket")
    return pidfd


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end of a unix socket is closed. Messages may still wait to be received."""
    return _has_event(connection.fileno(), select.POLLRDHUP)


def _has_event(descriptor: int, event: int) -> bool:
    """Whether `event` is to be seen on `descriptor` now; `select.select` refuses descriptors from 1024 on."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(0))


def send_descriptor(connection: socket.socket, message: bytes, descriptor: int) -> None:
    """Send `message` (not empty) with a copy of `descriptor` over a unix socket.

    Raises:
        OSError: the connection is broken, or it is not blocking and its buffer is full.
    """
    rights = array.array("i", [descriptor])
    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_descriptor(connection: socket.socket, max_bytes: int) -> tuple[bytes, int | None]:
    """Receive a message of at most `max_bytes`, and the descriptor that came with it, if one did.

    The caller closes the descriptor. The message is empty once the other end is closed.

    Raises:
        OSError: the connection is broken, or nothing came within its timeout.
    """
    # `socket.recv_fds` drops its flags: a child would inherit the descriptor. The kernel closes surplus ones.
    message, rights, _, _ = connection.recvmsg(max_bytes, socket.CMSG_LEN(_INT), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return message, array.array("i", data[:_INT])[0]
    return message, None
