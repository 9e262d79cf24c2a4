"""The lock of a cohort: of all engines that could serve in each other's place, the one that holds it serves.

The lock is ``flock`` on the file ``COHORT.lock`` in the failover directory, and the kernel releases it the
moment its holder has died, however it died. The file also says who holds it, and with which *epoch*: a number
that grows whenever another engine takes over. Everybody who hears of two engines of one cohort believes the
one with the higher epoch.

    lock = CohortLock(directory, "default")
    lock.acquire()                                        # in a daemon thread: waits for the holder's death
    epoch = lock.claim("engine-a", url, at_least=known)   # known: the highest epoch that anybody has heard of
    ...                                                   # serve, and look at `is_ours` every 100 ms
    lock.release()

``flock`` belongs to the open file, which a forked process shares until it closes it. So every process that
Python forks closes its copy at once, before any other code runs, and `O_CLOEXEC` closes the copy of one that
executes another program. A process that a C library forks without executing anything is beyond the reach of
both: while it lives, no other engine can take the lock. It delays a takeover, and there are still no two
holders.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import msgspec

from segue.errors import FailoverDirectoryError, LockLostError
from segue.options import check_name

SLOT_BYTES = 1024
NUM_SLOTS = 2
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LINE = re.compile(rb"([0-9a-f]{8}) (\{.*\}) *\n", re.DOTALL)


class LockNote(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a cohort's lock; if nobody does, who held it last."""

    engine: str
    pid: int  # in the holder's own PID namespace
    epoch: int
    url: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LockNote).decode
_locks: WeakSet[CohortLock] = WeakSet()  # those of this process, whose files a forked process has to close
_opening = threading.Lock()  # held while a file of one of them is opened or closed, and during a fork


class CohortLock:
    """One engine's side of its cohort's lock.

    One thread may be in :meth:`acquire` while others call the methods that do not wait.
    """

    def __init__(self, directory: Path, cohort: str) -> None:
        """Check the failover directory, which is made if it is not there; take no lock yet.

        Raises:
            ConfigError: the cohort's name cannot be that of a file.
            FailoverDirectoryError: others may write to the directory, or its file system has no locks.
        """
        check_name(cohort, "cohort")
        check_directory(directory)
        self.path = directory / f"{cohort}.lock"
        self.epoch = 0  # that was claimed with this lock; 0: none was
        self.is_held = False
        self._file: int | None = None
        _locks.add(self)

    def acquire(self) -> None:
        """Take the lock, once whoever holds it is dead or has released it."""
        assert not self.is_held
        while not self._try_file(fcntl.LOCK_EX):
            pass

    def try_acquire(self) -> bool:
        """Take the lock if nobody else holds it; returns whether it was taken."""
        assert not self.is_held
        while True:
            try:
                if self._try_file(fcntl.LOCK_EX | fcntl.LOCK_NB):
                    return True
            except BlockingIOError:
                return False

    def note(self) -> LockNote | None:
        """Returns who holds the lock, or held it last; None: no epoch was ever claimed with this file."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            return _newest(_slots(file))
        finally:
            os.close(file)

    def claim(self, engine_id: str, url: str, at_least: int) -> int:
        """Write into the file that this engine serves from now on; returns its epoch.

        The epoch is higher than ``at_least`` and than every one that was ever claimed with this file. A file
        that was made anew knows of none, so ``at_least`` must be the highest one that discovery, the memory
        service and the other engines know of.

        An engine that dies while it writes leaves the entry of the last epoch whole: the new entry goes to
        the file's other place, and counts only when all of it is there. Its epoch was not given to anybody
        then, and is the next one's.

        Raises:
            LockLostError: the file of the lock was deleted or made anew.
        """
        assert self.is_held and self._file is not None
        file = self._file
        if not self._has_path(file):
            raise LockLostError(
                f"{self.path} was deleted or made anew while this engine held its lock; end this engine, and "
                "let no other program delete this file"
            )
        slots = _slots(file)
        last = _newest(slots)
        epoch = max(at_least, self.epoch, 0 if last is None else last.epoch) + 1
        line = _line(LockNote(engine=engine_id, pid=os.getpid(), epoch=epoch, url=url))
        place = 0 if last is None else 1 - slots.index(last)
        os.pwrite(file, line, place * SLOT_BYTES)
        self.epoch = epoch
        return epoch

    def is_ours(self) -> bool:
        """Whether this engine has the lock of the file at the path, and its epoch is the newest there.

        An engine for which this is no longer true was replaced, and must end.
        """
        file = self._file
        if not self.is_held or file is None or not self._has_path(file):
            return False
        last = _newest(_slots(file))
        return self.epoch in (0, 0 if last is None else last.epoch)

    def release(self) -> None:
        """Give the lock back, also for processes that inherited its file. Not held: nothing happens."""
        with _opening:
            file, self._file = self._file, None
            self.is_held = False
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)

    def _try_file(self, operation: int) -> bool:
        """Open the file and lock it; returns False if another file has its path by then.

        Raises:
            BlockingIOError: another process holds the lock, and ``operation`` does not wait.
        """
        with _opening:
            file = self._file = os.open(self.path, _OPEN, 0o600)
        try:
            fcntl.flock(file, operation)
            self.is_held = self._has_path(file)
            return self.is_held
        finally:
            if not self.is_held:
                with _opening:
                    self._file = None
                    os.close(file)

    def _has_path(self, file: int) -> bool:
        """Whether an open file is the one that the path leads to."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(file))

    def close_in_child(self) -> None:
        """Close a forked process's copy of the file; the lock stays its parent's."""
        file, self._file = self._file, None
        self.is_held = False
        if file is not None:
            os.close(file)


def _close_all_in_child() -> None:
    for lock in _locks:
        lock.close_in_child()
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


def _line(note: LockNote) -> bytes:
    """Returns a note as it stands in the file: a checksum, the note, and spaces up to the slot's end.

    Raises:
        ValueError: the engine's id and its URL are too long together.
    """
    text = _encode(note)
    line = b"%08x %b" % (zlib.crc32(text), text)
    if len(line) >= SLOT_BYTES:
        raise ValueError(f"the note of a lock has {len(line)} bytes; at most {SLOT_BYTES - 1} are allowed")
    return line.ljust(SLOT_BYTES - 1) + b"\n"


def _slots(file: int) -> list[LockNote | None]:
    """Returns what stands in each place of the file; None: nothing that was written whole."""
    data = os.pread(file, NUM_SLOTS * SLOT_BYTES, 0)
    return [_note_of(data[at : at + SLOT_BYTES]) for at in range(0, NUM_SLOTS * SLOT_BYTES, SLOT_BYTES)]


def _note_of(slot: bytes) -> LockNote | None:
    found = _LINE.fullmatch(slot)
    if found is None or zlib.crc32(found[2]) != int(found[1], 16):
        return None
    with suppress(msgspec.DecodeError):
        return _decode(found[2])
    return None


def _newest(slots: list[LockNote | None]) -> LockNote | None:
    return max((each for each in slots if each is not None), key=lambda each: each.epoch, default=None)
