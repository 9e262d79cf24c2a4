"""The user's cache directory: files appear there complete or not at all, and many processes may share it."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from segue.checkpoint.model_files import check_wanted, open_file
from segue.errors import CacheDirectoryError, ModelFileError

_HASH_CHUNK = 1 << 20  # bytes hashed per read

_SHA256 = re.compile("[0-9a-f]{64}")


def publish_file(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, then rename that file to `target` in one atomic step.

    Raises:
        CacheDirectoryError: the directory cannot be written.
    """
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        try:
            write(Path(name))
            os.chmod(name, 0o644)
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)


def publish_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary directory, then rename that directory to `target`.

    If another process has published `target` first, its directory stays.

    Raises:
        CacheDirectoryError: the directory cannot be written.
    """
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            fill(temporary)
            temporary.chmod(0o755)
            os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, so that of several processes that need `target` one makes it.

    The lock only saves work: publishing is safe without it, and where files cannot be locked, none is taken.
    Temporary files of `target` that a killed process left while it held the lock are removed.

    Raises:
        CacheDirectoryError: the directory cannot be written.
    """
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            for left in target.parent.glob(f".{target.name}.*"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                elif left.suffix != ".lock":
                    left.unlink()
        yield
    finally:
        os.close(handle)


def sha256_of(path: Path, cache_dir: Path, *, anew: bool = False) -> str:
    """Return the file's SHA-256 in hex.

    The cache keeps it under the file's path, size, mtime and ctime, since hashing gigabytes takes seconds.
    `anew` computes it even if the cache has it.

    Raises:
        ModelFileError: the file cannot be read.
    """
    path = path.resolve()
    try:
        status = path.stat()
    except OSError as error:
        raise ModelFileError(f"cannot read model file {path}: {error.strerror}") from error
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    identity = {"path": str(path), "size": status.st_size, **times}
    record = cache_dir / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    known = None if anew else _read_record(record)
    if known is not None and {key: known.get(key) for key in identity} == identity:
        return str(known["sha256"])
    digest = _hash(path)
    # Without the record, the next call only takes longer. Writes that are needed raise their own errors.
    with suppress(CacheDirectoryError):
        publish_file(record, lambda file: _write_json(file, {**identity, "sha256": digest}))
    return digest


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def _read_record(record: Path) -> dict[str, object] | None:
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    is_digest = isinstance(known, dict) and _SHA256.fullmatch(str(known.get("sha256")))
    return known if is_digest else None


def _hash(path: Path) -> str:
    try:
        with os.fdopen(open_file(path), "rb", buffering=0) as file:
            digest, left = hashlib.sha256(), os.fstat(file.fileno()).st_size
            while left and (piece := file.read(min(left, _HASH_CHUNK))):  # the file may grow meanwhile
                digest.update(piece)
                left -= len(piece)
                check_wanted()
            return digest.hexdigest()
    except OSError as error:
        raise ModelFileError(f"cannot read model file {path}: {error.strerror}") from error


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot write to the cache directory {target.parent}: {error.strerror}. Make it writable, or "
            "set SEGUE_CACHE_DIR to a directory that is"
        ) from error
