"""Reads tensors of a safetensors file straight into their destination, and writes such files.

The safetensors package maps files into memory. Pages of a map that were read stay resident and count as
memory of this process, so loading a model that way takes its size twice. Here, bytes only go from the page
cache to their destination.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import torch

from segue.checkpoint.model_files import corrupt, read_at, truncated
from segue.dtypes import SAFETENSORS
from segue.errors import ModelFileError

DTYPES = {name: getattr(torch, dtype) for name, (dtype, _) in SAFETENSORS.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER = 100_000_000  # bytes; the limit of the format

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct):
    """What the header says of one tensor."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of an open file: its name, type and place."""

    file: FileIO
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    num_bytes: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the tensor's bytes from `offset`.

        Raises:
            ModelFileError: the file cannot be read, or is shorter than when it was opened.
        """
        assert offset + target.nbytes <= self.num_bytes
        read_at(self.file, self.start + offset, target, f"tensor {self.name!r}")


def read_header(file: FileIO) -> list[StoredTensor]:
    """Return the tensors of `file`, in the order of their bytes, after checking them against its length.

    Raises:
        ModelFileError: the file is unreadable, truncated or corrupt.
    """
    path, size = file.name, os.fstat(file.fileno()).st_size
    if size < 8:
        raise truncated(path, f"it has {size} bytes, not even a header")
    length = bytearray(8)
    read_at(file, 0, memoryview(length), "the header")
    header_size = int.from_bytes(length, "little")
    position = 8 + header_size
    if header_size > _MAX_HEADER:
        raise corrupt(path, f"not a safetensors file (header of {header_size} bytes)")
    if position > size:
        raise truncated(path, f"its header alone needs {position} bytes, the file has {size}")
    text = bytearray(header_size)
    read_at(file, 8, memoryview(text), "the header")
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise corrupt(path, f"its header cannot be read ({error})") from error
    tensors = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, (start, end) = DTYPES.get(entry.dtype), entry.data_offsets
        if dtype is None:
            raise ModelFileError(
                f"model file {path}: tensor {name!r} has type {entry.dtype!r}; known: {', '.join(DTYPES)}"
            )
        start, end = 8 + header_size + start, 8 + header_size + end
        if start != position or end - start != prod(entry.shape) * dtype.itemsize:
            raise corrupt(
                path,
                f"tensor {name!r} of shape {list(entry.shape)} and type {entry.dtype} cannot lie in bytes "
                f"{start} to {end}",
            )
        if end > size:
            raise truncated(path, f"tensor {name!r} ends at byte {end}, the file at {size}")
        tensors.append(
            StoredTensor(
                file=file, name=name, dtype=dtype, shape=entry.shape, start=start, num_bytes=end - start
            )
        )
        position = end
    if position != size:
        raise corrupt(path, f"{size - position} bytes follow the last tensor")
    return tensors


@contextmanager
def open_writer(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[BinaryIO]:
    """Write the header of a file of `tensors`, name -> (dtype, shape); the block writes their bytes in order.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield file
        assert file.tell() == 8 + len(text) + end, "not all bytes of the tensors were written"
