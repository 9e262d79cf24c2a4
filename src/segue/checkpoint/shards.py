"""Finds a checkpoint's safetensors files, checks them against the weight map, copies them into an arena."""

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from segue.checkpoint.bounce_buffers import BounceBuffers
from segue.checkpoint.model_files import read_text
from segue.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from segue.dtypes import SAFETENSORS, WEIGHTS
from segue.errors import ModelFileError
from segue.memory.arena import Arena
from segue.models.weight_map import Box, Shape, Slice, WeightMap

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, SAFETENSORS[name][0]) for name in WEIGHTS}
_DERIVED = ".rotary_emb.inv_freq"  # follows from the config, but old checkpoints store it
_CHUNK = 64 << 20  # bytes per read, so that the progress bar moves
_COMPARE_CHUNK = 1 << 20  # elements compared at a time
_SHOWN = 4  # tensor names in an error text, at most


class Shards:
    """A checkpoint's open files, and which file holds which tensor."""

    def __init__(self, origin: Path, paths: Iterable[Path]) -> None:
        """Open and check `paths`; errors about a missing tensor name the file or directory `origin`.

        Raises:
            ModelFileError: a file is missing, truncated or corrupt, or two files hold the same tensor.
        """
        self.origin = origin
        self.files: list[SafetensorsFile] = []
        self.tensors: dict[str, SafetensorsFile] = {}
        try:
            for path in paths:
                self._add(path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def in_directory(cls, directory: Path) -> Self:
        """Open the checkpoint in `directory`: one file, an index and its files, or all safetensors files.

        Raises:
            ModelFileError: there is no checkpoint, or one of its files is missing, truncated or corrupt.
        """
        if (directory / SINGLE).exists():
            return cls(directory / SINGLE, [directory / SINGLE])
        if (directory / INDEX).exists():
            return cls._indexed(directory / INDEX)
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ModelFileError(
                f"{directory} has no *.safetensors file; convert the model's weights to safetensors first"
            )
        return cls(directory, paths)

    @classmethod
    def _indexed(cls, index: Path) -> Self:
        places = _read_index(index)
        for name, file in places.items():
            if not (index.parent / file).exists():
                raise ModelFileError(
                    f"model file {index.parent / file} is missing; {index.name} says that tensor {name!r} is "
                    "in it"
                )
        shards = cls(index, [index.parent / file for file in sorted(set(places.values()))])
        for name, file in places.items():
            found = shards.tensors.get(name)
            if found is None or found.path.name != file:
                shards.close()
                raise ModelFileError(
                    f"model file {index.parent / file} has no tensor {name!r}, which {index.name} says it "
                    "has. Get both again"
                )
        return shards

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()

    def check(self, weight_map: WeightMap) -> None:
        """Check names, shapes and types of all tensors against `weight_map`, before anything is loaded.

        Raises:
            ModelFileError: a tensor is missing, unknown, of a wrong shape or type, or differs from the tensor
                it is tied to; the text names the file and the tensor.
        """
        for name, file in self.tensors.items():
            stored = file.tensors[name]
            if name.endswith(_DERIVED):
                continue
            target = weight_map.aliases.get(name, name)
            if target not in weight_map.slices:
                raise ModelFileError(
                    f"model file {file.path}: tensor {name!r} is not part of the model that config.json "
                    "describes"
                )
            if stored.shape != weight_map.shapes[target]:
                raise ModelFileError(
                    f"model file {file.path}: tensor {name!r} has shape {list(stored.shape)}; config.json "
                    f"asks for {list(weight_map.shapes[target])}"
                )
            if stored.dtype not in _DTYPES:
                raise ModelFileError(
                    f"model file {file.path}: tensor {name!r} has type {stored.dtype}; supported: "
                    f"{', '.join(_DTYPES)}"
                )
        missing = weight_map.missing(self.tensors)
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ModelFileError(f"{self.origin} lacks tensor {', '.join(map(repr, missing[:_SHOWN]))}{more}")
        repeated = weight_map.coverage(name for name in self.tensors if name in weight_map.slices).repeated
        if repeated:
            raise ModelFileError(
                f"{self.origin} holds the same weights under two names: see the names that fill "
                f"{next(iter(repeated))}"
            )
        for name, target in weight_map.aliases.items():
            if name in self.tensors and not self._equal(name, target):
                raise ModelFileError(
                    f"model file {self.tensors[name].path}: tensor {name!r} differs from {target!r}, to "
                    "which config.json ties it; set tie_word_embeddings to false in config.json"
                )

    def copy(self, arena: Arena, weight_map: WeightMap, staging: BounceBuffers) -> Iterator[int]:
        """Copy the slices of `weight_map` into `arena`, cast to its dtypes; yields the bytes of each copy.

        Bytes that cannot be read in place pass through `staging`.

        Raises:
            ModelFileError: a file cannot be read.
        """
        for file in self.files:
            for tensor in file.tensors.values():
                for part in weight_map.slices.get(tensor.name, ()):
                    yield from _copy(
                        file, tensor, part, arena.view(part.parameter)[part.destination], staging
                    )

    def _equal(self, *names: str) -> bool:
        """Whether two tensors of equal shape have equal values."""
        size = prod(self.tensors[names[0]].tensors[names[0]].shape)
        for first in range(0, size, _COMPARE_CHUNK):
            count = min(_COMPARE_CHUNK, size - first)
            one, other = (self._elements(name, first, count) for name in names)
            if not torch.equal(one, other):
                return False
        return True

    def _elements(self, name: str, first: int, count: int) -> Tensor:
        file = self.tensors[name]
        values = torch.empty(count, dtype=_DTYPES[file.tensors[name].dtype])
        item = values.itemsize
        file.read_into(file.tensors[name], first * item, values.view(torch.uint8).numpy().data)
        return values.float()

    def _add(self, path: Path) -> None:
        file = SafetensorsFile(path)
        self.files.append(file)
        for name in file.tensors:
            if name in self.tensors:
                raise ModelFileError(
                    f"model files {self.tensors[name].path} and {path} both hold tensor {name!r}"
                )
            self.tensors[name] = file


def _read_index(index: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(read_text(index))
        places = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            f"model file {index} is corrupt: it is not an index of tensors ({error!r}). Get it again"
        ) from error
    for name, file in places.items():
        if Path(file).name != file or file in ("", ".."):
            raise ModelFileError(
                f"model file {index} is corrupt: tensor {name!r} is in {file!r}, which is not a file name"
            )
    return places


def _copy(
    file: SafetensorsFile, tensor: StoredTensor, part: Slice, target: Tensor, staging: BounceBuffers
) -> Iterator[int]:
    if target.dim() > len(part.source):  # one expert's matrix in the parameter of all experts
        target = target[0]
    if len(tensor.shape) < 3:
        yield from _copy_rows(file, tensor, 0, tensor.shape, part.source, target, staging)
        return
    matrices, *box = part.source
    for place, index in enumerate(range(matrices.start, matrices.stop)):
        first = index * prod(tensor.shape[1:])
        yield from _copy_rows(file, tensor, first, tensor.shape[1:], tuple(box), target[place], staging)


def _copy_rows(
    file: SafetensorsFile,
    tensor: StoredTensor,
    first: int,
    shape: Shape,
    box: Box,
    target: Tensor,
    staging: BounceBuffers,
) -> Iterator[int]:
    """Copy `box` of the vector or matrix that begins at element `first` of `tensor`."""
    dtype = _DTYPES[tensor.dtype]
    row_bytes = prod(shape[1:]) * dtype.itemsize
    start = first * dtype.itemsize + box[0].start * row_bytes
    columns = box[1:]
    is_whole = all(column == slice(0, size) for column, size in zip(columns, shape[1:], strict=True))
    if is_whole and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        raw = target.view(-1).view(torch.uint8)
        for offset in range(0, raw.numel(), _CHUNK):
            piece = raw[offset : offset + _CHUNK]
            file.read_into(tensor, start + offset, piece.numpy().data)
            yield piece.numel()
        return
    step = max(1, staging.num_bytes // row_bytes)
    for row in range(0, len(target), step):
        block = target[row : row + step]
        with staging.take(len(block) * row_bytes) as buffer:
            file.read_into(tensor, start + row * row_bytes, buffer.numpy().data)
            rows = buffer.view(dtype).view(len(block), *shape[1:])
            block.copy_(rows[(slice(None), *columns)], non_blocking=True)
        yield block.nbytes
