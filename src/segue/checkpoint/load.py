"""Loads a rank's weights into its arena, from safetensors, GGUF or dummy weights, without a second copy."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from segue.checkpoint import dummy
from segue.checkpoint.safetensors import BOUNCE_BYTES, BounceBuffers, Shards
from segue.checkpoint.source import ModelSource
from segue.distributed.info import TPInfo
from segue.errors import ModelFileError
from segue.kernels.fp8 import FP8, has_nan
from segue.logs import writes_json
from segue.memory.arena import Arena, Layout, TensorSpec, bind
from segue.memory.rank_memory import RankMemory
from segue.memory.tensor_ops import are_finite
from segue.models.config import ModelConfig
from segue.models.destination import destination_of
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
    on_bytes: Callable[[int, int], None] | None = None,
) -> Arena:
    """Fill an arena of `memory` with this rank's shard of the weights, and bind `model` to it.

    `model` is on `meta` before. A GGUF file is converted to `dtype`; all values are cast to the parameters'
    dtype. With `progress` None, rank 0 shows a progress bar on a terminal, unless lines of the log are
    JSON, or `on_bytes` is called with the bytes so far and in all. `seed` is for dummy weights.

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
    assert sorted(specs, key=attrgetter("name")) == sorted(weight_map.specs(dtype), key=attrgetter("name")), (
        "model and weight map disagree"
    )
    may_show = sys.stderr.isatty() and not writes_json() and on_bytes is None
    show = progress if progress is not None else tp.is_first and may_show

    def fill(take: Callable[[], Arena]) -> None:
        """Check the files, then write all of the arena that `take` returns, gaps and padding too."""
        total = sum(spec.num_bytes for spec in specs)
        done = 0
        with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not show) as bar:
            for num_bytes in read_weights(source, weight_map, take, dtype, seed=seed, progress=show):
                bar.update(num_bytes)
                done += num_bytes
                if on_bytes is not None:
                    on_bytes(done, total)
        arena = take()
        arena.zero_gaps()
        for parameter, box in weight_map.padding.items():
            arena.view(parameter)[box].zero_()
        if source.format != "dummy":  # dummy weights are finite by construction
            check_finite(arena, weight_map, source.gguf or source.directory)

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
    buffer_bytes: int = BOUNCE_BYTES,
) -> Iterator[int]:
    """Check the files, then fill the arena that `make` returns; yields the bytes of each filled block.

    `make` is called only after the check, so that a bad checkpoint changes nothing.
    It does not write the arena's gaps and padding.
    `BounceBuffers` explains `buffer_bytes`; `load_weights` explains the other arguments and the errors.
    """
    if source.format == "dummy":
        yield from dummy.fill(make(), weight_map, seed, dtype)
        return
    if source.gguf is None:
        shards = Shards.in_directory(source.directory)
    else:
        from segue.checkpoint.gguf import weights as gguf_weights

        path = gguf_weights.convert(source.gguf, source.directory, source.config, dtype, progress=progress)
        shards = Shards(path, [path])
    with closing(shards):
        shards.check(weight_map)
        arena = make()
        buffers = BounceBuffers(arena.slabs[0].device, buffer_bytes)
        yield from shards.copy(arena, weight_map, buffers, dtype)


def check_finite(arena: Arena, weight_map: WeightMap, origin: Path) -> None:
    """Check all weights in `arena`, which were loaded from `origin`. This takes 0.3 s per GB on a CPU.

    Raises:
        ModelFileError: a value is NaN or infinite; the text names its tensor and counts such values.
    """
    views = [arena.view(name) for name in arena.layout.table]
    by_dtype = {each: [view for view in views if view.dtype == each] for each in {v.dtype for v in views}}
    fp8 = by_dtype.pop(FP8, [])
    if all(all(are_finite(each, kind)) for kind, each in by_dtype.items()) and not any(map(has_nan, fp8)):
        return
    # The slow part, for the error's text only: a parameter may hold several of the checkpoint's tensors.
    counts: dict[str, int] = {}
    for name in weight_map.names:
        values = (destination_of(arena.view, weight_map, part).read() for part in weight_map.slices[name])
        if count := sum(int((~each.isfinite()).sum()) for each in values):
            counts[name] = count
    first = next(iter(counts))
    dtype = str(views[0].dtype).removeprefix("torch.")
    more = f", and {len(counts) - 1} other tensors have such values too" if len(counts) > 1 else ""
    raise ModelFileError(
        f"{origin}: tensor {first!r} has {counts[first]} values that are NaN or infinite in {dtype}"
        f"{more}; a model with such weights gives no useful output. Get the weights again; if they are "
        "right, they may be too large for this dtype: choose --dtype bfloat16 or float32"
    )
