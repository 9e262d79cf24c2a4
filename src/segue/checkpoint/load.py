"""Filling a rank's arena with weights: safetensors, GGUF or made up, in one pass without a second copy."""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn
from tqdm import tqdm

from segue.checkpoint import dummy
from segue.checkpoint.bounce_buffers import STAGING_BYTES, BounceBuffers
from segue.checkpoint.finite import check_finite
from segue.checkpoint.gguf import weights as gguf_weights
from segue.checkpoint.shards import Shards
from segue.checkpoint.source import ModelSource
from segue.distributed.info import TPInfo
from segue.memory.arena import Arena, TensorSpec, bind
from segue.models import weight_map
from segue.models.config import ModelConfig
from segue.models.weight_map import WeightMap


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
        ModelFileError: a file or tensor is missing, truncated, corrupt or of the wrong shape, or has values
            that are not finite; both are named.
        CacheDirectoryError: a GGUF file has to be converted, and the cache cannot be written.
        TensorParallelError: the model cannot be cut into `tp.size` parts.
    """
    table = weight_map.build(config, tp)
    specs = [
        TensorSpec(name=name, shape=tuple(parameter.shape), dtype=parameter.dtype)
        for name, parameter in model.named_parameters()
    ]
    assert {spec.name: spec.shape for spec in specs} == table.parameters, "model and weight map disagree"
    show = progress if progress is not None else tp.is_first and sys.stderr.isatty()
    with tqdm(unit="B", unit_scale=True, desc="Loading weights", disable=not show) as bar:
        bar.reset(total=sum(spec.num_bytes for spec in specs))
        made: list[Arena] = []

        def make() -> Arena:
            made.append(_allocate(specs, table, device))
            return made[0]

        for num_bytes in read_weights(source, table, make, dtype, seed=seed, progress=show):
            bar.update(num_bytes)
    (arena,) = made
    if source.format != "dummy":
        check_finite(arena, table, source.gguf or source.directory)
    bind(model, arena)
    return arena


def read_weights(
    source: ModelSource,
    table: WeightMap,
    make: Callable[[], Arena],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    progress: bool = False,
    staging_bytes: int = STAGING_BYTES,
) -> Iterator[int]:
    """Check the files, then fill the arena that `make` gives; yields bytes as they arrive there.

    `staging_bytes`: see `BounceBuffers`; for the rest, and the errors, see `load_weights`.
    """
    if source.format == "dummy":
        arena = make()
        yield from dummy.fill(arena, table, seed)
        return
    with _open(source, table, dtype, progress=progress) as shards:
        shards.check(table)
        arena = make()
        yield from shards.copy(arena, table, BounceBuffers(arena.slabs[0].device, staging_bytes))


def _open(source: ModelSource, table: WeightMap, dtype: torch.dtype, *, progress: bool) -> Shards:
    if source.gguf is None:
        return Shards.in_directory(source.directory)
    path = gguf_weights.convert(source.gguf, source.directory, dtype, table, progress=progress)
    return Shards(path, [path])


def _allocate(specs: list[TensorSpec], table: WeightMap, device: torch.device | str) -> Arena:
    arena = Arena.allocate(specs, device)
    for parameter, box in table.padding.items():
        arena.view(parameter)[box].zero_()
    return arena
