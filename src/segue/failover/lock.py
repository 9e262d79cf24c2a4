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

What holds for processes that inherit the open file is said in `segue.lock_files`.
"""

from __future__ import annotations

import fcntl
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

from segue.errors import LockLostError
from segue.lock_files import OpenFile, check_directory
from segue.options import check_name

SLOT_BYTES = 1024
NUM_SLOTS = 2  # which an engine that claims an epoch writes to by turns
LEFT_SLOT = NUM_SLOTS  # of an engine that has lost its lock, and leaves its epoch
_LINE = re.compile(rb"([0-9a-f]{8}) (\{.*\}) *\n", re.DOTALL)


class LockNote(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a cohort's lock; if nobody does, who held it last."""

    engine: str
    pid: int  # in the holder's own PID namespace
    epoch: int
    url: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LockNote).decode


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
        self.cohort = cohort
        self.path = directory / f"{cohort}.lock"
        self.epoch = 0  # that was claimed with this lock; 0: none was
        self._seen = 0  # the highest epoch in any file that was locked here, deleted ones included
        self._file: OpenFile | None = None  # that is locked

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock; a forked process does not have that of its parent."""
        return self._file is not None and self._file.is_open

    def acquire(self) -> None:
        """Take the lock, once whoever holds it is dead or has released it.

        Raises:
            FailoverDirectoryError: the directory was removed, and cannot be made anew.
            LockLostError: the file of the lock cannot be opened.
        """
        assert not self.is_held
        while not self._try_file(fcntl.LOCK_EX):
            pass

    def try_acquire(self) -> bool:
        """Take the lock if nobody else holds it; returns whether it was taken.

        Raises:
            FailoverDirectoryError: the directory was removed, and cannot be made anew.
            LockLostError: the file of the lock cannot be opened.
        """
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
            with open(self.path, "rb") as file:
                return _newest(_slots(file.fileno()))
        except FileNotFoundError:
            return None

    def claim(self, engine_id: str, url: str, at_least: int) -> int:
        """Write into the file that this engine serves from now on; returns its epoch.

        The epoch is higher than ``at_least`` and than every one that was ever claimed with this file, or with
        another one at its path for which this engine has waited. A file that was made anew knows of none, so
        ``at_least`` must be the highest one that discovery, the memory service and the other engines know of.

        An engine that dies while it writes leaves the entry of the last epoch whole: the new entry goes to
        the file's other place, and counts only when all of it is there. Its epoch was not given to anybody
        then, and is the next one's.

        Raises:
            LockLostError: the file of the lock was deleted or made anew.
        """
        file = self._file
        assert file is not None
        if not file.is_at(self.path):
            raise LockLostError(
                f"{self.path} was deleted or made anew while this engine held its lock; end this engine, and "
                "let no other program delete this file"
            )
        slots = _slots(file.number)
        last = _newest(slots)
        epoch = max(at_least, self.epoch, self._seen, 0 if last is None else last.epoch) + 1
        line = _line(LockNote(engine=engine_id, pid=os.getpid(), epoch=epoch, url=url))
        own = _newest(slots[:NUM_SLOTS])
        place = 0 if own is None else 1 - slots.index(own)
        os.pwrite(file.number, line, place * SLOT_BYTES)
        self.epoch = epoch
        return epoch

    def is_ours(self) -> bool:
        """Whether this engine has the lock of the file at the path, and its epoch is the newest there.

        An engine for which this is no longer true was replaced, and must end.
        """
        file = self._file
        if file is None or not file.is_at(self.path):
            return False
        last = _newest(_slots(file.number))
        return self.epoch in (0, 0 if last is None else last.epoch)

    def leave_epoch(self, engine_id: str, url: str) -> None:
        """Write this engine's epoch into the file that is at the path by now; nobody claims it again then.

        For an engine whose file was deleted or made anew. A new file, which is made if there is none yet,
        knows of no epoch, and routers drop for ever an engine with a lower one. An engine that has claimed a
        lower one already sees that it is not the newest, and ends.

        Raises:
            OSError: the file cannot be made or written.
        """
        check_directory(self.path.parent)
        file = OpenFile(self.path, os.O_RDWR | os.O_CREAT)
        try:
            known = _newest(_slots(file.number))
            if self.epoch > (0 if known is None else known.epoch):
                note = LockNote(engine=engine_id, pid=os.getpid(), epoch=self.epoch, url=url)
                os.pwrite(file.number, _line(note), LEFT_SLOT * SLOT_BYTES)
        finally:
            file.close()

    def release(self) -> None:
        """Give the lock back, also for processes that inherited its file. Not held: nothing happens."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Give the lock back and delete its file, which whoever wants the lock next makes anew."""
        if self._file is not None and self._file.is_at(self.path):
            self.path.unlink(missing_ok=True)  # while it is locked: who waits for it sees that it has gone
        self.release()

    def _try_file(self, operation: int) -> bool:
        """Open the file and lock it; returns False if another file has its path by then, or none.

        Raises:
            BlockingIOError: another process holds the lock, and ``operation`` does not wait.
        """
        try:
            file = OpenFile(self.path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # the directory was removed
            check_directory(self.path.parent)
            return False
        except OSError as error:
            text = f"{self.path}, the lock, cannot be opened ({error.strerror})"
            raise LockLostError(f"{text}; let no other program touch this directory") from None
        try:
            fcntl.flock(file.number, operation)
            last = _newest(_slots(file.number))
            self._seen = max(self._seen, 0 if last is None else last.epoch)
            if file.is_at(self.path):
                self._file = file
                return True
            return False
        finally:
            if self._file is None:
                file.close()


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
    size = (LEFT_SLOT + 1) * SLOT_BYTES
    data = os.pread(file, size, 0)
    return [_note_of(data[at : at + SLOT_BYTES]) for at in range(0, size, SLOT_BYTES)]


def _note_of(slot: bytes) -> LockNote | None:
    found = _LINE.fullmatch(slot)
    if found is None or zlib.crc32(found[2]) != int(found[1], 16):
        return None
    with suppress(msgspec.DecodeError):
        return _decode(found[2])
    return None


def _newest(slots: list[LockNote | None]) -> LockNote | None:
    return max((each for each in slots if each is not None), key=lambda each: each.epoch, default=None)
