"""Reads tensors of a safetensors file straight into their destination, and writes such files.

The safetensors package maps files into memory. Pages of a map that were read stay resident and count as
memory of this process, so loading a model that way takes its size twice. Here, bytes only go from the page
cache to their destination.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from segue.checkpoint.model_files import check_wanted, open_file
from segue.dtypes import SAFETENSORS
from segue.errors import ModelFileError

_PIECE = 8 << 20  # bytes read between two checks for cancellation
_MAX_DIMS = 64
_MAX_HEADER = 100_000_000  # bytes; the limit of the format


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: its name, type and place."""

    name: str
    dtype: str  # as the format names it, such as "BF16"
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file and the tensors that its checked header lists."""

    def __init__(self, path: Path) -> None:
        """Open `path` and check its header against the file's length.

        Raises:
            ModelFileError: the file is missing, unreadable, truncated or corrupt.
        """
        self.path = path
        try:
            self._fd = open_file(path)
        except OSError as error:
            raise ModelFileError(f"cannot open model file {path}: {error.strerror}") from error
        try:
            self.tensors = _read_table(path, self._fd)
        except OSError as error:
            self.close()
            raise ModelFileError(f"cannot read model file {path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, tensor: StoredTensor, offset: int, target: memoryview) -> None:
        """Fill `target` with the tensor's bytes from `offset`.

        Raises:
            ModelFileError: the file cannot be read, or is shorter than when it was opened.
        """
        assert offset + target.nbytes <= tensor.num_bytes
        read_fully(self.path, self._fd, tensor.start + offset, target, tensor.name)


def read_fully(path: Path, fd: int, position: int, target: memoryview, tensor: str) -> None:
    """Fill `target` with the bytes of the file `fd` from `position`; `path` and `tensor` are for errors.

    Raises:
        ModelFileError: the file cannot be read, or ends too early.
        WeightSyncError: the reading was cancelled.
    """
    done = 0
    while done < target.nbytes:
        check_wanted()
        try:
            count = os.preadv(fd, [target[done : done + _PIECE]], position + done)
        except OSError as error:
            raise ModelFileError(
                f"cannot read tensor {tensor!r} of model file {path}: {error.strerror}"
            ) from error
        if count == 0:
            raise ModelFileError(
                f"model file {path} is truncated: it ends within tensor {tensor!r}. Get the file again"
            )
        done += count


def _read_table(path: Path, fd: int) -> dict[str, StoredTensor]:
    size = os.fstat(fd).st_size
    if size < 8:
        raise ModelFileError(
            f"model file {path} is truncated: it has {size} bytes, not even a header. Get it again"
        )
    header_size = int.from_bytes(os.pread(fd, 8, 0), "little")
    if header_size > _MAX_HEADER:
        raise ModelFileError(
            f"model file {path} is corrupt: not a safetensors file (header of {header_size} bytes)"
        )
    if 8 + header_size > size:
        raise ModelFileError(
            f"model file {path} is truncated: its header alone needs {8 + header_size} bytes, the file has "
            f"{size}. Get it again"
        )
    try:
        header = json.loads(os.pread(fd, header_size, 8))
        header.pop("__metadata__", None)
        items = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        tensors = [_stored(name, fields, 8 + header_size) for name, fields in items]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFileError(
            f"model file {path} is corrupt: its header cannot be read ({error}). Get it again"
        ) from error
    _check(path, tensors, 8 + header_size, size)
    return {tensor.name: tensor for tensor in tensors}


def _stored(name: str, fields: Mapping[str, Any], data_start: int) -> StoredTensor:
    start, end = fields["data_offsets"]
    shape = tuple(fields["shape"])
    if len(shape) > _MAX_DIMS or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in (start, end, *shape)
    ):
        raise ValueError(f"tensor {name[:80]!r} has a shape or data_offsets that no tensor can have")
    return StoredTensor(
        name=name, dtype=str(fields["dtype"]), shape=shape, start=data_start + start, num_bytes=end - start
    )


def _check(path: Path, tensors: list[StoredTensor], data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.dtype not in SAFETENSORS:
            raise ModelFileError(
                f"model file {path}: tensor {tensor.name!r} has type {tensor.dtype!r}; known: "
                f"{', '.join(SAFETENSORS)}"
            )
        if tensor.start != position or tensor.num_bytes != prod(tensor.shape) * SAFETENSORS[tensor.dtype][1]:
            raise ModelFileError(
                f"model file {path} is corrupt: tensor {tensor.name!r} of shape {list(tensor.shape)} and "
                f"type {tensor.dtype} cannot lie in bytes {tensor.start} to "
                f"{tensor.start + tensor.num_bytes}. Get it again"
            )
        position += tensor.num_bytes
        if position > size:
            raise ModelFileError(
                f"model file {path} is truncated: tensor {tensor.name!r} ends at byte {position}, the file "
                f"at {size}. Get it again"
            )
    if position != size:
        raise ModelFileError(
            f"model file {path} is corrupt: {size - position} bytes follow the last tensor. Get it again"
        )


@contextmanager
def open_writer(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[BinaryIO]:
    """Write the header of a file of `tensors`, name -> (dtype, shape); the block writes their bytes in order.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * SAFETENSORS[dtype][1]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield file
        assert file.tell() == 8 + len(text) + end, "not all bytes of the tensors were written"
