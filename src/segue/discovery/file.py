"""Discovery by files in a directory of one host: a record lives exactly as long as its engine's process.

Each engine has a file, which it locks by ``flock`` before the file gets its name, and until it dies. Whoever
can lock the file knows that the engine is dead. So there is no time to live: a death is seen at the next
look. A claimed epoch is an empty file that could be made because there was none.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from segue.discovery.base import OnRecords, Polling
from segue.discovery.record import EngineRecord, pack_record, unpack_record
from segue.errors import DiscoveryError, FailoverDirectoryError
from segue.lock_files import OpenFile, check_directory
from segue.options import check_name

POLL_S = 0.02
FOLDER = "discovery"  # in the failover directory
_RECORD, _EPOCH = "record-", "epoch-"
_BETWEEN = "~"  # in no name
_NAME = re.compile(rf"{_RECORD}[^{_BETWEEN}]+{_BETWEEN}[^{_BETWEEN}]+")


class FileDiscovery:
    """Records in a directory; see `segue.discovery.base.DiscoveryBackend`."""

    def __init__(self, directory: Path) -> None:
        """Keep the records in a folder of the failover directory; both are made if they are not there.

        Raises:
            FailoverDirectoryError: others may write to the directory, or its file system has no locks.
        """
        check_directory(directory)
        self._folder = directory / FOLDER
        try:
            self._make_folder()
        except OSError as error:
            text = f"failover_dir={str(directory)!r}: its folder {FOLDER} cannot be made ({error.strerror})"
            raise FailoverDirectoryError(f"{text}; choose another one", param="failover_dir") from None
        self._polling = Polling(POLL_S)
        self._put: dict[Path, OpenFile] = {}  # the records of this process

    async def put(self, record: EngineRecord) -> None:
        """Put an engine's record in place of its last one."""
        path = self._path(record.cohort, record.engine)
        try:
            file = self._new_file(record)
        except OSError as error:
            raise self._failure(error) from None
        before, self._put[path] = self._put.get(path), file
        if before is not None:
            before.close()
        self._clear(record)

    async def remove(self, cohort: str, engine: str) -> None:
        """Remove a record that this process has put."""
        path = self._path(cohort, engine)
        if (file := self._put.pop(path, None)) is not None:
            if file.is_at(path):
                path.unlink(missing_ok=True)
            file.close()

    async def list(self) -> Sequence[EngineRecord]:
        """Returns the records of all engines that live, sorted by the names of their files."""
        return [record for path in self._paths() if (record := _read(path, is_alive=True)) is not None]

    async def watch(self, on_records: OnRecords) -> None:
        """Call ``on_records`` with all records, at once and whenever they change."""
        await self._polling.watch(self, on_records)

    async def claim_epoch(self, cohort: str, epoch: int) -> bool:
        """Claim an epoch; lower ones are forgotten, which nobody can claim any more."""
        path = self._folder / f"{self._epoch_prefix(cohort)}{epoch}"
        try:
            self._make_folder()  # it may have been removed
        except OSError as error:
            raise self._failure(error) from None
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError as error:
            raise self._failure(error) from None
        known = self._epochs(cohort)
        is_highest = epoch == max(known, default=epoch)
        for each, other in known.items():
            if each < epoch or (each == epoch and not is_highest):
                other.unlink(missing_ok=True)
        return is_highest

    async def highest_epoch(self, cohort: str) -> int:
        """Returns the highest epoch that was ever claimed here."""
        return max(self._epochs(cohort), default=0)

    def nudge(self) -> None:
        """Look for changes at once."""
        self._polling.nudge()

    async def close(self) -> None:
        """Remove the records of this process."""
        for path, file in list(self._put.items()):
            if file.is_at(path):
                path.unlink(missing_ok=True)
            file.close()
        self._put.clear()

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def _new_file(self, record: EngineRecord) -> OpenFile:
        """Returns the file of a record, which has its name and is locked."""
        self._make_folder()  # it may have been removed
        number, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
        os.close(number)
        file = OpenFile(Path(name), os.O_RDWR)
        try:
            os.write(file.number, pack_record(record))
            fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(name, self._path(record.cohort, record.engine))
        except OSError:
            file.close()
            Path(name).unlink(missing_ok=True)
            raise
        return file

    def _path(self, cohort: str, engine: str) -> Path:
        check_name(cohort, "cohort")
        check_name(engine, "engine_id")
        return self._folder / f"{_RECORD}{cohort}{_BETWEEN}{engine}"

    def _paths(self) -> Sequence[Path]:
        """Returns the files of all records."""
        try:
            names = sorted(os.listdir(self._folder))
        except OSError as error:
            raise self._failure(error) from None
        return [self._folder / name for name in names if _NAME.fullmatch(name)]

    def _epoch_prefix(self, cohort: str) -> str:
        check_name(cohort, "cohort")
        return f"{_EPOCH}{cohort}{_BETWEEN}"

    def _epochs(self, cohort: str) -> dict[int, Path]:
        """Returns the claimed epochs of a cohort that have a file, the highest one among them."""
        prefix = self._epoch_prefix(cohort)
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            raise self._failure(error) from None
        numbers = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        return {int(each): self._folder / f"{prefix}{each}" for each in numbers if each.isdecimal()}

    def _clear(self, record: EngineRecord) -> None:
        """Delete what dead engines of this cohort have left.

        Only the engine that has the lock of the cohort puts a record, so nobody makes a new one meanwhile.
        """
        for path in self._paths():
            other = _read(path, is_alive=False)
            if other is not None and other.cohort == record.cohort and other.epoch < record.epoch:
                path.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> DiscoveryError:
        return DiscoveryError(f"discovery by files in {self._folder} failed: {error.strerror or error}")


def _read(path: Path, *, is_alive: bool) -> EngineRecord | None:
    """Returns the record in a file; None: the engine is not as ``is_alive`` says, or there is none."""
    with suppress(OSError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return unpack_record(file.read()) if is_alive else None
        return None if is_alive else unpack_record(file.read())
    return None
