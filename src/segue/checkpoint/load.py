"""Loads a rank's weights into its arena, from safetensors, GGUF or dummy weights, without a second copy."""

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
from segue.memory.arena import Arena, Layout, TensorSpec, bind
from segue.memory.rank_memory import RankMemory
from segue.models.config import ModelConfig
from segue.models.weight_map import WeightMap
from segue.models.weight_map import build as build_weight_map


def load_weights(
    model: nn.Module,
    config: ModelConfig,
    source: ModelSource,
    tp: TPInfo,
    memory: RankMemory,
    dtype: torch.dtype,
    progress: bool | None = None,
    *,
    seed: int = 0,
) -> Arena:
    """Fill an arena of `memory` with this rank's shard of the weights, and bind `model` to it.

    `model` is on `meta` before. A GGUF file is converted to `dtype`; all values are cast to the parameters'
    dtype. With `progress` None, rank 0 shows a progress bar on a terminal. `seed` is for dummy weights.

    Raises:
        ModelFileError: a file or tensor is missing, truncated, corrupt or of the wrong shape, or has values
            that are not finite; the text names the file and the tensor.
        CacheDirectoryError: a GGUF file has to be converted, and the cache cannot be written.
        TensorParallelError: the model cannot be cut into `tp.size` shards.
    """
    weight_map = build_weight_map(config, tp)
    specs = [
        TensorSpec(name=name, shape=tuple(parameter.shape), dtype=parameter.dtype)
        for name, parameter in model.named_parameters()
    ]
    assert {spec.name: spec.shape for spec in specs} == weight_map.parameters, "model and weight map disagree"
    show = progress if progress is not None else tp.is_first and sys.stderr.isatty()

    def fill(take: Callable[[], Arena]) -> None:
        def make() -> Arena:
            arena = take()
            arena.zero_gaps()
            for parameter, box in weight_map.padding.items():
                arena.view(parameter)[box].zero_()
            return arena

        with tqdm(unit="B", unit_scale=True, desc="Loading weights", disable=not show) as bar:
            bar.reset(total=sum(spec.num_bytes for spec in specs))
            for num_bytes in read_weights(source, weight_map, make, dtype, seed=seed, progress=show):
                bar.update(num_bytes)
        if source.format != "dummy":
            check_finite(take(), weight_map, source.gguf or source.directory)

    arena = memory.load(Layout.of(specs), fill)
    bind(model, arena)
    return arena


def read_weights(
    source: ModelSource,
    weight_map: WeightMap,
    make: Callable[[], Arena],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    progress: bool = False,
    staging_bytes: int = STAGING_BYTES,
) -> Iterator[int]:
    """Check the files, then fill the arena that `make` returns; yields the bytes of each filled block.

    `BounceBuffers` explains `staging_bytes`; `load_weights` explains the other arguments and the errors.
    """
    if source.format == "dummy":
        arena = make()
        yield from dummy.fill(arena, weight_map, seed)
        return
    with _open(source, weight_map, dtype, progress=progress) as shards:
        shards.check(weight_map)
        arena = make()
        yield from shards.copy(arena, weight_map, BounceBuffers(arena.slabs[0].device, staging_bytes))


def _open(source: ModelSource, weight_map: WeightMap, dtype: torch.dtype, *, progress: bool) -> Shards:
    if source.gguf is None:
        return Shards.in_directory(source.directory)
    path = gguf_weights.convert(source.gguf, source.directory, dtype, weight_map, progress=progress)
    return Shards(path, [path])
