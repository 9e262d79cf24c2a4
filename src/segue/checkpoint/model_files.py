"""Opens a model's files: regular files only, within the allowed directories, until the reading is cancelled.

All readers of model files open them here and call :func:`raise_if_cancelled` while they read. The rules are a
context variable, not an argument of every reader, so that no reader can be forgotten. By default, as when a
server starts, every directory is allowed and the reading cannot be cancelled.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path

from segue.errors import ModelFileError, WeightSyncError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONVERTED_KEY = "converted_from_gguf"  # in a tokenizer_config.json that was made of a GGUF file
MAX_JSON = 256 << 20  # bytes; the index of a model of a million tensors has a tenth of that
_PIECE = 8 << 20  # bytes read between two checks for cancellation
_MAX_PATH, _MAX_NAME = 4096, 255  # bytes; the limits of Linux
_SHOWN = 60  # characters shown of each end of a long path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The rules under which model files are read."""

    roots: Sequence[str] | None = None  # directories where models may be; None: anywhere
    own: Sequence[Path] = ()  # directories of Segue's own files, which may be read too
    hub: bool = True  # whether a model may be fetched from the hub
    is_cancelled: Callable[[], bool] | None = None


current: ContextVar[Reading] = ContextVar("reading", default=Reading())  # noqa: B039, it is frozen


@contextmanager
def reading(rules: Reading) -> Iterator[None]:
    """Let this thread read model files only under ``rules`` in the block."""
    token = current.set(rules)
    try:
        yield
    finally:
        current.reset(token)


def raise_if_cancelled() -> None:
    """Check that the reading is not cancelled.

    Raises:
        WeightSyncError: the reading was cancelled.
    """
    is_cancelled = current.get().is_cancelled
    if is_cancelled is not None and is_cancelled():
        raise WeightSyncError("the update was discarded while its files were read")


def may_be_at(path: str | os.PathLike[str]) -> bool:
    """Whether the rules allow a model at `path`, after following links."""
    roots = current.get().roots
    return roots is None or _is_below(os.path.realpath(path), roots)


def check_path(path: str) -> None:
    """Refuse a path that no file system can have.

    Raises:
        ModelFileError: `path` is too long, or has a character that no path may have.
    """
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate; it is refused below, as a NUL is
        name = b"\0"
    if b"\0" in name:
        raise ModelFileError(
            f"model path {short_path(path)} has a character that no path may have, a NUL or a lone "
            "surrogate; give the path without it"
        )
    if len(name) >= _MAX_PATH or any(len(part) > _MAX_NAME for part in name.split(b"/")):
        raise ModelFileError(
            f"model path {short_path(path)} is too long: a path must have less than {_MAX_PATH} bytes, and "
            f"each name in it at most {_MAX_NAME}"
        )


def short_path(path: str) -> str:
    """Return `path` in quotation marks, shortened in the middle if it is long."""
    if len(path) > 3 * _SHOWN:
        return f"{path[:_SHOWN]!a}…{path[-_SHOWN:]!a} ({len(path)} characters)"
    return ascii(path)


def open_file(path: Path) -> FileIO:
    """Open the regular file at `path` for reading, following links.

    Raises:
        ModelFileError: the file does not exist or cannot be opened; it is a device, a pipe, a socket or a
            directory; or the rules do not allow its path.
        WeightSyncError: the reading was cancelled.
    """
    raise_if_cancelled()
    try:
        _check_regular(path, os.stat(path))  # before opening, since opening a device can have side effects
        # Opening a pipe must not wait for its other end, and a terminal must not become this process's own.
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError as error:
        raise ModelFileError(f"cannot open model file {path}: {error.strerror}") from error
    try:
        _check_regular(path, os.fstat(file.fileno()))  # again: the path may lead to another file by now
        allowed = current.get()
        if allowed.roots is not None:
            # The kernel's path of the file that was opened, without links: `path` may have changed since.
            real = os.readlink(f"/proc/self/fd/{file.fileno()}")
            if not _is_below(real, (*allowed.roots, *allowed.own)):
                raise ModelFileError(
                    f"model file {path} leads to a file outside of the directories of --weights-root; add "
                    "that file's directory to them, or copy the file"
                )
    except BaseException:
        file.close()
        raise
    return file


def read_at(file: FileIO, position: int, target: memoryview, part: str) -> None:
    """Fill `target` with the bytes of `file` from `position`; `part` says in errors what they are.

    Raises:
        ModelFileError: the file cannot be read, or ends too early.
        WeightSyncError: the reading was cancelled.
    """
    done = 0
    while done < target.nbytes:
        raise_if_cancelled()
        try:
            count = os.preadv(file.fileno(), [target[done : done + _PIECE]], position + done)
        except OSError as error:
            raise ModelFileError(f"cannot read {part} of model file {file.name}: {error.strerror}") from error
        if count == 0:
            raise truncated(file.name, f"it ends within {part}")
        done += count


def read_text(path: Path) -> str:
    """Return the text of a small file, usually JSON.

    Raises:
        ModelFileError, WeightSyncError: as :func:`open_file`.
        ValueError: the file is not UTF-8, or is longer than MAX_JSON.
        OSError: the file cannot be read.
    """
    with BufferedReader(open_file(path)) as file:
        content = file.read(MAX_JSON + 1)
    if len(content) > MAX_JSON:
        raise ValueError(f"it has more than {MAX_JSON} bytes")
    return content.decode()


def corrupt(path: object, reason: str) -> ModelFileError:
    """Return the error for a file whose content is wrong."""
    return ModelFileError(f"model file {path} is corrupt: {reason}. Get it again")


def truncated(path: object, reason: str) -> ModelFileError:
    """Return the error for a file that is shorter than it should be."""
    return ModelFileError(f"model file {path} is truncated: {reason}. Get it again")


def _check_regular(path: Path, status: os.stat_result) -> None:
    """Refuse all but a regular file, by the `status` of `path`: reading a device or pipe may never end."""
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(
            f"model file {path} is no regular file; give a file, not a directory, a device or a pipe"
        )


def _is_below(real: str, roots: Sequence[str | os.PathLike[str]]) -> bool:
    """Whether the path `real`, which has no links, is in one of `roots`, which may have some."""
    return any(Path(real).is_relative_to(os.path.realpath(root)) for root in roots)
