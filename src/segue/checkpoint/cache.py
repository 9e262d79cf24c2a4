"""The user's cache directory: files appear there complete or not at all, and many processes may share it.

SHA-256 identifies a file, also one outside the cache. A record is a small JSON file in the cache, of one of
two kinds. One holds the SHA-256 of a file, so that it need not be computed again (`sha256_of`). The other
lies beside files that Segue writes and holds their CRC-32 checksums (`write_checksums`), which find damage by
a disk, a power failure or a stray write, in half the time of SHA-256 (measured on a CPU with instructions for
both: 3.9 and 1.8 GB per second and thread).
"""

import fcntl
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TextIO

import msgspec

from segue.checkpoint.model_files import open_file, raise_if_cancelled
from segue.errors import CacheDirectoryError, ModelFileError
from segue.logs import logger

_PIECE = 32 << 20  # bytes per checksum, so that several threads can check one file
_BLOCK = 1 << 20  # bytes per read: they stay in a core's cache until they are hashed
_MAX_THREADS = 4
_LOCK_POLL_S = 0.1  # between two tries for a lock that another process holds


class _KnownHash(msgspec.Struct):
    """The SHA-256 of a file that had this size, mtime and ctime, in bytes and nanoseconds."""

    identity: tuple[int, int, int]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


def publish(target: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write files into a temporary directory, then move each beside `target` in one atomic step.

    `target` is one of the files; of files that are made together it is always the same one.

    Raises:
        CacheDirectoryError: the directory cannot be written.
    """
    with _writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}."
        with TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as temporary:
            fill(Path(temporary))
            for made in Path(temporary).iterdir():
                made.chmod(0o644)
                made.replace(target.parent / made.name)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, so that only one of several processes makes a file that all of them need.

    The lock only saves work: `publish` is safe without it, and the block runs without a lock where the file
    system has none. Temporary directories that a killed process left for `target` are removed first. The wait
    for another process ends if the reading is cancelled.

    Raises:
        CacheDirectoryError: the directory cannot be written.
        WeightSyncError: the reading was cancelled.
    """
    with _writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = (target.parent / f".{target.name}.lock").open("a")
    with lock:
        if _wait_for(lock):
            for left in target.parent.glob(f".{target.name}.*/"):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _wait_for(lock: TextIO) -> bool:
    """Wait until this process has the lock; False: the file system has no locks."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            raise_if_cancelled()
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return False


def make_unless_intact(target: Path, record: Path, fill: Callable[[Path], object], origin: Path) -> None:
    """Publish the files that `fill` makes from the file `origin`, unless those of an earlier call are intact.

    `record` is the file beside them that gets their names and checksums; they are intact if these match.
    `target` is one of the files: if it or `record` is there, and yet something is wrong, damage is logged.
    `fill` writes the files into the temporary directory that it is given.

    Raises:
        CacheDirectoryError: the directory cannot be written.
    """
    if find_damage(record) is None:
        return
    with exclusive(record):
        damage = find_damage(record)  # another process may have been faster
        if damage is None:
            return
        if target.exists() or record.exists():
            logger.warning(
                "the cache directory %s is damaged: %s; converting %s again", record.parent, damage, origin
            )

        def fill_and_record(directory: Path) -> None:
            """Make the files and, beside them, the record of their checksums."""
            fill(directory)
            write_checksums(directory / record.name, sorted(made.name for made in directory.iterdir()))

        publish(record, fill_and_record)


def sha256_of(path: Path, cache_dir: Path, *, recompute: bool = False) -> str:
    """Return the file's SHA-256 in hex.

    The cache keeps it under the file's path, size, mtime and ctime, since hashing gigabytes takes seconds.
    With `recompute`, the file is read even if the cache has its hash.

    Raises:
        ModelFileError: the file cannot be read.
    """
    path = path.resolve()
    with open_file(path) as file:
        status = os.fstat(file.fileno())  # before hashing: a file that changes meanwhile will not match
    record = cache_dir / "hashes" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    identity = status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if not recompute:
        with suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
            # An error means that there is no record, or a damaged one.
            known = msgspec.json.decode(record.read_bytes(), type=_KnownHash)
            if known.identity == identity:
                return known.sha256
    found = _KnownHash(identity, sha256(path))
    # Without the record, the next call only takes longer. Writes that are needed raise their own errors.
    with suppress(CacheDirectoryError):
        content = msgspec.json.encode(found)
        publish(record, lambda directory: (directory / record.name).write_bytes(content))
    return found.sha256


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hex, without a look into the cache.

    Raises:
        ModelFileError: the file cannot be read.
    """
    with open_file(path) as file:
        digest, left = hashlib.sha256(), os.fstat(file.fileno()).st_size  # the file may grow meanwhile
        try:
            while left and (block := file.read(min(left, _BLOCK))):
                digest.update(block)
                left -= len(block)
                raise_if_cancelled()
        except OSError as error:
            raise ModelFileError(f"cannot read model file {path}: {error.strerror}") from error
        return digest.hexdigest()


def write_checksums(record: Path, names: Iterable[str]) -> None:
    """Write to `record` the checksums of the files `names`, which lie in the directory of `record`.

    Raises:
        OSError: a file cannot be read, or `record` cannot be written.
    """
    record.write_bytes(msgspec.json.encode({name: _checksums(record.parent / name) for name in names}))


def find_damage(record: Path) -> str | None:
    """Return what is wrong with the files listed in `record`, as a log text; None if they are as written."""
    try:
        known = msgspec.json.decode(record.read_bytes(), type=dict[str, list[int]])
    except FileNotFoundError:
        return f"{record.name} is missing"
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return f"{record.name} cannot be read"
    if not known:
        return f"{record.name} names no files"
    for name, checksums in known.items():
        try:
            found = _checksums(record.parent / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except ValueError:  # the record itself is damaged: no file can have this name
            return f"{record.name} names a file {name!a}, which cannot exist"
        if found != checksums:
            return f"{name} differs from what was written"
    return None


def _checksums(path: Path) -> list[int]:
    """Return the CRC-32 of each _PIECE bytes of the file, computed by several threads.

    The last piece may be empty, so that also an empty file has a checksum.
    """
    with FileIO(path) as file:
        starts = range(0, os.fstat(file.fileno()).st_size + 1, _PIECE)
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(starts))
        with ThreadPoolExecutor(threads) as pool:  # it starts no more threads than there are pieces
            return list(pool.map(partial(_checksum, file), starts))


def _checksum(file: FileIO, start: int) -> int:
    """Return the CRC-32 of the piece that begins at byte `start`.

    `preadv` leaves the file's position alone, so several threads can read one open file.
    """
    buffer, checksum, position = memoryview(bytearray(_BLOCK)), 0, start
    while count := os.preadv(file.fileno(), [buffer[: start + _PIECE - position]], position):
        checksum = zlib.crc32(buffer[:count], checksum)
        position += count
    return checksum


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CacheDirectoryError that names `directory` and the remedy."""
    try:
        yield
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot write to the cache directory {directory}: {error.strerror}. Make it writable, or "
            "set SEGUE_CACHE_DIR to a directory that is"
        ) from error
