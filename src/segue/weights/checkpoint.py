"""Filling a rank's arena with weights: safetensors, GGUF or made up, in one pass without a second copy."""

import sys

import torch
from torch import nn
from tqdm import tqdm

from segue.distributed.info import TPInfo
from segue.memory.arena import Arena, TensorSpec, bind
from segue.models.config import ModelConfig
from segue.weights import dummy, gguf_weights, name_table
from segue.weights.name_table import NameTable
from segue.weights.shards import Shards
from segue.weights.source import ModelSource


def load_weights(
    model: nn.Module,
    config: ModelConfig,
    source: ModelSource,
    tp: TPInfo,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool | None = None,
    *,
    seed: int = 0,
) -> Arena:
    """Fill a new arena with this rank's share of the weights, and bind `model`, so far on `meta`, to it.

    Values are cast to the parameters' dtype; `dtype` is the one a GGUF file is converted to. `progress` None
    shows a bar on rank 0 of a terminal. `seed` is that of dummy weights.

    Raises:
        ModelFileError: a file or tensor is missing, truncated, corrupt or of the wrong shape; both are named.
        CacheDirectoryError: a GGUF file has to be converted, and the cache cannot be written.
        TensorParallelError: the model cannot be cut into `tp.size` parts.
    """
    table = name_table.build(config, tp)
    specs = [
        TensorSpec(name=name, shape=tuple(parameter.shape), dtype=parameter.dtype)
        for name, parameter in model.named_parameters()
    ]
    assert {spec.name: spec.shape for spec in specs} == table.parameters, "model and name table disagree"
    show = progress if progress is not None else tp.is_first and sys.stderr.isatty()
    with tqdm(unit="B", unit_scale=True, desc="Loading weights", disable=not show) as bar:
        bar.reset(total=sum(spec.num_bytes for spec in specs))
        if source.format == "dummy":
            arena = _allocate(specs, table, device)
            for num_bytes in dummy.fill(arena, table, seed):
                bar.update(num_bytes)
        else:
            with _open(source, dtype, progress=show) as shards:
                shards.check(table)
                arena = _allocate(specs, table, device)
                for num_bytes in shards.copy(arena, table):
                    bar.update(num_bytes)
    bind(model, arena)
    return arena


def _open(source: ModelSource, dtype: torch.dtype, *, progress: bool) -> Shards:
    if source.gguf is None:
        return Shards.in_directory(source.directory)
    path = gguf_weights.convert(source.gguf, source.directory, dtype, progress=progress)
    return Shards(path, [path])


def _allocate(specs: list[TensorSpec], table: NameTable, device: torch.device | str) -> Arena:
    arena = Arena.allocate(specs, device)
    for parameter, box in table.padding.items():
        arena.view(parameter)[box].zero_()
    return arena
