"""Reads the header of a GGUF file: the metadata and the offset of each tensor.

The gguf package's reader makes array objects for each string of the vocabulary, which takes seconds; this
reader makes only the string. Dequantisation is left to the package.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from segue.checkpoint.model_files import corrupt, open_file, raise_if_cancelled, truncated
from segue.errors import ModelFileError
from segue.sizes import round_up

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAGIC = b"GGUF"
_MAX_ARRAY = 1 << 24  # items; the largest vocabularies have some 2^18
_MAX_HEADER = 64 << 20  # bytes; headers with the largest vocabularies have some 2^24
_CHECK_BYTES = 1 << 20  # bytes read between two checks for cancellation


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One tensor of a file: its name, type and place."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in torch
    start: int  # bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is, along the last dimension.

        A quantised type stores `block` values together in `size` bytes.
        """
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor, from the start of the file."""
        return self.start + prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """The header of a GGUF file. Arrays in the metadata are tuples."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]  # by name, in the order of their bytes in the file

    @classmethod
    def read(cls, path: Path) -> "GGUFFile":
        """Read the header of `path` and check it against the file's length.

        Raises:
            ModelFileError: the file is missing, truncated, corrupt, not GGUF, or one part of several.
        """
        with BufferedReader(open_gguf(path)) as file:
            size = os.fstat(file.fileno()).st_size
            cursor = _Cursor(file)
            try:
                version, num_tensors, num_keys = cursor.take("IQQ")
                if version not in (2, 3):
                    raise ModelFileError(
                        f"model file {path} has GGUF version {version:#x}; supported: 2 and 3, "
                        "little-endian. Convert the model again"
                    )
                metadata = {cursor.string(): cursor.value() for _ in range(num_keys)}
                num_parts = int(metadata.get("split.count", 0))
                tensors = [_tensor(path, cursor) for _ in range(num_tensors)]
                alignment = int(metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
                base = round_up(cursor.position, alignment)
            except OSError as error:
                raise ModelFileError(f"cannot open model file {path}: {error.strerror}") from error
            except (struct.error, EOFError) as error:
                raise truncated(path, "it ends within its header") from error
            except (KeyError, ValueError, TypeError, ArithmeticError) as error:
                raise corrupt(path, f"its header cannot be read ({error!r})") from error
        if num_parts > 1:
            raise ModelFileError(
                f"model file {path} is one of {num_parts} parts; merge them with llama.cpp's gguf-split"
            )
        by_name: dict[str, GGUFTensor] = {}
        for given in sorted(tensors, key=lambda tensor: tensor.start):
            tensor = replace(given, start=base + given.start)  # the header counts from `base`
            if tensor.name in by_name:
                raise corrupt(path, f"it has two tensors called {tensor.name!r}")
            by_name[tensor.name] = tensor
            if tensor.end > size:
                raise truncated(path, f"tensor {tensor.name!r} ends at byte {tensor.end}, the file at {size}")
        return cls(path=path, metadata=metadata, tensors=by_name)


def open_gguf(path: Path) -> FileIO:
    """Open a GGUF file. No more than its first bytes are read, so that no other file is read in full.

    Raises:
        ModelFileError: the file is missing, or is not a GGUF file.
    """
    file = open_file(path)
    # The size first: files of /proc have size 0, and reading them may never end, or may block.
    if os.fstat(file.fileno()).st_size < len(_MAGIC) or os.pread(file.fileno(), len(_MAGIC), 0) != _MAGIC:
        file.close()
        raise ModelFileError(f"model file {path} is not a GGUF file: it does not begin with 'GGUF'")
    return file


class _Cursor:
    """Reads one value of the header after the other, starting after the file's four magic bytes.

    `position` is the offset in the file of the next byte. Past the end, methods raise an EOFError; for what
    cannot be a header, a KeyError or a ValueError.

    The file is not mapped into memory: if a mapped file became shorter, reading it would kill the process.
    """

    def __init__(self, file: "BufferedReader[FileIO]") -> None:
        self.position = len(_MAGIC)
        self._file = file
        self._next_check = 0
        file.seek(self.position)

    def take(self, layout: str) -> tuple[Any, ...]:
        """Read numbers of the types in `layout`, as `struct` names them; they are little-endian."""
        return struct.unpack(f"<{layout}", self._bytes(struct.calcsize(f"<{layout}")))

    def string(self) -> str:
        (length,) = self.take("Q")
        return self._bytes(length).decode()

    def _bytes(self, count: int) -> bytes:
        """Read `count` bytes; a corrupt count cannot take more memory than a header may have."""
        self.position += count
        if self.position > _MAX_HEADER:
            raise ValueError(f"it has more than {_MAX_HEADER} bytes")
        if self.position >= self._next_check:
            self._next_check = self.position + _CHECK_BYTES
            raise_if_cancelled()
        found = self._file.read(count)
        if len(found) < count:
            raise EOFError
        return found

    def value(self) -> Any:
        """Read a metadata value: its type's number and then a string, a scalar, or an array as a tuple."""
        (kind,) = self.take("I")
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.take(_SCALARS[kind])[0]
        kind, length = self.take("IQ")
        if length > _MAX_ARRAY:
            raise ValueError(f"an array of {length} items")
        if kind != GGUFValueType.STRING:
            return self.take(f"{length}{_SCALARS[kind]}")
        return tuple(self.string() for _ in range(length))


def _tensor(path: Path, cursor: _Cursor) -> GGUFTensor:
    """Read the header's entry of one tensor.

    Its `start` still counts from the first tensor, whose place is known only after the whole header.
    """
    name = cursor.string()
    (num_dims,) = cursor.take("I")
    # GGUF lists the dimensions from the innermost on.
    shape = tuple(reversed(cursor.take(f"{num_dims}Q")))
    number, start = cursor.take("IQ")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise ModelFileError(
            f"model file {path}: tensor {name!r} has an unknown type, number {number}; use the model in "
            "another quantisation, which the gguf package knows"
        ) from error
    if not shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise corrupt(path, f"tensor {name!r} of shape {list(shape)} cannot have type {kind.name}")
    return GGUFTensor(name=name, type=kind, shape=shape, start=start)
