"""Reads a checkpoint of safetensors files straight into an arena, and writes such files.

A file has 8 bytes with the size of its header, the header (JSON: name -> dtype, shape, byte range), and the
bytes of the tensors one after the other. A checkpoint of several files has an index, which says in which file
each tensor is. A box is the part of a tensor that a rank needs: one slice per dimension.

A file's header is checked against its length, and its tensors against the weight map, before any is copied.

The safetensors package maps files into memory. Pages of a map that were read stay resident and count as
memory of this process, so loading a model that way takes its size twice. Here, bytes only go from the page
cache to their destination.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

import msgspec
import torch
from torch import Tensor

from segue.checkpoint.model_files import INDEX, SINGLE, corrupt, open_file, read_at, read_text, truncated
from segue.dtypes import SAFETENSORS, WEIGHTS
from segue.errors import ModelFileError
from segue.kernels.fp8 import FP8, scale_shapes
from segue.memory import backing
from segue.memory.arena import Arena
from segue.models.destination import Destination, destination_of
from segue.models.weight_map import Shape, WeightMap

BOUNCE_BYTES = 16 << 20

DTYPES = {name: getattr(torch, dtype) for name, (dtype, _) in SAFETENSORS.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER = 100_000_000  # bytes; the limit of the format

_DERIVED = ".rotary_emb.inv_freq"  # follows from the config, but old checkpoints store it
# Scales of activations, which are quantized by their own values here.
_ACTIVATION_SCALES = (".input_scale", ".output_scale", ".q_scale")
# Scales of keys and values, see `kv_scales`: also where no weight is in FP8.
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_CHUNK = 64 << 20  # bytes per read, so that the progress bar moves
_COMPARE_CHUNK = 1 << 20  # elements compared at a time
_SHOWN = 4  # tensor names in an error text, at most

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct):
    """What the header says of one tensor."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]  # start and end in bytes, from the end of the header


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
        """Fill `target` with the tensor's bytes from its byte `offset` on.

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
        raise corrupt(
            path,
            f"not a safetensors file (header of {header_size} bytes; the format allows {_MAX_HEADER})",
        )
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
    # The tensors must fill the rest of the file without gap or overlap: `position` is where the next begins.
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, (start, end) = DTYPES.get(entry.dtype), entry.data_offsets
        if dtype is None:
            raise ModelFileError(
                f"model file {path}: tensor {name!r} has type {entry.dtype!r}; known: {', '.join(DTYPES)}. "
                "Convert the weights to one of these"
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


class BounceBuffers:
    """Bounded host buffers for bytes that cannot be read from a file straight into the weights.

    These are bytes of weights on a GPU, of weights in another dtype than the file's, and of a tensor of which
    only some columns are needed. There is one buffer, or for CUDA two pinned ones: one is filled while the
    other is copied to the GPU. Each of the two has an event, recorded after the copy from it, for which its
    next use waits.
    """

    def __init__(self, device: torch.device, num_bytes: int = BOUNCE_BYTES) -> None:
        """Allocate buffers of `num_bytes` each for weights on `device`."""
        copied = [torch.Event(device), torch.Event(device)] if device.type == "cuda" else [None]
        self.num_bytes = num_bytes
        self._turns = cycle([(backing.pinned((num_bytes,), torch.uint8, device), event) for event in copied])

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[Tensor]:
        """Yield a uint8 buffer `[num_bytes]`; the block fills it, and may copy from it asynchronously."""
        assert num_bytes <= self.num_bytes
        buffer, copied = next(self._turns)
        if copied is not None:
            copied.synchronize()
        yield buffer[:num_bytes]
        if copied is not None:
            copied.record()


class Shards:
    """A checkpoint's open files, and their tensors by name."""

    def __init__(self, origin: Path, paths: Iterable[Path], places: Mapping[str, str] | None = None) -> None:
        """Open and check `paths`; errors about a missing tensor name the file or directory `origin`.

        `places`: which file an index says that each tensor is in.

        Raises:
            ModelFileError: a file is missing, truncated or corrupt, lacks a tensor of the index, or holds the
                same tensor as another.
        """
        self.origin = origin
        self.tensors: dict[str, StoredTensor] = {}
        with ExitStack() as files:
            for path in paths:
                for tensor in read_header(files.enter_context(open_file(path))):
                    other = self.tensors.setdefault(tensor.name, tensor)
                    if other is not tensor:
                        raise ModelFileError(
                            f"model files {other.file.name} and {path} both hold tensor {tensor.name!r}; "
                            "remove the file that does not belong to the model"
                        )
            for name, file in (places or {}).items():
                if name not in self.tensors or Path(str(self.tensors[name].file.name)).name != file:
                    raise ModelFileError(
                        f"model file {origin.parent / file} has no tensor {name!r}, which {origin.name} says "
                        "it has. Get both again"
                    )
            self.close = files.pop_all().close  # after an error above, the files are closed already

    @classmethod
    def in_directory(cls, directory: Path) -> Self:
        """Open the checkpoint in `directory`: one file, an index and its files, or all safetensors files.

        Raises:
            ModelFileError: there is no checkpoint, or one of its files is missing, truncated or corrupt.
        """
        if (directory / SINGLE).exists():
            return cls(directory / SINGLE, [directory / SINGLE])
        if (directory / INDEX).exists():
            places = _read_index(directory / INDEX)
            paths = [directory / file for file in sorted(set(places.values()))]
            return cls(directory / INDEX, paths, places)
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ModelFileError(
                f"{directory} has no *.safetensors file; convert the model's weights to safetensors first"
            )
        return cls(directory, paths)

    def check(self, weight_map: WeightMap) -> None:
        """Check names, shapes and types of all tensors against `weight_map`, before anything is loaded.

        Raises:
            ModelFileError: a tensor is missing, unknown, of a wrong shape or type, or differs from the tensor
                it is tied to; the text names the file and the tensor.
        """
        for name, stored in self.tensors.items():
            ignored = (_DERIVED, *_KV_SCALES, *(_ACTIVATION_SCALES if weight_map.scales else ()))
            if name.endswith(ignored):
                continue
            if weight := weight_map.weight_of_scale(name):
                self._check_scale(stored, weight, weight_map)
                continue
            shape = weight_map.shapes.get(weight_map.aliases.get(name, name))
            if shape is None:
                problem = "is not part of the model that config.json describes"
            elif stored.shape != shape:
                problem = f"has shape {list(stored.shape)}; config.json asks for {list(shape)}"
            elif NAMES[stored.dtype] not in WEIGHTS and not (stored.dtype == FP8 and weight_map.is_fp8(name)):
                problem = f"has type {NAMES[stored.dtype]}; supported: {', '.join(WEIGHTS)}"
            else:
                continue
            raise ModelFileError(f"model file {stored.file.name}: tensor {name!r} {problem}")
        scaled = {weight_map.weight_of_scale(name) for name in self.tensors}
        for name, stored in self.tensors.items():
            if stored.dtype == FP8 and name not in scaled:
                raise ModelFileError(
                    f"model file {stored.file.name}: tensor {name!r} is in FP8, and {self.origin} has no "
                    f"scale of it, such as {name + '_scale'!r}. Get the weights again"
                )
        missing = weight_map.missing(self.tensors)
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ModelFileError(
                f"{self.origin} lacks tensor {', '.join(map(repr, missing[:_SHOWN]))}{more}, for which "
                "config.json asks. Get the weights and config.json of the same model"
            )
        # For example, a tensor of all experts and also the tensors of its experts.
        repeated = weight_map.coverage(name for name in self.tensors if name in weight_map.slices).repeated
        if repeated:
            raise ModelFileError(
                f"{self.origin} holds the same weights under two names: see the names that fill "
                f"{next(iter(repeated))}, such as those of all experts and of each expert; keep one of them"
            )
        for name, target in weight_map.aliases.items():
            if name in self.tensors and not _are_equal(self.tensors[name], self.tensors[target]):
                raise ModelFileError(
                    f"model file {self.tensors[name].file.name}: tensor {name!r} differs from {target!r}, to "
                    "which config.json ties it; set tie_word_embeddings to false in config.json"
                )

    def _check_scale(self, stored: StoredTensor, weight: str, weight_map: WeightMap) -> None:
        """Check a tensor of scales against the tensor `weight`, which they are of.

        Raises:
            ModelFileError: the engine cannot use it.
        """
        scales = weight_map.scales[weight_map.slices[weight][0].parameter]
        shapes = scale_shapes(weight_map.shapes[weight], scales.block)
        if weight not in self.tensors or self.tensors[weight].dtype != FP8:
            problem = f"is a scale, but there is no {weight!r} in FP8; get the weights again"
        elif stored.shape not in shapes or NAMES[stored.dtype] not in WEIGHTS:
            problem = (
                f"has shape {list(stored.shape)} and type {NAMES[stored.dtype]}; here a scale of {weight!r} "
                f"may have the shapes {', '.join(str(list(shape)) for shape in shapes)} and the types "
                f"{', '.join(WEIGHTS)}: start an engine with this checkpoint instead, or correct "
                "quantization_config in config.json"
            )
        else:
            return
        raise ModelFileError(f"model file {stored.file.name}: tensor {stored.name!r} {problem}")

    def copy(
        self, arena: Arena, weight_map: WeightMap, buffers: BounceBuffers, dtype: torch.dtype
    ) -> Iterator[int]:
        """Copy the slices of `weight_map` into `arena`, cast to its dtypes; yields the bytes of each copy.

        Values are cast to `dtype` before they are quantized.

        Bytes that cannot be read in place pass through `buffers`.

        Raises:
            ModelFileError: a file cannot be read.
        """
        for tensor in self.tensors.values():
            for part in weight_map.slices.get(tensor.name, ()):
                target = destination_of(arena.view, weight_map, part, dtype)
                yield from _copy(tensor, first=0, shape=tensor.shape, target=target, buffers=buffers)
            if weight := weight_map.weight_of_scale(tensor.name):
                scales = torch.empty(tensor.num_bytes, dtype=torch.uint8)
                tensor.read_into(0, scales.numpy().data)
                for part in weight_map.slices[weight]:
                    target = destination_of(arena.view, weight_map, part)
                    target.write_scales(
                        scales.view(tensor.dtype).view(tensor.shape), weight_map.shapes[weight]
                    )
                    yield target.tensors[1].nbytes


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by the tensor's name, after checking that each is beside `index`.

    Raises:
        ModelFileError: the index is corrupt or names another place, or a file is missing.
    """
    try:
        content = msgspec.json.decode(read_text(index), type=dict[str, msgspec.Raw])
        places = msgspec.json.decode(content["weight_map"], type=dict[str, str])
    except (OSError, ValueError, KeyError, msgspec.MsgspecError, RecursionError) as error:
        raise corrupt(index, f"it is not an index of tensors ({error!r})") from error
    for name, file in places.items():
        if Path(file).name != file or file in ("", ".."):
            raise corrupt(
                index, f"tensor {name!r} is in {file!r}; it must be a file name, without a directory"
            )
        if not (index.parent / file).exists():
            raise ModelFileError(
                f"model file {index.parent / file} is missing; {index.name} says that tensor {name!r} is in "
                "it. Get it too"
            )
    return places


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of equal shape have equal values."""
    return all(map(torch.equal, _values(one), _values(other)))


def _values(tensor: StoredTensor) -> Iterator[Tensor]:
    """Yield the values of a tensor in float32, a bounded number at a time."""
    step = _COMPARE_CHUNK * tensor.dtype.itemsize
    for offset in range(0, tensor.num_bytes, step):
        raw = torch.empty(min(step, tensor.num_bytes - offset), dtype=torch.uint8)
        tensor.read_into(offset, raw.numpy().data)
        yield raw.view(tensor.dtype).float()


def _copy(
    tensor: StoredTensor, first: int, shape: Shape, target: Destination, buffers: BounceBuffers
) -> Iterator[int]:
    """Copy a box of the array of `shape` that begins at element `first` of `tensor` to `target`.

    Whole rows go from the file to `target` if it is contiguous, on the CPU and of the file's dtype. All
    others pass through `buffers` in blocks of rows; the copy from there also cuts the columns out and casts
    or quantizes the values. Yields the bytes of each copy.
    """
    row_size, box, values = prod(shape[1:]), target.source, target.values
    if len(shape) == 3:  # a tensor of all experts: one expert's matrix after the other
        for place, index in enumerate(range(box[0].start, box[0].stop)):
            yield from _copy(tensor, first + index * row_size, shape[1:], target.expert(place), buffers)
        return
    row_bytes = row_size * tensor.dtype.itemsize
    start = first * tensor.dtype.itemsize + box[0].start * row_bytes
    columns = box[1:]
    is_whole = all(column == slice(0, size) for column, size in zip(columns, shape[1:], strict=True))
    is_in_place = values.dtype == tensor.dtype and values.device.type == "cpu" and values.is_contiguous()
    if is_whole and is_in_place:
        raw = values.view(-1).view(torch.uint8)
        for offset in range(0, raw.numel(), _CHUNK):
            piece = raw[offset : offset + _CHUNK]
            tensor.read_into(start + offset, piece.numpy().data)
            yield piece.numel()
        return
    step = max(1, buffers.num_bytes // row_bytes)
    for row in range(0, len(values), step):
        count = min(step, len(values) - row)
        with buffers.take(count * row_bytes) as buffer:
            tensor.read_into(start + row * row_bytes, buffer.numpy().data)
            target.write_rows(buffer.view(tensor.dtype).view(count, *shape[1:]), row)
        yield sum(each[row : row + count].nbytes for each in target.tensors)


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
    text += b" " * (-len(text) % 8)  # so that the first tensor begins at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield file
        assert file.tell() == 8 + len(text) + end, "not all bytes of the tensors were written"
