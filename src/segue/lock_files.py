"""Files that a process locks by ``flock`` for as long as it lives, so that others notice its death at once.

The lock belongs to the open file, which a forked process shares until it closes it. So every process that
Python forks closes its copies at once, before any other code runs, and ``O_CLOEXEC`` closes those of a
process that executes another program. A process that a C library forks without executing anything is beyond
the reach of both: while it lives, the lock is held. That delays whoever waits for the lock, and there are
still no two holders.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from segue.errors import FailoverDirectoryError

_files: WeakSet[OpenFile] = WeakSet()  # of this process; a forked process has to close them
_opening = threading.Lock()  # held while one of them is opened or closed, and during a fork


class OpenFile:
    """An open file that no other process inherits for long."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open a file; a new one belongs to this user alone. Raises OSError if it cannot be opened."""
        with _opening:
            self.number = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _files.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process has it open."""
        return self.number >= 0

    def is_at(self, path: Path) -> bool:
        """Whether it is open, and a path leads to it: it may have been deleted, or made anew."""
        if not self.is_open:
            return False
        try:
            there = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self.number))

    def close(self) -> None:
        """Give up the lock, also for processes that have inherited the file. Closed: nothing happens."""
        with _opening:
            number, self.number = self.number, -1
            if number >= 0:
                with suppress(OSError):  # it was never locked, and its file system has no locks
                    fcntl.flock(number, fcntl.LOCK_UN)
                os.close(number)

    def close_in_child(self) -> None:
        """Close a forked process's copy; the lock stays its parent's."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


def _close_all_in_child() -> None:
    for file in _files:
        file.close_in_child()
    _opening.release()


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_all_in_child
)


def check_directory(directory: Path) -> None:
    """Make the failover directory if it is not there, and check that a lock in it means something.

    Raises:
        FailoverDirectoryError: it cannot be made, others may write to it, or its file system has no locks.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise _refusal(directory, f"it cannot be made ({error.strerror})", "choose another one") from None
    if found.st_uid not in (os.geteuid(), 0):
        why = f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        raise _refusal(directory, why, "run all engines as one user, and give them a directory of their own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise _refusal(directory, why, f"say `chmod 700 {directory}`, or give a directory that is not there")
    kind = file_system_of(directory)
    remedy = "choose a directory on a local disk, or in /run or /dev/shm"
    try:
        probe, name = tempfile.mkstemp(dir=directory, prefix=".probe-")
    except OSError as error:
        raise _refusal(directory, f"no file can be made in it ({error.strerror})", remedy) from None
    try:
        with open(name, "rb") as other:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(BlockingIOError):  # as it should be; some network file systems ignore locks
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise _refusal(directory, f"its file system ({kind}) gives one lock to two processes", remedy)
    except OSError as error:
        why = f"its file system ({kind}) takes no lock ({error.strerror})"
        raise _refusal(directory, why, remedy) from None
    finally:
        os.close(probe)
        os.unlink(name)


def file_system_of(path: Path) -> str:
    """Returns the type of the file system that a path is on, such as ``nfs4``."""
    best, found = "", "unknown"
    resolved = str(path.resolve())
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, *_ = line.split(" ")
            if len(place) >= len(best) and Path(resolved).is_relative_to(place):
                best, found = place, kind
    return found


def _refusal(directory: Path, why: str, remedy: str) -> FailoverDirectoryError:
    text = f"failover_dir={str(directory)!r}: {why}; {remedy}"
    return FailoverDirectoryError(text, param="failover_dir")
