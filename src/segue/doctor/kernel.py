"""What the kernel must have for some options: features are tried, not looked up by the kernel's version."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import closing

from segue.doctor.findings import Finding
from segue.errors import SegueError
from segue.memory import shared

_SHARING = "--gms-dir, --pd-transport shm and --enable-memory-saver on a CPU"
_WATCHING = "segue cluster, --shadows and segue gms"
_HANDING_ON = "--kv-owner gms and --warm-kv: KV memory is handed on to the next engine"


def describe_kernel() -> list[Finding]:
    """Return the findings about memfd, pidfd, SO_PEERPIDFD and flock."""
    release = os.uname().release
    return [
        Finding(name="kernel", value=release),
        _tried("memfd with seals", _memfd, f"needed for {_SHARING}", "run on Linux 3.17 or newer"),
        _tried(
            "pidfd", _pidfd, f"needed for {_WATCHING}", "run on Linux 5.3 or newer, without a seccomp rule"
        ),
        _tried("SO_PEERPIDFD", _peer_pidfd, f"needed for {_HANDING_ON}", "run on Linux 6.5 or newer"),
        _tried("flock", _flock, "needed in the directory of temporary files", "set TMPDIR to a local disk"),
    ]


def _tried(name: str, attempt: Callable[[], str], why: str, remedy: str) -> Finding:
    """Return whether an attempt to use a feature succeeds."""
    try:
        return Finding(name=name, value=attempt())
    except (OSError, SegueError) as error:
        return Finding(name=name, value=f"not there ({error})", status="missing", why=why, remedy=remedy)


def _memfd() -> str:
    descriptor = shared.create(4096)
    try:
        with closing(shared.map_shared(descriptor, 4096)):
            return "works"
    finally:
        os.close(descriptor)


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "works"


def _peer_pidfd() -> str:
    one, other = socket.socketpair()
    with one, other:
        os.close(one.getsockopt(socket.SOL_SOCKET, shared.SO_PEERPIDFD))
    return "works"


def _flock() -> str:
    with tempfile.NamedTemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return f"works in {tempfile.gettempdir()}"
