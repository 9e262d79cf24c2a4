"""Converts a GGUF file's weights to a safetensors file in the engine's dtype, once, in the cache."""

import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from tqdm import tqdm

from segue.checkpoint import cache
from segue.checkpoint.gguf.file import GGUFFile, GGUFTensor
from segue.checkpoint.model_files import corrupt, open_file, raise_if_cancelled, read_at
from segue.checkpoint.safetensors import open_writer
from segue.distributed.info import TPInfo
from segue.errors import ModelFileError
from segue.models.config import ModelConfig
from segue.models.weight_map import build as build_weight_map

# Elements dequantised per block: this bounds memory, and temporaries stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 19
_MAX_THREADS = 4  # each thread takes memory for its blocks

_IGNORED = "rope_freqs.weight"  # the RoPE scaling; the converted config has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows of a GGUF tensor that make up one checkpoint tensor, perhaps in another order."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]
    tensor: GGUFTensor
    first_row: int = 0
    # For llama, GGUF stores the q and k rows of a head as the pairs that RoPE rotates together, (0, D/2),
    # (1, D/2+1), …; a checkpoint has the first rows of all pairs, then the second rows. 0: the same order.
    head_dim: int = 0


def convert(
    path: Path, directory: Path, config: ModelConfig, dtype: torch.dtype, *, progress: bool = False
) -> Path:
    """Return the path of `weights-<dtype>.safetensors` in `directory`, made from the GGUF file at `path`.

    An intact file from an earlier call is used; a damaged one, as after a power failure, is made again.
    Values are dequantised to float32 in blocks of rows, then cast. `config` is that of the model that the
    file's metadata describes: other tensors are refused before they take memory or space in the cache.

    Raises:
        ModelFileError: the file is missing, truncated, corrupt, or holds a tensor that cannot be dequantised,
            or that is not part of the model.
        CacheDirectoryError: `directory` cannot be written.
    """
    target = directory / f"weights-{str(dtype).removeprefix('torch.')}.safetensors"
    record = target.with_suffix(".checksums.json")

    def fill(made: Path) -> None:
        """Write the safetensors file into the temporary directory `made`."""
        file = GGUFFile.read(path)
        _write(made / target.name, file, list(_sources(file, config)), dtype, progress)

    cache.make_unless_intact(target, record, fill, path)
    return target


def _sources(file: GGUFFile, config: ModelConfig) -> Iterator[Source]:
    """Yield the checkpoint tensors in `file`, in the order of its bytes. `config` is that of its model.

    Raises:
        ModelFileError: a tensor is not part of the model, or has another shape than there.
    """
    architecture = file.metadata["general.architecture"]
    in_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers).get_name
    weight_map = build_weight_map(config, TPInfo())  # of one rank: the file in the cache has whole tensors
    names: dict[str | None, list[str]] = defaultdict(list)  # name in GGUF -> checkpoint names
    for name in weight_map.names:
        names[in_gguf(re.sub(r"experts\.\d+", "experts", name), (".weight", ".bias"))].append(name)
    for tensor in file.tensors.values():
        if tensor.name == _IGNORED:
            continue
        if tensor.name not in names:
            raise ModelFileError(
                f"model file {file.path}: tensor {tensor.name!r} is not part of the model that its metadata "
                "describes; the model needs more than Segue implements"
            )
        # One name, or for a tensor of all experts the names of each expert's tensor.
        for index, name in enumerate(names[tensor.name]):
            shape = weight_map.shapes[name]
            expected = (len(names[tensor.name]), *shape) if ".experts." in name else shape
            if tensor.shape != expected:
                raise corrupt(
                    file.path,
                    f"tensor {tensor.name!r} has shape {list(tensor.shape)}, and the model that its metadata "
                    f"describes asks for {list(expected)}",
                )
            is_paired = architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
            yield Source(
                name=name,
                shape=shape,
                tensor=tensor,
                first_row=index * shape[0],
                head_dim=config.head_dim if is_paired else 0,
            )


def _write(target: Path, file: GGUFFile, sources: list[Source], dtype: torch.dtype, progress: bool) -> None:
    """Write the safetensors file `target` with `sources`, in their order, in `dtype`.

    A pool's threads dequantise a few blocks ahead; the calling thread writes the blocks in their order.
    """
    shapes = {source.name: (dtype, source.shape) for source in sources}
    total = sum(prod(source.shape) for source in sources) * dtype.itemsize
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    label = f"Converting {file.path.name}"
    with (
        open_file(file.path) as given,
        open_writer(target, shapes) as output,
        tqdm(total=total, unit="B", unit_scale=True, desc=label, disable=not progress) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        waiting: deque[Future[memoryview]] = deque()  # few, which bounds the memory
        for source in sources:
            for rows in _blocks(source):
                raise_if_cancelled()
                waiting.append(pool.submit(_dequantise, given, source, rows, dtype))
                if len(waiting) > 2 * threads:
                    bar.update(output.write(waiting.popleft().result()))
        for block in waiting:
            bar.update(output.write(block.result()))


def _blocks(source: Source) -> Iterator[range]:
    """Cut a tensor into blocks of whole rows, and of whole heads if the rows of a head change their order.

    Returns the rows of each block, counted from `source.first_row`.
    """
    step = max(1, _BLOCK_ELEMENTS // source.shape[-1])
    if source.head_dim:
        step = max(step // source.head_dim, 1) * source.head_dim
    num_rows = prod(source.shape[:-1])
    return (range(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _dequantise(file: FileIO, source: Source, rows: range, dtype: torch.dtype) -> memoryview:
    """Read `rows` of `source`, counted from its first row, and return their bytes in `dtype`.

    q and k rows of llama get a checkpoint's order (see `Source.head_dim`).
    """
    tensor = source.tensor
    raw = np.empty((len(rows), tensor.row_bytes), np.uint8)
    start = tensor.start + (source.first_row + rows.start) * tensor.row_bytes
    read_at(file, start, raw.data.cast("B"), f"tensor {tensor.name!r}")
    try:
        values = torch.from_numpy(gguf.dequantize(raw, tensor.type))
    except NotImplementedError as error:
        raise ModelFileError(
            f"model file {file.name}: tensor {tensor.name!r} has type {tensor.type.name}, which the gguf "
            "package cannot dequantise; use the model in another quantisation"
        ) from error
    if source.head_dim:
        pairs = values.view(-1, source.head_dim // 2, 2, values.shape[-1])
        values = pairs.transpose(1, 2).reshape(values.shape)
    return values.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data
