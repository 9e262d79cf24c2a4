"""Converts a GGUF file's weights to a safetensors file in the engine's dtype, once, in the cache."""

import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from segue.checkpoint import cache, file_checksums
from segue.checkpoint.gguf import names
from segue.checkpoint.gguf.file import GGUFFile
from segue.checkpoint.gguf.names import Source
from segue.checkpoint.model_files import check_wanted, open_file
from segue.checkpoint.safetensors_file import open_writer, read_fully
from segue.dtypes import SAFETENSORS_NAMES
from segue.errors import ModelFileError
from segue.logs import logger
from segue.models.weight_map import WeightMap

# Elements dequantised per block: this bounds memory, and temporaries stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 19
_MAX_THREADS = 4  # each thread takes memory for its blocks


def convert(
    path: Path,
    directory: Path,
    dtype: torch.dtype,
    weight_map: WeightMap | None = None,
    *,
    progress: bool = False,
) -> Path:
    """Return the path of `weights-<dtype>.safetensors` in `directory`, made from the GGUF file at `path`.

    An intact file from an earlier call is used; a damaged one, as after a power failure, is made again.
    Values are dequantised to float32 in blocks of rows, then cast. `weight_map` belongs to the model that
    the file's metadata describes: other tensors are refused before they take memory or space in the cache.

    Raises:
        ModelFileError: the file is missing, truncated, corrupt, or holds a tensor that cannot be dequantised,
            or that is not part of the model.
        CacheDirectoryError: `directory` cannot be written.
    """
    target = directory / f"weights-{str(dtype).removeprefix('torch.')}.safetensors"
    record = target.with_suffix(".checksums.json")
    if file_checksums.find_damage(record) is None:
        return target
    with cache.exclusive(target):
        damage = file_checksums.find_damage(record)  # another process may have been faster
        if damage is not None:
            if target.exists():
                logger.warning(
                    "the cache directory %s is damaged: %s; converting %s again", directory, damage, path
                )
            file = GGUFFile.read(path)
            sources = names.sources(file, json.loads((directory / "config.json").read_text(encoding="utf-8")))
            if weight_map is not None:
                _check(path, sources, weight_map)
            cache.publish_file(target, lambda temporary: _write(temporary, file, sources, dtype, progress))
            cache.publish_file(record, lambda temporary: file_checksums.write(temporary, [target.name]))
    return target


def _check(path: Path, sources: list[Source], weight_map: WeightMap) -> None:
    for source in sources:
        expected = weight_map.shapes.get(weight_map.aliases.get(source.name, source.name))
        if source.shape != expected:
            rule = "has no such tensor" if expected is None else f"asks for {list(expected)}"
            raise ModelFileError(
                f"model file {path} is corrupt: tensor {source.tensor.name!r} has shape "
                f"{list(source.shape)}, and the model that its metadata describes {rule}. Get it again"
            )


def _write(target: Path, file: GGUFFile, sources: list[Source], dtype: torch.dtype, progress: bool) -> None:
    stored_as = SAFETENSORS_NAMES[str(dtype).removeprefix("torch.")]
    shapes = {source.name: (stored_as, source.shape) for source in sources}
    total = sum(prod(source.shape) for source in sources) * dtype.itemsize
    handle = open_file(file.path)
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    try:
        with (
            open_writer(target, shapes) as output,
            tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                desc=f"Converting {file.path.name}",
                disable=not progress,
            ) as bar,
            ThreadPoolExecutor(threads) as pool,
        ):
            blocks = (block for source in sources for block in _blocks(source))
            waiting: deque[Future[Tensor]] = deque()
            for source, rows in blocks:
                check_wanted()
                waiting.append(pool.submit(_dequantise, file.path, handle, source, rows, dtype))
                if len(waiting) > 2 * threads:
                    bar.update(output.write(_bytes(waiting.popleft().result())))
            for block in waiting:
                bar.update(output.write(_bytes(block.result())))
    finally:
        os.close(handle)


def _blocks(source: Source) -> Iterator[tuple[Source, range]]:
    """Cut a tensor into blocks of whole rows, and of whole heads if the rows of a head change their order."""
    step = max(1, _BLOCK_ELEMENTS // source.shape[-1])
    if source.head_dim:
        step = max(step // source.head_dim, 1) * source.head_dim
    num_rows = prod(source.shape[:-1])
    for start in range(0, num_rows, step):
        yield source, range(start, min(start + step, num_rows))


def _dequantise(path: Path, handle: int, source: Source, rows: range, dtype: torch.dtype) -> Tensor:
    tensor = source.tensor
    raw = np.empty((len(rows), tensor.row_bytes), np.uint8)
    start = tensor.start + (source.first_row + rows.start) * tensor.row_bytes
    read_fully(path, handle, start, raw.data.cast("B"), tensor.name)
    try:
        values = torch.from_numpy(gguf.dequantize(raw, tensor.type))
    except NotImplementedError as error:
        raise ModelFileError(
            f"model file {path}: tensor {tensor.name!r} has type {tensor.type.name}, which the gguf package "
            "cannot dequantise"
        ) from error
    if source.head_dim:
        pairs = values.view(-1, source.head_dim // 2, 2, values.shape[-1])
        values = pairs.transpose(1, 2).reshape(values.shape)
    return values.to(dtype).contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
